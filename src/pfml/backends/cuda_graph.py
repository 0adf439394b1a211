"""Launching small work as one CUDA graph: Python needs longer for ten launches than a GPU for a small field.

A graph repeats what it has recorded, with the addresses that it has recorded. Inputs come to a new address in each
step, so they are copied to where the graph expects them; what stays where it is (proxies) is part of the key that a
graph is found by. The results are copied from where the graph leaves them: small ones are laid out one after the other,
so that one copy takes them all.
"""

from __future__ import annotations

import gc
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pfml.backends.operator import Compute
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["CudaGraphed", "GraphCache", "is_small", "is_switched_off", "record"]

T = TypeVar("T")

#: Set to 0, this environment variable keeps everything from being recorded.
SWITCH = "PFML_CUDA_GRAPHS"
#: Calls of one kind before it is recorded: the first ones compile kernels, and some never come again.
CALLS_BEFORE = 3
#: Calls until the next attempt if a recording has failed or was evicted.
NOT_AGAIN_FOR = 10_000
#: Graphs that are kept, each with its working memory.
KEPT = 4
#: Kinds of calls that are counted.
COUNTED = 64
#: Numbers (charges x dimensions) up to which it pays; above, the working memory of a graph would be large.
LARGEST = 2**24
#: Results begin at multiples of so many bytes.
ALIGNMENT = 256
#: Results of this size are copied by themselves: copying them twice takes longer than a launch.
LARGE_BYTES = 2**23


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]  # those that are large; None for one that is packed
    packed: Tensor  # (bytes,)
    parts: tuple[tuple[int, torch.Size, torch.dtype], ...]  # of each packed result: where it begins


def is_switched_off() -> bool:
    """Whether the user wants nothing recorded."""
    return os.environ.get(SWITCH) == "0"


