import pytest

from pfml.plots.curves import Curve, loss_curve, mean_loss_curve, metric_curve, plot_loss, plot_metric
from pfml.plots.theme import DARK, LIGHT, png_of_figure
from pfml.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """Two epochs of two steps, evaluated after each."""
    folder = RunFolder(tmp_path)
    for step, loss in enumerate([8.0, 6.0, 4.0, 2.0], start=1):
        folder.append("step", step, epoch=(step - 1) // 2, loss=loss)
        if step % 2 == 0:
            test = {"recall_at_1": step / 10, "map_at_r": step / 20}
            validation = {"recall_at_1": step / 5}
            folder.append("evaluation", step, epoch=step // 2, loss=loss + 1, test=test, validation=validation)
    folder.close()
    return folder


def test_a_metric_is_read_at_each_evaluation(folder):
    assert metric_curve(folder, "run", "recall_at_1") == Curve("run", (1.0, 2.0), (0.2, 0.4))
    assert metric_curve(folder, "run", "map_at_r") == Curve("run", (1.0, 2.0), (0.1, 0.2))


def test_validation_classes_have_a_curve_of_their_own(folder):
    assert metric_curve(folder, "run", "recall_at_1", role="validation") == Curve("run", (1.0, 2.0), (0.4, 0.8))


def test_the_untrained_model_is_at_epoch_zero(folder):
    assert metric_curve(folder, "run", "recall_at_1", untrained=0.05) == Curve("run", (0.0, 1.0, 2.0), (0.05, 0.2, 0.4))


def test_curves_of_two_protocols_are_refused_in_one_plot(folder, tmp_path):
    folder.write_results({"last": {}, "best_on_test": {}, "validation_selected": None, "protocol": "images"})
    known = metric_curve(folder, "known", "recall_at_1")
    assert known.protocol == "images"
    assert plot_metric([known, known], LIGHT)
    with pytest.raises(ValueError, match="one protocol, got held-out images of known classes and unseen classes"):
        plot_metric([known, Curve("unseen", (1.0,), (0.5,))], LIGHT)


def test_steps_lie_within_their_epochs(folder):
    assert loss_curve(folder, "run") == Curve("run", (0.25, 0.75, 1.25, 1.75), (8.0, 6.0, 4.0, 2.0))


def test_the_mean_loss_of_an_epoch_is_that_of_its_steps(folder):
    assert mean_loss_curve(folder, "run") == Curve("run", (0.5, 1.5), (7.0, 3.0))


def test_a_run_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold an evaluation, got none"):
        metric_curve(RunFolder(tmp_path), "run", "recall_at_1")


def test_lines_show_percent_in_the_order_of_the_runs(folder):
    curves = [metric_curve(folder, name, "recall_at_1") for name in ("first", "second")]
    figure = plot_metric(curves, LIGHT, levels={"pixels": 0.3})
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["first"].get_ydata()) == [20.0, 40.0]
    assert list(lines["pixels"].get_ydata()) == [30.0, 30.0]
    assert [lines[name].get_color() for name in ("pixels", "first", "second")] == list(LIGHT.series[:3])


def test_themes_and_widths_change_the_plot(folder):
    curves = [metric_curve(folder, "run", "recall_at_1")]
    plots = {png_of_figure(plot_metric(curves, theme, width=300)) for theme in (LIGHT, DARK)}
    plots.add(png_of_figure(plot_metric(curves, LIGHT, width=320)))
    assert len(plots) == 3


def test_a_loss_is_plotted_by_steps_and_by_epochs(folder):
    steps, means = loss_curve(folder, "run"), mean_loss_curve(folder, "run")
    figure = plot_loss(steps, means, LIGHT, color=2)
    raw, mean = figure.axes[0].lines
    assert list(raw.get_ydata()) == [8.0, 6.0, 4.0, 2.0]
    assert list(mean.get_ydata()) == [7.0, 3.0]
    assert mean.get_color() == LIGHT.series[2]
    assert (
        len({png_of_figure(plot_loss(steps, means, theme, width=w)) for theme in (LIGHT, DARK) for w in (200, 210)})
        == 4
    )
