import io

from rich.console import Console

from pfml.training.progress import Monitor, ProgressMonitor

ENTRY = {"epoch": 2, "loss": 1.25, "images_per_second": 321.0, "test": {"recall_at_1": 0.5, "map_at_r": 0.25}}


def shown(terminal, act, **options):
    text = io.StringIO()
    act(ProgressMonitor(Console(file=text, force_terminal=terminal, width=140), **options))
    return text.getvalue()


def train(monitor):
    monitor.start(3, 2, 0)
    monitor.step(0, 1.5, 300.0)
    monitor.step(0, 1.25, 300.0)
    monitor.evaluated(ENTRY)
    monitor.step(1, 1.0, 300.0)
    monitor.stop()


def test_without_a_terminal_there_is_a_line_per_evaluation_and_no_bar():
    assert shown(False, train).splitlines() == ["epoch   2/3  loss 1.25  test R@1 50.0%, MAP@R 25.0%  321 images/s"]


def test_lines_can_be_left_out():
    assert shown(False, train, lines=False) == ""


def test_the_bar_has_epoch_loss_speed_time_and_the_last_recall():
    text = shown(True, train)
    for part in ("epoch 2/3", "3/6", "loss 1", "300 images/s", "R@1 50.0%", "left"):
        assert part in text, part


def test_validation_is_shown_beside_test():
    entry = {**ENTRY, "validation": {"recall_at_1": 0.75, "map_at_r": 0.1}}
    text = shown(False, lambda monitor: (monitor.start(3, 2, 0), monitor.evaluated(entry), monitor.stop()))
    assert "validation R@1 75.0%" in text


def test_a_remark_may_hold_brackets():
    assert shown(False, lambda monitor: monitor.remark("[red] images")) == "[red] images\n"


def test_tracked_items_come_through_whether_shown_or_not():
    for terminal in (True, False):
        items = []
        shown(terminal, lambda monitor, items=items: items.extend(monitor.track([1, 2, 3], "reading", 3)))
        assert items == [1, 2, 3]
    assert list(Monitor().track([1, 2], "reading", 2)) == [1, 2]


def test_before_the_first_step_there_is_no_loss_to_show():
    text = shown(True, lambda monitor: (monitor.start(3, 2, 0), monitor.stop()))
    assert "nan" not in text
    assert "loss -" in text
