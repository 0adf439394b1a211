"""The ResNet-50 of He et al. against timm's, with its two differences applied by hand."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from pfml.models.inference import folded, fuse
from pfml.models.resnet_he import ResNet50He
from pfml.models.weights import load_weights
from pfml.storage.files import load_tensors

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "resnet50_he.safetensors"
PHOTOGRAPHS = WEIGHTS.parents[1] / "data" / "cub200" / "cub-0.tar"
#: ImageNet's classes of birds
BIRDS = {*range(7, 25), *range(80, 101), *range(127, 147)}


@pytest.fixture(scope="module")
def timm_backbone() -> torch.nn.Module:
    import timm

    return timm.create_model("resnet50", pretrained=False, num_classes=0, global_pool="").eval()


def test_names_and_shapes_are_those_of_torchvision_without_fc(timm_backbone: torch.nn.Module) -> None:
    own = {name: tensor.shape for name, tensor in ResNet50He().state_dict().items()}
    assert own == {name: tensor.shape for name, tensor in timm_backbone.state_dict().items()}


def test_features_are_those_of_a_resnet_whose_strides_are_on_the_1x1(timm_backbone: torch.nn.Module) -> None:
    torch.manual_seed(0)
    backbone = ResNet50He().double().eval()
    for name, buffer in backbone.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.1, 0.3)
    timm_backbone.double().load_state_dict(backbone.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torchvision_like = timm_backbone.forward_features(images)
        for stage in (timm_backbone.layer2, timm_backbone.layer3, timm_backbone.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        for layer in timm_backbone.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.eps = 1.001e-5
        features = backbone(images)
        torch.testing.assert_close(features, timm_backbone.forward_features(images), rtol=1e-9, atol=1e-9)
    assert features.shape == (2, 2048, 2, 2)
    assert not torch.allclose(features, torchvision_like, rtol=1e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fused_convolutions_give_the_same_features(device: str) -> None:
    torch.manual_seed(0)
    backbone = ResNet50He().eval().to(device)
    for layer in backbone.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(layer.bias, -0.1, 0.1)
    images = torch.rand(2, 3, 64, 64, device=device)
    fast = folded(backbone, images)
    fuse(fast)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), backbone(images), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(fast(images.flip(0)), backbone(images), rtol=1e-3, atol=1e-3)


def test_eps_is_that_of_keras() -> None:
    layers = [layer for layer in ResNet50He().modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert len(layers) == 53
    assert {layer.eps for layer in layers} == {1.001e-5}


def test_strides_are_on_the_first_convolution_of_three_stages() -> None:
    strided = {name for name, m in ResNet50He().named_modules() if getattr(m, "stride", None) == (2, 2)}
    assert strided == {"conv1"} | {f"layer{n}.0.{name}" for n in (2, 3, 4) for name in ("conv1", "downsample.0")}


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="needs ../shared/weights/resnet50_he.safetensors")
def test_the_published_weights_load_and_fit() -> None:
    backbone = ResNet50He().eval()
    load_weights(backbone, WEIGHTS)
    stored = load_tensors(WEIGHTS)
    assert all(p.dtype == torch.float32 for p in backbone.parameters())
    assert torch.equal(backbone.state_dict()["layer3.5.conv2.weight"], stored["layer3.5.conv2.weight"].float())


@pytest.mark.skipif(not PHOTOGRAPHS.is_file(), reason=f"needs ../shared/data/cub200/{PHOTOGRAPHS.name}")
def test_the_published_weights_see_birds_in_photographs_of_birds() -> None:
    from pfml.data.preprocessing import Preprocessing
    from pfml.models import create_embedder

    embedder = create_embedder("resnet50_he", weights=str(WEIGHTS), embedding_dim=None)
    assert embedder.preprocessing == Preprocessing()
    stored = load_tensors(WEIGHTS)
    with tarfile.open(PHOTOGRAPHS) as archive:
        files = [archive.extractfile(member) for member in itertools.islice(archive, 4) if member.isfile()]
        photographs = [Image.open(file).convert("RGB") for file in files]
    logits = embedder.encode(photographs) @ stored["fc.weight"].float().T  # of unit length: the ranking is as good
    assert all(int(best) in BIRDS for best in logits.argmax(1))
