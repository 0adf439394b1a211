"""A map of the embedding: t-SNE of some classes, each image drawn where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfml.plots.theme import PIXEL_DENSITY, Theme, class_colors, new_figure, png_of_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["choose_images", "draw_map", "draw_photo_map", "draw_proxy_map", "flatten"]


def choose_images(labels: Tensor, *, classes: int, per_class: int, seed: int = 0) -> Tensor:
    """Positions of up to `per_class` images of each of up to `classes` classes, drawn with `seed`; by class."""
    generator = torch.Generator().manual_seed(seed)
    present = labels.unique()
    chosen = present[torch.randperm(len(present), generator=generator)[:classes]].sort().values
    parts = []
    for label in chosen:
        members = (labels == label).nonzero()[:, 0]
        parts.append(members[torch.randperm(len(members), generator=generator)[:per_class]].sort().values)
    return torch.cat(parts)


def flatten(points: Tensor, *, perplexity: float = 20.0, seed: int = 0) -> Tensor:
    """t-SNE of the directions of `points` (n, D), (n, 2), each axis stretched to [0, 1].

    Neighbors stay neighbors; large distances mean nothing.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from pfml.evaluation.nearest_neighbors import directions

    if len(points) < 4:
        raise ValueError(f"a map needs at least 4 points, got {len(points)}")
    perplexity = min(perplexity, (len(points) - 1) / 3)
    # more threads add the same numbers in another order each time
    with threadpool_limits(1):
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed)
        places = torch.from_numpy(tsne.fit_transform(directions(points, "points").cpu().numpy())).double()
    low, high = places.amin(0), places.amax(0)
    return (places - low) / (high - low).clamp(min=1e-12)


def draw_map(places: Tensor, labels: Tensor, tiles: Tensor, theme: Theme, *, width: int = 470) -> bytes:
    """A PNG with each image at its place, in the color of its class.

    Args:
        places: (n, 2) in [0, 1], x to the right and y up.
        labels: (n,).
        tiles: (n, 3, side, side), RGB in [0, 1], bright signs on dark ground: their brightness is drawn as ink, in the
            color of the class, so that the ground does not cover the neighbors.
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    side, pixels = tiles.shape[-1], width * PIXEL_DENSITY
    canvas = torch.tensor(to_rgb(theme.paper)).view(3, 1, 1).repeat(1, pixels, pixels)
    classes, numbers = labels.unique(return_inverse=True)
    colors = torch.tensor(class_colors(len(classes), theme))
    corners = (places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * (pixels - side)
    # what is faint is noise of the ground
    inks = ((tiles.mean(1) - 0.35) / 0.4).clamp(0, 1) * 0.9
    for (left, top), number, ink in zip(corners.round().long().tolist(), numbers.tolist(), inks, strict=True):
        area = canvas[:, top : top + side, left : left + side]
        area.lerp_(colors[number].view(3, 1, 1).expand_as(area), ink.expand_as(area))
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))


FRAME = 3  # pixels
NAMED_CLASSES = 12  # more would need a legend larger than the map


def draw_photo_map(places: Tensor, labels: Tensor, tiles: Tensor, theme: Theme, *, width: int = 940) -> bytes:
    """A PNG with each photograph at its place, in a frame of the color of its class, later ones over earlier ones.

    Args:
        places: (n, 2) in [0, 1], x to the right and y up.
        labels: (n,).
        tiles: (n, 3, side, side), RGB in [0, 1].
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    side, pixels = tiles.shape[-1] + 2 * FRAME, width * PIXEL_DENSITY
    height = round(0.72 * pixels)
    canvas = torch.tensor(to_rgb(theme.paper)).view(3, 1, 1).repeat(1, height, pixels)
    classes, numbers = labels.unique(return_inverse=True)
    colors = torch.tensor(class_colors(len(classes), theme))
    room = torch.tensor([pixels - side, height - side])
    corners = (places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * room
    for (left, top), number, tile in zip(corners.round().long().tolist(), numbers.tolist(), tiles, strict=True):
        canvas[:, top : top + side, left : left + side] = colors[number].view(3, 1, 1)
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
    """Images as dots and proxies as stars, in the colors of their classes.

    Args:
        places, labels: (n, 2) in [0, 1] and (n,), of the images.
        proxy_places, proxy_labels: (p, 2) and (p,), of the proxies.
        names: Label -> what to call the class, in the legend if they are few.
        theme: Colors.
        width: In CSS pixels.
    """
    figure = new_figure(theme, width=width, height=round(0.6 * width))
    axes = figure.subplots()
    axes.set_facecolor(theme.paper)
    axes.set(xticks=[], yticks=[], xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    for spine in axes.spines.values():
        spine.set_visible(False)
    classes = labels.unique().tolist()
    for label, color in zip(classes, class_colors(len(classes), theme), strict=True):
        x, y = places[labels == label].T
        axes.scatter(x, y, s=16, color=[color], linewidths=0, alpha=0.8, label=names[label])
        x, y = proxy_places[proxy_labels == label].T
        axes.scatter(x, y, s=210, marker="*", color=[color], edgecolors=theme.ink, linewidths=1.1, zorder=3)
    if len(classes) <= NAMED_CLASSES:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure
