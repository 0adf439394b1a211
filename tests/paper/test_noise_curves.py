from io import BytesIO

import numpy
import pytest
from PIL import Image

from pfml.paper.fill import filled_tables
from pfml.paper.noise_curves import draw_noise, noise_curves
from pfml.paper.write import report_of, write_report
from pfml.plots.theme import DARK, LIGHT, png_of_figure
from records import record


@pytest.fixture
def runs():
    glyphs = {"experiment": "noise", "dataset": "glyphs", "backbone": "convnet", "dim": 64}
    return [
        record(**glyphs, method=method, seed=seed, settings={"noise": rate}, recall=top - rate + seed / 50)
        for method, top in (("pfml", 0.8), ("proxy-anchor", 0.7))
        for rate in (0.2, 0.0, 0.5)
        for seed in range(2)
    ]


def curves_of(records):
    return noise_curves([one for one in filled_tables(records) if one.table.id == "noise"])


def test_a_curve_is_the_mean_over_seeds_at_rising_rates(runs):
    first, second = curves_of(runs)
    assert (first.panel, first.name, first.rates) == ("glyphs, convnet, 64 dim", "Potential Field", (0.0, 0.2, 0.5))
    assert [one.mean for one in first.recalls] == pytest.approx([81, 61, 31])
    assert [one.std for one in second.recalls] == pytest.approx([numpy.std([0, 2], ddof=1)] * 3)


def test_one_rate_is_no_curve_and_the_papers_sections_are_not_ours(runs):
    at_one_rate = [one for one in runs if one["settings"]["noise"] == 0.2]
    assert curves_of(at_one_rate) == []
    assert curves_of([]) == []


def test_the_papers_own_section_is_a_point_of_the_curve():
    own = [record(experiment="noise", settings={"noise": rate}) for rate in (0.2, 0.4)]
    (curve,) = [one for one in curves_of(own) if one.name.startswith("Potential Field")]
    assert (curve.panel, curve.rates) == ("cub, resnet50, 512 dim", (0.2, 0.4))


def test_each_data_set_has_a_panel_with_its_lines(runs):
    other = [{**one, "dataset": "letters", "key": f"l{k}"} for k, one in enumerate(runs[:6])]
    axes = draw_noise(curves_of([*runs, *other]), LIGHT).axes
    assert ["glyphs" in one.get_xlabel() for one in axes] == [True, False]
    assert [len(one.containers) for one in axes] == [2, 1]
    line = axes[0].containers[1].lines[0]
    assert list(line.get_xdata()) == [0, 20, 50]
    assert list(line.get_ydata()) == pytest.approx([71, 51, 21])


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_picture_is_not_blank(runs, theme):
    pixels = numpy.asarray(Image.open(BytesIO(png_of_figure(draw_noise(curves_of(runs), theme)))).convert("RGB"))
    assert len(numpy.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="a curve to draw"):
        draw_noise([], LIGHT)


@pytest.mark.parametrize("ending", ["md", "latex"])
def test_the_report_has_the_picture_beside_it(runs, tmp_path, ending):
    out = tmp_path / "report.txt"
    write_report(report_of(runs, experiment="noise"), ending, out)
    assert (tmp_path / "report-noise.png").read_bytes().startswith(b"\x89PNG")
    assert "report-noise.png" in out.read_text(encoding="utf-8")
    assert not (tmp_path / "report-ablation.png").exists()


def test_the_page_has_the_picture_inside(runs):
    text = write_report(report_of(runs, experiment="noise"), "html", None)
    assert text.count('<img src="data:image/png') == 1
    assert "<h2>Label noise</h2>" in text
