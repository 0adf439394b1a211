"""A map of the embedding: t-SNE of some classes, each image drawn where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.report.theme import PIXEL_DENSITY, Theme, class_colours, png_of_image

__all__ = ["choose_images", "draw_map", "flatten"]


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

    Neighbours stay neighbours; large distances mean nothing.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from pfml.evaluation.neighbours import directions

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
    """A PNG with each image at its place, in the colour of its class.

    Args:
        places: (n, 2) in [0, 1], x to the right and y up.
        labels: (n,).
        tiles: (n, 3, side, side), RGB in [0, 1], bright signs on dark ground: their brightness is drawn as ink, in the
            colour of the class, so that the ground does not cover the neighbours.
        theme: Colours.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    side, pixels = tiles.shape[-1], width * PIXEL_DENSITY
    canvas = torch.tensor(to_rgb(theme.paper)).view(3, 1, 1).repeat(1, pixels, pixels)
    classes, numbers = labels.unique(return_inverse=True)
    colours = torch.tensor(class_colours(len(classes), theme))
    corners = (places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * (pixels - side)
    # what is faint is noise of the ground
    inks = ((tiles.mean(1) - 0.35) / 0.4).clamp(0, 1) * 0.9
    for (left, top), number, ink in zip(corners.round().long().tolist(), numbers.tolist(), inks, strict=True):
        area = canvas[:, top : top + side, left : left + side]
        area.lerp_(colours[number].view(3, 1, 1).expand_as(area), ink.expand_as(area))
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))
