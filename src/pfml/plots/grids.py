"""Grids of images: thumbnails in rows, and queries with their nearest images, framed by whether they match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data.image_set import ImageSet
from pfml.data.image_source import ImageSource, open_images
from pfml.data.preprocessing import Preprocessing
from pfml.evaluation import QueryScores, nearest
from pfml.plots.theme import png_of_image

__all__ = ["Retrievals", "choose_queries", "image_grid", "plot_retrievals", "retrieve", "thumbnails"]

GREEN, RED, BLUE = (0.10, 0.62, 0.32), (0.86, 0.16, 0.18), (0.25, 0.45, 0.95)


def thumbnails(images: ImageSet | ImageSource, indices: Tensor | Sequence[int], *, side: int = 64) -> Tensor:
    """The middle squares of the images at `indices`, (n, 3, side, side), RGB in [0, 1], on the CPU."""
    indices = torch.as_tensor(indices, dtype=torch.int64)
    if len(indices) == 0:
        return torch.empty(0, 3, side, side)
    if isinstance(images, ImageSet):  # reads only those that are shown
        images, indices = open_images(images.subset(indices)), torch.arange(len(indices))
    windows = Preprocessing(resize=side, crop=side).windows(indices, images.sizes)
    (crops,) = images.crops([windows])
    return crops.cpu()


def image_grid(tiles: Tensor, *, zoom: int = 1, gap: int = 4, column_gaps: Sequence[int] = ()) -> bytes:
    """A PNG of rows of tiles, transparent between them.

    Args:
        tiles: (rows, columns, 3, side, side), RGB in [0, 1].
        zoom: Pixels per pixel of a tile.
        gap: Pixels between tiles.
        column_gaps: Columns before which the gap is four times as wide.
    """
    from PIL import Image

    rows, columns, _, side, _ = tiles.shape
    large = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
    step = side * zoom + gap
    lefts = [step * k + 3 * gap * sum(k >= before for before in column_gaps) for k in range(columns)]
    grid = torch.full((3, step * rows - gap, lefts[-1] + side * zoom), torch.nan)
    for row in range(rows):
        for column, left in enumerate(lefts):
            top = step * row
            grid[:, top : top + side * zoom, left : left + side * zoom] = large[row, column]
    pixels = grid.nan_to_num(0.5).mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous()
    # five bits of each channel, repeated to keep black and white: 255 colors for them are chosen eight times faster,
    # and approximate photographs as well
    pixels = pixels & 0xF8 | pixels >> 5
    return png_of_image(Image.fromarray(pixels.numpy()), transparent=grid[0].isnan().numpy())


@dataclass(frozen=True, eq=False)
class Retrievals:
    """The nearest images of some queries.

    Args:
        queries: (n,) positions of the queries among the test images.
        neighbors: (n, k) positions in the gallery (the test images if there is none), nearest first.
        correct: (n, k) whether a neighbor is of the query's class.
    """

    queries: Tensor
    neighbors: Tensor
    correct: Tensor


def choose_queries(
    scores: QueryScores, labels: Tensor, *, best: int = 0, random: int = 0, worst: int = 0, seed: int = 0
) -> Tensor:
    """Positions of the `best` queries, of `random` ones sampled with `seed`, and of the `worst`, no two of one class.

    The best have the highest average precision at R, of equal ones the most matches: it is harder to find many. The
    worst have the least, of equal ones the highest rank of the first match. Queries without a match are no candidates.
    Fewer are returned if there are not enough classes.
    """
    labels = labels.cpu()
    matched = (scores.num_matches > 0).nonzero()[:, 0].cpu()
    shuffled = matched[torch.randperm(len(matched), generator=torch.Generator().manual_seed(seed))]
    ranks, precision = scores.first_rank.cpu()[matched], scores.average_precision_at_r.cpu()[matched]
    by_matches = scores.num_matches.cpu()[matched].argsort(descending=True, stable=True)
    from_best = matched[by_matches[precision[by_matches].argsort(descending=True, stable=True)]]
    by_rank = ranks.argsort(descending=True, stable=True)
    from_worst = matched[by_rank[precision[by_rank].argsort(stable=True)]]
    chosen: list[int] = []
    for candidates, count in ((from_best, best), (shuffled, random), (from_worst, worst)):
        wanted, classes = len(chosen) + count, {int(labels[k]) for k in chosen}
        for k in candidates.tolist():
            if len(chosen) < wanted and int(labels[k]) not in classes:
                chosen.append(k)
                classes.add(int(labels[k]))
    return torch.tensor(chosen, dtype=torch.int64)


def retrieve(
    embeddings: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    k: int = 8,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
) -> Retrievals:
    """The k nearest of each of the `queries`, positions in `embeddings`, among all others or in a gallery."""
    asked = embeddings[queries.to(embeddings.device)]
    if gallery is None or gallery_labels is None:
        # one more, since each query finds itself; it need not be the first where images have equal embeddings
        found = nearest(asked, embeddings, min(k + 1, len(embeddings)))[1].cpu()
        itself = found == queries[:, None]
        itself[~itself.any(1), -1] = True
        found, found_labels = found[~itself].view(len(queries), -1), labels.cpu()
    else:
        found, found_labels = nearest(asked, gallery, min(k, len(gallery)))[1].cpu(), gallery_labels.cpu()
    return Retrievals(queries, found, found_labels[found] == labels.cpu()[queries][:, None])


def plot_retrievals(
    retrievals: Retrievals,
    images: ImageSet | ImageSource,
    gallery: ImageSet | ImageSource | None = None,
    *,
    side: int = 64,
    zoom: int = 1,
) -> bytes:
    """A PNG with a row per query: the query (blue), then its nearest images, green if they match.

    Those of another class are red and have a cut corner, for readers who do not tell red from green.

    Args:
        retrievals: Queries and neighbors.
        images: Holds the queries.
        gallery: Holds the neighbors; None for `images`.
        side: Pixels of an image.
        zoom: Pixels per pixel.
    """
    rows, columns = retrievals.neighbors.shape
    asked = thumbnails(images, retrievals.queries, side=side)
    found = thumbnails(images if gallery is None else gallery, retrievals.neighbors.flatten(), side=side)
    tiles = torch.cat([asked[:, None], found.view(rows, columns, *found.shape[1:])], dim=1)
    tiles = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
    framed = torch.stack([_framed(tile, BLUE, cut=False) for tile in tiles[:, 0]])[:, None]
    answers = [
        _framed(tile, GREEN if right else RED, cut=not right)
        for tile, right in zip(tiles[:, 1:].flatten(0, 1), retrievals.correct.flatten().tolist(), strict=True)
    ]
    neighbors = torch.stack(answers).unflatten(0, (rows, columns))
    return image_grid(torch.cat([framed, neighbors], dim=1), gap=6, column_gaps=(1,))


def _framed(tile: Tensor, color: tuple[float, float, float], *, cut: bool) -> Tensor:
    """The tile (3, side, side) in a frame around it, with a triangle of the frame's color in a corner if cut."""
    side = tile.shape[-1]
    width = max(side // 16, 2)
    paint = torch.tensor(color)[:, None, None]
    framed = paint.repeat(1, side + 2 * width, side + 2 * width)
    framed[:, width:-width, width:-width] = tile
    if cut:
        down, right = torch.arange(side + 2 * width)[:, None], torch.arange(side + 2 * width)[None]
        framed = torch.where((right - down > 0.72 * side)[None], paint, framed)
    return framed
