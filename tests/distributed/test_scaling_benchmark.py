"""benchmarks/scaling.py: what it says about machines that are not there, and that it admits a wrong model."""

import pytest

import scaling
from pfml.distributed import StepCost


def test_half_a_million_classes_on_64_ranks(capsys):
    arguments = ["--simulate", "--world", "64", "--classes", "500000", "--batch", "4096", "--dim", "512"]
    assert scaling.main([*arguments, "--normalizations", "none"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "none" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    pairs = 1_004_096 * 1_004_095 // 2
    shown_pairs, shown_sent = float(cells[3]), float(cells[6].replace(",", ""))
    assert cells[:3] == ["none", "64", "15,625"]
    assert shown_pairs == pytest.approx(pairs / 64, rel=1e-2)
    # by hand: 31.5 rounds with points and forces, and each rank's samples to 63 others, their forces back
    row_bytes = 4 * 512
    by_hand = 15_625 * row_bytes * 2 * 31.75 + 64 * (row_bytes + 8) * 63 + (4096 - 64) * row_bytes
    assert shown_sent == pytest.approx(by_hand / 2**20, rel=1e-2)


def test_a_measurement_beside_a_wrong_model_ends_with_1(monkeypatch, capsys):
    wrong = scaling.Measured(StepCost(1, 2, 3, 4), extra_bytes=2**20, cpu_seconds=1.0, seconds=1.0)
    monkeypatch.setattr(scaling, "measure", lambda *_: wrong)
    assert scaling.main(["--worlds", "1", "2", "--classes", "10", "--batch", "8", "--dim", "4"]) == 1
    assert "does not agree" in capsys.readouterr().out


def test_a_measurement_that_fits_ends_with_0(monkeypatch, capsys):
    def as_modelled(options, world, normalization):
        return scaling.Measured(
            scaling.busiest(scaling.modelled(options, world, normalization)), 2**20, 0.5 * world, float(world) ** 2
        )

    monkeypatch.setattr(scaling, "measure", as_modelled)
    assert scaling.main(["--worlds", "1", "2", "--normalizations", "log", "--classes", "10"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "log" in line and " 2 " in line)
    assert "exact" in row
    assert "2.00" in row
    assert "4.00" in row
