"""A teacher's forward pass by cuDNN's fused convolutions: bias, sum and ReLU without a pass of their own.

python research/fused_resnet.py --out OUT/forward.jsonl       images per second of four teachers, each way, on a GPU

Where it wins, research/transfer.py --fused asks teachers so; nothing is compiled then.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.models import Embedder, EmbedderConfig
from pfml.models.resnet_he import STAGES, Bottleneck, ResNet50He
from pfml.training.environment import reproducible
from pfml.training.teachers import Teachers

__all__ = ["fuse", "teachers_of"]

WAYS = {
    "fused": {"compiling": False, "fused": True},
    "eager": {"compiling": False, "fused": False},
    "compiled": {"compiling": True, "fused": False},
}


def teachers_of(embedders: list[Embedder], device: torch.device, *, compiling: bool, fused: bool) -> Teachers:
    """Teachers, those of ResNet50He fused if asked for and nothing compiled then."""
    if not fused or not all(isinstance(each.backbone, ResNet50He) for each in embedders):
        return Teachers(embedders, device, compiling=compiling)
    teachers = Teachers(embedders, device, compiling=False)
    for network in teachers.networks:
        fuse(network)
    return teachers


def fuse(network: Embedder) -> None:
    """Replace the forward passes of a network whose BatchNorm is folded."""
    backbone = network.backbone
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


def _convolution_relu(layer: nn.Conv2d, features: Tensor, more: Tensor | None = None) -> Tensor:
    """relu(layer(features) + more) in one kernel on a GPU."""
    assert layer.bias is not None
    if not features.is_cuda:
        result = layer(features)
        return F.relu(result if more is None else result + more)
    shape = layer.stride, layer.padding, layer.dilation, layer.groups
    if more is None:
        return torch.cudnn_convolution_relu(features, layer.weight, layer.bias, *shape)
    return torch.cudnn_convolution_add_relu(features, layer.weight, more, 1.0, layer.bias, *shape)


def measure(teachers: Teachers, crops: Tensor, seconds: float) -> float:
    """Images per second and teacher."""
    for _ in range(3):
        teachers(crops)
    torch.cuda.synchronize()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            teachers(crops)
        torch.cuda.synchronize()
        runs += 5
    return runs * len(crops) * len(teachers) / (time.perf_counter() - start)


def main() -> None:
    """Each way, at two sizes of a batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/forward.jsonl"))
    parser.add_argument("--weights", default="none")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    device = torch.device("cuda")
    config = EmbedderConfig("resnet50_he", weights=options.weights)
    with reproducible(False):
        embedders = [Embedder(config).to(device).eval() for _ in range(4)]
        crops = torch.rand(400, 3, 224, 224, device=device)
        wanted = Teachers(embedders, device)(crops[:100])
        for way, how in ((way, WAYS[way]) for way in options.ways):
            try:
                teachers = teachers_of(embedders, device, **how)
                difference = float((teachers(crops[:100]) - wanted).norm() / wanted.norm())
                rates = {batch: measure(teachers, crops[:batch], options.seconds) for batch in (100, 400)}
                found: dict[str, Any] = {"way": way, "difference": difference, "images_per_second": rates}
            except Exception as error:
                found = {"way": way, "error": f"{type(error).__name__}: {error}"[:300]}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(found, flush=True)


if __name__ == "__main__":
    main()
