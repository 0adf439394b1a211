"""The table of metrics: what each is called in files and in tables, how it is computed, and how it is written.

Everything that shows a metric (log lines, tables, model cards, pages, curves, the paper) reads `METRICS`. A new metric
is one function and one row here. A metric that needs more than a few lines has its function in a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pfml.evaluation.clustering import kmeans, normalized_mutual_information
from pfml.evaluation.ranks import QueryScores

__all__ = [
    "HEADLINE",
    "METRICS",
    "Metric",
    "RankedQueries",
    "find_metric",
    "meanings",
    "metric_label",
    "metric_text",
    "shown_metrics",
    "summary",
]

Unit = Literal["percent", "distance", "seconds"]
#: Unit -> factor, decimals, and what a caption calls it.
UNITS: Mapping[Unit, tuple[float, int, str]] = {
    "percent": (100.0, 1, "Percent"),
    "distance": (1.0, 2, "Distances"),
    "seconds": (1.0, 1, "Seconds"),
}
#: Metrics of one-line summaries, learning curves and comparisons.
HEADLINE = ("recall_at_1", "map_at_r")


@dataclass(frozen=True, eq=False)
class RankedQueries:
    """What a metric is computed from.

    Args:
        queries, labels: (N, D) unit vectors and (N,) int64, of all queries.
        gallery, gallery_labels: (G, D) and (G,), where they are searched; None for the queries themselves.
        scores: Of the queries that have a match, on the CPU.
        seed: Of whatever is random.
    """

    queries: Tensor
    labels: Tensor
    gallery: Tensor | None
    gallery_labels: Tensor | None
    scores: QueryScores
    seed: int


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`.

    Args:
        key: Its name in results, logs and settings; "{k}" is replaced by a number.
        label: Its heading in tables, likewise.
        meaning: A sentence for captions.
        compute: The metric of ranked queries, and of K if the key has one; None if it is measured elsewhere.
        unit: How it is written.
        is_shown: Whether tables of one run show it.
        is_optional: Whether it is computed only on request.
    """

    key: str
    label: str
    meaning: str
    compute: Callable[..., float] | None = None
    unit: Unit = "percent"
    is_shown: bool = True
    is_optional: bool = False

    @property
    def factor(self) -> float:
        """What a value is multiplied by before it is written: 100 for percent."""
        return UNITS[self.unit][0]

    @property
    def decimals(self) -> int:
        """How many are written."""
        return UNITS[self.unit][1]

    @property
    def unit_name(self) -> str:
        """The unit as a caption begins with it: "Percent"."""
        return UNITS[self.unit][2]


def recall_at_k(ranked: RankedQueries, k: int) -> float:
    """Fraction of queries with a match among the K nearest."""
    return _share(ranked.scores.first_rank <= k)


def precision_at_1(ranked: RankedQueries) -> float:
    """Fraction of queries whose nearest item is a match."""
    return _share(ranked.scores.first_rank == 1)


def r_precision(ranked: RankedQueries) -> float:
    """Mean fraction of matches among the R nearest, R being the number of matches of the query."""
    return _mean(ranked.scores.r_precision)


def map_at_r(ranked: RankedQueries) -> float:
    """Mean of (1/R) sum over i <= R of precision(i) where item i is a match."""
    return _mean(ranked.scores.average_precision_at_r)


def nmi(ranked: RankedQueries) -> float:
    """Normalized mutual information of the classes and of k-means clusters of the queries."""
    clusters = kmeans(ranked.queries, len(ranked.labels.unique()), seed=ranked.seed)
    return normalized_mutual_information(ranked.labels, clusters)


#: Key -> metric, in the order of tables.
METRICS: dict[str, Metric] = {
    row.key: row
    for row in (
        Metric(
            "recall_at_{k}",
            "R@{k}",
            "R@K: queries with an image of their class among the K nearest",
            recall_at_k,
        ),
        Metric(
            "precision_at_1",
            "P@1",
            "P@1: queries whose nearest image is of their class",
            precision_at_1,
            is_shown=False,  # it equals R@1
        ),
        Metric(
            "r_precision",
            "RP",
            "RP: fraction of matches among the R nearest images, R being the number of matches",
            r_precision,
        ),
        Metric("map_at_r", "MAP@R", "MAP@R: R-precision that also rewards the right order", map_at_r),
        Metric("nmi", "NMI", "NMI: agreement of k-means clusters with the classes", nmi, is_optional=True),
        Metric("alignment", "W2", "W2: distance of proxies to their data", unit="distance", is_shown=False),
        Metric("seconds_per_epoch", "seconds per epoch", "Seconds per epoch", unit="seconds", is_shown=False),
    )
}


def find_metric(key: str) -> Metric | None:
    """The row of "map_at_r" or "recall_at_8"; None for a key that is no metric, such as "num_queries"."""
    family, _, number = key.rpartition("_")
    return METRICS.get(key) or (METRICS.get(f"{family}_{{k}}") if number.isdecimal() else None)


def metric_label(key: str) -> str:
    """The heading of a metric in tables.

    Example:
        >>> metric_label("recall_at_8"), metric_label("map_at_r")
        ('R@8', 'MAP@R')
    """
    return _metric(key).label.replace("{k}", key.rpartition("_")[2])


def metric_text(key: str, value: float) -> str:
    """The value as tables write it, without its unit.

    Example:
        >>> metric_text("recall_at_1", 0.613), metric_text("alignment", 0.613)
        ('61.3', '0.61')
    """
    metric = _metric(key)
    return f"{metric.factor * value:.{metric.decimals}f}"


def shown_metrics(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that a table of one run shows, in the order of `METRICS`; counts are no metrics."""
    rows = list(METRICS.values())
    found = [(key, metric) for key in keys if (metric := find_metric(key)) is not None and metric.is_shown]
    return [key for key, _ in sorted(found, key=lambda pair: rows.index(pair[1]))]


def meanings(keys: Iterable[str]) -> str:
    """What these metrics mean, for a caption: each row once, joined by semicolons."""
    return "; ".join(dict.fromkeys(_metric(key).meaning for key in keys))


def summary(scores: Mapping[str, float], keys: Iterable[str] = HEADLINE) -> str:
    """The headline metrics in one line.

    Example:
        >>> summary({"recall_at_1": 0.613, "map_at_r": 0.25})
        'R@1 61.3%, MAP@R 25.0%'
    """
    return ", ".join(f"{metric_label(key)} {scores[key]:.1%}" for key in keys)


def _metric(key: str) -> Metric:
    metric = find_metric(key)
    if metric is None:
        raise ValueError(f"a metric must be one of {', '.join(METRICS)}, got {key!r}")
    return metric


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / len(mask)


def _mean(values: Tensor) -> float:
    """The mean, correctly rounded, so that it depends neither on threads nor on the device."""
    return math.fsum(values.tolist()) / len(values)
