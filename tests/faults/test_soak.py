"""Training for long does not grow: neither memory nor tensors nor files."""

import inspect
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from pfml.runs.config_files import shipped_config
from pfml.training import BatchConfig
from small_data import few_glyphs
from soak import Sample, growth_per_step, soak

#: Bytes that the allocator may take at once; more than this is not its habit.
TAKEN_ONCE = 2**22


def assert_no_growth(samples, steps):
    """In the second half: the same tensors, files and threads, and memory that does not leak."""
    assert samples[-1].step >= steps
    for field in ("tensors", "tensor_bytes", "files", "threads"):
        late = {getattr(one, field) for one in samples[len(samples) // 2 :]}
        assert len(late) == 1, f"{field}: {late}"
    assert growth_per_step(samples, "objects") < 0.5
    assert not leaks(samples)


def leaks(samples):
    """Whether memory grows in the second half: usually by 0.5 KiB per step or more, or by more than a part at once."""
    grown = samples[-1].resident - samples[len(samples) // 2].resident
    return usual_growth_per_step(samples) >= 512 or grown > TAKEN_ONCE


def usual_growth_per_step(samples):
    """The median over five parts of the second half, in bytes of memory per step.

    A leak grows in each of them. The allocator takes a megabyte now and then, which the slope of a line would call one.
    """
    marks = samples[len(samples) // 2 :: max(len(samples) // 10, 1)] + samples[-1:]
    return statistics.median((b.resident - a.resident) / (b.step - a.step) for a, b in pairwise(marks) if a is not b)


@pytest.mark.parametrize(
    ("leaked", "taken_once", "is_leak"),
    [(0, 0, False), (0, 2**21, False), (600, 0, True), (0, 2**23, True), (200, 0, False)],
)
def test_memory_that_is_taken_once_is_no_leak(leaked, taken_once, is_leak):
    samples = [
        Sample(step, 2**30 + leaked * step + taken_once * (step >= 1500), 180, 2**25, 370_000, 5, 1)
        for step in range(50, 2001, 50)
    ]
    assert leaks(samples) == is_leak
    assert (growth_per_step(samples, "resident") >= 512) == (leaked >= 512 or taken_once > 0)


@pytest.mark.slow
def test_2000_steps_on_glyphs_do_not_grow(tmp_path):
    """In a process of its own: in this one, what other tests have left behind would move."""
    written = tmp_path / "samples.json"
    program = [sys.executable, inspect.getfile(soak), "--steps", "2000", "--json", written]
    assert subprocess.run(program, stdout=subprocess.DEVNULL).returncode == 0
    assert_no_growth([Sample(**one) for one in json.loads(written.read_text())], 2000)


@pytest.mark.slow
def test_20_steps_hold_as_many_tensors_at_the_end_as_in_the_middle(tmp_path, monkeypatch):
    """The quick version: counts only, since memory settles over hundreds of steps."""
    monkeypatch.setattr(sys.modules["pfml.runs.data"], "load_data", lambda name, root, **division: few_glyphs())
    config = replace(shipped_config("glyphs"), batch=BatchConfig(32, 4))
    samples = soak(20, 4, tmp_path / "run", config)
    late = samples[len(samples) // 2 :]
    assert len({(one.tensors, one.tensor_bytes, one.files, one.threads) for one in late}) == 1
