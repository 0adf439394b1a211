"""Launching a field as one CUDA graph: Python needs longer for ten launches than a GPU for a small field.

A graph repeats what it has recorded, with the addresses that it has recorded. Samples come to a new address in each
step, so they are copied to where the graph expects them; proxies stay where they are, and are part of what a graph is
found by.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.backends.operator import Superpose
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["Replayed"]

#: Calls of one kind before it is recorded: the first ones compile kernels, and some never come again.
CALLS_BEFORE = 3
#: Calls until it is tried again if that has failed.
NOT_AGAIN_FOR = 10_000
#: Graphs that are kept, each with its working memory.
KEPT = 4
#: Kinds of calls that are counted.
COUNTED = 64
#: Charges up to which Python is what takes time; above, the working memory of a graph would be large.
LARGEST = 32_768


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    points: Tensor
    labels: Tensor
    slopes: Tensor | None
    results: tuple[Tensor, Tensor, Tensor]


class Replayed:
    """A `Superpose` that is recorded as a CUDA graph once it has been called a few times in the same way."""

    def __init__(self, superpose: Superpose) -> None:
        self.superpose = superpose
        self.calls: OrderedDict[Hashable, int] = OrderedDict()
        self.recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(
        self,
        samples: Charges,
        proxies: Charges,
        field: Field,
        weights: PairWeights,
        slopes: Tensor | None,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `operator.Superpose`."""
        if not _may_be_recorded(samples, proxies):
            return self.superpose(samples, proxies, field, weights, slopes, with_gradient)
        key = _kind_of_call(samples, proxies, field, weights, slopes, with_gradient)
        with self.lock:
            recording = self.recordings.get(key)
            if recording is None:
                if self._count(key) <= CALLS_BEFORE:
                    return self.superpose(samples, proxies, field, weights, slopes, with_gradient)
                try:
                    recording = self._record(samples, proxies, field, weights, slopes, with_gradient)
                except RuntimeError:  # a device or a moment that does not allow it, or no memory left
                    self.calls[key] = -NOT_AGAIN_FOR
                    return self.superpose(samples, proxies, field, weights, slopes, with_gradient)
                self.recordings[key] = recording
                if len(self.recordings) > KEPT:
                    self.recordings.popitem(last=False)
            self.recordings.move_to_end(key)
            recording.points.copy_(samples.points)
            recording.labels.copy_(samples.labels)
            if slopes is not None and recording.slopes is not None:
                recording.slopes.copy_(slopes)
            recording.graph.replay()
            sums, sample_gradient, proxy_gradient = (result.clone() for result in recording.results)
        return sums, sample_gradient, proxy_gradient

    def _count(self, key: Hashable) -> int:
        self.calls[key] = self.calls.pop(key, 0) + 1
        if len(self.calls) > COUNTED:
            self.calls.popitem(last=False)
        return self.calls[key]

    def _record(
        self,
        samples: Charges,
        proxies: Charges,
        field: Field,
        weights: PairWeights,
        slopes: Tensor | None,
        with_gradient: bool,
    ) -> _Recording:
        points, labels = samples.points.clone(), samples.labels.clone()
        slopes = None if slopes is None else slopes.clone()
        still = samples._replace(points=points, labels=labels)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self.superpose(still, proxies, field, weights, slopes, with_gradient)
        return _Recording(graph, points, labels, slopes, results)


def _may_be_recorded(samples: Charges, proxies: Charges) -> bool:
    return (
        samples.points.is_cuda
        and 0 < len(samples.points) + len(proxies.points) <= LARGEST
        and proxies.anchors is None
        and not torch.cuda.is_current_stream_capturing()
    )


def _kind_of_call(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> Hashable:
    """Everything that a recording depends on."""
    device = samples.points.device
    return (
        device,
        torch.cuda.current_stream(device).cuda_stream,
        samples.points.shape,
        samples.labels.dtype,
        samples.on_sphere,
        proxies.points.shape,
        proxies.points.data_ptr(),
        proxies.labels.data_ptr(),
        proxies.labels.dtype,
        proxies.on_sphere,
        field.handle,
        weights,
        slopes is None,
        with_gradient,
    )
