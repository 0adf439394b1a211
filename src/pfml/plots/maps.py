"""Maps of the embedding: a projection to the plane by t-SNE, UMAP or PCA, with images or marks at their coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pfml.evaluation.nearest_neighbors import directions
from pfml.packages import require_packages
from pfml.plots.theme import PIXEL_DENSITY, Theme, class_colors, new_figure, png_of_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Method", "choose_images", "plot_glyph_map", "plot_photo_map", "plot_proxy_map", "project"]

Method = Literal["tsne", "umap", "pca"]
#: Principal components that UMAP is given: it searches for neighbors, which more of them slow down and hardly change.
UMAP_COMPONENTS = 64
FRAME = 3  # pixels around a photograph
NAMED_CLASSES = 12  # more would need a legend larger than the map


def choose_images(labels: Tensor, *, classes: int, per_class: int, seed: int = 0) -> Tensor:
    """Positions of up to `per_class` images of each of up to `classes` classes, sampled with `seed`; by class."""
    generator = torch.Generator().manual_seed(seed)
    present = labels.unique()
    chosen = present[torch.randperm(len(present), generator=generator)[:classes]].sort().values
    parts = []
    for label in chosen:
        members = (labels == label).nonzero()[:, 0]
        parts.append(members[torch.randperm(len(members), generator=generator)[:per_class]].sort().values)
    return torch.cat(parts)


def project(
    points: Tensor,
    method: Method = "tsne",
    *,
    perplexity: float = 20.0,
    keep_aspect: bool = False,
    margin: float = 0.0,
    threads: int | None = 1,
    seed: int = 0,
) -> Tensor:
    """A projection of the directions of `points` (n, D) to the plane, (n, 2) float64 in [0, 1].

    t-SNE and UMAP keep neighbors together; their large distances mean nothing. Fewer than 3 points lie on a line, and
    fewer than 5 are too few for UMAP, so that PCA takes its place.

    Args:
        points: Of any length; only their directions count.
        method: "tsne"; "umap" (umap-learn), which is faster for many points; "pca", the fastest, keeps large distances.
        perplexity: Of t-SNE, about the number of neighbors that are kept together; less for few points. UMAP keeps
            half as many.
        keep_aspect: Whether both axes have one scale; otherwise each is stretched to [0, 1].
        margin: Left free on each side.
        threads: Of t-SNE and UMAP. Only one thread gives the same map each time: several add numbers in a random order.
            None for as many as there are cores.
        seed: Of all methods.
    """
    if len(points) < 3:
        coordinates = torch.arange(2 * len(points), dtype=torch.float64).reshape(-1, 2)
    else:
        coordinates = _projected(directions(points, "points").cpu(), method, perplexity, threads, seed)
    if not len(coordinates):
        return coordinates
    low, high = coordinates.amin(0), coordinates.amax(0)
    extent = high - low
    size = (extent.max().expand(2) if keep_aspect else extent).clamp(min=1e-12)
    centered = (coordinates - low) / size + (1 - extent / size) / 2
    return centered * (1 - 2 * margin) + margin


def _projected(points: Tensor, method: Method, perplexity: float, threads: int | None, seed: int) -> Tensor:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if points.shape[1] < 2:
        points = torch.cat([points, torch.zeros_like(points)], dim=1)
    if method == "pca" or (method == "umap" and len(points) < 5):
        return torch.from_numpy(PCA(2, random_state=seed).fit_transform(points.double().numpy()))
    if method == "umap":
        return _umap(points, round(perplexity / 2), threads, seed)
    tsne = TSNE(perplexity=min(perplexity, (len(points) - 1) / 3), init="pca", random_state=seed)
    with threadpool_limits(threads):
        return torch.from_numpy(tsne.fit_transform(points.numpy())).double()


def _umap(points: Tensor, neighbors: int, threads: int | None, seed: int) -> Tensor:
    require_packages("umap", purpose="a map by UMAP", install="pfml[umap]")
    from sklearn.decomposition import PCA
    from umap import UMAP

    if min(points.shape) > UMAP_COMPONENTS:
        points = torch.from_numpy(PCA(UMAP_COMPONENTS, random_state=seed).fit_transform(points.float().numpy()))
    start = PCA(2, random_state=seed).fit_transform(points.float().numpy())
    made = UMAP(
        n_neighbors=max(min(neighbors, len(points) - 1), 2),
        init=10 * start / max(abs(start).max(), 1e-12),  # the default needs eigenvectors, which take long and may fail
        random_state=seed if threads == 1 else None,  # with a seed it uses one thread
        n_jobs=-1 if threads is None else threads,
    )
    return torch.from_numpy(made.fit_transform(points.float().numpy())).double()


def plot_glyph_map(coordinates: Tensor, labels: Tensor, tiles: Tensor, theme: Theme, *, width: int = 470) -> bytes:
    """A PNG with each glyph at its coordinates, in the color of its class.

    Args:
        coordinates: (n, 2) in [0, 1], x to the right and y up.
        labels: (n,).
        tiles: (n, 3, side, side), RGB in [0, 1], bright glyphs on a dark background: their brightness is ink in the
            color of the class, so that the background does not cover the neighbors.
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    side, pixels = tiles.shape[-1], width * PIXEL_DENSITY
    canvas = torch.tensor(to_rgb(theme.paper)).view(3, 1, 1).repeat(1, pixels, pixels)
    classes, numbers = labels.unique(return_inverse=True)
    colors = torch.tensor(class_colors(len(classes), theme))
    corners = (coordinates * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * (pixels - side)
    # what is faint is noise of the background
    inks = ((tiles.mean(1) - 0.35) / 0.4).clamp(0, 1) * 0.9
    for (left, top), number, ink in zip(corners.round().long().tolist(), numbers.tolist(), inks, strict=True):
        area = canvas[:, top : top + side, left : left + side]
        area.lerp_(colors[number].view(3, 1, 1).expand_as(area), ink.expand_as(area))
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))


def plot_photo_map(coordinates: Tensor, labels: Tensor, tiles: Tensor, theme: Theme, *, width: int = 940) -> bytes:
    """A PNG with each photograph at its coordinates, framed in the color of its class, later ones on top.

    Args:
        coordinates: (n, 2) in [0, 1], x to the right and y up.
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
    free = torch.tensor([pixels - side, height - side])
    corners = (coordinates * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * free
    for (left, top), number, tile in zip(corners.round().long().tolist(), numbers.tolist(), tiles, strict=True):
        canvas[:, top : top + side, left : left + side] = colors[number].view(3, 1, 1)
        canvas[:, top + FRAME : top + side - FRAME, left + FRAME : left + side - FRAME] = tile
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))


def plot_proxy_map(
    coordinates: Tensor,
    labels: Tensor,
    proxy_coordinates: Tensor,
    proxy_labels: Tensor,
    names: dict[int, str],
    theme: Theme,
    *,
    width: int = 940,
) -> Figure:
    """Images as dots and proxies as stars, in the colors of their classes.

    Args:
        coordinates, labels: (n, 2) in [0, 1] and (n,), of the images.
        proxy_coordinates, proxy_labels: (p, 2) and (p,), of the proxies.
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
        x, y = coordinates[labels == label].T
        axes.scatter(x, y, s=16, color=[color], linewidths=0, alpha=0.8, label=names[label])
        x, y = proxy_coordinates[proxy_labels == label].T
        axes.scatter(x, y, s=210, marker="*", color=[color], edgecolors=theme.ink, linewidths=1.1, zorder=3)
    if len(classes) <= NAMED_CLASSES:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure
