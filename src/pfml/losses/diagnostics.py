"""What a field does to a batch, in a few numbers that explain why training goes well or does not."""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from pfml.backends.tiled import pair_sums, tiled_energy
from pfml.field import DecayLaw
from pfml.losses.checks import CollapseWarning
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["FieldDiagnostics", "diagnose"]

#: Embeddings whose root mean square distance from their mean is below this have collapsed.
COLLAPSED_SPREAD = 1e-3


@dataclass(frozen=True)
class FieldDiagnostics:
    """Counts are of unordered pairs; shares and distances are NaN where there is nothing to measure.

    Attributes:
        active_repulsions: Pairs of different classes within reach of each other's repulsion, where it is switched on.
        active_repulsion_share: Their share of all pairs of different classes.
        same_class_inside_delta: Share of same-class pairs so close that they no longer attract.
        sample_spread: Root mean square distance of the embeddings from their mean (1 on the whole sphere).
        proxy_spread: Mean distance between proxies of one class.
        largest_force: Largest |dU / dposition| on any sample or proxy, for the summed energy.
        collapsed: Whether all embeddings, or all proxies of every class, have come together.
    """

    active_repulsions: int
    active_repulsion_share: float
    same_class_inside_delta: float
    sample_spread: float
    proxy_spread: float
    largest_force: float
    collapsed: bool


@dataclass(frozen=True)
class _Counting(DecayLaw):
    """psi_att = -1 inside `contact`, psi_rep = 1 inside `reach`: superposed, these count pairs."""

    contact: float
    reach: float
    decays = False

    def attraction(self, r: Tensor) -> Tensor:
        return -(r < self.contact).to(r.dtype)

    def repulsion(self, r: Tensor) -> Tensor:
        return (r < self.reach).to(r.dtype)

    def attraction_slope(self, r: Tensor) -> Tensor:
        return torch.zeros_like(r)

    repulsion_slope = attraction_slope


def diagnose(samples: Charges, proxies: Tensor, field: Field, weights: PairWeights) -> FieldDiagnostics:
    """Measure the field of `samples` and of proxies at (C, M, D)."""
    num_classes, per_class, _ = proxies.shape
    labels = torch.arange(num_classes, device=proxies.device).repeat_interleave(per_class)
    samples, sources = Charges(samples.positions().detach(), samples.labels), Charges(proxies.flatten(0, 1), labels)

    law = field.law
    switched_on = PairWeights(*(float(weight != 0) for weight in astuple(weights)))
    counting = Field(_Counting(law.contact, law.reach))
    outside_contact, within_reach = pair_sums(samples, sources, counting, switched_on).sum(dim=1).tolist()
    same, different = _pair_counts(samples.labels, labels, num_classes, switched_on)
    inside_contact = same - outside_contact if law.contact > 0 else 0.0

    sample_spread = _spread(samples.points)
    proxy_spread = _mean_pair_distance(proxies)
    collapsed = sample_spread < COLLAPSED_SPREAD or proxy_spread < COLLAPSED_SPREAD
    if collapsed:
        warnings.warn(
            f"the field has collapsed: embeddings spread over {sample_spread:.2g}, proxies of a class over "
            f"{proxy_spread:.2g}; lower the learning rates, or switch proxy_attraction off",
            CollapseWarning,
            stacklevel=3,
        )
    return FieldDiagnostics(
        active_repulsions=round(within_reach / 2),
        active_repulsion_share=_ratio(within_reach, different),
        same_class_inside_delta=_ratio(inside_contact, same),
        sample_spread=sample_spread,
        proxy_spread=proxy_spread,
        largest_force=_largest_force(samples, sources, field, weights),
        collapsed=collapsed,
    )


def _pair_counts(
    sample_labels: Tensor, proxy_labels: Tensor, num_classes: int, switched_on: PairWeights
) -> tuple[float, float]:
    """Ordered pairs of one class, and of different classes, among the kinds of pairs that are switched on."""
    samples, proxies = (torch.bincount(y, minlength=num_classes).double() for y in (sample_labels, proxy_labels))
    same = different = 0.0
    for left, right, twice, (own, other) in (
        (samples, samples, 1, switched_on.of_samples()),
        (samples, proxies, 2, switched_on.of_mixed()),
        (proxies, proxies, 1, switched_on.of_proxies()),
    ):
        together = (left * right).sum().item()
        itself = left.sum().item() if left is right else 0.0
        same += own * twice * (together - itself)
        different += other * twice * (left.sum().item() * right.sum().item() - together)
    return same, different


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _spread(points: Tensor) -> float:
    if len(points) < 2:
        return float("nan")
    return (points - points.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()


def _mean_pair_distance(proxies: Tensor) -> float:
    per_class = proxies.shape[1]
    if per_class < 2:
        return float("nan")
    total: float = sum(torch.cdist(part, part).double().sum().item() for part in proxies.split(1024))
    return total / (len(proxies) * per_class * (per_class - 1))


def _largest_force(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> float:
    points = [group.points.detach().requires_grad_() for group in (samples, proxies)]
    with torch.enable_grad():
        energy = tiled_energy(Charges(points[0], samples.labels), Charges(points[1], proxies.labels), field, weights)
    gradients = torch.autograd.grad(energy, points)
    return max((gradient.norm(dim=1).max().item() for gradient in gradients if len(gradient)), default=0.0)
