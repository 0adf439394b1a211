import pytest

from pfml.runs.results import summarize


def entry(epoch, test, validation=None, map_at_r=0.0):
    found = {"epoch": epoch, "test": {"recall_at_1": test, "map_at_r": map_at_r}}
    return (
        found if validation is None else {**found, "validation": {"recall_at_1": validation, "map_at_r": -validation}}
    )


def test_the_last_and_the_best_epoch_are_told_apart():
    results = summarize([entry(1, 0.5), entry(2, 0.7), entry(3, 0.6)])
    assert results["last"]["epoch"] == 3
    assert results["best_on_test"]["epoch"] == 2
    assert results["validation_selected"] is None


def test_validation_chooses_by_its_own_score():
    results = summarize([entry(1, 0.5, 0.9), entry(2, 0.7, 0.1)])
    assert results["validation_selected"]["epoch"] == 1


def test_another_score_can_choose():
    results = summarize([entry(1, 0.5, 0.9, 0.1), entry(2, 0.7, 0.1, 0.05)], select_by="map_at_r")
    assert results["validation_selected"]["epoch"] == 2
    assert results["best_on_test"]["epoch"] == 1
    assert results["selected_by"] == "map_at_r"


def test_among_equals_the_earlier_epoch_is_chosen():
    assert summarize([entry(1, 0.7), entry(2, 0.7)])["best_on_test"]["epoch"] == 1


def test_a_run_without_evaluation_has_nothing_to_report():
    with pytest.raises(ValueError, match="at least one evaluation"):
        summarize([])
