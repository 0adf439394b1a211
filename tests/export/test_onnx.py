"""ONNX files, with torch's embedder as the oracle and onnxruntime as the reader."""

import copy
import json
import shutil

import pytest
import torch

from pfml.data import ImageSet
from pfml.export import OnnxDifferenceError, export_onnx
from pfml.export import onnx as onnx_module
from pfml.models import create_embedder


def some_images(count=5, size=(40, 56)):
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 6, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size, mode="bilinear")
    return ImageSet.unlabeled((255 * smooth).to(torch.uint8))


def embedder_of(name, **options):
    torch.manual_seed(3)
    embedder = create_embedder(name, weights="none", embedding_dim=16, **options)
    for module in embedder.modules():  # statistics of a model that has trained, so that a wrong mode shows
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return embedder


def vectors(path, pixels):
    import onnxruntime

    return torch.from_numpy(onnxruntime.InferenceSession(str(path)).run(["embeddings"], {"images": pixels.numpy()})[0])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    embedder = embedder_of("convnet", pooling="avg+max").train()
    path = tmp_path_factory.mktemp("onnx") / "sub" / "model.onnx"
    result = export_onnx(embedder, path, some_images())
    assert embedder.training  # as before
    return embedder.eval(), result


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {"pooling": "token", "layer_norm": "features"}),
        pytest.param("test_resnet", {"image_size": 64, "layer_norm": "features"}, marks=pytest.mark.slow),
    ],
)
def test_onnxruntime_gives_the_embeddings_of_torch(name, options, tmp_path):
    embedder = embedder_of(name, **options)
    result = export_onnx(embedder, tmp_path / "net.onnx", some_images(3))
    pixels = torch.rand(4, 3, *2 * [embedder.preprocessing.crop], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = embedder.eval()(pixels)
    assert (vectors(result.path, pixels) - expected).abs().max() < 1e-5
    assert result.largest_difference < 1e-5
    assert result.images == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_lite0", "vit_small", "bn_inception", "resnet50_he"])
def test_the_backbones_of_the_paper_are_exported(name, tmp_path):
    assert export_onnx(embedder_of(name), tmp_path / "net.onnx", some_images(2)).largest_difference < 1e-4


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_size_of_the_batch_is_free_and_the_vectors_have_length_one(exported, batch):
    embedder, result = exported
    pixels = torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = embedder.eval()(pixels)
    found = vectors(result.path, pixels)
    assert (found - expected).abs().max() < 1e-5
    assert torch.allclose(found.norm(dim=1), torch.ones(batch))


def test_a_program_that_follows_the_description_gets_the_embeddings_of_encode(exported):
    from torchvision.transforms import v2

    embedder, result = exported
    described = json.loads(result.preprocessing.read_text())
    resize, crop, scale = described["before_the_model"]
    interpolation = v2.InterpolationMode(resize["interpolation"])
    resized = v2.Resize(resize["short_side"], interpolation, antialias=resize["antialias"])
    steps = v2.Compose([resized, v2.CenterCrop(crop["side"])])
    images = some_images().images
    pixels = torch.stack([steps(image.float()).clamp(*resize["clip"]) * scale["factor"] for image in images])
    assert list(pixels.shape[1:]) == described["input"]["shape"][1:]
    assert (vectors(result.path, pixels) - embedder.encode(list(images))).abs().max() < 1e-4


def test_the_file_itself_tells_its_preprocessing(exported):
    import onnx

    embedder, result = exported
    metadata = {entry.key: entry.value for entry in onnx.load(result.path).metadata_props}
    described = json.loads(metadata["preprocessing"])
    assert described == json.loads(result.preprocessing.read_text())
    assert described["inside_the_model"]["mean"] == list(embedder.preprocessing.mean)
    assert described["output"] == {**described["output"], "shape": ["batch", 16], "unit_vectors": True}
    assert metadata["backbone"] == "convnet"
    assert result.preprocessing.name == "model.preprocessing.json"


def test_a_file_that_differs_is_not_left_and_the_one_before_stays(exported, tmp_path, monkeypatch):
    embedder, result = exported
    other = copy.deepcopy(embedder)
    with torch.no_grad():
        other.head.linear.bias.add_(0.05)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    # an exporter that is wrong: it writes a model with another bias
    monkeypatch.setattr(onnx_module, "_write", lambda _, target, description: shutil.copyfile(result.path, target))
    with pytest.raises(OnnxDifferenceError, match="to 0.0001, got a difference of"):
        export_onnx(other, path, some_images())
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert export_onnx(other, path, some_images(), tolerance=10.0).largest_difference > 1e-4
    assert path.read_bytes() == result.path.read_bytes()


def test_another_ending_and_no_images_are_refused(exported, tmp_path):
    embedder, _ = exported
    with pytest.raises(ValueError, match=r"must end in \.onnx, got .*model.pt"):
        export_onnx(embedder, tmp_path / "model.pt", some_images())
    with pytest.raises(ValueError, match="at least one image"):
        export_onnx(embedder, tmp_path / "model.onnx", some_images().subset([]))


def test_a_model_that_no_protobuf_file_can_hold_is_refused(exported, tmp_path, monkeypatch):
    embedder, _ = exported
    monkeypatch.setattr(onnx_module, "LARGEST", 1000)
    with pytest.raises(ValueError, match="less than 2 GiB"):
        export_onnx(embedder, tmp_path / "model.onnx", some_images())


def test_a_missing_package_is_named_with_its_extra(exported, tmp_path, monkeypatch):
    embedder, _ = exported
    monkeypatch.setattr("pfml.packages.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"packages onnx.*pip install 'pfml\[export\]'"):
        export_onnx(embedder, tmp_path / "model.onnx", some_images())
