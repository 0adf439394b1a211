"""Figures of the report: ablations and label noise."""

from io import BytesIO

import numpy
import pytest
from PIL import Image, ImageColor

from pfml.paper.figures import noise_curves, plot_ablation, plot_noise
from pfml.paper.fill import filled_tables
from pfml.paper.write import report_of, write_report
from pfml.plots.theme import DARK, LIGHT, png_of_figure
from records import record


def panels(records):
    return [table for table in filled_tables(records) if table.sweep is not None]


def curves_of(records):
    return noise_curves([table for table in filled_tables(records) if table.id == "noise"])


@pytest.fixture
def _small_figures(monkeypatch):
    monkeypatch.setattr("pfml.plots.theme.PIXEL_DENSITY", 1)


def image_of(figure):
    return Image.open(BytesIO(png_of_figure(figure))).convert("RGB")


def labels(axes):
    return axes.get_legend_handles_labels()[1]


@pytest.fixture
def ablations():
    return [
        record(experiment="ablation", seed=seed, settings={"alpha": alpha}, recall=0.6 + alpha / 100 + seed / 50)
        for seed in range(2)
        for alpha in (1, 3, 5)
    ]


@pytest.fixture
def noisy():
    glyphs = {"experiment": "noise", "dataset": "glyphs", "backbone": "convnet", "dim": 64}
    return [
        record(**glyphs, method=method, seed=seed, settings={"noise": rate}, recall=top - rate + seed / 50)
        for method, top in (("pfml", 0.8), ("proxy-anchor", 0.7))
        for rate in (0.2, 0.0, 0.5)
        for seed in range(2)
    ]


def test_there_are_four_panels_with_the_papers_points_in_both_data_sets():
    figure = plot_ablation(panels([]), LIGHT)
    assert [axes.get_xlabel()[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [7, 6, 7, 7]
    for axes in figure.axes:
        assert labels(axes) == ["Cars-196, paper (read off its figure)", "CUB-200-2011, paper (read off its figure)"]


def test_ours_are_plotted_where_they_were_run_with_their_standard_deviation(ablations):
    axes = plot_ablation(panels(ablations), LIGHT).axes[2]
    assert labels(axes).count("CUB-200-2011, ours") == 1
    assert not any("Cars-196, ours" in label for label in labels(axes))
    (bars,) = axes.containers
    line, _, (spread,) = bars.lines
    assert list(line.get_xdata()) == [1, 3, 5]
    assert list(line.get_ydata()) == pytest.approx([62.0, 64.0, 66.0])
    (low, high) = spread.get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(numpy.std([61, 63], ddof=1))
    assert not plot_ablation(panels(ablations), LIGHT).axes[0].containers


@pytest.mark.usefixtures("_small_figures")
def test_the_ablation_figure_is_not_blank_and_shows_ours_in_either_theme(ablations):
    light, dark, without = (
        image_of(plot_ablation(panels(records), theme))
        for records, theme in ((ablations, LIGHT), (ablations, DARK), ([], LIGHT))
    )
    assert light.width == dark.width == 980
    for image in (light, dark):
        assert len(image.getcolors(image.width * image.height)) > 20
    assert (light.getpixel((0, 0)), dark.getpixel((0, 0))) == tuple(map(ImageColor.getrgb, (LIGHT.paper, DARK.paper)))
    assert light.tobytes() != without.tobytes()


def test_nothing_to_plot_is_an_error():
    with pytest.raises(ValueError, match="a table of Figure 3"):
        plot_ablation([], LIGHT)
    with pytest.raises(ValueError, match="a curve to plot"):
        plot_noise([], LIGHT)


def test_a_curve_is_the_mean_over_seeds_at_rising_rates(noisy):
    first, second = curves_of(noisy)
    assert (first.panel, first.name, first.rates) == ("glyphs, convnet, 64 dim", "Potential Field", (0.0, 0.2, 0.5))
    assert [one.mean for one in first.recalls] == pytest.approx([81, 61, 31])
    assert [one.std for one in second.recalls] == pytest.approx([numpy.std([0, 2], ddof=1)] * 3)


def test_one_rate_is_no_curve_and_the_papers_sections_are_not_ours(noisy):
    at_one_rate = [one for one in noisy if one["settings"]["noise"] == 0.2]
    assert curves_of(at_one_rate) == []
    assert curves_of([]) == []


def test_the_papers_own_section_is_a_point_of_the_curve():
    own = [record(experiment="noise", settings={"noise": rate}) for rate in (0.2, 0.4)]
    (curve,) = [one for one in curves_of(own) if one.name.startswith("Potential Field")]
    assert (curve.panel, curve.rates) == ("cub, resnet50, 512 dim", (0.2, 0.4))


def test_each_data_set_has_a_panel_with_its_lines(noisy):
    other = [{**one, "dataset": "other", "key": f"l{k}"} for k, one in enumerate(noisy[:6])]
    axes = plot_noise(curves_of([*noisy, *other]), LIGHT).axes
    assert ["glyphs" in one.get_xlabel() for one in axes] == [True, False]
    assert [len(one.containers) for one in axes] == [2, 1]
    line = axes[0].containers[1].lines[0]
    assert list(line.get_xdata()) == [0, 20, 50]
    assert list(line.get_ydata()) == pytest.approx([71, 51, 21])


@pytest.mark.usefixtures("_small_figures")
def test_the_noise_figure_is_not_blank(noisy):
    image = image_of(plot_noise(curves_of(noisy), DARK))
    assert len(image.getcolors(image.width * image.height)) > 20


@pytest.mark.usefixtures("_small_figures")
@pytest.mark.parametrize("ending", ["md", "latex"])
def test_the_report_has_the_figure_beside_it(noisy, tmp_path, ending):
    out = tmp_path / "report.txt"
    write_report(report_of(noisy, experiment="noise"), ending, out)
    assert (tmp_path / "report-noise.png").read_bytes().startswith(b"\x89PNG")
    assert "report-noise.png" in out.read_text(encoding="utf-8")
    assert not (tmp_path / "report-ablation.png").exists()


@pytest.mark.usefixtures("_small_figures")
def test_the_page_has_the_figure_inside(noisy):
    text = write_report(report_of(noisy, experiment="noise"), "html", None)
    assert text.count('<img src="data:image/png') == 1
    assert "<h2>Label noise</h2>" in text


def test_curves_of_tuned_and_of_other_runs_are_two():
    rates = (0.1, 0.2)
    tuning = {"trials": 12, "split": "half", "values": {"optimizer.lr": 2e-4}}
    runs = [record(experiment="noise", settings={"noise": rate}, recall=0.7 - rate) for rate in rates]
    tuned = [
        record(experiment="noise", settings={"noise": rate}, recall=0.8 - rate, key=f"t{rate}", tuning=tuning)
        for rate in rates
    ]
    curves = curves_of([*runs, *tuned])
    values = {curve.name.endswith(", tuned"): [point.mean for point in curve.recalls] for curve in curves}
    assert values == {False: pytest.approx([60.0, 50.0]), True: pytest.approx([70.0, 60.0])}
