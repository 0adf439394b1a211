"""Networks for inference only, with fewer passes over their feature maps: what makes a teacher's forward pass cheap.

In evaluation mode BatchNorm is a scale and a shift for each channel, which the convolution before it can carry
(`folded`). A ResNet50He without BatchNorm then has bias, sum and ReLU inside of cuDNN's convolutions (`fuse`), which
have no gradient. `python benchmarks/gpu.py --sections teachers` measures what both gain on a GPU.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pfml.models.resnet_he import STAGES, Bottleneck, ResNet50He

__all__ = ["folded", "fuse"]


@torch.no_grad()
def folded(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of `model` in evaluation mode, with each BatchNorm folded that directly follows a convolution.

    Args:
        model: Left as it is.
        example: A batch that the model takes; it tells which convolution each BatchNorm follows.

    Raises:
        ValueError: The copy differs from the model on `example`: a convolution's output is used twice.
    """
    made = copy.deepcopy(model).eval().requires_grad_(False).double()  # in which folding changes nothing
    wanted = made(example.double())
    for name, normalization, convolution in _followers(made, example.double()):
        mean, variance = normalization.running_mean, normalization.running_var
        assert mean is not None
        assert variance is not None
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            mean,
            variance,
            normalization.eps,
            normalization.weight,
            normalization.bias,
        )
        after = [getattr(normalization, part) for part in ("drop", "act") if hasattr(normalization, part)]  # timm's
        made.set_submodule(name, nn.Sequential(*after) if after else nn.Identity())
    largest = (wanted - made(example.double())).abs().max().item()
    if not largest <= 1e-5 * wanted.abs().max().item():
        raise ValueError(f"BatchNorm cannot be folded here: the model's output would change by {largest:.3g}")
    return made.to(example.dtype)


def _followers(model: nn.Module, example: Tensor) -> list[tuple[str, nn.BatchNorm2d, nn.Conv2d]]:
    """Each BatchNorm whose input is the output of a convolution, with its name and that convolution."""
    made_by: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # the tensor is kept, so that its id stays its own
    found: dict[str, tuple[nn.BatchNorm2d, nn.Conv2d]] = {}
    hooks = []

    def made(module: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        made_by[id(output)] = module, output

    def taken(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in made_by:
            assert isinstance(module, nn.BatchNorm2d)
            found[name] = module, made_by[id(inputs[0])][0]

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(made))
        elif isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            hooks.append(module.register_forward_pre_hook(partial(taken, name)))
    try:
        model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return [(name, *pair) for name, pair in found.items()]


def fuse(backbone: nn.Module) -> None:
    """Replace the forward passes of a ResNet50He and its blocks.

    Args:
        backbone: As `folded` leaves it: each convolution has a bias.
    """
    assert isinstance(backbone, ResNet50He)
    backbone.forward = partial(_backbone, backbone)  # type: ignore[method-assign]
    for block in backbone.modules():
        if isinstance(block, Bottleneck):
            block.forward = partial(_block, block)  # type: ignore[method-assign]


def _backbone(backbone: ResNet50He, images: Tensor) -> Tensor:
    features = F.relu(backbone.conv1(images), inplace=True)  # of three channels, which few fused kernels take
    features = F.max_pool2d(features, 3, 2, padding=1)
    for number in range(1, len(STAGES) + 1):
        features = backbone.get_submodule(f"layer{number}")(features)
    return features


def _block(block: Bottleneck, features: Tensor) -> Tensor:
    inner = _convolution_relu(block.conv2, _convolution_relu(block.conv1, features))
    return _convolution_relu(block.conv3, inner, block.downsample(features))


def _convolution_relu(layer: nn.Conv2d, features: Tensor, added: Tensor | None = None) -> Tensor:
    """relu(layer(features) + added), one kernel on a GPU."""
    assert layer.bias is not None
    if not features.is_cuda:
        result = layer(features)
        return F.relu(result if added is None else result + added)
    assert not isinstance(layer.padding, str)
    stride, padding, dilation, groups = layer.stride, layer.padding, layer.dilation, layer.groups
    if added is None:
        return torch.cudnn_convolution_relu(features, layer.weight, layer.bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(
        features, layer.weight, added, 1.0, layer.bias, stride, padding, dilation, groups
    )
