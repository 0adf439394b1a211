"""The loss on a GPU: the sections small and million of `gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from charge_sets import DIMS, ChargeSet, charge_set
from gpu_field import (
    CUB,
    OTHERS,
    TARGET_ERROR,
    TINY,
    beside,
    charges_of,
    fast_backend,
    field_bound,
    force_error,
    forget,
)
from gpu_measure import GIB, Recorder, Row, Setting, count_kernels, extra_mib, times_ms, timing
from gpu_rates import Bound, Rates, captured
from methods import PAPER, Step, backend_step
from pfml.losses import PotentialFieldLoss

__all__ = ["loss_step", "million_section", "small_section"]

#: Classes, dimensions, proxies subsampled, batch.
MILLION, SMALL_MILLION = (1_000_000, 256, 16_384, 256), (2_000, 16, 64, 8)


def small_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """CUB's 1,600 points, where launches are all: the field, the whole loss, and the loss in a graph of the user."""
    points = CUB if setting.on_gpu else TINY
    backend = fast_backend(setting)

    def of_field() -> Row:
        charges = charge_set(points, "random", setting.device)
        step = backend_step(backend, PAPER)(charges)
        step()
        error = force_error(charges, PAPER)
        row = _timed_row(f"{backend}, n = {points:,}, from Python", backend, points, step, setting, rates, charges)
        return replace(row, target_ms=0.4 if setting.on_gpu else math.nan, error=error, target_error=TARGET_ERROR)

    def of_loss(graphed: bool) -> Callable[[], Row]:
        def measure() -> Row:
            charges = charge_set(points, "random", setting.device)
            step = loss_step(charges, setting, backend)
            what = f"PotentialFieldLoss, n = {points:,}, {'as part of a CUDA graph' if graphed else 'from Python'}"
            run, method = (captured(step), "loss graph") if graphed else (step, "loss")
            row = _timed_row(what, method, points, run, setting, rates, charges)
            return row if graphed else replace(row, target_ms=0.5 if setting.on_gpu else math.nan)

        return measure

    recorder.attempt("small", f"{backend}, n = {points:,}, from Python", of_field)
    recorder.attempt("small", f"PotentialFieldLoss, n = {points:,}, from Python", of_loss(False))
    if setting.on_gpu:
        recorder.attempt("small", f"PotentialFieldLoss, n = {points:,}, as part of a CUDA graph", of_loss(True))
    for method, mode in OTHERS:
        beside(recorder, setting, rates, method, points, "random", mode, "small")


def _timed_row(
    what: str, method: str, points: int, step: Step, setting: Setting, rates: Rates, charges: ChargeSet
) -> Row:
    memory = extra_mib(step, setting, lambda: forget(charges))
    at_least = max(setting.repeats, 100) if setting.on_gpu else setting.repeats
    times = timing(times_ms(step, setting, at_least=at_least, seconds=setting.seconds, warm_up=at_least // 5))
    kernels = count_kernels(step, setting) if "graph" not in method else 0  # a graph is launched as one
    about = rates.explain(field_bound(charges, PAPER), times["p50_ms"], kernels)
    return Row("small", what, method, points, DIMS, "random", "none", mib=memory, **times, **about)


def loss_step(charges: ChargeSet, setting: Setting, backend: str) -> Step:
    """Forward and backward of the whole loss, gradients set to None before."""
    loss = PotentialFieldLoss(charges.classes, DIMS, proxies_per_class=charges.proxies_per_class, backend=backend).to(
        setting.device
    )
    embeddings, labels = charges.samples.points, charges.samples.labels

    def step() -> None:
        embeddings.grad = loss.proxies.grad = None
        loss(embeddings, labels).backward()

    return step


def million_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """A step of training with a million proxies: forward, backward, and a fused Adam step."""
    classes, dims, sampled, batch = MILLION if setting.on_gpu and not setting.quick else SMALL_MILLION
    what = f"{classes:,} proxies, {dims} dims, {sampled:,} sampled, batch {batch}, with Adam"

    def measure() -> Row:
        charges_of.cache_clear()  # the peak is of all memory
        loss = PotentialFieldLoss(
            classes, dims, proxies_per_class=1, proxy_sample=sampled, backend=fast_backend(setting)
        ).to(setting.device)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=setting.on_gpu)
        embeddings, labels = _batch(batch, dims, classes, setting.device)

        def step() -> None:
            embeddings.grad = None
            optimizer.zero_grad(set_to_none=True)
            loss(embeddings, labels).backward()
            optimizer.step()

        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats(setting.device)
        times = timing(times_ms(step, setting, at_least=setting.repeats, seconds=1.0))
        peak = torch.cuda.max_memory_allocated(setting.device) / 2**20 if setting.on_gpu else math.nan
        anchors, values = batch + sampled, classes * dims
        # Every sampled proxy meets all others. Adam reads 4 and writes 3 numbers per value; the gradient is written.
        bound = Bound(flops=2.0 * anchors * classes * dims, bytes=4.0 * values * 8)
        promised = setting.on_gpu and not setting.quick
        return Row(
            "million",
            what,
            "loss and Adam",
            classes + batch,
            dims,
            target_ms=60.0 if promised else math.nan,
            target_mib=8 * GIB if promised else math.nan,
            mib=peak,
            **times,
            **rates.explain(bound, times["p50_ms"], count_kernels(step, setting)),
        )

    recorder.attempt("million", what, measure)


def _batch(batch: int, dims: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(batch, dims, generator=generator)).to(device)
    return embeddings.requires_grad_(), torch.randint(classes, (batch,), generator=generator).to(device)
