from io import BytesIO

import numpy
import pytest
from PIL import Image

from pfml.paper.ablation import draw_ablation
from pfml.paper.fill import filled_tables
from pfml.plots.theme import DARK, LIGHT, png_of_figure
from records import record


def panels(records):
    return [one for one in filled_tables(records) if one.table.sweep is not None]


@pytest.fixture
def runs():
    return [
        record(experiment="ablation", seed=seed, settings={"alpha": alpha}, recall=0.6 + alpha / 100 + seed / 50)
        for seed in range(2)
        for alpha in (1, 3, 5)
    ]


def labels(axes):
    return axes.get_legend_handles_labels()[1]


def test_there_are_four_panels_with_the_papers_points_in_both_data_sets():
    figure = draw_ablation(panels([]), LIGHT)
    assert [axes.get_xlabel()[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [7, 6, 7, 7]
    for axes in figure.axes:
        assert labels(axes) == ["Cars-196, paper (read off its figure)", "CUB-200-2011, paper (read off its figure)"]


def test_ours_are_drawn_where_they_were_run_with_their_standard_deviation(runs):
    axes = draw_ablation(panels(runs), LIGHT).axes[2]
    assert labels(axes).count("CUB-200-2011, ours") == 1
    assert not any("Cars-196, ours" in label for label in labels(axes))
    (bars,) = axes.containers
    line, _, (spread,) = bars.lines
    assert list(line.get_xdata()) == [1, 3, 5]
    assert list(line.get_ydata()) == pytest.approx([62.0, 64.0, 66.0])
    (low, high) = spread.get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(numpy.std([61, 63], ddof=1))
    assert not draw_ablation(panels(runs), LIGHT).axes[0].containers


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_picture_is_not_blank(runs, theme):
    with_ours, without = (
        numpy.asarray(Image.open(BytesIO(png_of_figure(draw_ablation(panels(records), theme)))).convert("RGB"))
        for records in (runs, [])
    )
    assert with_ours.shape[1] == 1960
    assert len(numpy.unique(with_ours.reshape(-1, 3), axis=0)) > 20
    assert with_ours.shape != without.shape or (with_ours != without).any()


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="a table of Figure 3"):
        draw_ablation([], LIGHT)
