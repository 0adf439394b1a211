"""Time, peak memory and force error of one case; `field.py` runs this file in a fresh process for each of them.

python benchmarks/measure.py '{"method": "tiled", "state": "random", "points": 1600, "repeats": 5, "seconds": 60}'
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch

from charge_sets import DELTA, DIMS, ChargeSet, charge_set, share_inside
from exact_rows import exact_gradient_rows, gradient_rows
from machine import OthersClock, available_bytes, peak_extra_bytes
from methods import METHODS, Step
from pfml.backends import BACKENDS
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["Case", "Measurement", "measure"]

#: Up to here every row is checked against the dense backend in float64, above it CHECKED_ROWS against exact rows.
CHECKED_FULLY = 1_600
CHECKED_ROWS = 64
#: A first run longer than this is not a warm-up but the measurement: nothing that warms up takes that long.
LONG_ENOUGH = 20.0
#: No case may take more than this share of the available memory, which others may want too.
MEMORY_SHARE = 0.6
_SMALLEST = 200  # points; runs before anything is measured, so that loading code costs neither time nor memory


@dataclass(frozen=True)
class Case:
    """One cell of the benchmark."""

    method: str
    state: str
    points: int
    repeats: int = 15
    seconds: float = 60.0


@dataclass(frozen=True)
class Measurement:
    """What one case gave; NaN where it was not measured, and then `note` says why."""

    method: str
    state: str
    points: int
    dims: int
    share_inside_delta: float = math.nan
    p20_ms: float = math.nan
    p50_ms: float = math.nan
    p80_ms: float = math.nan
    ratio_to_product: float = math.nan
    product_ms: float = math.nan
    peak_extra_mib: float = math.nan
    force_error: float = math.nan
    repeats: int = 0
    cores_busy_elsewhere: float = math.nan
    note: str = ""


def measure(case: Case) -> Measurement:
    """Run one case: memory and forces from a first run, then times, with one product timed before and after."""
    method = METHODS[case.method]
    result = Measurement(case.method, case.state, case.points, DIMS)
    expected = method.bytes_per_pair * case.points**2
    available = available_bytes()
    if expected > MEMORY_SHARE * available:
        size = f"{expected / 2**30:.0f} GiB, more than {MEMORY_SHARE:.0%} of the {available / 2**30:.0f} GiB available"
        return replace(result, note=f"not attempted: needs about {size}")

    charges = charge_set(case.points, case.state)
    result = replace(result, share_inside_delta=share_inside(charges, DELTA))
    method.step(charge_set(_SMALLEST, case.state))()
    first_time, peak = peak_extra_bytes(lambda: method.step(charges)())
    result = replace(result, peak_extra_mib=peak / 2**20)
    if method.field is not None:
        result = replace(result, force_error=_force_error(charges, method.field))

    product = METHODS["product"].step(charges)
    clock = OthersClock()
    before = _times(product, repeats=min(case.repeats, 5), seconds=case.seconds / 10, warm_up=True)
    if first_time > LONG_ENOUGH:
        times = [first_time]
    else:
        times = _times(method.step(charges), case.repeats, case.seconds - first_time)
    after = _times(product, repeats=min(case.repeats, 5), seconds=case.seconds / 10)
    product_time = min(statistics.median(before), statistics.median(after))
    p20, p50, p80 = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return replace(
        result,
        p20_ms=p20 * 1e3,
        p50_ms=p50 * 1e3,
        p80_ms=p80 * 1e3,
        ratio_to_product=p50 / product_time,
        product_ms=product_time * 1e3,
        repeats=len(times),
        cores_busy_elsewhere=clock.cores_busy(),
    )


def _times(step: Step, repeats: int, seconds: float, *, warm_up: bool = False) -> list[float]:
    """Seconds of each run: at least one, and no further one once `seconds` are spent."""
    if warm_up:
        step()
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) + min(times) < seconds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def _force_error(charges: ChargeSet, field: Field) -> float:
    """|g - g64| / |g64| over all charges of a small set, over `CHECKED_ROWS` random ones of a large set."""
    num_points = len(charges.samples.points) + len(charges.proxies.points)
    if num_points <= CHECKED_FULLY:
        rows = torch.arange(num_points)
        exact = _dense_gradient(charges, field)
    else:
        generator = torch.Generator().manual_seed(0)
        num_samples = len(charges.samples.points)
        some_samples = torch.randperm(num_samples, generator=generator)[: CHECKED_ROWS // 4]
        some_proxies = torch.randperm(len(charges.proxies.points), generator=generator)[: CHECKED_ROWS * 3 // 4]
        rows = torch.cat([some_samples, some_proxies + num_samples])
        exact = exact_gradient_rows(charges, field, rows)
    return ((gradient_rows(charges, rows) - exact).norm() / exact.norm()).item()


def _dense_gradient(charges: ChargeSet, field: Field) -> torch.Tensor:
    """The gradient of the dense backend in float64, (n, D)."""
    groups = [
        Charges(group.points.detach().double().requires_grad_(), group.labels, group.on_sphere)
        for group in (charges.samples, charges.proxies)
    ]
    energy = BACKENDS["dense"](groups[0], groups[1], field, PairWeights())
    return torch.cat(torch.autograd.grad(energy, [group.points for group in groups]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Case(**json.loads(sys.argv[1]))))))
