"""The confusion matrix as a plot."""

import pytest
import torch

from pfml.plots.confusion import WRITTEN, plot_confusion
from pfml.plots.theme import DARK, LIGHT, png_of_figure


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_cells_have_the_counts_and_mistakes_another_color(theme):
    figure = plot_confusion(torch.tensor([[3, 1], [0, 4]]), ["ant", "bee"], theme)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["3", "1", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee"]
    (shown,) = axes.images
    pixels = shown.get_array()
    empty = tuple(int(theme.paper[k : k + 2], 16) / 255 for k in (1, 3, 5))
    assert tuple(pixels[1, 0]) == pytest.approx(empty)
    assert tuple(pixels[0, 1]) != pytest.approx(empty), "a single mistake is seen"
    assert png_of_figure(figure).startswith(b"\x89PNG")


def test_of_many_classes_the_counts_are_colors_only():
    many = WRITTEN + 1
    figure = plot_confusion(torch.eye(many, dtype=torch.int64), [f"class {k}" for k in range(many)], LIGHT)
    assert not figure.axes[0].texts
