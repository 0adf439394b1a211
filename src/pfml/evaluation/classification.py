"""Accuracy on known classes: which of them an embedding is taken for, by its nearest images, means, field or proxies.

Queries are images that were not trained on, of classes that were; the gallery holds labeled images of these classes.
A predictor names one class for each query (`PREDICTORS`). Its accuracy is the fraction of queries for which that is
right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfml.evaluation.class_attraction import fitted_law, most_attractive
from pfml.evaluation.nearest_neighbors import directions, nearest
from pfml.field import DecayLaw

__all__ = ["PREDICTORS", "Accuracy", "Classification", "classification_metrics", "predictor_label"]

#: Neighbors that vote.
K = 10
#: Standard errors of a 95 % interval.
Z = 1.959964

#: Key in results -> heading in tables; "{k}" is the number of neighbors.
PREDICTORS = {
    "nearest": "nearest image (1-NN, R@1)",
    "k_nearest": "{k} nearest images (k-NN)",
    "class_mean": "nearest class mean",
    "class_potential": "class potential (Eq. 4)",
    "proxy": "nearest proxy",
}


@dataclass(frozen=True)
class Accuracy:
    """A share of queries whose class was predicted.

    Args:
        correct: How many.
        total: Of how many.
    """

    correct: int
    total: int

    @property
    def value(self) -> float:
        """The share, correct / total."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson, for other images of the same classes.

        Example:
            >>> low, high = Accuracy(9, 10).interval
            >>> round(low, 3), round(high, 3)
            (0.596, 0.982)
        """
        share, n = self.value, self.total
        center = share + Z**2 / (2 * n)
        half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
        scale = 1 + Z**2 / n
        return max((center - half) / scale, 0.0), min((center + half) / scale, 1.0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, "interval": list(self.interval)}


@dataclass(frozen=True)
class Classification:
    """How often queries are taken for the right one of the known classes.

    Args:
        accuracy: Predictor (a key of `PREDICTORS`) -> its accuracy, all over the same queries.
        confusions: (true class, class that k-NN predicts) -> number of queries; pairs that do not occur are left out.
        k: Neighbors that vote in k-NN.
        num_queries: Of all queries.
        num_without_class: Queries whose class is not in the gallery. They can only fail, and are in no accuracy.
    """

    accuracy: dict[str, Accuracy]
    confusions: dict[tuple[int, int], int]
    k: int
    num_queries: int
    num_without_class: int

    @property
    def of_class(self) -> dict[int, Accuracy]:
        """Class -> the accuracy of k-NN on its queries; classes without queries are left out."""
        correct: dict[int, int] = {}
        total: dict[int, int] = {}
        for (true, predicted), count in self.confusions.items():
            total[true] = total.get(true, 0) + count
            correct[true] = correct.get(true, 0) + (count if predicted == true else 0)
        return {label: Accuracy(correct[label], total[label]) for label in sorted(total)}

    @property
    def mistakes(self) -> list[tuple[tuple[int, int], int]]:
        """((true, predicted), count) of the wrong predictions of k-NN, the most frequent first, then by classes."""
        wrong = [(pair, count) for pair, count in self.confusions.items() if pair[0] != pair[1]]
        return sorted(wrong, key=lambda one: (-one[1], one[0]))

    def most_confused(self, count: int) -> list[int]:
        """At most `count` classes, in order: those with the most mistakes, of their own queries or of others."""
        mistakes: dict[int, int] = dict.fromkeys({label for pair in self.confusions for label in pair}, 0)
        for pair, times in self.mistakes:
            for label in pair:
                mistakes[label] += times
        return sorted(sorted(mistakes, key=lambda label: (-mistakes[label], label))[:count])

    def matrix(self, classes: Sequence[int]) -> Tensor:
        """Counts (c, c) int64 of these classes: rows are the true class, columns the prediction of k-NN."""
        position = {label: k for k, label in enumerate(classes)}
        result = torch.zeros(len(classes), len(classes), dtype=torch.int64)
        for (true, predicted), count in self.confusions.items():
            if true in position and predicted in position:
                result[position[true], position[predicted]] = count
        return result

    def as_dict(self) -> dict[str, Any]:
        """The accuracies with their intervals and the counts, for JSON; without the confusions."""
        return {
            "accuracy": {name: one.as_dict() for name, one in self.accuracy.items()},
            "k": self.k,
            "num_queries": self.num_queries,
            "num_without_class": self.num_without_class,
        }


def predictor_label(name: str, known: Mapping[str, Any]) -> str:
    """The heading of a predictor in a table of `known`, as `Classification.as_dict` returns it."""
    return PREDICTORS[name].replace("{k}", str(known["k"]))


def classification_metrics(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor,
    gallery_labels: Tensor,
    *,
    proxies: Tensor | None = None,
    law: DecayLaw | None = None,
    k: int = K,
) -> Classification:
    """The accuracy of every predictor of the class of a query.

    Similarity is the cosine; of equally similar images the one of the lower index is nearer.

    - nearest: the class of the nearest image of the gallery. Its accuracy is R@1.
    - k_nearest: the most frequent class among the k nearest images; of equally frequent ones that of the nearest image.
    - class_mean: the class whose mean of unit vectors has the most similar direction.
    - class_potential: the class that attracts most, the lowest Psi_j,att (Eq. 4) of gallery and proxies.
    - proxy: the class of the nearest proxy.

    Args:
        queries: Embeddings of images that were not trained on, (N, D), normalized here.
        labels: (N,) int64 in [0, C).
        gallery: Embeddings of labeled images, such as those that trained, (G, D), normalized here.
        gallery_labels: (G,) int64 in [0, C).
        proxies: Of the loss that trained the embeddings, (C, M, D); None, or M = 0, if it has none.
        law: Of the class potential; None for the one that fits the gallery
            (`pfml.evaluation.class_attraction.fitted_law`), which needs no label of a query.
        k: Neighbors that vote; all of a smaller gallery.

    Example:
        >>> gallery, labels = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
        >>> found = classification_metrics(torch.tensor([[1.0, 0.2]]), torch.tensor([0]), gallery, labels)
        >>> found.accuracy["nearest"].value, found.confusions
        (1.0, {(0, 0): 1})
    """
    for points, own, role in ((queries, labels, "labels"), (gallery, gallery_labels, "gallery_labels")):
        if points.ndim != 2 or own.shape != points.shape[:1]:
            raise ValueError(
                f"{role} must be (N,), one per embedding, got {tuple(own.shape)} for {tuple(points.shape)}"
            )
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    points, items = directions(queries, "queries"), directions(gallery, "gallery")
    labels, own = labels.to(points.device).long(), gallery_labels.to(points.device).long()
    known = torch.isin(labels, own)
    if not known.any():
        raise ValueError(f"some query must be of a class of the gallery, but none of the {len(labels):,} is")
    points, truth, present = points[known], labels[known], own.unique()
    num_classes = int(present[-1]) + 1
    charges = None
    if proxies is not None and proxies.numel():
        if proxies.ndim != 3 or len(proxies) < num_classes or proxies.shape[2] != points.shape[1]:
            raise ValueError(
                f"proxies must be (C, M, D) for {num_classes} classes or more of {points.shape[1]} dimensions, "
                f"got {tuple(proxies.shape)}"
            )
        num_classes = len(proxies)
        flat = directions(proxies.to(points.device).flatten(0, 1), "proxies")
        charges = flat.view(proxies.shape)

    neighbors = own[nearest(points, items, min(k, len(items)))[1]]  # (n, k)
    voted = majority(neighbors)
    means = points.new_zeros(len(present), points.shape[1]).index_add_(0, torch.searchsorted(present, own), items)
    if law is None and len(items) > 1:
        law = fitted_law(items, own, num_classes, proxies=charges)
    predicted = {
        "nearest": neighbors[:, 0],
        "k_nearest": voted,
        "class_mean": present[nearest(points, means, 1)[1][:, 0]],
    }
    if law is not None:
        predicted["class_potential"] = most_attractive(points, items, own, num_classes, law=law, proxies=charges)
    if charges is not None:
        predicted["proxy"] = nearest(points, charges.flatten(0, 1), 1)[1][:, 0] // charges.shape[1]
    pairs, counts = torch.stack([truth, voted], dim=1).unique(dim=0, return_counts=True)
    return Classification(
        {name: Accuracy(int((each == truth).sum()), len(truth)) for name, each in predicted.items()},
        {(true, guess): count for (true, guess), count in zip(pairs.tolist(), counts.tolist(), strict=True)},
        k=neighbors.shape[1],
        num_queries=len(labels),
        num_without_class=len(labels) - len(truth),
    )


def majority(neighbors: Tensor) -> Tensor:
    """The most frequent label of each row (n,), of equally frequent ones the first.

    Args:
        neighbors: (n, k) labels, nearest first.
    """
    k = neighbors.shape[1]
    votes = torch.stack([(neighbors == neighbors[:, [column]]).sum(dim=1) for column in range(k)], dim=1)
    order = votes * k - torch.arange(k, device=votes.device)  # no two are equal
    return neighbors.gather(1, order.argmax(dim=1, keepdim=True))[:, 0]
