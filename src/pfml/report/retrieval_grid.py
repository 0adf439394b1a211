"""Queries and what they find, framed green where it is right and red where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data.image_set import ImageSet
from pfml.data.sources import ImageSource
from pfml.evaluation import nearest, query_scores
from pfml.evaluation.neighbours import directions
from pfml.report.tiles import image_sheet, thumbnails

__all__ = ["Retrievals", "choose_queries", "draw_retrievals", "retrieve"]

GREEN, RED, BLUE = (0.10, 0.62, 0.32), (0.86, 0.16, 0.18), (0.25, 0.45, 0.95)


@dataclass(frozen=True, eq=False)
class Retrievals:
    """What some queries found.

    Args:
        queries: (n,) positions of the queries among the test images.
        neighbours: (n, k) positions in the gallery (the test images if there is none), nearest first.
        correct: (n, k) whether a neighbour is of the query's class.
    """

    queries: Tensor
    neighbours: Tensor
    correct: Tensor


def choose_queries(
    embeddings: Tensor,
    labels: Tensor,
    *,
    random: int,
    worst: int,
    seed: int = 0,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
) -> Tensor:
    """Positions of `random` queries drawn with `seed`, then of the `worst` ones of all, no two of one class.

    The worst are those of least average precision at R, of equal ones those whose first match has the highest rank.
    Queries without a match are no candidates. Fewer are returned if there are not enough classes.
    """
    labels = labels.to(embeddings.device)
    items = None if gallery is None else directions(gallery, "gallery")
    scores = query_scores(directions(embeddings, "embeddings"), labels, items, gallery_labels)
    matched = (scores.num_matches > 0).nonzero()[:, 0].cpu()
    shuffled = matched[torch.randperm(len(matched), generator=torch.Generator().manual_seed(seed))]
    ranks, precision = scores.first_rank.cpu()[matched], scores.average_precision_at_r.cpu()[matched]
    by_rank = ranks.argsort(descending=True, stable=True)
    from_worst = matched[by_rank[precision[by_rank].argsort(stable=True)]]
    chosen: list[int] = []
    for candidates, count in ((shuffled, random), (from_worst, worst)):
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


def draw_retrievals(
    retrievals: Retrievals,
    images: ImageSet | ImageSource,
    gallery: ImageSet | ImageSource | None = None,
    *,
    side: int = 64,
    zoom: int = 1,
) -> bytes:
    """A PNG: a row per query, the query left, what it found right, a corner of the wrong ones cut off besides the red.

    Args:
        retrievals: What was found.
        images: Where the queries are.
        gallery: Where the neighbours are; None for `images`.
        side: Pixels of an image.
        zoom: Pixels per pixel.
    """
    rows, columns = retrievals.neighbours.shape
    asked = thumbnails(images, retrievals.queries, side=side)
    found = thumbnails(images if gallery is None else gallery, retrievals.neighbours.flatten(), side=side)
    tiles = torch.cat([asked[:, None], found.view(rows, columns, *found.shape[1:])], dim=1)
    tiles = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
    framed = torch.stack([_framed(tile, BLUE, cut=False) for tile in tiles[:, 0]])[:, None]
    answers = [
        _framed(tile, GREEN if right else RED, cut=not right)
        for tile, right in zip(tiles[:, 1:].flatten(0, 1), retrievals.correct.flatten().tolist(), strict=True)
    ]
    neighbours = torch.stack(answers).unflatten(0, (rows, columns))
    return image_sheet(torch.cat([framed, neighbours], dim=1), gap=6, column_gaps=(1,))


def _framed(tile: Tensor, colour: tuple[float, float, float], *, cut: bool) -> Tensor:
    """The tile (3, side, side) in a frame around it, with a triangle of the frame's colour in a corner if cut."""
    side = tile.shape[-1]
    width = max(side // 16, 2)
    paint = torch.tensor(colour)[:, None, None]
    framed = paint.repeat(1, side + 2 * width, side + 2 * width)
    framed[:, width:-width, width:-width] = tile
    if cut:
        down, right = torch.arange(side + 2 * width)[:, None], torch.arange(side + 2 * width)[None]
        framed = torch.where((right - down > 0.72 * side)[None], paint, framed)
    return framed
