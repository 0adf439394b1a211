"""Losses of a student that follows the geometry of its teachers, and sees no labels.

A teacher says of each pair of a batch how far apart its two images are. Several teachers are one: their embeddings
side by side, divided by the root of their number (`combined`), have as squared distance the mean of the teachers'
squared distances, and no space needs to be aligned with another.

    relaxed contrastive   s d^2 + (1 - s) [margin - d]+^2 over pairs        Kim et al., CVPR 2021
    relational KL         KL of softmax(-D^2 / 2 tau) over each row         neighborhoods as distributions
    soft field            s psi_att(r) + (1 - s) psi_rep(r) over pairs      Eq. 6 with soft charges, this package

with r the student's distance, d = r divided by the mean distance of the anchor, D the teachers' distance, and the share
s = exp(-D^2 / sigma) by which a pair belongs together; under `EquilibriumLaw` s is what lets the pair rest at D.

Each is called as `loss(embeddings, teacher_embeddings)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.backends import BACKENDS, resolve_backend
from pfml.field import DecayLaw, EquilibriumLaw, power_law
from pfml.losses.checks import check_batch
from pfml.sphere import unit
from pfml.superposition import Charges, Field, PairWeights

__all__ = [
    "RelationalKLLoss",
    "RelaxedContrastiveLoss",
    "SoftFieldLoss",
    "combined",
    "pair_shares",
    "principal_directions",
]


def combined(teacher_embeddings: Sequence[Tensor]) -> Tensor:
    """One embedding (n, sum of D) whose squared distances are the mean of the teachers' squared distances."""
    if not teacher_embeddings:
        raise ValueError("teacher_embeddings must hold at least one tensor, got none")
    return torch.cat(list(teacher_embeddings), dim=1) / math.sqrt(len(teacher_embeddings))


def principal_directions(batches: Iterable[Tensor], dims: int) -> tuple[Tensor, float]:
    """Directions (D, dims) in which embeddings (n, D) of all batches differ most, and their share of the variance.

    They are scaled: `embeddings @ directions` keeps the mean of the squared distances.
    """
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for batch in batches:
        points = batch.double()
        count, total, squares = count + len(points), total + points.sum(dim=0), squares + points.T @ points
    covariance = squares / count - torch.outer(total, total) / count**2
    variances, directions = torch.linalg.eigh(covariance)  # ascending
    kept = float(variances[-dims:].sum() / variances.sum())
    return (directions[:, -dims:] / math.sqrt(kept)).float(), kept


def pair_shares(teacher_embeddings: Tensor, *, sigma: float = 1.0) -> Tensor:
    """exp(-D^2 / sigma), (n, n): the share by which two samples belong together, 1 at no distance."""
    return torch.exp(-_squared_distances(teacher_embeddings) / sigma)


