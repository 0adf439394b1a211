"""Facility location loss (Oh Song et al., CVPR 2017): labels must cluster a batch better than anything else does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pfml.losses.checks import check_batch
from pfml.sphere import unit

__all__ = ["ClusteringLoss", "greedy_medoids", "refined_medoids"]


class ClusteringLoss(nn.Module):
    """A structured loss: the clustering by labels against the worst clustering around as many medoids.

    With r distances on the unit sphere, K the classes of the batch, medoids S among its samples, g(S) the clustering of
    the samples by their nearest medoid, and y the clustering by labels:

        F(S)   = - sum over samples i of min over j in S of r(i, j)
        F*(y)  = - sum over classes of min over its members j of sum over its members i of r(i, j)
        A(S)   = F(S) + gamma (1 - NMI(g(S), y))
        loss   = [ max over S of K samples of A(S) - F*(y) ]+

    The maximum is approximate, as published: S grows by the sample that makes A largest, K times (`greedy_medoids`).
    Then, `refinements` times, each cluster of g(S) moves its medoid to the member that makes the sum of -r within the
    cluster plus gamma (1 - NMI) largest (`refined_medoids`). NMI divides by the geometric mean of both entropies. The
    search is not differentiated, distances to the medoids that it found are. It waits for the device once, for K.
    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Published, in TensorFlow's code by the authors: all of the above with 5 refinements; gamma is left to the user, and
    the paper lowers it while it trains.

    Ours: gamma is constant, and its default is not the authors' (on glyphs 10 does better than 1). An empty batch and a
    batch of one class have loss 0.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        gamma: Weight of the structured margin.
        refinements: Rounds of local search after the greedy one.

    Attributes:
        terms: "nmi" of the clustering that was found, detached.
    """

    no_proxies: Tensor

    def __init__(self, num_classes: int, embedding_dim: int, *, gamma: float = 10.0, refinements: int = 5) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not 0 <= gamma < math.inf:
            raise ValueError(f"gamma must be finite and not negative, got {gamma}")
        if not isinstance(refinements, int) or refinements < 0:
            raise ValueError(f"refinements must be an integer >= 0, got {refinements!r}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.gamma = gamma
        self.refinements = refinements
        self.terms: dict[str, Tensor] = {}
        self.register_buffer("no_proxies", torch.empty(num_classes, 0, embedding_dim), persistent=False)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self.no_proxies)
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))
            distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
            if len(labels) == 0:
                return distances.sum()
            classes, numbers = labels.unique(return_inverse=True)
            membership = nn.functional.one_hot(numbers, len(classes)).to(wide)  # (batch, K)
            fixed = distances.detach()
            medoids = greedy_medoids(fixed, membership, self.gamma)
            for _ in range(self.refinements):
                medoids = refined_medoids(fixed, membership, medoids, self.gamma)
            to_medoids, clusters = distances[medoids].min(dim=0)  # (batch,)
            found = nmi(_one_hot(clusters, len(medoids), wide), membership)
            to_own = membership.T @ distances  # (K, batch): from all members of a class to a sample
            own = to_own.masked_fill(membership.T == 0, torch.inf).min(dim=1).values
            self.terms = {"nmi": found.detach()}
            return torch.relu(self.gamma * (1 - found) - to_medoids.sum() + own.sum())

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """None: the loss learns nothing."""
        return []

    def proxy_points(self) -> Tensor:
        """There are no proxies, (C, 0, D)."""
        return self.no_proxies

    def extra_repr(self) -> str:
        return f"{self.num_classes}, {self.embedding_dim}, gamma={self.gamma}, refinements={self.refinements}"


def greedy_medoids(distances: Tensor, membership: Tensor, gamma: float) -> Tensor:
    """As many samples as there are classes, each the one that makes A of those so far and it largest, (K,).

    Args:
        distances: (n, n).
        membership: (n, K), one-hot, of the classes.
        gamma: Weight of 1 - NMI in A.
    """
    size, count = membership.shape  # indices stay tensors of one number: nothing waits for the device
    nearest = distances.new_full((size,), torch.inf)  # distance to the medoids so far
    clusters = distances.new_zeros(size, count)  # one-hot, of the medoids so far
    chosen = torch.zeros(size, dtype=torch.bool, device=distances.device)
    medoids = []
    for number in range(count):
        taken = distances < nearest  # (candidates, samples)
        energy = torch.where(taken, distances, nearest).sum(dim=1)
        score = gamma * (1 - _nmi_with(clusters, membership, taken, number)) - energy
        best = score.masked_fill(chosen, -torch.inf).argmax(dim=0, keepdim=True)
        medoids.append(best)
        mine = taken[best][0]
        nearest = torch.where(mine, distances[best][0], nearest)
        clusters = clusters * ~mine[:, None]
        clusters[:, number] = mine.to(clusters.dtype)
        chosen = chosen.index_fill(0, best, True)
    return torch.cat(medoids)


def refined_medoids(distances: Tensor, membership: Tensor, medoids: Tensor, gamma: float) -> Tensor:
    """One round of local search: the medoid of each cluster in turn moves to its best member, (K,).

    Clusters are those of the medoids before the round. NMI is that of the clustering that a move would make.

    Args:
        distances: (n, n).
        membership: (n, K), one-hot, of the classes.
        medoids: (K,).
        gamma: Weight of 1 - NMI.
    """
    count = len(medoids)
    before = distances[medoids].argmin(dim=0)  # (n,)
    members = before[:, None] == torch.arange(count, device=distances.device)  # (n, K)
    within = distances @ members.to(distances.dtype)  # (n, K): from a sample to all members of a cluster
    medoids = medoids.clone()
    for number in range(count):
        others = distances[medoids]
        others[number] = torch.inf
        nearest, clusters = others.min(dim=0)
        # of equally near medoids the first has the sample
        taken = (distances < nearest) | ((distances == nearest) & (clusters > number))
        margin = 1 - _nmi_with(_one_hot(clusters, count, distances.dtype), membership, taken, number)
        score = gamma * margin - within[:, number]
        medoids[number] = score.masked_fill(~members[:, number], -torch.inf).argmax()
    return medoids


def nmi(clusters: Tensor, membership: Tensor) -> Tensor:
    """Normalized mutual information of two clusterings, one-hot (n, K) each, a scalar."""
    return _nmi((clusters.T @ membership)[None], len(membership))[0]


def _one_hot(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return nn.functional.one_hot(numbers, count).to(dtype)


def _nmi_with(clusters: Tensor, membership: Tensor, taken: Tensor, number: int) -> Tensor:
    """NMI with the classes after the cluster `number` has taken samples from the others, for each candidate, (n,).

    Args:
        clusters: (n, K), one-hot, before; `number` is empty.
        membership: (n, K), one-hot, of the classes.
        taken: (candidates, n): what a candidate takes.
        number: The cluster of the candidates.
    """
    size, count = membership.shape
    own = taken.to(membership.dtype) @ membership  # (candidates, K)
    kept = (~taken).to(membership.dtype) @ (clusters[:, :, None] * membership[:, None]).flatten(1)
    table = kept.view(-1, count, count)  # (candidates, clusters, classes)
    table[:, number] = own
    return _nmi(table, size)


def _nmi(table: Tensor, size: int) -> Tensor:
    """NMI of contingency tables (m, K, K) of `size` samples, (m,); 1 if both clusterings are a single cluster."""
    joint, rows, columns = (_entropy(counts, size) for counts in (table.flatten(1), table.sum(2), table.sum(1)))
    mean = (rows * columns).clamp(min=0).sqrt()
    score = torch.where(mean > 0, (rows + columns - joint) / torch.where(mean > 0, mean, 1), 0.0)
    return torch.where((rows <= 0) & (columns <= 0), 1.0, score.clamp(0, 1))


def _entropy(counts: Tensor, size: int) -> Tensor:
    """Of each row of counts (m, k) that add up to `size`, (m,)."""
    shares = counts / size
    return -torch.special.xlogy(shares, shares).sum(dim=1)
