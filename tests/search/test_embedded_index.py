"""An index takes vectors from an embedded collection instead of computing them again."""

import shutil

import pytest
import torch

from pfml.search import (
    ImageIndex,
    ImageShard,
    ModelIdentity,
    OtherModelError,
    embed_collection,
    list_images,
    update_index,
)
from pfml.storage.embeddings import open_embeddings
from small_collection import NAMES, SMALL, write_collection
from small_data import small_embedder
from small_index import write_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def images(tmp_path):
    return write_collection(tmp_path / "images")


@pytest.fixture
def embedder():
    return small_embedder().eval()


def test_an_index_from_embeddings_equals_one_made_directly(tmp_path, embedder, images, embedded):
    for number in (1, 2, 3):
        embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(number, 3), **SMALL)
    model, listing = ModelIdentity.of(embedder), list_images(images)
    direct = ImageIndex.create(tmp_path / "direct", model, 8)
    update_index(direct, embedder, listing, shard_images=5)
    embedded.clear()
    index = ImageIndex.create(tmp_path / "index", model, 8)
    update = update_index(index, embedder, listing, embeddings=open_embeddings(tmp_path / "out"), shard_images=5)
    assert (update.added, update.taken, sum(embedded)) == (23, 23, 0)
    assert list(index.entries()) == list(direct.entries())
    queries = torch.nn.functional.normalize(torch.randn(9, 8))
    answers = (each.search(queries, 7, model=model) for each in (index, direct))
    for found, expected in zip(*answers, strict=True):
        named, named_directly = ([(hit.id, hit.path, hit.class_name) for hit in hits] for hits in (found, expected))
        assert named == named_directly
        assert [hit.distance for hit in found] == pytest.approx([hit.distance for hit in expected], abs=1e-6)


def test_an_index_embeds_what_the_embeddings_lack_and_what_has_changed(tmp_path, embedder, images, embedded):
    embed_collection(tmp_path / "out", embedder, [images], dtype="float16", **SMALL)
    write_images(images, ["new.png"], size=24)
    shutil.copy(images / NAMES[0], images / NAMES[9])
    embedded.clear()
    index = ImageIndex.create(tmp_path / "index", ModelIdentity.of(embedder), 8)
    update = update_index(index, embedder, list_images(images), embeddings=open_embeddings(tmp_path / "out"))
    assert (update.added, update.taken, embedded) == (24, 22, [2])
    found = index.vectors([index.find(images / name).id for name in NAMES])
    torch.testing.assert_close(found, embedder.encode([images / name for name in NAMES]), atol=1e-3, rtol=0)
    with torch.no_grad():
        next(embedder.parameters()).mul_(1.001)
    other = ImageIndex.create(tmp_path / "other", ModelIdentity.of(embedder), 8)
    with pytest.raises(OtherModelError, match=r"the embeddings .*out belongs to"):
        update_index(other, embedder, list_images(images), embeddings=open_embeddings(tmp_path / "out"))