class _StudentLoss(nn.Module, ABC):
    """Checks and precision that these losses have in common; a subclass computes `of_pairs`."""

    def forward(self, embeddings: Tensor, teacher_embeddings: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            embeddings: The student's, (n, D); they are put on the unit sphere.
            teacher_embeddings: The teachers', (n, any width), of the same images; see `combined`. They get no gradient.
        """
        _check(embeddings, teacher_embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            wide = torch.promote_types(embeddings.dtype, torch.float32)
            return self.of_pairs(unit(embeddings.to(wide)), teacher_embeddings.detach().to(wide))

    @abstractmethod
    def of_pairs(self, points: Tensor, taught: Tensor) -> Tensor:
        """The loss of points on the unit sphere, (n, D), and the teachers' points, both in float32 or float64."""


class RelaxedContrastiveLoss(_StudentLoss):
    """Kim et al. (CVPR 2021): contrastive in distances relative to their mean, each pair by its share.

    (1 / n) sum over pairs of s d_ij^2 + (1 - s) [margin - d_ij]+^2, where d_ij = r_ij / mean_k r_ik. In the words of
    PFML's paper: CPML's potentials with soft charges.

    Args:
        sigma: Width of the shares exp(-D^2 / sigma).
        margin: Relative distance from which pairs no longer repel.

    Example:
        >>> loss = RelaxedContrastiveLoss()
        >>> loss(torch.randn(8, 64), torch.randn(8, 512)).shape
        torch.Size([])
    """

    def __init__(self, *, sigma: float = 1.0, margin: float = 1.0) -> None:
        super().__init__()
        self.sigma, self.margin = _positive(sigma=sigma, margin=margin)

    def of_pairs(self, points: Tensor, taught: Tensor) -> Tensor:
        share = pair_shares(taught, sigma=self.sigma)
        r = _distances(points)
        d = r / r.mean(dim=1, keepdim=True).clamp_min(torch.finfo(r.dtype).tiny)
        pairs = share * d.square() + (1 - share) * (self.margin - d).clamp_min(0).square()
        return pairs.fill_diagonal_(0.0).sum() / max(len(points), 1)

    def extra_repr(self) -> str:
        return f"sigma={self.sigma}, margin={self.margin}"


class RelationalKLLoss(_StudentLoss):
    """The mean divergence of the student's neighborhoods from the teachers': KL over rows of softmax(-D^2 / 2 tau).

    Args:
        temperature: tau, of teachers and student alike.
    """

    def __init__(self, *, temperature: float = 0.1) -> None:
        super().__init__()
        (self.temperature,) = _positive(temperature=temperature)

    def of_pairs(self, points: Tensor, taught: Tensor) -> Tensor:
        if len(points) < 2:
            return points.sum() * 0.0
        itself = torch.eye(len(points), dtype=torch.bool, device=points.device)
        wanted, found = (
            # the lowest number and not -inf, whose product with a probability of zero is NaN
            F.log_softmax((-_squared_distances(each) / (2 * self.temperature)).masked_fill(itself, -1e4), dim=1)
            for each in (taught, points)
        )
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class SoftFieldLoss(_StudentLoss):
    """The energy of a batch of soft charges, per charge: Eq. 6 where a pair belongs together by a share.

    Args:
        law: The decay law; `EquilibriumLaw()` if None, under which each pair rests at the teachers' distance.
        sigma: Width of the shares exp(-D^2 / sigma); None for the shares of `EquilibriumLaw.share_at`.
        normalization: A key of `pfml.superposition.NORMALIZATIONS`.
        backend: "auto" or a key of `pfml.backends.BACKENDS`.
    """

    def __init__(
        self,
        *,
        law: DecayLaw | None = None,
        sigma: float | None = None,
        normalization: str = "none",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        law = EquilibriumLaw() if law is None else law
        if sigma is None and not isinstance(law, EquilibriumLaw):
            raise ValueError(f"sigma must be given, since {type(law).__name__} has no shares of its own")
        self.sigma = None if sigma is None else _positive(sigma=sigma)[0]
        self.field, self.backend = Field(law, normalization), backend
        resolve_backend(backend, 0)

    def of_pairs(self, points: Tensor, taught: Tensor) -> Tensor:
        law = self.field.law
        if self.sigma is None:
            assert isinstance(law, EquilibriumLaw)
            shares = law.share_at(_distances(taught))
        else:
            shares = pair_shares(taught, sigma=self.sigma)
        labels = torch.zeros(len(points), dtype=torch.int64, device=points.device)  # which the shares stand in for
        none = Charges(points[:0].detach(), labels[:0])
        compute = BACKENDS[resolve_backend(self.backend, len(points), points, self.field, soft=True)]
        energy = compute(Charges(points, labels, shares=shares), none, self.field, PairWeights())
        return energy / max(len(points), 1)

    def extra_repr(self) -> str:
        sigma = "" if self.sigma is None else f", sigma={self.sigma}"
        return f"law={self.field.law}{sigma}, normalization={self.field.normalization!r}"


def relaxed_contrastive(
    num_classes: int, embedding_dim: int, *, sigma: float = 1.0, margin: float = 1.0
) -> RelaxedContrastiveLoss:
    """`RelaxedContrastiveLoss` as a row of the method table."""
    return RelaxedContrastiveLoss(sigma=sigma, margin=margin)


def relational_kl(num_classes: int, embedding_dim: int, *, temperature: float = 0.1) -> RelationalKLLoss:
    """`RelationalKLLoss` as a row of the method table."""
    return RelationalKLLoss(temperature=temperature)


def soft_field(
    num_classes: int,
    embedding_dim: int,
    *,
    sigma: float = 1.0,
    delta: float = 0.6,
    delta_rep: float | None = 1.2,
    alpha: float = 3.0,
    normalization: str = "log",
) -> SoftFieldLoss:
    """`SoftFieldLoss` under the paper's law, as a row of the method table."""
    law = power_law(delta=delta, delta_rep=delta_rep, alpha=alpha)
    return SoftFieldLoss(law=law, sigma=sigma, normalization=normalization)


def equilibrium_field(
    num_classes: int, embedding_dim: int, *, alpha: float = 1.0, beta: float = 2.0, core: float = 0.05
) -> SoftFieldLoss:
    """`SoftFieldLoss` under `EquilibriumLaw`, as a row of the method table."""
    return SoftFieldLoss(law=EquilibriumLaw(alpha=alpha, beta=beta, core=core))


def _squared_distances(points: Tensor) -> Tensor:
    """(n, n), exact for close pairs."""
    return _distances(points).square()


def _distances(points: Tensor) -> Tensor:
    """(n, n) from differences, with a gradient of zero where two points coincide."""
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def _check(embeddings: Tensor, teacher_embeddings: Tensor) -> None:
    for name, value in (("embeddings", embeddings), ("teacher_embeddings", teacher_embeddings)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; `combined` makes one of several")
        if value.dim() != 2 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be floating-point and (n, D), got {value.dtype} of shape {tuple(value.shape)}"
            )
    if len(embeddings) != len(teacher_embeddings):
        raise ValueError(
            f"embeddings and teacher_embeddings must be of the same images, got {len(embeddings)} and "
            f"{len(teacher_embeddings)} rows"
        )
    for value in (embeddings, teacher_embeddings):
        labels = torch.zeros(len(value), dtype=torch.int64, device=value.device)
        check_batch(value, labels, value.new_zeros(1, 0, value.shape[1]))


def _positive(**values: float) -> list[float]:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    return [float(value) for value in values.values()]
