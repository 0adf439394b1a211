"""The pair functions of `states.Yukawa` on a GPU: all that a decay law of one's own needs there."""

import triton
import triton.language as tl

from pfml.backends.kernels.laws import GPULaw


@triton.jit
def attraction(r, reached, edge, length):
    potential = -tl.exp2(-reached / length * 1.4426950408889634)
    return potential, -potential / length


@triton.jit
def repulsion(r, reached, edge, length):
    potential = tl.exp2(-reached / length * 1.4426950408889634)
    return potential, -potential / length


def gpu_yukawa(law):
    return GPULaw(attraction, repulsion, law.length)
