"""Hierarchical triplet loss (Ge et al., ECCV 2018): margins from a tree of classes that is built before every epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pfml.losses.checks import check_batch
from pfml.sphere import unit

__all__ = ["HierarchicalTripletLoss", "single_linkage"]


class HierarchicalTripletLoss(nn.Module):
    """All triplets of a batch, each with a margin that grows with the distance of its two classes in a tree.

    `start_epoch` builds the tree from the embeddings of all training images. With d2 squared distances on the unit
    sphere, the distance of two classes is the mean d2 of their pairs of images, the spread s_c of a class the mean d2
    of two of its images, and d_0 the mean spread. Level l = 0 ... `levels` of the tree merges what is nearer than

        d_l = d_0 + l (4 - d_0) / levels

    and H(c, k) is the threshold d_l of the level that merges the classes c and k. Then, with Z triplets of an anchor a,
    a positive p and a negative n of the class y_n in the batch:

        margin(a, n) = beta + H(y_a, y_n) - s_(y_a)
        loss         = 1 / (2 Z) sum over triplets of [ d2(a, p) - d2(a, n) + margin(a, n) ]+

    Before the first tree the margin is `beta`. Sums over triplets come from sorted distances, so that a batch of B
    takes memory of B^2. Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Published: 16 levels, beta 0.1, a tree before every epoch, and batches of classes with their nearest classes
    (`batch.neighbors`; `class_neighbors` says which). The first tree is that of a network that the triplet loss has
    trained. No code is public: these values could not be looked up again but in code of others.

    Ours: the first tree is that of the network as the run starts. Distances of triplets are squared, as those of the
    tree are, so that margins and distances have one unit. "Merges" is transitive (single linkage), which the
    paper leaves open. A class of one image has the spread d_0. A batch without a triplet has loss 0.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        levels: Of the tree above the classes.
        beta: Part of the margin that does not depend on the classes.

    Attributes:
        terms: "active", the share of triplets that act, and "margin", the mean margin; detached.
    """

    class_means: Tensor  # (C, D): of unit embeddings, so shorter than 1; 0 for a class without images
    spreads: Tensor  # (C,)
    nodes: Tensor  # (levels + 1, C): of two classes equal from the level on that merges them
    thresholds: Tensor  # (levels + 1,)

    def __init__(self, num_classes: int, embedding_dim: int, *, levels: int = 16, beta: float = 0.1) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("embedding_dim", embedding_dim), ("levels", levels)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not -math.inf < beta < math.inf:
            raise ValueError(f"beta must be finite, got {beta}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.levels = levels
        self.beta = beta
        self.terms: dict[str, Tensor] = {}
        self.register_buffer("class_means", torch.zeros(num_classes, embedding_dim))
        self.register_buffer("spreads", torch.zeros(num_classes))
        self.register_buffer("nodes", torch.zeros(levels + 1, num_classes, dtype=torch.int64))
        self.register_buffer("thresholds", torch.zeros(levels + 1))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self.class_means[:, None])
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))
            distances = 2 - 2 * points @ points.T  # (batch, batch), squared
            same = labels[:, None] == labels
            positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
            margins = self.margins(labels).to(wide)
            total, active = _sum_of_hinges(distances, distances - margins, positive, ~same)
            per_pair = positive.sum(dim=1, keepdim=True) * ~same  # triplets of each anchor and negative
            triplets = per_pair.sum().clamp(min=1)
            self.terms = {"active": active / triplets, "margin": (margins * per_pair).sum() / triplets}
            return total / (2 * triplets)

    @torch.no_grad()
    def margins(self, labels: Tensor) -> Tensor:
        """The margin of every anchor and negative of a batch, (batch, batch)."""
        nodes = self.nodes[:, labels]  # (levels + 1, batch)
        separate = (nodes[:, :, None] != nodes[:, None]).sum(dim=0)  # levels that keep a pair apart
        merged = self.thresholds[separate.clamp(max=self.levels)]
        return self.beta + merged - self.spreads[labels][:, None]

    @torch.no_grad()
    def start_epoch(self, embeddings: Tensor, labels: Tensor) -> None:
        """Build the tree of all training images: embeddings (N, D) and labels (N,) in [0, C)."""
        labels = labels.to(embeddings.device)
        points = unit(embeddings.double())
        counts = torch.bincount(labels, minlength=self.num_classes)
        sums = points.new_zeros(self.num_classes, self.embedding_dim)
        if points.is_cuda:  # index_add_ adds in any order there, and a resumed run shall see the same tree
            order = labels.argsort(stable=True)
            sums = torch.segment_reduce(points[order], "sum", lengths=counts, unsafe=True, initial=0)
        else:
            sums.index_add_(0, labels, points)
        means = sums / counts.clamp(min=1)[:, None]
        several = counts > 1
        spreads = 2 * (1 - means.square().sum(dim=1)) * counts / (counts - 1).clamp(min=1)
        inner = (spreads * several).sum() / several.sum().clamp(min=1)  # d_0
        self.class_means.copy_(means)
        self.spreads.copy_(torch.where(several, spreads, inner).clamp(min=0))
        steps = torch.arange(self.levels + 1, dtype=torch.float64, device=points.device) / self.levels
        thresholds = inner + steps * (4 - inner)
        self.thresholds.copy_(thresholds)
        edges = single_linkage(2 - 2 * (means @ means.T).cpu())
        for level, threshold in enumerate(thresholds.tolist()):
            self.nodes[level] = _components(edges, threshold if level < self.levels else math.inf, self.num_classes)

    def class_neighbors(self, count: int) -> Tensor:
        """The nearest other classes of each class by the last tree, nearest first, (C, count) int64 on the CPU."""
        cosines = self.class_means @ self.class_means.T
        cosines.masked_fill_((self.class_means == 0).all(dim=1), -torch.inf).fill_diagonal_(-torch.inf)
        return cosines.topk(count, dim=1).indices.cpu()

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """None: the loss learns nothing, its tree is computed."""
        return []

    def proxy_points(self) -> Tensor:
        """There are no proxies, (C, 0, D)."""
        return self.class_means.new_empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_classes}, {self.embedding_dim}, levels={self.levels}, beta={self.beta}"


def single_linkage(distances: Tensor) -> list[tuple[int, int, float]]:
    """The edges (i, j, distance) of a minimum spanning tree of n points, by Prim's algorithm.

    Points that are connected by edges below a threshold are those that single linkage merges at it.

    Args:
        distances: (n, n), symmetric.
    """
    size = len(distances)
    nearest = distances[0].clone()
    parents = torch.zeros(size, dtype=torch.int64)
    outside = torch.ones(size, dtype=torch.bool)
    outside[0] = False
    edges = []
    for _ in range(size - 1):
        new = int(torch.where(outside, nearest, torch.inf).argmin())
        edges.append((int(parents[new]), new, float(nearest[new])))
        outside[new] = False
        closer = distances[new] < nearest
        parents = torch.where(closer, new, parents)
        nearest = torch.where(closer, distances[new], nearest)
    return edges


def _components(edges: list[tuple[int, int, float]], threshold: float, size: int) -> Tensor:
    """A number for each of `size` points, equal for those that edges below the threshold connect."""
    numbers = list(range(size))
    for parent, child, distance in edges:  # in the order in which Prim's algorithm reached the children
        if distance < threshold:
            numbers[child] = numbers[parent]
    return torch.tensor(numbers)


def _sum_of_hinges(upper: Tensor, lower: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over all (a, p, n) of [ upper(a, p) - lower(a, n) ]+, and how many are above 0.

    Args:
        upper, lower: (batch, batch).
        positive, negative: Which pairs are (a, p), which are (a, n).
    """
    ordered, order = lower.detach().masked_fill(~negative, torch.inf).sort(dim=1)
    below = torch.searchsorted(ordered, upper.detach().contiguous()) * positive  # negatives that act with (a, p)
    values = torch.where(negative, lower, 0).gather(1, order)
    sums = nn.functional.pad(values.cumsum(dim=1), (1, 0))  # (batch, batch + 1)
    return (below * torch.where(positive, upper, 0) - sums.gather(1, below)).sum(), below.sum()
