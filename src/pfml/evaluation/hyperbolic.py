"""Retrieval by distance in hyperbolic space, as the authors of Hyp and HIER rank; all other metrics rank by cosines."""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.hyperbolic import clip_lengths, tangent_distances

__all__ = ["hyperbolic_recall_at_1"]

#: Distances that are held at once.
PAIRS_AT_ONCE = 2**22


@torch.no_grad()
def hyperbolic_recall_at_1(
    vectors: Tensor, labels: Tensor, *, curvature: float = 0.1, clip_radius: float = 2.3
) -> float:
    """Recall@1 of searching each embedding among all others by distance in the Poincare ball.

    Vectors that are all at least as long as `clip_radius` are ranked as by cosines: only shorter ones can differ.

    Args:
        vectors: (N, D) with their lengths: `embedder.head.projected(embed(embedder, images, features=True))`.
        labels: (N,) integers; those whose class has no other member count as not found.
        curvature, clip_radius: As in the loss.

    Example:
        >>> vectors = torch.tensor([[0.1, 0.0], [0.0, 0.1], [2.0, 0.1], [2.0, 0.0]])
        >>> hyperbolic_recall_at_1(vectors, torch.tensor([0, 0, 1, 1]))
        1.0
    """
    if vectors.ndim != 2 or len(vectors) < 2 or labels.shape != vectors.shape[:1]:
        shapes = f"{tuple(vectors.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"vectors must be (N, D) with N >= 2 and labels (N,), got {shapes}")
    clipped, labels = clip_lengths(vectors, clip_radius), labels.to(vectors.device)
    rows, found = max(PAIRS_AT_ONCE // len(clipped), 1), 0
    for start in range(0, len(clipped), rows):
        distances = tangent_distances(clipped[start : start + rows], clipped, curvature=curvature)
        distances.diagonal(start).fill_(torch.inf)
        found += int((labels[distances.argmin(dim=1)] == labels[start : start + rows]).sum())
    return found / len(clipped)
