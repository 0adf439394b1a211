"""An index follows a folder or a table of images."""

import os
import shutil

import pytest
import torch

from pfml.data.image_set import ImageSet
from pfml.evaluation import embed
from pfml.search import ImageIndex, ModelIdentity, OtherModelError, list_images, update_index
from small_data import small_embedder
from small_index import write_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images")


@pytest.fixture
def embedder():
    return small_embedder()


@pytest.fixture
def index(tmp_path, embedder):
    return ImageIndex.create(tmp_path / "index", ModelIdentity.of(embedder), 8)


def names_of(index):
    return {entry.path.rpartition("images/")[2]: entry.class_name for entry in index.entries()}


def test_the_class_of_an_image_is_its_folder_and_its_vector_that_of_evaluation(index, embedder, images):
    update = update_index(index, embedder, list_images(images))
    assert str(update) == "5 added"
    assert names_of(index) == {"a/1.png": "a", "a/2.png": "a", "b/3.png": "b", "b/4.png": "b", "b/deep/5.png": "b"}
    files = sorted(images.rglob("*.png"))
    expected = embed(embedder, ImageSet.unlabeled(files))
    found = torch.cat([index.vectors([index.find(file).id]) for file in files])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_repeating_embeds_what_is_new_or_changed_and_drops_what_is_gone(index, embedder, images, embedded):
    update_index(index, embedder, list_images(images))
    (images / "a/1.png").unlink()
    shutil.copy(images / "b/4.png", images / "b/3.png")  # changed
    os.utime(images / "a/2.png")  # touched: the same content at another time
    write_images(images, ["c/new.png"])
    update = update_index(index, embedder, list_images(images))
    assert (update.added, update.replaced, update.unchanged, update.removed) == (1, 1, 3, 1)
    assert embedded == [5, 2]
    assert set(names_of(index)) == {"a/2.png", "b/3.png", "b/4.png", "b/deep/5.png", "c/new.png"}
    same = [index.vectors([index.find(images / name).id]) for name in ("b/3.png", "b/4.png")]
    torch.testing.assert_close(*same, atol=1e-6, rtol=0)
    assert str(update_index(index, embedder, list_images(images))) == "0 added, 5 unchanged"
    assert embedded == [5, 2]


def test_a_change_that_keeps_size_and_content_s_length_is_noticed(index, embedder, tmp_path, embedded):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "x.ppm").write_bytes(b"P6 2 2 255\n" + bytes(12))
    update_index(index, embedder, list_images(folder))
    (folder / "x.ppm").write_bytes(b"P6 2 2 255\n" + bytes([200] * 12))
    assert update_index(index, embedder, list_images(folder)).replaced == 1
    assert embedded == [1, 1]


def test_images_that_cannot_be_read_are_named_and_left_out(index, embedder, images):
    update_index(index, embedder, list_images(images))
    (images / "a/1.png").write_bytes((images / "a/1.png").read_bytes()[:900])  # a good header, no end
    (images / "a/text.png").write_text("no image")
    (images / "a/empty.png").touch()
    update = update_index(index, embedder, list_images(images))
    reasons = {str(failure.path).rpartition("/")[2]: failure.reason for failure in update.failures}
    assert reasons.keys() == {"1.png", "text.png", "empty.png"}
    assert "truncated" in reasons["1.png"]
    assert reasons["empty.png"] == "is empty"
    assert str(update).endswith("3 unreadable")
    assert set(names_of(index)) == {"a/2.png", "b/3.png", "b/4.png", "b/deep/5.png"}
    assert (update.added, update.unchanged) == (0, 4)


def test_a_table_gives_classes_and_another_label_needs_no_embedding(index, embedder, images, embedded, tmp_path):
    update_index(index, embedder, list_images(images))
    table = tmp_path / "list.csv"
    table.write_text("path,label\nimages/a/1.png,cat\nimages/a/2.png,dog\nimages/b/3.png,b\n")
    update = update_index(index, embedder, list_images(table))
    assert (update.relabeled, update.unchanged, update.removed) == (2, 1, 0)
    assert embedded == [5]
    assert names_of(index)["a/1.png"] == "cat"
    assert index.class_counts() == {"b": 3, "cat": 1, "dog": 1}
    table.write_text("path,label\nimages/a/2.png,dog\nimages/b/3.png,b\n")
    assert update_index(index, embedder, list_images(table)).removed == 1
    assert set(names_of(index)) == {"a/2.png", "b/3.png", "b/4.png", "b/deep/5.png"}


