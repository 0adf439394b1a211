"""DiVA (Milbich, Roth et al., ECCV 2020): four heads that learn different relations of one batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pfml.losses.checks import check_batch, checked_sum
from pfml.losses.perceptron import Perceptron
from pfml.losses.triplet_margin import (
    Triplets,
    distance_weighted_triplets,
    log_inverse_density,
    margin_loss,
    within_class_triplets,
)
from pfml.sphere import unit

__all__ = ["DiVALoss"]

HEADS = ("discriminative", "sample", "shared", "intra")
#: Heads that have the margin loss, and so a boundary for each class.
WITH_BOUNDARIES = ("discriminative", "shared", "intra")
#: Dimensions of a head that the published weights are for.
PUBLISHED_WIDTH = 128
#: Heads that the discriminative one is decorrelated from.
AUXILIARY = ("sample", "shared", "intra")


class DiVALoss(nn.Module):
    """Four heads of an embedding, each a quarter of it on a unit sphere of its own, and none predicts the first.

    The heads are, in the order of the embedding, and J is the margin loss of `pfml.losses.triplet_margin`:

        discriminative  J over distance-weighted triplets
        sample          -log( exp(x k / T) / (exp(x k / T) + sum over the queue of exp(w_q x q / T)) ), the mean over x:
                        k is another crop of the image, embedded by the network that follows (`followed`), the queue
                        holds the latest k of other batches, and w is their distance-weighted share of the row, not
                        differentiated, 0 for distances above `queue_cutoff`
        shared          J over distance-weighted triplets of shuffled labels: what classes have in common
        intra           J over triplets within a class: what samples of a class differ in

        loss = discriminative + sample_weight * sample + shared_weight * shared + intra_weight * intra
             - decorrelation * sum over the three of mean over x, dimensions of (disc * unit(R(other)))^2

    Gradients of the last term are reversed for the heads: the adversaries R, two layers each, learn to predict the
    discriminative head, and the heads to be unpredictable.

    Published, in the authors' code: all of the above with margin 0.2, beta 1.2 at its start, T 0.01, momentum 0.9,
    30 batches in the queue (SOP 70), 512 hidden units; weights 0.3 and decorrelation 1500 on CUB with ResNet-50, the
    defaults, other values elsewhere (see the recipes). Boundaries beta learn with 5e-4, adversaries with 1e-5.
    Weights w are normalized for each sample, as the paper has it and the code with --diva_fixed.

    Ours: the queue fills during the first batches, where the code fills it before the training. Without `followed`,
    the sample head has no term of its own. An anchor without positives or negatives is left out. The decorrelation of
    heads of d dimensions is weighed by (d / 128)^2 more, since that of independent heads is 1 / d^2, and the published
    weights are for 128.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D, a multiple of 4.
        sample_weight, shared_weight, intra_weight: Weights of the auxiliary heads' losses.
        decorrelation: Weight of the adversaries' term for heads of 128 dimensions.
        margin: Half the width of the gap between positives and negatives.
        beta: Boundary between positives and negatives at the start; each class learns its own.
        cutoff: Distances below it count as this one where negatives are drawn.
        temperature: What cosines of the sample head are divided by.
        queue_size: Keys that are kept.
        queue_cutoff: Keys farther than this have the least weight.
        momentum: Share that the weights of the network that follows keep of themselves in a step.
        hidden_dim: Hidden units of an adversary.
        adversary_lr: Learning rate of the adversaries, whatever that of the boundaries is.

    Attributes:
        terms: All five terms of the last value, detached, before their weights: the heads' names and "decorrelation".
    """

    needs_second_crop = True

    boundaries: nn.Parameter  # (3, C)
    queue: Tensor  # (queue_size, D / 4), on the unit sphere
    queued: Tensor  # how many keys have ever been put into the queue

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        sample_weight: float = 0.3,
        shared_weight: float = 0.3,
        intra_weight: float = 0.3,
        decorrelation: float = 1500.0,
        margin: float = 0.2,
        beta: float = 1.2,
        cutoff: float = 0.5,
        temperature: float = 0.01,
        queue_size: int = 3360,
        queue_cutoff: float = 1.4,
        momentum: float = 0.9,
        hidden_dim: int = 512,
        adversary_lr: float = 1e-5,
    ) -> None:
        super().__init__()
        for name, size in (
            ("num_classes", num_classes),
            ("embedding_dim", embedding_dim),
            ("queue_size", queue_size),
            ("hidden_dim", hidden_dim),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if embedding_dim % len(HEADS):
            raise ValueError(
                f"embedding_dim must be a multiple of {len(HEADS)}, one part for each head, got {embedding_dim}"
            )
        weights = {"sample_weight": sample_weight, "shared_weight": shared_weight, "intra_weight": intra_weight}
        for name, value in (*weights.items(), ("decorrelation", decorrelation), ("margin", margin)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name, value in (
            ("beta", beta),
            ("cutoff", cutoff),
            ("temperature", temperature),
            ("queue_cutoff", queue_cutoff),
            ("adversary_lr", adversary_lr),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.weights = {"discriminative": 1.0, **{name.removesuffix("_weight"): w for name, w in weights.items()}}
        self.decorrelation = decorrelation
        self.margin = margin
        self.beta = beta
        self.cutoff = cutoff
        self.temperature = temperature
        self.queue_size = queue_size
        self.queue_cutoff = queue_cutoff
        self.momentum = momentum
        self.hidden_dim = hidden_dim
        self.adversary_lr = adversary_lr
        self.terms: dict[str, Tensor] = {}
        width = embedding_dim // len(HEADS)
        self.boundaries = nn.Parameter(torch.full((len(WITH_BOUNDARIES), num_classes), beta))
        self.adversaries = nn.ModuleDict({head: Perceptron(width, hidden_dim, width) for head in AUXILIARY})
        self.register_buffer("queue", torch.zeros(queue_size, width))
        self.register_buffer("queued", torch.zeros((), dtype=torch.int64))

    def forward(self, embeddings: Tensor, labels: Tensor, *, followed: Tensor | None = None) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C).

        Args:
            embeddings: The four heads side by side.
            labels: Of the samples.
            followed: Embeddings of the same images by the network that follows, (batch, D), without gradient.
        """
        labels = check_batch(embeddings, labels, checked_sum(self, embeddings))
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.boundaries.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            heads = self._heads(embeddings.to(wide))
            boundaries = self.boundaries.to(wide)
            if not len(labels):
                return (embeddings.to(wide) * 0).sum() + checked_sum(self, embeddings, differentiable=True).sum() * 0
            values = {
                name: margin_loss(heads[name], triplets, boundaries[number, labels], margin=self.margin)
                for number, (name, triplets) in enumerate(self._triplets(heads, labels).items())
            }
            if followed is not None:
                keys = self._heads(followed.detach().to(wide))["sample"]
                values["sample"] = self._sample_specific(heads["sample"], keys)
                if self.training:
                    self._put_into_queue(keys)
            similarity = self._predicted(heads)
            self.terms = {name: value.detach() for name, value in values.items()} | {
                "decorrelation": similarity.detach()
            }
            weighted = torch.stack([self.weights[name] * value for name, value in values.items()]).sum()
            return weighted - self.decorrelation * (self.embedding_dim / len(HEADS) / PUBLISHED_WIDTH) ** 2 * similarity

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: the boundaries with `lr`, and the adversaries with `adversary_lr`."""
        boundaries = {"params": [self.boundaries], "lr": lr, "weight_decay": weight_decay}
        adversaries = list(self.adversaries.parameters())
        return [boundaries, {"params": adversaries, "lr": self.adversary_lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """No proxies, (C, 0, D)."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        weights = ", ".join(f"{head}_weight={self.weights[head]}" for head in AUXILIARY)
        return (
            f"{self.num_classes}, {self.embedding_dim}, {weights}, decorrelation={self.decorrelation}, "
            f"margin={self.margin}, beta={self.beta}, cutoff={self.cutoff}, temperature={self.temperature}, "
            f"queue_size={self.queue_size}, queue_cutoff={self.queue_cutoff}, momentum={self.momentum}, "
            f"hidden_dim={self.hidden_dim}, adversary_lr={self.adversary_lr}"
        )

    def _heads(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Each head's points (batch, D / 4) on the unit sphere."""
        return dict(zip(HEADS, unit(embeddings.unflatten(1, (len(HEADS), -1))).unbind(dim=1), strict=True))

    def _triplets(self, heads: dict[str, Tensor], labels: Tensor) -> dict[str, Triplets]:
        """Of each head of `WITH_BOUNDARIES`, in this order."""
        shuffled = labels[torch.rand(len(labels), device=labels.device).argsort()]
        return {
            "discriminative": distance_weighted_triplets(heads["discriminative"], labels, cutoff=self.cutoff),
            "shared": distance_weighted_triplets(heads["shared"], shuffled, cutoff=self.cutoff),
            "intra": within_class_triplets(labels),
        }

    def _sample_specific(self, points: Tensor, keys: Tensor) -> Tensor:
        """Mean cross entropy of each point's own key against the queue."""
        own = (points * keys).sum(dim=1, keepdim=True)  # (batch, 1)
        others = points @ self.queue.to(points.dtype, copy=True).T  # (batch, queue); the queue changes before backward
        is_filled = torch.arange(self.queue_size, device=points.device) < self.queued
        logits = torch.where(is_filled, others * self._shares(others.detach(), is_filled), -math.inf)
        logits = torch.cat([own, logits], dim=1) / self.temperature
        return (logits.logsumexp(dim=1) - logits[:, 0]).mean()

    def _shares(self, cosines: Tensor, is_filled: Tensor) -> Tensor:
        """Shares (batch, queue) of the queue's keys, which sum to 1 for each sample."""
        r = (2 - 2 * cosines).clamp(min=0).sqrt().clamp(min=self.cutoff)
        log_weights = log_inverse_density(r, self.embedding_dim // len(HEADS))
        highest = torch.where(is_filled, log_weights, -1e30).amax(dim=1, keepdim=True)
        weights = torch.where(r > self.queue_cutoff, 0.0, (log_weights - highest).clamp(max=0).exp())
        weights = torch.where(is_filled, weights.clamp(min=1e-30), 0.0)
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-30)

    @torch.no_grad()
    def _put_into_queue(self, keys: Tensor) -> None:
        """Replace the oldest keys."""
        keys = keys[-self.queue_size :]
        rows = (self.queued + torch.arange(len(keys), device=keys.device)) % self.queue_size
        self.queue.index_copy_(0, rows, keys.to(self.queue.dtype))
        self.queued += len(keys)

    def _predicted(self, heads: dict[str, Tensor]) -> Tensor:
        """How well the adversaries predict the discriminative head, with reversed gradients for the heads."""
        reversed_heads = {name: 2 * points.detach() - points for name, points in heads.items()}
        target = reversed_heads["discriminative"]
        similarities = [
            (target * unit(self.adversaries[name](reversed_heads[name]))).square().mean() for name in AUXILIARY
        ]
        return torch.stack(similarities).sum()
