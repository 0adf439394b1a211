import pytest

from pfml.runs.config import ScheduleConfig
from pfml.training.optimizer import learning_rate_factor


def factors(schedule, epochs=10, steps_per_epoch=5):
    return [learning_rate_factor(schedule, step, steps_per_epoch, epochs) for step in range(epochs * steps_per_epoch)]


def test_constant_is_one():
    assert set(factors(ScheduleConfig("constant"))) == {1.0}


def test_steps_halve_every_so_many_epochs():
    values = factors(ScheduleConfig("step", every=4, factor=0.5))
    assert values[:20] == [1.0] * 20
    assert values[20:40] == [0.5] * 20
    assert values[40:] == [0.25] * 10


def test_milestones_lower_the_rates_after_each_of_these_epochs():
    values = factors(ScheduleConfig("milestones", factor=0.1, milestones=(3, 8)))
    assert values == pytest.approx([1.0] * 15 + [0.1] * 25 + [0.01] * 10)


@pytest.mark.parametrize("name", ["step", "constant"])
def test_milestones_belong_to_their_schedule(name):
    with pytest.raises(
        ValueError, match=rf"schedule.milestones are epochs of schedule.name milestones.*got \[3\] with {name}"
    ):
        ScheduleConfig(name, milestones=(3,))
    with pytest.raises(ValueError, match=r"which needs some: got \[\] with milestones"):
        ScheduleConfig("milestones")
    for wrong in ((0, 3), (5, 5), (6, 2)):
        with pytest.raises(ValueError, match="schedule.milestones must be rising epochs >= 1"):
            ScheduleConfig("milestones", milestones=wrong)
    assert ScheduleConfig("milestones", milestones=[2, 4]) == ScheduleConfig("milestones", milestones=(2, 4))


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
