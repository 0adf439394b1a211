"""DAS (Liu et al., ECCV 2022): densely-anchored sampling, here beside the multi-similarity loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pfml.losses.checks import check_batch
from pfml.losses.multi_similarity import log_one_plus_sum, mined_pairs, pair_masks
from pfml.sphere import unit

__all__ = ["DASLoss"]


class DASLoss(nn.Module):
    """The multi-similarity loss over the samples of a batch and `num_produced` more embeddings around each.

    A produced embedding of a sample x of class c, on the unit sphere:

        x' = unit(w * x + shift_weight * t)

    Discriminative feature scaling: w is 1 but for the `num_scaled` features that were most often among the largest of
    the class's samples; there it is uniform in [scale_low, scale_high]. Memorized transformation shifting: t is drawn
    from the class's last `memory_size` differences x_i - x_j of two of its samples in one batch. Both memories have
    seen the batch before they are used. With all samples and s their cosines, over anchors for which the miner keeps
    positives P and negatives N (see `mined_pairs`):

        loss = mean over anchors of log(1 + sum over P of exp(-alpha (s - base))) / alpha
                                  + log(1 + sum over N of exp(beta (s - base))) / beta

    Memories are buffers. In evaluation mode nothing is produced or memorized. Computed in float32 at least, whatever
    autocast says; checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above, 3 produced embeddings, memory 10, alpha 2, beta 40, base 0.5,
    epsilon 0.1; with 512 dimensions num_scaled 8; on CUB and Cars scales of 0.99 to 1.01, shift_weight 0.01 and no
    gradient through produced embeddings, on SOP 0.5 to 2, 0.1 and a gradient.

    Ours: the memory of differences is one ring, the oldest leaves first, where the code overwrites all of it, without
    moving on, if a batch brings more than its size. The difference of two samples that coincide is memorized too.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        alpha, beta, base: Sharpness for positives, for negatives, and the cosine between them.
        epsilon: Tolerance of the miner.
        num_produced: Embeddings produced for each sample; 0 for the plain loss.
        num_scaled: Features of a class that are scaled; at most D of them.
        scale_low, scale_high: Range of their factors.
        memory_size: Differences that a class remembers.
        shift_weight: Factor of a difference.
        detach: Whether produced embeddings pass no gradient on to their samples.

    Attributes:
        terms: What positives and negatives contribute, detached: "pull" and "push".
    """

    frequencies: Tensor  # (C, D) of int64: how often a feature was among the largest of a sample
    differences: Tensor  # (C * memory_size, D)
    filled: Tensor  # (C,) of int64
    heads: Tensor  # (C,) of int64: where the next difference goes

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        num_produced: int = 3,
        num_scaled: int = 8,
        scale_low: float = 0.99,
        scale_high: float = 1.01,
        memory_size: int = 10,
        shift_weight: float = 0.01,
        detach: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim, "memory_size": memory_size}
        for name, size in {**sizes, "num_scaled": num_scaled}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if not isinstance(num_produced, int) or isinstance(num_produced, bool) or num_produced < 0:
            raise ValueError(f"num_produced must be an integer >= 0, got {num_produced!r}")
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= scale_low <= scale_high < math.inf:
            raise ValueError(f"scale_low must lie in [0, scale_high], got {scale_low} and {scale_high}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.alpha, self.beta, self.base, self.epsilon = alpha, beta, base, epsilon
        self.num_produced = num_produced
        self.num_scaled = min(num_scaled, embedding_dim)
        self.scale_low, self.scale_high = scale_low, scale_high
        self.memory_size = memory_size
        self.shift_weight = shift_weight
        self.detach = bool(detach)
        self.terms: dict[str, Tensor] = {}
        self.register_buffer("frequencies", torch.zeros(num_classes, embedding_dim, dtype=torch.int64))
        self.register_buffer("differences", torch.zeros(num_classes * memory_size, embedding_dim))
        self.register_buffer("filled", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("heads", torch.zeros(num_classes, dtype=torch.int64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self._no_proxies())
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))  # (B, D)
            if self.training and self.num_produced and len(labels):
                self.memorize(points, labels)
                produced = [self.produce(points, labels) for _ in range(self.num_produced)]
                points = torch.cat([points, *produced])
                labels = labels.repeat(1 + self.num_produced)
            return self._multi_similarity(points, labels)

    @torch.no_grad()
    def memorize(self, points: Tensor, labels: Tensor) -> None:
        """Let both memories see the samples of a batch: points (B, D) on the unit sphere, labels (B,)."""
        largest = points.topk(self.num_scaled, dim=1).indices  # (B, num_scaled)
        seen = (labels[:, None] * self.embedding_dim + largest).flatten()
        self.frequencies.view(-1).index_add_(0, seen, torch.ones_like(seen))
        self._memorize_differences(points, labels)

    def produce(self, points: Tensor, labels: Tensor) -> Tensor:
        """One more embedding for each sample, (B, D), drawn with torch's global generator."""
        points = points.detach() if self.detach else points
        chosen = self.frequencies[labels].topk(self.num_scaled, dim=1).indices  # (B, num_scaled)
        drawn = torch.rand(chosen.shape, dtype=points.dtype, device=points.device)
        scales = self.scale_low + (self.scale_high - self.scale_low) * drawn
        factors = torch.ones_like(points).scatter(1, chosen, scales)
        slots = (torch.rand(len(labels), device=points.device) * self.filled[labels]).long()  # 0 of an empty memory
        shifts = self.differences[labels * self.memory_size + slots].to(points.dtype)
        return unit(factors * points + self.shift_weight * shifts)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """None: the loss learns nothing."""
        return []

    def proxy_points(self) -> Tensor:
        """No proxies, (C, 0, D)."""
        return self._no_proxies()

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, alpha={self.alpha}, beta={self.beta}, base={self.base}, "
            f"epsilon={self.epsilon}, num_produced={self.num_produced}, num_scaled={self.num_scaled}, "
            f"scale_low={self.scale_low}, scale_high={self.scale_high}, memory_size={self.memory_size}, "
            f"shift_weight={self.shift_weight}, detach={self.detach}"
        )

    def _no_proxies(self) -> Tensor:
        return self.differences.new_empty(self.num_classes, 0, self.embedding_dim)

    def _memorize_differences(self, points: Tensor, labels: Tensor) -> None:
        """Append the differences of all ordered pairs of a class, row by row; of too many the last remain."""
        count, size = len(labels), self.memory_size
        pairs, negatives = pair_masks(labels)  # (B, B)
        same = ~negatives
        per_row = pairs.sum(dim=1)
        of_class = (same * per_row).sum(dim=1)  # (B,): how many differences the class of each row gets
        before = (same.tril(-1) * per_row).sum(dim=1)
        position = before[:, None] + pairs.cumsum(dim=1) - 1  # of a pair among those of its class
        kept = pairs & (position >= of_class[:, None] - size)
        most = min(count * count, count // 2 * size)  # a class needs two samples for a difference
        kept, chosen = kept.flatten().to(torch.uint8).topk(most)
        rows, columns = chosen // count, chosen % count
        slots = labels[rows] * size + (self.heads[labels[rows]] + position.flatten()[chosen]) % size
        fresh = (points[rows] - points[columns]).to(self.differences.dtype)
        # what is not kept adds nothing, wherever its slot is; kept slots differ from each other
        self.differences.index_add_(0, slots, (fresh - self.differences[slots]) * kept[:, None])
        added = torch.zeros_like(self.heads).index_add_(0, labels, per_row)
        self.heads.copy_((self.heads + added) % size)
        self.filled.copy_((self.filled + added).clamp(max=size))

    def _multi_similarity(self, points: Tensor, labels: Tensor) -> Tensor:
        cosines = points @ points.T
        positives, negatives = mined_pairs(cosines, labels, self.epsilon)
        both = positives.any(dim=1) & negatives.any(dim=1)
        anchors = both.sum().clamp(min=1)
        pull = log_one_plus_sum(-self.alpha * (cosines - self.base), positives) / self.alpha  # (B,)
        push = log_one_plus_sum(self.beta * (cosines - self.base), negatives) / self.beta
        pulls, pushes = (pull * both).sum() / anchors, (push * both).sum() / anchors
        self.terms = {"pull": pulls.detach(), "push": pushes.detach()}
        return pulls + pushes
