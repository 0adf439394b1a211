"""Recall@K, P@1, R-precision, MAP@R and NMI of labeled embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pfml.evaluation.clustering import kmeans, normalized_mutual_information
from pfml.evaluation.nearest_neighbors import directions
from pfml.evaluation.ranks import query_scores

__all__ = ["RetrievalMetrics", "retrieval_metrics"]


@dataclass(frozen=True)
class RetrievalMetrics:
    """How well classes are found by nearest neighbors; all of them fractions in [0, 1], means over queries.

    A query without a match, whose class has no other member to be found, can only fail: it is left out of every
    mean, as in pytorch-metric-learning's AccuracyCalculator, and counted in `num_without_match`. Code that descends
    from Proxy-Anchor counts it as a miss of Recall@K; multiply recall by 1 - num_without_match / num_queries to get
    that. (CUB, Cars, SOP and In-Shop have no such query.)

    Args:
        recall: K -> share of queries with a match among the K nearest.
        precision_at_1: Share of queries whose nearest item is a match; equal to Recall@1.
        r_precision: Share of matches among the R nearest, R being the number of matches of the query.
        map_at_r: (1/R) sum over i <= R of precision(i) where item i is a match.
        nmi: Normalized mutual information of classes and k-means clusters of the queries; None if not asked for.
        num_queries: Of all queries, with or without a match.
        num_without_match: Queries that are in none of the means.
    """

    recall: dict[int, float]
    precision_at_1: float
    r_precision: float
    map_at_r: float
    nmi: float | None
    num_queries: int
    num_without_match: int

    def as_dict(self) -> dict[str, float]:
        """Names and numbers, in an order that does not change; `nmi` only if it was asked for."""
        return {
            **{f"recall_at_{k}": value for k, value in sorted(self.recall.items())},
            "precision_at_1": self.precision_at_1,
            "r_precision": self.r_precision,
            "map_at_r": self.map_at_r,
            **({} if self.nmi is None else {"nmi": self.nmi}),
            "num_queries": self.num_queries,
            "num_without_match": self.num_without_match,
        }


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    nmi: bool = False,
    seed: int = 0,
    tile_pairs: int | None = None,
) -> RetrievalMetrics:
    """Metrics of searching each embedding among all others, or in a gallery; exact, ties in favor of the lower index.

    Args:
        embeddings: (N, D) of any length; they are normalized here. The computation runs on their device.
        labels: (N,) integers.
        gallery: (G, D) where the queries are searched; None for the embeddings themselves, each without itself.
        gallery_labels: (G,) integers; with a gallery only.
        recall_at: The K of Recall@K.
        nmi: Whether to cluster the queries too, which takes longer than all the rest.
        seed: Of the clustering.
        tile_pairs: Similarities that are held at once, by default 2^22 on a CPU and 2^26 on a GPU.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.8]])
        >>> metrics = retrieval_metrics(embeddings, torch.tensor([0, 0, 1, 1]), recall_at=(1, 2))
        >>> metrics.recall
        {1: 1.0, 2: 1.0}
    """
    _check_labels(embeddings, labels, "labels", "embeddings")
    if (gallery is None) != (gallery_labels is None):
        given, missing = ("gallery_labels", "gallery") if gallery is None else ("gallery", "gallery_labels")
        raise ValueError(f"gallery and gallery_labels must be given together, got {given} without {missing}")
    if not recall_at or any(k < 1 for k in recall_at):
        raise ValueError(f"recall_at must be positive numbers, got {tuple(recall_at)}")
    queries = directions(embeddings, "embeddings")
    items = None
    if gallery is not None and gallery_labels is not None:
        _check_labels(gallery, gallery_labels, "gallery_labels", "gallery")
        if gallery.shape[1:] != embeddings.shape[1:] or gallery.device != embeddings.device:
            raise ValueError(
                f"gallery must have {embeddings.shape[1]} dimensions on {embeddings.device} like the embeddings, "
                f"got {gallery.shape[1]} on {gallery.device}"
            )
        items, gallery_labels = directions(gallery, "gallery"), gallery_labels.to(queries.device).long()

    labels = labels.to(queries.device).long()
    scores = query_scores(queries, labels, items, gallery_labels, tile_pairs=tile_pairs)
    matched = (scores.num_matches > 0).cpu()
    if not matched.any():
        raise ValueError(
            f"some class must have a member to be found, but none of the {len(labels)} queries has a match"
        )
    first_rank = scores.first_rank.cpu()[matched]
    return RetrievalMetrics(
        recall={int(k): _share(first_rank <= k) for k in recall_at},
        precision_at_1=_share(first_rank == 1),
        r_precision=_mean(scores.r_precision.cpu()[matched]),
        map_at_r=_mean(scores.average_precision_at_r.cpu()[matched]),
        nmi=_nmi(queries, labels, seed) if nmi else None,
        num_queries=len(labels),
        num_without_match=len(labels) - len(first_rank),
    )


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / len(mask)


def _mean(values: Tensor) -> float:
    """The mean, correctly rounded, so that it depends neither on threads nor on the device."""
    return math.fsum(values.tolist()) / len(values)


def _nmi(queries: Tensor, labels: Tensor, seed: int) -> float:
    clusters = kmeans(queries, len(labels.unique()), seed=seed)
    return normalized_mutual_information(labels, clusters)


def _check_labels(points: Tensor, labels: Tensor, name: str, owner: str) -> None:
    if points.ndim != 2 or labels.shape != points.shape[:1]:
        raise ValueError(
            f"{name} must be (N,), one per row of {owner} (N, D), got {tuple(labels.shape)} for {tuple(points.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} must be integers, got {labels.dtype}; pfml.LabelMap makes integers of anything")
