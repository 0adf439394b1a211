"""benchmarks/scaling.py: what it says about machines that are not there, and that it admits a wrong model."""

import pytest

import scaling
import scaling_time
from pfml.distributed import StepCost
from scaling_time import Case, Timed, TimeModel, Work

#: Prices that no machine has: the times of a step follow from them.
KNOWN = TimeModel(per_plain_pair=3e-9, per_class_pair=1e-8, per_acting_pair=6e-8, per_byte=5e-9, per_step=1e-2)


def rows_of(text, *beginning):
    """The cells of the printed table rows that begin with these cells."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    return [row for row in rows if row[: len(beginning)] == list(beginning)]


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
    assert float(cells[-1].replace(",", "")) == pytest.approx(2 * 512 * pairs / 64 / by_hand, rel=1e-2)


def test_a_measurement_beside_a_wrong_model_ends_with_1(monkeypatch, capsys):
    wrong = scaling.Measured(StepCost(1, 2, 3, 4), extra_bytes=2**20, cpu_seconds=1.0, seconds=1.0)
    monkeypatch.setattr(scaling, "measure", lambda *_: wrong)
    assert scaling.main(["--worlds", "1", "2", "--classes", "10", "--batch", "8", "--dim", "4"]) == 1
    assert "does not agree" in capsys.readouterr().out


def test_a_measurement_that_fits_ends_with_0(monkeypatch, capsys):
    def as_modeled(options, world, normalization):
        return scaling.Measured(
            scaling.busiest(scaling.modeled(options, world, normalization)), 2**20, 0.5 * world, float(world) ** 2
        )

    monkeypatch.setattr(scaling, "measure", as_modeled)
    assert scaling.main(["--worlds", "1", "2", "--normalizations", "log", "--classes", "10"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "log" in line and " 2 " in line)
    assert "exact" in row
    assert "2.00" in row
    assert "4.00" in row


def test_the_work_of_a_rank_by_hand():
    # 2 ranks with 3,000 proxies each: in the round in which they meet, each computes half of the block
    case = Case("none", world=2, classes=3_000, batch=256, per_class=2, dim=128)
    samples = [(i, j) for i in range(256) for j in range(i)]
    with_samples = len(samples) // 2 + 256 * 3_000
    proxies = 3_000 * 2_999 // 2 + 3_000 * 3_000 // 2
    for rank in (0, 1):
        work = scaling_time.rank_work(case.problem(), rank)
        assert work.class_pairs == pytest.approx(with_samples + 3_000 * 1024, rel=1e-9)
        assert work.plain_pairs == pytest.approx(proxies - 3_000 * 512, rel=1e-9)
        assert work.acting_pairs == 0
    once, twice = (scaling_time.mean_work(case._replace(normalization=name)) for name in ("none", "log"))
    assert twice.class_pairs == 2 * once.class_pairs
    assert twice.plain_pairs == 2 * once.plain_pairs


def test_where_all_pairs_act_there_are_no_others():
    case = Case("anchor", world=1, classes=50, batch=8, per_class=2, dim=4)
    assert scaling_time.rank_work(case.problem(), 0) == Work(0, 0, 2 * (8 * 7 // 2 + 8 * 100), 0)


def test_prices_are_found_again_in_the_times_they_make():
    sizes = [(world, classes) for world in (1, 3) for classes in (3_000, 6_000)]
    works = [scaling_time.mean_work(Case(n, *size, 256, 2, 128)) for n in ("none", "log", "anchor") for size in sizes]
    found = scaling_time.fitted(works, [KNOWN.seconds(work) for work in works])
    for name, price in vars(KNOWN).items():
        assert getattr(found, name) == pytest.approx(price, rel=1e-6), name


def test_no_work_has_a_negative_price():
    works = [Work(100, 0, 0, 0), Work(200, 0, 0, 0), Work(400, 0, 0, 100)]
    found = scaling_time.fitted(works, [1.0, 3.0, 4.0])  # a line through them would begin below zero, and fall by bytes
    assert min(vars(found).values()) == 0.0
    assert found.per_plain_pair > 0
    assert found.per_acting_pair == 0.0


def test_a_processor_that_slows_down_changes_nothing():
    steady = [[[(2.0, 0.1)] * 4, [(1.0, 0.1)] * 4]]
    slowed = [[[(2.0, 0.1)] * 2 + [(6.0, 0.3)] * 2, [(1.0, 0.1)] * 3 + [(5.0, 0.5)]]]
    for rounds in (steady, slowed):
        (first, first_spread), (second, second_spread) = scaling_time._at_one_speed(rounds)
        assert [first, second] == pytest.approx([2.0, 1.0])
        assert [first_spread, second_spread] == pytest.approx([0.0, 0.0])


@pytest.mark.slow
def test_times_are_measured_in_worlds_beside_each_other_and_with_processes_left_over():
    cases = [Case("none", world, classes=40, batch=6, per_class=2, dim=4) for world in (1, 2, 3)]
    found = scaling_time.timed(cases, rounds=2)
    assert list(found) == cases
    assert all(timed.seconds > 0 for timed in found.values())


@pytest.fixture
def times_by_known_prices(monkeypatch):
    """Times as `KNOWN` makes them, but for a factor of some cases; and what was asked for."""
    factors, asked = {}, []

    def timed(cases, *, rounds):
        asked.append((list(cases), rounds))
        return {
            case: Timed(KNOWN.seconds(scaling_time.mean_work(case)) * factors.get(case[:3], 1.0), 0.01)
            for case in cases
        }

    monkeypatch.setattr(scaling, "timed", timed)
    return factors, asked


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.85, 0), (1.24, 0), (1.26, 1), (0.8, 1)])
def test_a_predicted_time_more_than_a_fifth_off_ends_with_1(times_by_known_prices, capsys, factor, code):
    factors, _ = times_by_known_prices
    factors["log", 4, 8_000] = factor
    assert scaling.main(["--time-model", "--world", "4"]) == code
    shown = capsys.readouterr().out
    (row,) = rows_of(shown, "log", "8,000", "4", "predict")
    assert float(row[6].split("%")[0]) == pytest.approx(100 * (1 / factor - 1), abs=0.06)
    assert ("!" in row[6]) == (code == 1) == ("more than 20%" in shown)
    assert len(rows_of(shown, "log", "8,000")) == 3  # all points are shown, and those that were fitted
    assert len(rows_of(shown, "log", "3,000")) == 2


def test_predicted_ratios_are_those_to_one_rank(times_by_known_prices, capsys):
    assert scaling.main(["--time-model", "--normalizations", "none", "--world", "4"]) == 0
    alone, four = (KNOWN.seconds(scaling_time.mean_work(Case("none", w, 8_000, 256, 2, 128))) for w in (1, 4))
    (row,) = rows_of(capsys.readouterr().out, "none", "8,000", "4")
    assert row[4] == row[5] == f"{four / alone:.2f}"


def test_the_time_model_runs_the_sizes_it_is_told(times_by_known_prices, capsys):
    _, asked = times_by_known_prices
    options = ["--calibration-classes", "50", "70", "--calibration-worlds", "1", "2", "5", "--worlds", "1", "3"]
    sizes = ["--classes", "60", "--batch", "10", "--per-class", "4", "--dim", "6"]
    scaling.main(["--time-model", "--normalizations", "none", "--repeats", "8", "--world", "4", *options, *sizes])
    ((cases, rounds),) = asked
    expected = [("none", world, classes) for classes in (50, 70) for world in (1, 2, 5)]
    expected += [("none", world, 60) for world in (1, 3)]
    assert [case[:3] for case in cases] == expected
    assert {case[3:] for case in cases} == {(10, 4, 6)}
    assert rounds == 8
    capsys.readouterr()


def test_where_the_time_of_a_large_run_would_go(times_by_known_prices, capsys):
    scaling.main(["--time-model", "--normalizations", "none"])
    (row,) = rows_of(capsys.readouterr().out, "none", "4,096", "500,000", "64")
    plain = 3e-9 * 1_000_000**2 / 2 / 64
    where_classes_meet = 1e-8 * 15_625 * (4_096 + 1_024)
    moved = 5e-9 * 2 * 1_954 * 2**20 / 4  # as at 512 dimensions in the test above, at 128
    shown = [float(cell.rstrip("%")) for cell in row[4:]]
    parts = [plain, where_classes_meet, 0, moved, 1e-2]
    assert shown == pytest.approx([100 * part / sum(parts) for part in parts], abs=0.3)


def test_sizes_that_are_predicted_are_not_calibrated_with(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--time-model", "--classes", "6000"])
    assert "--calibration-classes must be others than those predicted, got 6000" in capsys.readouterr().err
