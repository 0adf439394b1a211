"""From the potentials of pairs to the energy of a set of charges (Eqs. 3 to 6), and its normalized forms.

Every charge a (an "anchor") sums two things over the other charges:

    own[a]   = sum over charges of its class      of own_pair(r)
    other[a] = sum over charges of other classes  of other_pair(r)

and the energy is a sum over anchors of a function of these two numbers. Superposition is all that the backends do;
what follows from it is written here, once:

    none     own + other                                   Eq. 6 without its constants (the gradients are Eq. 6's)
    log      log(1 + R / c) - log A                        A = strength of attraction, R = shifted repulsion
    anchor   log(A + B) - log A                            B = strength of attraction by other classes

with strength = -psi_att, c = -psi_att(0) = delta^-alpha. "log" and "anchor" are not in the paper. Their forces are
relative: a charge counts by its share of the field at the anchor, so no pair dominates by being close.

Of very many proxies a subsample may estimate all (`Anchors`). With a[i], how many anchors the charge i counts for (0 if
it is none), s[i] = a[i] d energy / d sum, and w(j on i), what the charge j counts at the anchor i (`SourceWeights`),

    sum[i]                      = sum over all charges j but i of  w(j on i) pair(r_ij)
    d energy / d pair(r_ij)     = s[i] w(j on i) + s[j] w(i on j)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.field import DecayLaw, Interaction, attraction, check_law, repulsion
from pfml.sphere import unit

__all__ = [
    "NORMALIZATIONS",
    "Anchors",
    "Charges",
    "Field",
    "Normalization",
    "PairWeights",
    "SourceWeights",
    "anchor_counts",
    "field_of",
    "source_weights",
]


class Anchors(NamedTuple):
    """The charges of a group that are anchors, and how many anchors each one counts for.

    Rows are distinct but for those of weight 0, which are no anchors and may repeat any row: so that a subsample of any
    size fits into tensors of one size.
    """

    rows: Tensor  # (k,), int64
    weights: Tensor  # (k,), float64, >= 0


class Charges(NamedTuple):
    """Points of one kind (samples, or proxies) with their classes.

    If `on_sphere`, the charges sit at points / |points|, and gradients are those of the points as given. Without
    `anchors` every charge is one, as the field's normalization has it; only proxies ever have some.

    Soft charges: with `shares`, two of these charges belong together by a share s in [0, 1] in place of their labels.
    The pair adds s own_pair(r) to the first sum and (1 - s) other_pair(r) to the second; labels are the case
    s in {0, 1}. Only samples ever have shares, and pairs with proxies go by labels. No gradient reaches the shares.
    """

    points: Tensor  # (n, D), float32 or float64
    labels: Tensor  # (n,), int64
    on_sphere: bool = False
    anchors: Anchors | None = None
    shares: Tensor | None = None  # (n, n), symmetric; the diagonal is not used

    def positions(self) -> Tensor:
        """Where the charges sit, (n, D)."""
        return unit(self.points) if self.on_sphere else self.points


@dataclass(frozen=True)
class PairWeights:
    """How much each kind of pair counts; Eq. 6 has 1 everywhere, 0 switches a kind off."""

    sample_sample: float = 1.0
    sample_proxy: float = 1.0
    proxy_attraction: float = 1.0
    proxy_repulsion: float = 1.0

    def of_samples(self) -> tuple[float, float]:
        """(own, other) weight of a pair of samples."""
        return self.sample_sample, self.sample_sample

    def of_mixed(self) -> tuple[float, float]:
        """(own, other) weight of a sample and a proxy."""
        return self.sample_proxy, self.sample_proxy

    def of_proxies(self) -> tuple[float, float]:
        """(own, other) weight of a pair of proxies."""
        return self.proxy_attraction, self.proxy_repulsion


class Normalization(NamedTuple):
    """One row of `NORMALIZATIONS`."""

    own_pair: Callable[..., Interaction]
    other_pair: Callable[..., Interaction]
    #: (own, other, depth) -> energy of each anchor
    energy: Callable[[Tensor, Tensor, float], Tensor]
    #: (own, other, depth) -> its derivatives with respect to own and other
    slopes: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    proxies_are_anchors: bool
    #: energy = own + other: forces are known before the sums are, so one pass gives both
    linear: bool


def _sum_energy(own: Tensor, other: Tensor, depth: float) -> Tensor:
    return own + other


def _sum_slopes(own: Tensor, other: Tensor, depth: float) -> tuple[Tensor, Tensor]:
    return torch.ones_like(own), torch.ones_like(other)


def _log_energy(own: Tensor, other: Tensor, depth: float) -> Tensor:
    strength = torch.where(own < 0, -own, 1.0)  # an anchor without positives is not attracted
    return torch.log1p(other / depth) - strength.log()


def _log_slopes(own: Tensor, other: Tensor, depth: float) -> tuple[Tensor, Tensor]:
    return torch.where(own < 0, -1 / own, 0.0), 1 / (depth + other)


def _share_energy(own: Tensor, other: Tensor, depth: float) -> Tensor:
    has_positive = own < 0  # without positives there is no share to raise
    strength = torch.where(has_positive, -own, 1.0)
    total = torch.where(has_positive, -(own + other), 1.0)
    return total.log() - strength.log()


def _share_slopes(own: Tensor, other: Tensor, depth: float) -> tuple[Tensor, Tensor]:
    has_positive = own < 0
    inverse_total = torch.where(has_positive, 1 / (own + other), 0.0)
    return torch.where(has_positive, inverse_total - 1 / own, 0.0), inverse_total


NORMALIZATIONS: dict[str, Normalization] = {
    "none": Normalization(
        own_pair=partial(attraction, shifted=True),
        other_pair=partial(repulsion, shifted=True),
        energy=_sum_energy,
        slopes=_sum_slopes,
        proxies_are_anchors=True,
        linear=True,
    ),
    "log": Normalization(
        own_pair=partial(attraction, shifted=False),
        other_pair=partial(repulsion, shifted=True),
        energy=_log_energy,
        slopes=_log_slopes,
        proxies_are_anchors=True,
        linear=False,
    ),
    "anchor": Normalization(
        own_pair=partial(attraction, shifted=False),
        other_pair=partial(attraction, shifted=False),
        energy=_share_energy,
        slopes=_share_slopes,
        proxies_are_anchors=False,
        linear=False,
    ),
}


@dataclass(frozen=True)
class Field:
    """A decay law and a normalization of its superposed potentials: all that a backend needs to know.

    Attributes:
        literal: Whether the law's potentials hold at every distance, without its core: for energies in float64, since
            they may be beyond float32, and infinite at r = 0.
        own_pair: What two charges of one class do to each other.
        other_pair: What two charges of different classes do to each other.
        depth: -psi_att(0), how deep the well of one charge is (delta^-alpha).
        handle: The number under which custom operators find this field, see `field_of`.
    """

    law: DecayLaw
    normalization: str = "none"
    literal: bool = False

    own_pair: Interaction = field(init=False, repr=False, compare=False)
    other_pair: Interaction = field(init=False, repr=False, compare=False)
    depth: float = field(init=False, repr=False, compare=False)
    handle: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization must be one of {sorted(NORMALIZATIONS)}, got {self.normalization!r}")
        if self.normalization != "none" and not self.law.decays:
            raise ValueError(
                f"normalization={self.normalization!r} needs an attraction that is negative everywhere and decays; "
                f"{type(self.law).__name__} has none"
            )
        handle = _handle(self.law, self.normalization, self.literal)
        if handle not in _fields:
            check_law(self.law)
        derived = {
            "own_pair": self.rule.own_pair(self.law, literal=self.literal),
            "other_pair": self.rule.other_pair(self.law, literal=self.literal),
            "depth": -attraction(self.law, shifted=True).offset,
            "handle": handle,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the way to fill a frozen dataclass
        if not self.literal:
            self._check_float32_range()
        _fields.setdefault(handle, self)

    def __reduce__(self) -> tuple[type[Field], tuple[DecayLaw, str, bool]]:
        return Field, (self.law, self.normalization, self.literal)  # so that a copy registers itself where it is made

    @property
    def rule(self) -> Normalization:
        """This field's row of `NORMALIZATIONS`."""
        return NORMALIZATIONS[self.normalization]

    def anchor_energies(self, own: Tensor, other: Tensor) -> Tensor:
        """The energy of each anchor, from its two sums."""
        return self.rule.energy(own, other, self.depth)

    def anchor_slopes(self, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """d energy / d own and d energy / d other of each anchor."""
        return self.rule.slopes(own, other, self.depth)

    def _check_float32_range(self) -> None:
        """Refuse laws that leave the range of float32 between r = 0 and r = 2, the diameter of the sphere."""
        r = torch.tensor([0.0, self.law.core, 2.0], dtype=torch.float64, device="cpu")
        for pair in (self.own_pair, self.other_pair):
            largest = max(pair.potential(r).abs().max().item(), pair.slope(r).abs().max().item())
            if not largest < 1e30:
                raise ValueError(f"{self.law} reaches {largest:.3g} near r = 0, beyond float32: lower its decay rate")
        if self.normalization != "none" and not self.own_pair.potential(r).abs().min().item() > 1e-30:
            raise ValueError(
                f"{self.law} vanishes in float32 at r = 2, so it cannot be normalized: lower its decay rate"
            )


class SourceWeights(NamedTuple):
    """How much a source counts at an anchor, by the kinds of both: `proxies_on_samples` is of a proxy at a sample."""

    samples_on_samples: float
    proxies_on_samples: float
    samples_on_proxies: float
    proxies_on_proxies: float


def source_weights(field: Field, weights: PairWeights, sampled: bool) -> tuple[SourceWeights, SourceWeights]:
    """(own, other) weights of sources; `sampled`: only a subsample of the proxies are anchors, and estimate the others.

    Eq. 6 counts a sample and a proxy from both ends. Where proxies are sampled, both counts are given to the sample,
    which is always an anchor: then only pairs of proxies are estimated. "log" is no sum over pairs, so that there the
    energy of a proxy is estimated as a whole.
    """
    own, other = (
        _source_weights(field.rule, sampled, *kinds)
        for kinds in zip(weights.of_samples(), weights.of_mixed(), weights.of_proxies(), strict=True)
    )
    return own, other


def _source_weights(
    rule: Normalization, sampled: bool, of_samples: float, of_mixed: float, of_proxies: float
) -> SourceWeights:
    if not rule.proxies_are_anchors:
        return SourceWeights(of_samples, of_mixed, 0.0, 0.0)
    if sampled and rule.linear:
        return SourceWeights(of_samples, 2 * of_mixed, 0.0, of_proxies)
    return SourceWeights(of_samples, of_mixed, of_mixed, of_proxies)


def anchor_counts(samples: Charges, proxies: Charges, field: Field) -> Tensor:
    """How many anchors each charge counts for, (n,) in float64, samples first; 0 if it is none."""
    counts = samples.points.new_ones(len(samples.points) + len(proxies.points), dtype=torch.float64)
    of_proxies = counts[len(samples.points) :]
    if not field.rule.proxies_are_anchors:
        of_proxies.zero_()
    elif proxies.anchors is not None:
        of_proxies.zero_().index_add_(0, proxies.anchors.rows, proxies.anchors.weights.double())
    return counts


# Torch passes numbers and tensors to a custom operator, but no Python objects: a field travels as a handle. It is a
# digest of the field, so that a graph which was exported by another process cannot meet another field here.
_fields: dict[int, Field] = {}


def _handle(law: DecayLaw, normalization: str, literal: bool) -> int:
    text = f"{type(law).__module__}.{law!r} {normalization}" + (" literal" if literal else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def field_of(handle: int) -> Field:
    """The field with that handle."""
    if handle not in _fields:
        raise RuntimeError("this graph was made with a field that this process does not know: construct its loss first")
    return _fields[handle]