def record(compute: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `compute` launches, as a CUDA graph, and its results, which each replay overwrites.

    `compute` must have run before: the first time, kernels are compiled and chosen.

    Raises:
        RuntimeError: `compute` waits for the GPU, or no memory is left.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    gc.collect()  # a module that is unloaded meanwhile would end the recording
    # What cuBLAS keeps for a stream may lie in the memory of an earlier graph, and end with that graph.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.device(device):
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = compute()
        except BaseException:
            torch.cuda.set_stream(current)
            _leave(pool, stream)
            raise
    return graph, result


def _leave(pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """End a recording that has failed.

    Up to torch 2.11 its memory pool and the random generator stay as if it went on, and fail at their next use. Where
    nothing is left of it, the first of these calls raises.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):  # it releases the generator as it ends
            torch.zeros(1, device=stream.device)


class GraphCache:
    """CUDA graphs of functions of tensors, each recorded after a few calls of one kind."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Hashable, int] = OrderedDict()
        self.recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self.lock = threading.Lock()

    def replay(
        self, key: Hashable, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...] | None:
        """What `compute` gives of tensors on the current device; None while there is no graph of this kind of call.

        Args:
            key: Everything that a recording depends on besides the values of the inputs.
            compute: Called to be recorded, with tensors like the inputs; without a synchronization.
            inputs: Tensors whose types and shapes the key holds.
        """
        if is_switched_off():
            return None
        key = (key, inputs[0].device, torch.are_deterministic_algorithms_enabled())
        # Without gradients, or a copy would tie the history of each batch to the memory that all of them pass through.
        with self.lock, torch.no_grad():
            recording = self.recordings.get(key)
            if recording is None:
                if self._count(key) <= CALLS_BEFORE:
                    return None
                try:
                    recording = self._record(compute, inputs)
                except RuntimeError:  # a device or a moment that does not allow it, or no memory left
                    self.calls[key] = -NOT_AGAIN_FOR
                    return None
                self.recordings[key] = recording
                if len(self.recordings) > KEPT:  # an evicted kind is not recorded again for a while
                    evicted, _ = self.recordings.popitem(last=False)
                    self.calls[evicted] = -NOT_AGAIN_FOR
            self.recordings.move_to_end(key)
            for here, given in zip(recording.inputs, inputs, strict=True):
                here.copy_(given)
            recording.graph.replay()
            packed = recording.packed.clone()
            large = [None if result is None else result.clone() for result in recording.results]
        # A number is often kept, or changed in place: it must not be a view of everything.
        small = (part.clone() if part.dim() == 0 else part for part in _unpacked(packed, recording.parts))
        return tuple(next(small) if result is None else result for result in large)

    def _count(self, key: Hashable) -> int:
        self.calls[key] = self.calls.pop(key, 0) + 1
        if len(self.calls) > COUNTED:
            self.calls.popitem(last=False)
        return self.calls[key]

    def _record(self, compute: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> _Recording:
        # What is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            inputs = tuple(given.detach().clone() for given in inputs)
            device = inputs[0].device
            compute(*inputs)  # earlier calls may have had other types, or no gradients
            graph, (kept, packed, parts) = record(lambda: pack(compute(*inputs), device), device)
        return _Recording(graph, inputs, kept, packed, parts)


class CudaGraphed:
    """A function of charges that becomes a CUDA graph after a few calls of one kind."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.graphs = GraphCache()

    def __call__(
        self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights, *tensors: Tensor, **switches: bool
    ) -> tuple[Tensor, ...]:
        """What `compute` gives."""
        if not samples.points.is_cuda:
            return self.compute(samples, proxies, field, weights, *tensors, **switches)
        if torch.cuda.current_device() == samples.points.device.index:
            return self._call(samples, proxies, field, weights, *tensors, **switches)
        with torch.cuda.device(samples.points.device):
            return self._call(samples, proxies, field, weights, *tensors, **switches)

    def _call(
        self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights, *tensors: Tensor, **switches: bool
    ) -> tuple[Tensor, ...]:
        def compute(points: Tensor, labels: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            moved = samples._replace(points=points, labels=labels)
            return self.compute(moved, proxies, field, weights, *tensors, **switches)

        inputs = (samples.points, samples.labels, *tensors)
        if _may_be_recorded(samples, proxies):
            key = _kind_of_call(samples, proxies, field, weights, tensors, switches)
            results = self.graphs.replay(key, compute, *inputs)
            if results is not None:
                return results
        return compute(*inputs)


def pack(
    results: tuple[Tensor, ...], device: torch.device
) -> tuple[tuple[Tensor | None, ...], Tensor, tuple[tuple[int, torch.Size, torch.dtype], ...]]:
    """The large results, None for the others; these in one tensor; and where each of them begins."""
    kept = tuple(result.contiguous() if result.nbytes >= LARGE_BYTES else None for result in results)
    small = [result for result, large in zip(results, kept, strict=True) if large is None]
    parts, size = [], 0
    for result in small:
        parts.append((size, result.shape, result.dtype))
        size += math.ceil(result.nbytes / ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, device=device)
    for result, part in zip(small, _unpacked(packed, tuple(parts)), strict=True):
        part.copy_(result)
    return kept, packed, tuple(parts)


def _unpacked(packed: Tensor, parts: tuple[tuple[int, torch.Size, torch.dtype], ...]) -> tuple[Tensor, ...]:
    """The results that lie in `packed`."""
    by_type = {dtype: packed.view(dtype) for dtype in {dtype for _, _, dtype in parts}}
    return tuple(
        by_type[dtype].as_strided(shape, _strides(shape), begin // dtype.itemsize) for begin, shape, dtype in parts
    )


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[after:]) for after in range(1, len(shape) + 1))


def is_small(*points: Tensor) -> bool:
    """Whether a field of these points is worth a graph."""
    return 0 < sum(each.numel() for each in points) <= LARGEST


def _may_be_recorded(samples: Charges, proxies: Charges) -> bool:
    return (
        is_small(samples.points, proxies.points)
        and proxies.anchors is None
        and not torch.cuda.is_current_stream_capturing()
    )


def _kind_of_call(
    samples: Charges,
    proxies: Charges,
    field: Field,
    weights: PairWeights,
    tensors: tuple[Tensor, ...],
    switches: dict[str, bool],
) -> Hashable:
    """Everything that a recording depends on."""
    device = samples.points.device
    return (
        device,
        torch.cuda.current_stream(device).cuda_stream,
        samples.points.shape,
        samples.points.dtype,
        samples.labels.dtype,
        samples.on_sphere,
        proxies.points.shape,
        proxies.points.data_ptr(),
        proxies.labels.data_ptr(),
        proxies.on_sphere,
        field.handle,
        type(field.law),  # a notebook may define a class again under its name
        weights,
        tuple(tensor.dtype for tensor in tensors),
        tuple(switches.items()),
    )
