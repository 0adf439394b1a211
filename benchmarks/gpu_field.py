"""The field on a GPU: the sections field and plot of `gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from charge_sets import DIMS, STATES, ChargeSet, charge_set, share_inside
from gpu_measure import (
    GIB,
    Recorder,
    Row,
    Setting,
    count_kernels,
    extra_mib,
    precision,
    times_ms,
    timing,
)
from gpu_rates import Bound, Rates
from methods import ANCHOR, LOG, METHODS, PAPER, Step, backend_step, naive_step
from pfml.superposition import Charges, Field

__all__ = [
    "CUB",
    "OTHERS",
    "SOP",
    "TARGET_ERROR",
    "TINY",
    "beside",
    "charges_of",
    "fast_backend",
    "field_bound",
    "field_section",
    "force_error",
    "forget",
    "plot_section",
]

SOP, CUB, TINY = 22_736, 1_600, 200
FIELDS = {"none": PAPER, "log": LOG, "anchor": ANCHOR}
TARGET_MIB, TARGET_ERROR = 0.3 * GIB, 1e-4
CURVE_SIZES = (400, 1_600, 3_000, 6_100, 11_100, 22_736, 50_000, 100_000)
#: What may be allocated for one row of the plot.
LARGEST_BYTES = 40 * 2**30


def target_ms(state: str, normalization: str) -> float:
    """What was promised at 22,736 points."""
    if normalization != "none":
        return 10.0
    return 8.0 if state == "crowded" else 3.0


def fast_backend(setting: Setting) -> str:
    """The backend that the targets are about; on a CPU, where it does not run, the other one."""
    return "triton" if setting.on_gpu else "tiled"


@lru_cache(maxsize=1)
def charges_of(points: int, state: str, device: torch.device) -> ChargeSet:
    """The charges of the last size and state, since all methods use the same."""
    return charge_set(points, state, device)


def field_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """The field of Stanford Online Products in three states and three normalizations, and what to compare it with."""
    points = SOP if setting.on_gpu and not setting.quick else CUB if setting.on_gpu else TINY
    backend = fast_backend(setting)
    for state in STATES:
        charges = charges_of(points, state, setting.device)
        for normalization, rule in FIELDS.items():
            what = f"{backend}, {normalization}, {state}, n = {points:,}"
            known = {"points": points, "state": state, "normalization": normalization, "method": backend}
            measure = _field_row(what, charges, rule, state, backend, setting, rates, points == SOP)
            recorder.attempt("field", what, measure, **known)
    for state in STATES:
        beside(recorder, setting, rates, "tiled", points, state, "ieee")
    for method, mode in OTHERS:
        beside(recorder, setting, rates, method, points, "random", mode)


OTHERS = (("naive", "tf32"), ("naive", "ieee"), ("product", "ieee"), ("product", "tf32"), ("product", "bf16"))


def _field_row(
    what: str, charges: ChargeSet, rule: Field, state: str, backend: str, setting: Setting, rates: Rates, promised: bool
) -> Callable[[], Row]:
    def measure() -> Row:
        step = backend_step(backend, rule)(charges)
        step()
        error = force_error(charges, rule)
        memory = extra_mib(step, setting, lambda: forget(charges))
        times = timing(times_ms(step, setting, at_least=setting.repeats, seconds=setting.seconds))
        bound = field_bound(charges, rule)
        return Row(
            "field",
            what,
            method=backend,
            points=_size(charges),
            dims=DIMS,
            state=state,
            normalization=rule.normalization,
            target_ms=target_ms(state, rule.normalization) if promised else math.nan,
            target_mib=TARGET_MIB if promised else math.nan,
            target_error=TARGET_ERROR,
            mib=memory,
            error=error,
            **times,
            **rates.explain(bound, times["p50_ms"], count_kernels(step, setting)),
        )

    return measure


def field_bound(charges: ChargeSet, rule: Field) -> Bound:
    """What a field needs at least: half a 16-bit product to find pairs within reach, and more for the pairs found.

    These take three products, half of each by symmetry, for their distances, and three for their forces. Where forces
    follow from sums ("log", "anchor"), distances are evaluated twice. Where proxies are no anchors ("anchor"), pairs of
    them do not count. Points are read and gradients written once.
    """
    n, reach = _size(charges), rule.other_pair.stop
    pairs = float(n) ** 2 if rule.rule.proxies_are_anchors else 2.0 * len(charges.samples.points) * n
    whole = 2.0 * pairs * DIMS
    found = share_inside(charges, reach) if reach < 2 else 1.0
    screened = whole / 2 if reach < 2 else 0.0
    sweeps = 1 if rule.rule.linear else 2
    return Bound(flops=screened + (1.5 * sweeps + 3) * found * whole, bytes=2.0 * 4 * n * DIMS)


def force_error(charges: ChargeSet, rule: Field) -> float:
    """|g - g64| / |g64| over all charges, g64 by the tiled backend in float64."""
    found = torch.cat([group.points.grad for group in _groups(charges) if group.points.grad is not None]).double()
    wide = charges._replace(
        samples=_widened(charges.samples),
        proxies=_widened(charges.proxies),
    )
    backend_step("tiled", rule)(wide)()
    exact = torch.cat([group.points.grad for group in _groups(wide) if group.points.grad is not None])
    return ((found - exact).norm() / exact.norm()).item()


def _widened(group: Charges) -> Charges:
    return group._replace(points=group.points.detach().double().requires_grad_())


def _groups(charges: ChargeSet) -> tuple[Charges, Charges]:
    return charges.samples, charges.proxies


def _size(charges: ChargeSet) -> int:
    return sum(len(group.points) for group in _groups(charges))


def forget(charges: ChargeSet) -> None:
    """Free the gradients."""
    for group in _groups(charges):
        group.points.grad = None


def beside(
    recorder: Recorder,
    setting: Setting,
    rates: Rates,
    method: str,
    points: int,
    state: str,
    mode: str,
    section: str = "field",
) -> None:
    """A row without a target: a method in one precision of its products, where it fits."""
    name = method if method in ("tiled", "triton") else f"{method} {'fp32' if mode == 'ieee' else mode}"
    what = f"{name}, {state}, n = {points:,}"
    needed = METHODS[method].bytes_per_pair * points**2 if method in METHODS else 0.0
    if needed > LARGEST_BYTES:
        note = f"left out: needs about {needed / 2**30:.0f} GiB"
        recorder.add(Row(section, what, name, points, DIMS, state, note=note))
        return

    def measure() -> Row:
        charges = charges_of(points, state, setting.device)
        step = _step(method, charges, mode)
        with precision("tf32" if mode == "tf32" else "ieee"):
            step()
            memory = extra_mib(step, setting, lambda: forget(charges))
            at_least = 5 if section == "plot" else setting.repeats
            times = timing(times_ms(step, setting, at_least=at_least, seconds=setting.seconds, warm_up=2))
        row = Row(section, what, name, points, DIMS, state, "none", mib=memory, **times)
        if method == "product":
            products = {"ieee": "fp32", "tf32": "tf32", "bf16": "low"}[mode]
            width = 2 if mode == "bf16" else 4
            bound = Bound(2.0 * points**2 * DIMS, width * (2.0 * points * DIMS + points**2), products)
            return replace(row, **rates.explain(bound, row.p50_ms))
        return replace(row, **rates.explain(field_bound(charges, PAPER), row.p50_ms))

    recorder.attempt(section, what, measure, method=name, points=points, state=state)


def _step(method: str, charges: ChargeSet, mode: str) -> Step:
    if method == "naive":
        return naive_step(charges)
    if method != "product":
        return backend_step(method, PAPER)(charges)
    points = torch.cat([group.points for group in _groups(charges)]).detach()
    if mode == "bf16":
        points = points.bfloat16()
    return lambda: points @ points.T


def plot_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """Time and extra memory over n, for the plot."""
    sizes = CURVE_SIZES if setting.on_gpu and not setting.quick else (400, 1_600) if setting.on_gpu else (200, 400)
    backends = ("tiled", "triton") if setting.on_gpu else ("tiled",)
    for points in sizes:
        for backend in backends:
            beside(recorder, setting, rates, backend, points, "trained", "ieee", "plot")
        for method, mode in OTHERS[:4]:
            beside(recorder, setting, rates, method, points, "trained", mode, "plot")
