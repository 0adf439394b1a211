"""Maps of photographs: each where its embedding was put, and proxies among the images of their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfml.report.theme import PIXEL_DENSITY, Theme, class_colours, new_figure, png_of_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_photo_map", "draw_proxy_map"]

FRAME = 3  # pixels
NAMED_CLASSES = 12  # more would need a legend larger than the map


def draw_photo_map(places: Tensor, labels: Tensor, tiles: Tensor, theme: Theme, *, width: int = 940) -> bytes:
    """A PNG with each photograph at its place, in a frame of the colour of its class, later ones over earlier ones.

    Args:
        places: (n, 2) in [0, 1], x to the right and y up.
        labels: (n,).
        tiles: (n, 3, side, side), RGB in [0, 1].
        theme: Colours.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    side, pixels = tiles.shape[-1] + 2 * FRAME, width * PIXEL_DENSITY
    height = round(0.72 * pixels)
    canvas = torch.tensor(to_rgb(theme.paper)).view(3, 1, 1).repeat(1, height, pixels)
    classes, numbers = labels.unique(return_inverse=True)
    colours = torch.tensor(class_colours(len(classes), theme))
    room = torch.tensor([pixels - side, height - side])
    corners = (places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * room
    for (left, top), number, tile in zip(corners.round().long().tolist(), numbers.tolist(), tiles, strict=True):
        canvas[:, top : top + side, left : left + side] = colours[number].view(3, 1, 1)
        canvas[:, top + FRAME : top + side - FRAME, left + FRAME : left + side - FRAME] = tile
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))


def draw_proxy_map(
    places: Tensor,
    labels: Tensor,
    proxy_places: Tensor,
    proxy_labels: Tensor,
    names: dict[int, str],
    theme: Theme,
    *,
    width: int = 940,
) -> Figure:
    """Images as dots and proxies as stars, in the colours of their classes.

    Args:
        places, labels: (n, 2) in [0, 1] and (n,), of the images.
        proxy_places, proxy_labels: (p, 2) and (p,), of the proxies.
        names: Label -> what to call the class, in the legend if they are few.
        theme: Colours.
        width: In CSS pixels.
    """
    figure = new_figure(theme, width=width, height=round(0.6 * width))
    axes = figure.subplots()
    axes.set_facecolor(theme.paper)
    axes.set(xticks=[], yticks=[], xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    for spine in axes.spines.values():
        spine.set_visible(False)
    classes = labels.unique().tolist()
    for label, colour in zip(classes, class_colours(len(classes), theme), strict=True):
        x, y = places[labels == label].T
        axes.scatter(x, y, s=16, color=[colour], linewidths=0, alpha=0.8, label=names[label])
        x, y = proxy_places[proxy_labels == label].T
        axes.scatter(x, y, s=210, marker="*", color=[colour], edgecolors=theme.ink, linewidths=1.1, zorder=3)
    if len(classes) <= NAMED_CLASSES:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure
