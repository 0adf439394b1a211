"""Models on the Hugging Face Hub; a local folder, in the layout of its cache, is the hub."""

from pathlib import Path

import pytest
import torch

from local_hub import LocalHub
from pfml.models import create_embedder, load_embedder
from pfml.storage.files import DamagedFileError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return LocalHub.installed(tmp_path / "hub", monkeypatch)


def test_a_model_goes_to_the_hub_and_comes_back(hub):
    embedder = create_embedder("convnet", embedding_dim=4).eval()
    name = embedder.push_to_hub("birds/small", private=True, token="secret")
    assert name == "hf-hub:birds/small"
    assert (hub.private, hub.token) == (True, "secret")
    assert "README.md" in hub.files
    images = [torch.rand(3, 40, 60)]
    assert torch.equal(load_embedder(name).encode(images), embedder.encode(images))


def test_a_later_model_replaces_the_one_before_which_stays_under_its_revision(hub):
    first, second = (create_embedder("convnet", embedding_dim=4).eval() for _ in range(2))
    first.push_to_hub("birds/small")
    second.push_to_hub("birds/small", message="better")
    assert hub.message == "better"
    assert len([name for name in hub.files if name.endswith(".safetensors")]) == 1
    images = [torch.rand(3, 40, 60)]
    assert torch.equal(load_embedder("hf-hub:birds/small").encode(images), second.encode(images))
    assert torch.equal(load_embedder(f"hf-hub:birds/small@{1:040x}").encode(images), first.encode(images))


def test_names_that_cannot_be_found_are_one_sentence(hub):
    with pytest.raises(ValueError, match="must be hf-hub:organization/name"):
        load_embedder("hf-hub:birds")
    with pytest.raises(OSError, match=r"hf-hub:birds/none could not be downloaded \(.*HF_TOKEN"):
        load_embedder("hf-hub:birds/none")


def test_a_model_that_was_damaged_on_the_way_is_refused(hub):
    create_embedder("convnet", embedding_dim=4).push_to_hub("birds/small")
    (file,) = Path(hub.cache).rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError):
        load_embedder("hf-hub:birds/small")
