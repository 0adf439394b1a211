"""The teachers of a student: trained embedders that see the student's crops, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pfml.losses.distillation import combined
from pfml.models import Embedder
from pfml.models.folding import folded

__all__ = ["Teachers"]


class Teachers:
    """Embeddings of a batch by several trained embedders, side by side (`pfml.losses.distillation.combined`).

    On a GPU the forward passes have BatchNorm folded, run in bfloat16 and are one CUDA graph for each shape of a
    batch: Python launches a ResNet-50's kernels more slowly than they run.

    Args:
        embedders: Left as they are.
        device: Where to compute.
        low_precision: Whether the backbones compute in bfloat16.
    """

    def __init__(self, embedders: Sequence[Embedder], device: torch.device, *, low_precision: bool) -> None:
        if not embedders:
            raise ValueError("a student needs at least one teacher, got none")
        self.device = device
        self.precision = torch.bfloat16 if low_precision else torch.float32
        self.networks = [self._prepared(each) for each in embedders]
        self.sides = [each.preprocessing.crop for each in embedders]
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.networks)

    @torch.no_grad()
    def __call__(self, crops: Tensor) -> Tensor:
        """(n, sum of D) in float32 of RGB crops (n, 3, side, side) in [0, 1]; resized for teachers of another size."""
        if crops.is_cuda and not torch.cuda.is_current_stream_capturing():
            return self._replayed(crops)
        return self.embeddings(crops)

    def embeddings(self, crops: Tensor) -> Tensor:
        """The same, operation by operation."""
        outputs = []
        for network, side in zip(self.networks, self.sides, strict=True):
            seen = crops if crops.shape[-1] == side else _resized(crops, side)
            mixed = torch.autocast(crops.device.type, self.precision, enabled=self.precision != torch.float32)
            with mixed:
                outputs.append(network(seen).float())
        return combined(outputs)

    def _prepared(self, embedder: Embedder) -> Embedder:
        side = embedder.preprocessing.crop
        example = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
        network = folded(embedder, example.to(next(embedder.parameters()).device))
        assert isinstance(network, Embedder)
        network.to(self.device, memory_format=torch.channels_last)
        network.backbone.to(self.precision)
        return network

    def _replayed(self, crops: Tensor) -> Tensor:
        if crops.shape not in self._graphs:
            self._graphs[crops.shape] = self._captured(crops)
        graph, given, result = self._graphs[crops.shape]
        given.copy_(crops)
        graph.replay()
        return result.clone()  # the next batch is written to the same place

    def _captured(self, crops: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        given = crops.clone()
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):  # kernels are chosen before they are recorded
            for _ in range(3):
                self.embeddings(given)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on with their work
            result = self.embeddings(given)
        return graph, given, result


def _resized(crops: Tensor, side: int) -> Tensor:
    return F.interpolate(crops, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