def test_an_image_has_one_entry_from_wherever_its_folder_or_table_is_named(
    index, embedder, images, tmp_path, monkeypatch
):
    update_index(index, embedder, list_images(images))
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path / "lists")
    listing = list_images(f"../{images.name}")
    assert listing == list_images(images)
    assert update_index(index, embedder, listing).unchanged == len(index) == 5
    table = tmp_path / "lists" / "corrected.csv"
    table.write_text(f"path,label\n../{images.name}/a/1.png,cat\n../{images.name}/b/3.png,b\n")
    update = update_index(index, embedder, list_images(table))
    assert (update.added, update.relabeled, update.unchanged, len(index)) == (0, 1, 1, 5)


def test_a_path_through_a_link_leads_where_the_system_says(images, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    shutil.copytree(images, tmp_path / "elsewhere" / images.name)
    found = list_images(tmp_path / "link" / ".." / images.name)
    assert found.source == str((tmp_path / "elsewhere" / images.name).resolve())


def test_images_of_other_folders_stay(index, embedder, images, tmp_path):
    update_index(index, embedder, list_images(images))
    other = write_images(tmp_path / "other images", ["z.png"])
    update = update_index(index, embedder, list_images(other))
    assert (update.added, update.removed, len(index)) == (1, 0, 6)
    assert index.find(other / "z.png").class_name == ""


def test_shards_are_written_as_they_come_and_an_interrupted_update_goes_on(index, embedder, images, monkeypatch):
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("pfml.search.embedding.embed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update_index(index, embedder, list_images(images), shard_images=2)
    assert len(ImageIndex.open(index.path)) == 4
    update = update_index(index, embedder, list_images(images), shard_images=2)
    assert (update.added, update.unchanged, index.num_shards) == (1, 4, 3)


def test_progress_is_shown_over_all_images(index, embedder, images):
    shown = []

    def track(items, description, total):
        shown.append((description, total))
        return items

    update_index(index, embedder, list_images(images), shard_images=3, batch_size=2, track=track)
    assert shown == [
        ("comparing files", 5),
        ("embedding 1 to 3 of 5", 2),
        ("embedding 4 to 5 of 5", 1),
    ]


def test_threads_do_not_change_the_vectors(tmp_path, embedder, images):
    vectors = []
    for workers in (1, 4):
        index = ImageIndex.create(tmp_path / f"{workers}", ModelIdentity.of(embedder), 8)
        update_index(index, embedder, list_images(images), batch_size=1, workers=workers)
        vectors.append(index.vectors(range(5)))
    assert torch.equal(*vectors)


def test_a_folder_divided_into_train_and_test_has_its_classes_below(tmp_path):
    root = write_images(tmp_path / "divided", ["train/a/1.png", "test/b/2.png", "more/3.png", "4.png"])
    listing = list_images(root)
    named = {path.rpartition("/")[2]: name for path, name in zip(listing.paths, listing.class_names, strict=True)}
    assert named == {"1.png": "a", "2.png": "b", "3.png": "more", "4.png": ""}
    assert "1 of 4 images" in listing.remarks[0]


def test_what_is_no_folder_and_no_table_is_refused(tmp_path, index, embedder, images):
    with pytest.raises(FileNotFoundError, match="must be a folder or a .csv file"):
        list_images(tmp_path / "nothing")
    with pytest.raises(ValueError, match="shard_images must be at least 1"):
        update_index(index, embedder, list_images(images), shard_images=0)


def test_the_identity_of_a_model_survives_saving_and_changes_with_a_weight(tmp_path, index, embedder, images):
    from pfml.models import load_embedder

    embedder.save(tmp_path / "model")
    again = load_embedder(tmp_path / "model")
    assert ModelIdentity.of(again) == ModelIdentity.of(embedder)
    with torch.no_grad():
        next(again.parameters()).mul_(1.001)
    with pytest.raises(OtherModelError, match="belongs to convnet, untrained"):
        update_index(index, again, list_images(images))
