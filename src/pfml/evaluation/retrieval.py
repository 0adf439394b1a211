"""Recall@K, P@1, R-precision, MAP@R and NMI of labeled embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from pfml.evaluation.metrics import METRICS, RankedQueries
from pfml.evaluation.nearest_neighbors import directions
from pfml.evaluation.ranks import QueryScores, query_scores

__all__ = ["RetrievalMetrics", "metrics_of", "retrieval_metrics"]


@dataclass(frozen=True)
class RetrievalMetrics:
    """How well classes are found by nearest neighbors; fractions in [0, 1], means over queries.

    A query without a match, whose class has no other member to be found, can only fail: it is left out of every
    mean, as in pytorch-metric-learning's AccuracyCalculator, and counted in `num_without_match`. Code that descends
    from Proxy-Anchor counts it as a miss of Recall@K; multiply recall by 1 - num_without_match / num_queries to get
    that. (CUB, Cars, SOP and In-Shop have no such query.)

    Args:
        values: Key -> value of the rows of `METRICS` that were computed, with a key for each K of Recall@K.
        num_queries: Of all queries, with or without a match.
        num_without_match: Queries that are in none of the means.
    """

    values: dict[str, float]
    num_queries: int
    num_without_match: int

    @property
    def recall(self) -> dict[int, float]:
        """K -> fraction of queries with a match among the K nearest."""
        prefix = "recall_at_"
        return {int(key.removeprefix(prefix)): value for key, value in self.values.items() if key.startswith(prefix)}

    @property
    def precision_at_1(self) -> float:
        """Fraction of queries whose nearest item is a match; equal to Recall@1."""
        return self.values["precision_at_1"]

    @property
    def r_precision(self) -> float:
        """Fraction of matches among the R nearest, R being the number of matches of the query."""
        return self.values["r_precision"]

    @property
    def map_at_r(self) -> float:
        """(1/R) sum over i <= R of precision(i) where item i is a match."""
        return self.values["map_at_r"]

    @property
    def nmi(self) -> float | None:
        """Normalized mutual information of classes and k-means clusters of the queries; None if not asked for."""
        return self.values.get("nmi")

    def as_dict(self) -> dict[str, float]:
        """All values by key, in the order of `METRICS`, then the counts."""
        return {**self.values, "num_queries": self.num_queries, "num_without_match": self.num_without_match}


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
        nmi: Whether to compute the optional metrics too: NMI, which takes longer than all the rest.
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
    return metrics_of(scores, queries, labels, items, gallery_labels, recall_at=recall_at, nmi=nmi, seed=seed)


def metrics_of(
    scores: QueryScores,
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    *,
    recall_at: Sequence[int],
    nmi: bool = False,
    seed: int = 0,
) -> RetrievalMetrics:
    """The rows of `METRICS` from what each query found; the arguments are those of `retrieval_metrics`."""
    matched = (scores.num_matches > 0).cpu()
    if not matched.any():
        raise ValueError(
            f"some class must have a member to be found, but none of the {len(labels)} queries has a match"
        )
    found = QueryScores(*(getattr(scores, field.name).cpu()[matched] for field in fields(scores)))
    ranked = RankedQueries(queries, labels, gallery, gallery_labels, found, seed)
    values: dict[str, float] = {}
    for key, metric in METRICS.items():
        if metric.compute is None or (metric.is_optional and not nmi):
            continue
        if "{k}" in key:
            values |= {key.format(k=k): metric.compute(ranked, k) for k in sorted({int(k) for k in recall_at})}
        else:
            values[key] = metric.compute(ranked)
    return RetrievalMetrics(values, len(labels), len(labels) - int(matched.sum()))


def _check_labels(points: Tensor, labels: Tensor, name: str, owner: str) -> None:
    if points.ndim != 2 or labels.shape != points.shape[:1]:
        raise ValueError(
            f"{name} must be (N,), one per row of {owner} (N, D), got {tuple(labels.shape)} for {tuple(points.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} must be integers, got {labels.dtype}; pfml.LabelMap makes integers of anything")
