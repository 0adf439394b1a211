"""Decay laws on the GPU. A new law is a row of `GPU_LAWS` and two functions of one pair.

A pair function gets distances r >= core and `reached`, r without the part where the law is flat: for attraction
max(r, edge), for repulsion min(r, edge). It gives potential and slope there; `pair` sees to the flat part, the core,
the offset and the interval in which the pair acts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from pfml.field import ContrastiveLaw, DecayLaw, Interaction, LogarithmicLaw, PowerLaw

__all__ = ["GPU_LAWS", "GPULaw", "PairNumbers", "gpu_law", "over", "pair", "pair_numbers"]

#: Instead of infinity: larger than any distance, and float32 has room for it.
LARGEST = 1e18


@triton.jit
def power_attraction(r, reached, edge, alpha):
    """psi = -reached^-alpha."""
    power = tl.exp2(-alpha * tl.log2(reached))
    return -power, alpha * power / r


@triton.jit
def power_repulsion(r, reached, edge, alpha):
    """psi = reached^-alpha."""
    power = tl.exp2(-alpha * tl.log2(reached))
    return power, -(alpha * power / r)


@triton.jit
def logarithmic_attraction(r, reached, edge, parameter):
    """psi = log(reached)."""
    return tl.log2(reached) * 0.6931471805599453, 1.0 / r


@triton.jit
def logarithmic_repulsion(r, reached, edge, parameter):
    """psi = -log(reached)."""
    return -(tl.log2(reached) * 0.6931471805599453), -1.0 / r


@triton.jit
def square_attraction(r, reached, edge, parameter):
    """psi = reached^2."""
    return reached * reached, 2.0 * r


@triton.jit
def hinge_repulsion(r, reached, edge, parameter):
    """psi = max(edge - r, 0)^2."""
    gap = tl.maximum(edge - r, 0.0)
    return gap * gap, -2.0 * gap


@triton.jit
def square_repulsion(r, reached, edge, parameter):
    """psi = -reached^2."""
    return -reached * reached, -2.0 * r


class GPULaw(NamedTuple):
    """The pair functions of a law, and the one number that they depend on besides its radii."""

    attraction: Any
    repulsion: Any
    parameter: float = 0.0


#: law -> its functions. A subclass may be anything, so that it needs a row of its own.
GPU_LAWS: dict[type[DecayLaw], Callable[[Any], GPULaw]] = {
    PowerLaw: lambda law: GPULaw(power_attraction, power_repulsion, law.alpha),
    LogarithmicLaw: lambda law: GPULaw(logarithmic_attraction, logarithmic_repulsion),
    ContrastiveLaw: lambda law: GPULaw(square_attraction, hinge_repulsion if law.bounded else square_repulsion),
}


def gpu_law(law: DecayLaw) -> GPULaw:
    """The functions of a law that is in `GPU_LAWS`."""
    return GPU_LAWS[type(law)](law)


class PairNumbers(NamedTuple):
    """What `pair` needs to know of an `Interaction`."""

    parameter: float
    edge: float
    core: float
    offset: float
    start: float
    stop: float


def pair_numbers(interaction: Interaction, law: DecayLaw) -> PairNumbers:
    """The numbers of an interaction under `law`; a very large one for infinity."""
    numbers = (
        gpu_law(law).parameter, interaction.kink, interaction.core, interaction.offset, interaction.start,
        interaction.stop,
    )  # fmt: skip
    return PairNumbers(*(min(float(number), LARGEST) for number in numbers))


@triton.jit
def pair(r, numbers, LAW: tl.constexpr, ATTRACTS: tl.constexpr):
    """Energy and slope of pairs at distance r, as `pfml.field.Interaction` has them; LAW is a pair function."""
    outside = tl.maximum(r, numbers.core)
    inside_edge = outside < numbers.edge
    # in this order and form: with others, ptxas spills more registers in `interact`
    reached = tl.where(inside_edge == ATTRACTS, numbers.edge, outside)
    potential, slope = LAW(outside, reached, numbers.edge, numbers.parameter)
    flat = inside_edge if ATTRACTS else outside >= numbers.edge
    slope = tl.where(flat, 0.0, slope)
    energy = potential + slope * (r - outside) - numbers.offset
    acts = (r >= numbers.start) & (r < numbers.stop)
    return tl.where(acts, energy, 0.0), tl.where(acts, slope, 0.0)


@triton.jit
def over(slope, r):
    """slope / r; 0 at r = 0, where there is no direction."""
    return tl.where(r > 0, slope / tl.where(r > 0, r, 1.0), 0.0)
