"""The ladder: every rung of the log in its row, from the bottom up."""

import math

import pytest

from pfml.ladder.crossfit import Gain
from pfml.plots.ladder import LoggedRung, logged_rungs, plot_ladder, shown_gain
from pfml.plots.theme import DARK, LIGHT, in_both_themes
from pfml.runs.folder import RunFolder


def rung(name, scores, gains, *, is_kept=False):
    """Of R@1 and MAP@R; a gain is a mean and an error."""
    metrics = ("recall_at_1", "map_at_r")
    measured = (Gain(*gain) for gain in gains)
    return LoggedRung(
        name, "x", dict(zip(metrics, scores, strict=True)), dict(zip(metrics, measured, strict=True)), 1.0, is_kept
    )


RUNGS = [
    rung("pretrained", (0.5, 0.3), ((0.0, 0.0), (0.0, 0.0))),
    rung("closed form", (0.52, 0.36), ((0.02, 0.005), (0.06, 0.01)), is_kept=True),
    rung("trained head", (0.49, 0.35), ((-0.01, 0.02), (0.05, 0.03))),
]


def drawn(axes):
    """Height of a row -> the gain, the ends of its bar and the color."""
    found = {}
    for container in axes.containers:
        point, _, bars = container.lines
        ends = bars[0].get_segments()[0][:, 0].tolist() if bars else None
        found[int(point.get_ydata()[0])] = (float(point.get_xdata()[0]), ends, point.get_color())
    return found


def test_rungs_are_read_from_the_log_with_or_without_scores(tmp_path):
    folder = RunFolder(tmp_path)
    gains = {"map_at_r": {"mean": 0.02, "error": 0.01, "later": 7}}
    folder.append("rung", 0, name="pretrained", candidate="no head", scores={}, gains={}, seconds=1.0, is_kept=False)
    folder.append("step", 1, epoch=0, loss=1.0)
    folder.append(
        "rung", 0, name="new", candidate="x", scores={"map_at_r": 0.4}, gains=gains, is_kept=True, unknown=[1]
    )
    folder.close()
    assert logged_rungs(folder) == [
        LoggedRung("pretrained", "no head", {}, {}, 1.0, False),
        LoggedRung("new", "x", {"map_at_r": 0.4}, {"map_at_r": Gain(0.02, 0.01)}, None, True),
    ]
    assert logged_rungs(RunFolder(tmp_path / "another")) == []


def test_each_rung_has_a_row_from_the_bottom_up_with_its_gain_and_interval():
    (axes,) = plot_ladder(RUNGS, "map_at_r", LIGHT).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "pretrained",
        "closed form (kept)",
        "trained head",
    ]
    assert axes.get_ylim() == (-0.5, 2.5)
    rows = drawn(axes)
    assert {height: mean for height, (mean, _, _) in rows.items()} == pytest.approx({0: 0.0, 1: 6.0, 2: 5.0})
    assert rows[0][1] is None
    assert rows[1][1] == pytest.approx([6 - 1.96, 6 + 1.96])
    assert rows[2][1] == pytest.approx([5 - 5.88, 5 + 5.88])
    assert [each.get_text() for each in axes.texts] == ["30.0", "36.0 (+6.0)", "35.0 (+5.0)"]
    assert "MAP@R" in axes.get_xlabel()


def test_the_kept_rung_is_emphasized():
    (axes,) = plot_ladder(RUNGS, "recall_at_1", LIGHT).axes
    assert [color for _, _, color in drawn(axes).values()] == [LIGHT.series[0], LIGHT.accent, LIGHT.series[0]]
    assert [each.get_fontweight() for each in axes.get_yticklabels()] == ["normal", "bold", "normal"]
    assert [each.get_fontweight() for each in axes.texts] == ["normal", "bold", "normal"]
    (band,) = axes.patches
    assert (band.get_y(), band.get_height()) == (0.5, 1.0)


def test_metrics_share_one_scale():
    limits = {plot_ladder(RUNGS, metric, LIGHT).axes[0].get_xlim() for metric in ("recall_at_1", "map_at_r")}
    ((low, high),) = limits
    assert low < 100 * (-0.01 - 1.96 * 0.02)
    assert high > 100 * (0.05 + 1.96 * 0.03)


def test_a_rung_without_scores_has_an_empty_row_and_an_unknown_error_no_bar():
    empty = LoggedRung("fine-tuned", "all layers", {}, {}, 1.0, False)
    single = LoggedRung("one class", "x", {"map_at_r": 0.4}, {"map_at_r": Gain(0.1, math.inf)}, 1.0, False)
    (axes,) = plot_ladder([RUNGS[0], empty, single], "map_at_r", LIGHT).axes
    rows = drawn(axes)
    assert set(rows) == {0, 2}
    assert rows[2][1] is None
    assert math.isfinite(axes.get_xlim()[1])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pretrained", "fine-tuned", "one class"]


def test_both_themes_and_widths_give_plots():
    light, dark = in_both_themes(lambda theme: plot_ladder(RUNGS, "map_at_r", theme))
    (narrow, _) = in_both_themes(lambda theme: plot_ladder(RUNGS, "map_at_r", theme, width=300))
    assert all(png.startswith(b"\x89PNG") for png in (light, dark, narrow))
    assert len({light, dark, narrow}) == 3
    assert drawn(plot_ladder(RUNGS, "map_at_r", DARK).axes[0])[1][2] == DARK.accent


def test_gains_have_a_sign():
    assert [shown_gain("map_at_r", Gain(mean, 0.0)) for mean in (0.021, -0.021, 0.0)] == ["+2.1", "-2.1", "+0.0"]
