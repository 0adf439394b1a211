"""The curve of verification: what is drawn is what was measured."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pfml.evaluation.verification import verification_metrics
from pfml.plots.theme import DARK, LIGHT, in_both_themes
from pfml.plots.verification import plot_verification, rate_text


@pytest.fixture(scope="module")
def pairs():
    """Twelve classes that overlap."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(10)
    centers = torch.randn(12, 6, generator=random)
    return verification_metrics(centers[labels] + 0.8 * torch.randn(120, 6, generator=random), labels)


def line(axes, label):
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def test_the_line_is_the_curve_in_percent_on_a_logarithmic_axis(pairs):
    (axes,) = plot_verification(pairs, LIGHT).axes
    fmr, fnmr = line(axes, "this model")
    assert axes.get_xscale() == "log"
    assert fmr[1:].tolist() == pairs.curve[1:, 0].tolist()
    assert fnmr.tolist() == pytest.approx((100 * pairs.curve[:, 1]).tolist())
    assert (fmr > 0).all(), "a rate of 0 would be lost"
    assert axes.get_xlim()[0] < min(pairs.fnmr_at)
    assert "FMR" in axes.get_xlabel()
    assert "FNMR" in axes.get_ylabel()


def test_the_band_is_the_interval(pairs):
    (axes,) = plot_verification(pairs, LIGHT).axes
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    low, high = 100 * pairs.curve_interval.T.numpy()
    assert set(np.round(corners[:, 1], 9)) == set(np.round([*low, *high], 9))
    (axes,) = plot_verification(replace(pairs, curve_interval=None), LIGHT).axes
    assert not axes.collections


def test_chance_accepts_both_kinds_of_pairs_alike(pairs):
    (axes,) = plot_verification(pairs, LIGHT).axes
    fmr, fnmr = line(axes, "chance: random distances")
    assert fnmr.tolist() == pytest.approx((100 - 100 * fmr).tolist())


def test_the_reported_rates_and_the_equal_error_rate_are_marked_and_labeled(pairs):
    (axes,) = plot_verification(pairs, LIGHT).axes
    marks = {(each.get_xdata()[0], each.get_ydata()[0]) for each in axes.lines if len(each.get_xdata()) == 1}
    wanted = {(rate, 100 * each.value) for rate, each in pairs.fnmr_at.items()}
    assert len(wanted) == 2, "1e-4 is less than one of these pairs"
    assert marks == wanted | {(pairs.eer.value, 100 * pairs.eer.value)}
    texts = {each.get_text() for each in axes.texts}
    assert texts == {f"{y:.1f} %" for _, y in wanted} | {f"EER {100 * pairs.eer.value:.1f} %"}


def test_perfect_embeddings_of_very_few_images_are_plotted_too():
    points = torch.eye(2).repeat_interleave(2, dim=0)
    pairs = verification_metrics(points, torch.tensor([0, 0, 1, 1]))
    (axes,) = plot_verification(pairs, LIGHT).axes
    assert line(axes, "this model")[1].tolist() == [0.0] * len(pairs.curve)
    assert math.isclose(axes.get_xlim()[0], 0.1)


def test_both_themes_and_widths_give_plots(pairs):
    light, dark = in_both_themes(lambda theme: plot_verification(pairs, theme))
    (narrow, _) = in_both_themes(lambda theme: plot_verification(pairs, theme, width=400))
    assert all(png.startswith(b"\x89PNG") for png in (light, dark, narrow))
    assert len({light, dark, narrow}) == 3
    (axes,) = plot_verification(pairs, DARK).axes
    (model,) = [each for each in axes.lines if each.get_label() == "this model"]
    assert model.get_color() == DARK.accent


@pytest.mark.parametrize(("rate", "text"), [(1.0, "100 %"), (0.01, "1 %"), (1e-4, "0.01 %"), (0.025, "2.5 %")])
def test_rates_are_written_in_percent(rate, text):
    assert rate_text(rate) == text
