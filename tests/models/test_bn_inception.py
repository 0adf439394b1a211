"""BN-Inception against what is published about it: names, shapes, counts, and the way its branches are joined."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pfml.models.bn_inception import BNInception
from pfml.models.weights import load_weights

#: read off the published weight file
PUBLISHED_SHAPES = {
    "conv1_7x7_s2.weight": (64, 3, 7, 7),
    "conv1_7x7_s2.bias": (64,),
    "conv1_7x7_s2_bn.running_var": (64,),
    "conv2_3x3_reduce.weight": (64, 64, 1, 1),
    "conv2_3x3.weight": (192, 64, 3, 3),
    "inception_3a_1x1.weight": (64, 192, 1, 1),
    "inception_3a_3x3_reduce_bn.running_mean": (64,),
    "inception_3a_double_3x3_2.weight": (96, 96, 3, 3),
    "inception_3a_pool_proj.weight": (32, 192, 1, 1),
    "inception_3c_3x3.weight": (160, 128, 3, 3),
    "inception_4a_1x1.weight": (224, 576, 1, 1),
    "inception_4d_double_3x3_1.weight": (192, 160, 3, 3),
    "inception_4e_double_3x3_reduce.weight": (192, 608, 1, 1),
    "inception_5a_double_3x3_reduce.weight": (160, 1056, 1, 1),
    "inception_5b_double_3x3_reduce.weight": (192, 1024, 1, 1),
    "inception_5b_pool_proj_bn.weight": (128,),
}


@pytest.fixture(scope="module")
def backbone() -> BNInception:
    """Random weights, and BatchNorm statistics that make a forgotten BatchNorm or ReLU visible."""
    torch.manual_seed(0)
    backbone = BNInception().eval()
    for name, buffer in backbone.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.1, 0.5)
    return backbone


def test_names_and_shapes_are_those_of_the_published_file(backbone: BNInception) -> None:
    state = backbone.state_dict()
    assert {name: tuple(state[name].shape) for name in PUBLISHED_SHAPES} == PUBLISHED_SHAPES


def test_it_has_as_many_parameters_as_published_less_the_classifier(backbone: BNInception) -> None:
    assert sum(p.numel() for p in backbone.parameters()) == 11_295_240 - (1000 * 1024 + 1000)
    # 69 convolutions with bias, each with a BatchNorm
    assert len(backbone.state_dict()) == 69 * (2 + 5)


def test_stride_2_modules_have_neither_a_1x1_branch_nor_a_projection(backbone: BNInception) -> None:
    for module in ("3c", "4e"):
        assert not any(name.startswith(f"inception_{module}_1x1") for name in backbone.state_dict())
        assert not any(name.startswith(f"inception_{module}_pool") for name in backbone.state_dict())
        strides = {
            name: backbone.get_submodule(f"inception_{module}_{name}").stride for name in ("3x3", "double_3x3_2")
        }
        assert strides == {"3x3": (2, 2), "double_3x3_2": (2, 2)}


def test_224_pixels_become_a_map_of_1024_channels_and_7_by_7(backbone: BNInception) -> None:
    with torch.no_grad():
        assert backbone(torch.rand(1, 3, 224, 224)).shape == (1, 1024, 7, 7)


def convolution(backbone: BNInception, name: str, features: torch.Tensor) -> torch.Tensor:
    return backbone.get_submodule(f"{name}_bn")(backbone.get_submodule(name)(features)).relu()


@pytest.mark.parametrize(("number", "channels", "pool"), [(0, 192, "avg"), (6, 608, "avg"), (9, 1024, "max")])
def test_a_module_is_the_concatenation_of_its_four_branches(
    backbone: BNInception, number: int, channels: int, pool: str
) -> None:
    from pfml.models.bn_inception import INCEPTIONS

    module = INCEPTIONS[number]
    x = torch.randn(1, channels, 5, 5)
    prefix = f"inception_{module.name}_"

    def branch(*names: str) -> torch.Tensor:
        features = x
        for name in names:
            features = convolution(backbone, prefix + name, features)
        return features

    pooled = F.avg_pool2d(x, 3, 1, 1) if pool == "avg" else F.max_pool2d(x, 3, 1, 1)
    expected = [
        branch("1x1"),
        branch("3x3_reduce", "3x3"),
        branch("double_3x3_reduce", "double_3x3_1", "double_3x3_2"),
        convolution(backbone, prefix + "pool_proj", pooled),
    ]
    with torch.no_grad():
        torch.testing.assert_close(backbone.inception(module, x), torch.cat(expected, 1))


def test_a_stride_2_module_passes_its_pooled_input_on(backbone: BNInception) -> None:
    from pfml.models.bn_inception import INCEPTIONS

    x = torch.randn(1, 320, 8, 8)
    with torch.no_grad():
        features = backbone.inception(INCEPTIONS[2], x)
    assert features.shape == (1, 576, 4, 4)
    # Caffe's pooling covers the last row and column, torch's default does not
    assert torch.equal(features[:, 256:, :3, :3], F.max_pool2d(x, 3, 2))
    assert torch.equal(features[0, 256:, 3, 3], x[0, :, 6:, 6:].amax((1, 2)))


def test_an_image_size_that_cannot_be_halved_is_refused(backbone: BNInception) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        backbone(torch.rand(1, 3, 72, 72))


def test_batch_norm_is_that_of_the_published_definition(backbone: BNInception) -> None:
    layers = [m for m in backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-5, 0.9)}


def test_a_file_in_the_published_form_loads(backbone: BNInception, tmp_path: Path) -> None:
    published = {}
    for name, tensor in backbone.state_dict().items():
        if "_bn." in name and tensor.ndim == 1:
            tensor = tensor[None]  # as the published file has it
        if not name.endswith("num_batches_tracked"):  # older than these counters
            published[name] = tensor
    published |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    torch.save(published, tmp_path / "bn_inception.pth")
    torch.manual_seed(1)
    other = BNInception()
    load_weights(other, tmp_path / "bn_inception.pth")
    assert all(torch.equal(tensor, backbone.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_it_can_be_moved_and_converted(backbone: BNInception) -> None:
    double = BNInception().double()
    assert {p.dtype for p in double.parameters()} == {torch.float64}
