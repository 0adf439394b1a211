import pytest

from pfml.training.config import ScheduleConfig
from pfml.training.schedules import learning_rate_factor


def factors(schedule, epochs=10, steps_per_epoch=5):
    return [learning_rate_factor(schedule, step, steps_per_epoch, epochs) for step in range(epochs * steps_per_epoch)]


def test_constant_is_one():
    assert set(factors(ScheduleConfig("constant"))) == {1.0}


def test_steps_halve_every_so_many_epochs():
    values = factors(ScheduleConfig("step", every=4, factor=0.5))
    assert values[:20] == [1.0] * 20
    assert values[20:40] == [0.5] * 20
    assert values[40:] == [0.25] * 10


def test_a_cosine_goes_from_one_to_nearly_zero_and_never_up():
    values = factors(ScheduleConfig("cosine"))
    assert values[0] == 1
    assert values[25] == pytest.approx(0.5)
    assert values[-1] < 0.01
    assert values == sorted(values, reverse=True)


def test_one_cycle_peaks_after_three_tenths():
    values = factors(ScheduleConfig("one-cycle"))
    assert values[0] == pytest.approx(0.04)
    assert values.index(max(values)) == 15
    assert max(values) == pytest.approx(1)
    assert values[-1] < 0.01


@pytest.mark.parametrize("wrong", [{"every": 0}, {"factor": 0.0}, {"factor": 1.5}])
def test_values_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match="schedule"):
        ScheduleConfig("step", **wrong)
