"""The benchmark of training itself, at a size where it takes seconds."""

from __future__ import annotations

import csv

import pytest
import torch

import training as training_benchmark
from training import Row, benchmark, main, synthetic_data


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    assert main(["--quick", "--device", "cpu", "--networks", "eager", "--out", str(out)]) == 0
    with (out / "training.csv").open() as file:
        return list(csv.DictReader(file))


def test_loop_and_step_are_measured_for_each_method(lines):
    timed = [line for line in lines if line["network"] == "eager"]
    assert [line["method"] for line in timed] == ["pfml", "proxy-anchor"]
    for line in timed:
        step, loop = float(line["step_images_per_second"]), float(line["loop_images_per_second"])
        assert float(line["ratio"]) == pytest.approx(loop / step)
        assert float(line["crops_ms"]) > 0
        assert {"device", "torch", "date"} <= set(line)


def test_the_share_of_the_loss_is_measured_at_both_sizes(lines):
    shares = [line for line in lines if line["network"] == "loss"]
    assert [(line["method"], line["classes"]) for line in shares] == [
        ("pfml", "8"),
        ("proxy-anchor", "8"),
        ("pfml", "60"),
        ("proxy-anchor", "60"),
    ]
    assert all(0 < float(line["loss_share"]) < 1 for line in shares)


def test_a_case_that_fails_does_not_take_the_others_with_it(tmp_path, capsys):
    good, bad = Row("pfml", "eager", 8, 3, 16), Row("pfml", "compiled", 8, 3, 16)

    def fail():
        raise RuntimeError("no compiler\nand more")

    rows = benchmark([(bad, fail), (good, lambda: good)], tmp_path, {"device": "x"})
    assert [row.note for row in rows] == ["failed: RuntimeError: no compiler", ""]
    with (tmp_path / "training.csv").open() as file:
        assert [line["network"] for line in csv.DictReader(file)] == ["compiled", "eager"]


def test_synthetic_images_have_many_sizes_and_all_classes():
    data, source = synthetic_data(20, 5, (30, 60), torch.device("cpu"))
    assert len(source.sizes.unique(dim=0)) > 10
    assert data.train.labels.unique().tolist() == list(range(5))
    assert training_benchmark.TARGET == 0.85
