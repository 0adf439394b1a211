"""What the hardware could do: the rates of this machine in this run, and the bound that they put on a row."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from gpu_measure import Setting, precision, times_ms
from methods import Step

__all__ = ["Bound", "Rates", "captured", "measure_rates"]


@dataclass(frozen=True)
class Bound:
    """What an algorithm cannot do without."""

    flops: float
    bytes: float
    #: "low" for products of 16-bit numbers, "tf32" or "fp32"
    products: str = "low"


@dataclass(frozen=True)
class Rates:
    """What this machine does in this run: FLOP/s of products, bytes/s of a copy, seconds of a kernel that does nothing.

    The kernel is one of many in a CUDA graph, so that the CPU is out of the way.
    """

    low: float
    tf32: float
    fp32: float
    bandwidth: float
    kernel: float

    def explain(self, bound: Bound, p50_ms: float, kernels: int = 0) -> dict[str, Any]:
        """The columns of a row about what bounds it: the longest of products, memory and the kernels' number."""
        names = {"low": "16-bit products", "tf32": "tf32 products", "fp32": "fp32 products"}
        times = {
            names[bound.products]: bound.flops / getattr(self, bound.products),
            "memory": bound.bytes / self.bandwidth,
            f"{kernels} kernels": kernels * self.kernel,
        }
        name = max(times, key=lambda each: times[each])
        bound_ms = times[name] * 1e3
        return {
            "bound": name,
            "bound_ms": bound_ms,
            "share_of_bound": bound_ms / p50_ms,
            "flops": bound.flops,
            "bytes": bound.bytes,
            "kernels": kernels,
        }


def measure_rates(setting: Setting) -> Rates:
    """Time a product in each precision (8192^3), a copy (1 GiB), and a small kernel."""
    side = 8192 if setting.on_gpu and not setting.quick else 2048 if setting.on_gpu else 128
    left = torch.randn(side, side, device=setting.device)
    out = torch.empty_like(left)

    def rate(step: Step, work: float) -> float:
        times = times_ms(step, setting, at_least=10, seconds=0.2)
        return work / (statistics.median(times) / 1e3)

    flops = 2.0 * side**3
    low = {}
    for dtype in (torch.bfloat16, torch.float16):
        small = left.to(dtype)
        low[dtype] = rate(lambda small=small: small @ small, flops)  # type: ignore[misc]
    with precision("tf32"):
        tf32 = rate(lambda: torch.mm(left, left, out=out), flops)
    with precision("ieee"):
        fp32 = rate(lambda: torch.mm(left, left, out=out), flops)
    source = torch.empty(2**28 if setting.on_gpu else 2**20, device=setting.device)
    target = torch.empty_like(source)
    bandwidth = rate(lambda: target.copy_(source), 2.0 * 4 * source.numel())
    tiny = torch.zeros(16, device=setting.device)

    def kernels() -> None:
        for _ in range(100):
            tiny.add_(1.0)

    many = captured(kernels) if setting.on_gpu else kernels
    return Rates(max(low.values()), tf32, fp32, bandwidth, kernel=1 / rate(many, 100.0))


def captured(step: Step) -> Step:
    """The same step, replayed as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
