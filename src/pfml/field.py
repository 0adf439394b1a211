"""The potential that one charge creates, as a function of the distance r to it.

A charge (an embedding or a proxy) attracts its own class and repels every other class:

    Eq. 1   psi_att(r) = -max(r, delta_att)^-alpha      flat, so without a force, for r <  delta_att
    Eq. 2   psi_rep(r) = +min(r, delta_rep)^-alpha      flat, so without a force, for r >= delta_rep

The paper has one delta for both; its last ablation separates them, and so do we.
Everything here is a pure function of r. Superposition (Eqs. 3 to 6) lives in `superposition` and `energy`.

A decay law is a frozen dataclass with four one-line methods. A new one is written in ten lines,
and every backend runs it:

    @dataclass(frozen=True)
    class Yukawa(DecayLaw):
        length: float = 0.5
        def attraction(self, r): return -torch.exp(-r / self.length)
        def attraction_slope(self, r): return torch.exp(-r / self.length) / self.length
        def repulsion(self, r): return torch.exp(-r / self.length)
        def repulsion_slope(self, r): return -torch.exp(-r / self.length) / self.length
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "ContrastiveLaw",
    "DecayLaw",
    "EquilibriumLaw",
    "Interaction",
    "LogarithmicLaw",
    "PowerLaw",
    "attraction",
    "check_law",
    "power_law",
    "repulsion",
]


class DecayLaw(ABC):
    """Two potentials and their slopes d psi / dr, for tensors of distances r >= core.

    Subclasses are frozen dataclasses, so that a law can be compared, hashed and stored with a run.
    The three radii tell the backends where nothing happens; leave the defaults if in doubt.
    """

    #: Attraction is flat for r < contact: such a pair feels no attraction.
    contact: float = 0.0
    #: Repulsion is flat for r >= reach: such a pair feels no repulsion.
    reach: float = math.inf
    #: Below this distance both potentials continue as straight lines (see `Interaction`).
    core: float = 0.0
    #: Whether attraction is negative everywhere, so that its strength is a positive, decaying share of a field.
    #: The normalizations "anchor" and "log" need that.
    decays: bool = True

    @abstractmethod
    def attraction(self, r: Tensor) -> Tensor:
        """psi_att(r), the potential felt by a charge of the same class."""

    @abstractmethod
    def attraction_slope(self, r: Tensor) -> Tensor:
        """d psi_att / dr."""

    @abstractmethod
    def repulsion(self, r: Tensor) -> Tensor:
        """psi_rep(r), the potential felt by a charge of another class."""

    @abstractmethod
    def repulsion_slope(self, r: Tensor) -> Tensor:
        """d psi_rep / dr."""


def _power(r: Tensor, exponent: float) -> Tensor:
    """r ** exponent for r > 0; six times faster on a CPU than torch.pow, within 1e-6 of it in float32."""
    return torch.exp(exponent * torch.log(r))


#: The core ends at delta / CORE_FRACTION: from there on Eqs. 1 and 2 hold exactly.
CORE_FRACTION = 20
#: ... or where a force has grown by this factor since delta, if that is farther out (alpha > 18): float32 ends at 3e38.
LARGEST_GROWTH = 1e27


def _require_positive(name: str, value: object, hint: str = "") -> None:
    """Refuse what a stored run could not hold, such as a tensor, and numbers that are no radius or rate."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int or a float, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}{hint}")


@dataclass(frozen=True, kw_only=True)
class _TwoRadii(DecayLaw):
    """A law whose attraction stops inside delta and whose repulsion stops outside delta_rep (default: delta)."""

    delta: float = 0.2
    delta_rep: float | None = None

    def __post_init__(self) -> None:
        _require_positive("delta", self.delta)
        if self.delta_rep is not None:
            _require_positive("delta_rep", self.delta_rep)

    @property
    def contact(self) -> float:  # type: ignore[override]
        return self.delta

    @property
    def reach(self) -> float:  # type: ignore[override]
        return self.delta if self.delta_rep is None else self.delta_rep

    @property
    def core(self) -> float:  # type: ignore[override]
        return min(self.contact, self.reach) / CORE_FRACTION


@dataclass(frozen=True, kw_only=True)
class PowerLaw(_TwoRadii):
    """Eqs. 1 and 2: psi_att = -max(r, delta)^-alpha, psi_rep = min(r, delta_rep)^-alpha.

    At r = delta the equations' own case distinction decides: attraction acts there, repulsion does not.

    Args:
        delta: Radius inside which attraction stops (delta_att).
        delta_rep: Radius outside which repulsion stops; delta if None, as in the paper.
        alpha: Rate of decay, > 0. For alpha = 0 see `LogarithmicLaw` and `power_law`.

    Example:
        >>> law = PowerLaw(delta=0.5, alpha=1.0)
        >>> law.attraction(torch.tensor([0.25, 1.0]))  # flat inside delta
        tensor([-2., -1.])
        >>> law.repulsion(torch.tensor([0.25, 1.0]))  # flat outside
        tensor([4., 2.])
    """

    alpha: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("alpha", self.alpha, "; for alpha = 0 use LogarithmicLaw")

    @property
    def core(self) -> float:  # type: ignore[override]
        """Radius below which both potentials continue as straight lines; larger for steep laws."""
        return min(self.contact, self.reach) / min(CORE_FRACTION, LARGEST_GROWTH ** (1 / (self.alpha + 2)))

    def attraction(self, r: Tensor) -> Tensor:
        return -_power(torch.where(r < self.contact, self.contact, r), -self.alpha)

    def attraction_slope(self, r: Tensor) -> Tensor:
        return torch.where(r < self.contact, 0.0, self.alpha * _power(r, -self.alpha - 1))

    def repulsion(self, r: Tensor) -> Tensor:
        return _power(torch.where(r < self.reach, r, self.reach), -self.alpha)

    def repulsion_slope(self, r: Tensor) -> Tensor:
        return torch.where(r < self.reach, -self.alpha * _power(r, -self.alpha - 1), 0.0)


@dataclass(frozen=True, kw_only=True)
class LogarithmicLaw(_TwoRadii):
    """The limit alpha -> 0 of Eqs. 1 and 2: psi_att = log max(r, delta), psi_rep = -log min(r, delta_rep).

    Taken literally, alpha = 0 makes both potentials constant and every force zero. (r^-alpha - 1) / alpha has the
    forces of Eq. 2 up to the factor alpha, and tends to -log r: a field that decays as slowly as 1 / r.
    """

    decays = False

    def attraction(self, r: Tensor) -> Tensor:
        return torch.where(r < self.contact, self.contact, r).log()

    def attraction_slope(self, r: Tensor) -> Tensor:
        return torch.where(r < self.contact, 0.0, 1 / r)

    def repulsion(self, r: Tensor) -> Tensor:
        return -torch.where(r < self.reach, r, self.reach).log()

    def repulsion_slope(self, r: Tensor) -> Tensor:
        return torch.where(r < self.reach, -1 / r, 0.0)


@dataclass(frozen=True, kw_only=True)
class ContrastiveLaw(_TwoRadii):
    """CPML (supplement, Sec. 1): psi_att = max(r, delta)^2, a force that grows with distance.

    The paper never defines CPML's repulsion. The default is the classical contrastive one,
    psi_rep = max(delta_rep - r, 0)^2; with `bounded=False` it is -min(r, delta_rep)^2, the mirror image of Eq. 2.
    """

    bounded: bool = True
    decays = False
    core = 0.0  # nothing is singular here

    def attraction(self, r: Tensor) -> Tensor:
        return torch.where(r < self.contact, self.contact, r).square()

    def attraction_slope(self, r: Tensor) -> Tensor:
        return torch.where(r < self.contact, 0.0, 2 * r)

    def repulsion(self, r: Tensor) -> Tensor:
        if self.bounded:
            return (self.reach - r).clamp_min(0).square()
        return -torch.where(r < self.reach, r, self.reach).square()

    def repulsion_slope(self, r: Tensor) -> Tensor:
        inside = 2 * (r - self.reach) if self.bounded else -2 * r
        return torch.where(r < self.reach, inside, 0.0)


@dataclass(frozen=True, kw_only=True)
class EquilibriumLaw(DecayLaw):
    """psi_att = -r^-alpha, psi_rep = r^-beta with beta > alpha: soft charges that rest at a distance, as atoms do.

    A pair that belongs together by a share s (see `pfml.superposition.Charges`) has the energy
    -s r^-alpha + (1 - s) r^-beta. Repulsion wins near, attraction wins far, and the pair is at rest at

        r* = (beta (1 - s) / (alpha s))^(1 / (beta - alpha))

    so that a share is a distance to rest at: `share_at` gives the share of a distance. Both forces decay, and the
    stiffness at rest is proportional to r*^-(alpha + 2): near pairs are held more firmly than far ones.

    Args:
        alpha: Rate of decay of attraction, > 0.
        beta: Rate of decay of repulsion, > alpha.
        core: Below this distance both potentials continue as straight lines.
    """

    alpha: float = 1.0
    beta: float = 2.0
    core: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.alpha < self.beta < math.inf:
            raise ValueError(f"alpha and beta must be numbers with 0 < alpha < beta, got {self.alpha} and {self.beta}")
        if not 0 < self.core < math.inf:
            raise ValueError(f"core must be a positive number, got {self.core}")

    def attraction(self, r: Tensor) -> Tensor:
        return -_power(r, -self.alpha)

    def attraction_slope(self, r: Tensor) -> Tensor:
        return self.alpha * _power(r, -self.alpha - 1)

    def repulsion(self, r: Tensor) -> Tensor:
        return _power(r, -self.beta)

    def repulsion_slope(self, r: Tensor) -> Tensor:
        return -self.beta * _power(r, -self.beta - 1)

    def share_at(self, r: Tensor) -> Tensor:
        """The share of a pair that rests at distance r: beta / (beta + alpha r^(beta - alpha)), 1 at r = 0."""
        return self.beta / (self.beta + self.alpha * r.pow(self.beta - self.alpha))


def power_law(*, delta: float = 0.2, alpha: float = 3.0, delta_rep: float | None = None) -> DecayLaw:
    """The paper's law for any alpha >= 0: `PowerLaw`, or its logarithmic limit (with a warning) at alpha = 0."""
    if alpha == 0:
        warnings.warn(
            "alpha=0 makes Eqs. 1 and 2 constant, without any force; their logarithmic limit is used instead",
            stacklevel=3,
        )
        return LogarithmicLaw(delta=delta, delta_rep=delta_rep)
    return PowerLaw(delta=delta, alpha=alpha, delta_rep=delta_rep)


@dataclass(frozen=True)
class Interaction:
    """Energy and slope of one pair at distance r, and the interval [start, stop) outside which both are zero.

    `kink` is the radius at which the slope may jump; below `flat_below` there is no slope.

    Below `core` the potential continues as the straight line that touches it there. Its energy at r = 0 is
    finite, and its force keeps the size |slope(core)|, so two charges that almost coincide still separate. Two
    charges that coincide exactly have no direction to separate in, and feel none. Without a core (0) the potential is
    the law's own down to r = 0, where it may be infinite.
    """

    pair_potential: Callable[[Tensor], Tensor]
    pair_slope: Callable[[Tensor], Tensor]
    core: float
    kink: float
    flat_below: float
    offset: float = 0.0
    start: float = 0.0
    stop: float = math.inf

    def potential(self, r: Tensor) -> Tensor:
        """The energy of a pair at each distance r, inside [start, stop)."""
        return self.potential_and_slope(r)[0]

    def slope(self, r: Tensor) -> Tensor:
        """d potential / dr at each distance r: the size of the force, positive where the pair attracts."""
        return self.pair_slope(r.clamp_min(self.core))

    def potential_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once."""
        if self.core == 0:
            return self.pair_potential(r) - self.offset, self.pair_slope(r)
        outside_core = r.clamp_min(self.core)
        slope = self.pair_slope(outside_core)
        straight_line = slope * (r - outside_core)  # zero outside the core
        return self.pair_potential(outside_core) + straight_line - self.offset, slope


def _at(potential: Callable[[Tensor], Tensor], r: float) -> float:
    return potential(torch.tensor(r, dtype=torch.float64, device="cpu")).item()


def attraction(law: DecayLaw, *, shifted: bool, literal: bool = False) -> Interaction:
    """Attraction under `law`; shifted to be zero on contact (same forces, no constants) or as Eq. 1 has it.

    `literal`: without the law's core, so that Eq. 1 holds at every distance.
    """
    core = 0.0 if literal else law.core
    pair = Interaction(law.attraction, law.attraction_slope, core, kink=law.contact, flat_below=law.contact)
    return replace(pair, offset=_at(pair.potential, 0.0), start=law.contact) if shifted else pair


def repulsion(law: DecayLaw, *, shifted: bool, literal: bool = False) -> Interaction:
    """Repulsion under `law`; shifted to be zero out of reach (same forces, no constants) or as Eq. 2 has it.

    `literal`: without the law's core, so that Eq. 2 holds at every distance.
    """
    core = 0.0 if literal else law.core
    pair = Interaction(law.repulsion, law.repulsion_slope, core, kink=law.reach, flat_below=0.0)
    return replace(pair, offset=_at(law.repulsion, law.reach), stop=law.reach) if shifted else pair


def check_law(law: DecayLaw) -> None:
    """Raise unless `law` keeps what the backends trust: its slopes, its radii and `decays` fit its potentials.

    `pfml.superposition.Field` runs this once for each new law: a wrong sign in a user's law would train silently.
    """
    name = type(law).__name__
    if not isinstance(law, DecayLaw):
        raise TypeError(f"a decay law must be a DecayLaw, got {name}")
    if not is_dataclass(law) or type(law).__hash__ is None:
        raise TypeError(f"{name} must be declared with @dataclass(frozen=True), so that it can be compared and stored")
    r = torch.linspace(max(law.core, 1e-3), 2.0, 97, dtype=torch.float64, device="cpu")  # the diameter of the sphere
    step = 1e-6
    kinks = torch.tensor([law.contact, law.reach], dtype=torch.float64, device="cpu")
    r = r[((r[:, None] - kinks).abs() > 2 * step).all(dim=1) & (r > law.core + 2 * step)]
    for kind, flat in (("attraction", r < law.contact), ("repulsion", r >= law.reach)):
        potential, slope = getattr(law, kind), getattr(law, kind + "_slope")
        expected = (potential(r + step) - potential(r - step)) / (2 * step)
        wrong = (slope(r) - expected).abs() > 1e-4 * (1 + expected.abs())
        if wrong.any():
            k = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name}.{kind}_slope must be the derivative of {kind}: "
                f"at r = {r[k]:.4g} it should be {expected[k]:.4g}, got {slope(r)[k]:.4g}"
            )
        if (slope(r)[flat] != 0).any():
            where = f"r < contact = {law.contact:g}" if kind == "attraction" else f"r >= reach = {law.reach:g}"
            raise ValueError(f"{name}.{kind} must be flat for {where}, got a slope there")
    if not math.isfinite(repulsion(law, shifted=True).offset):
        raise ValueError(f"{name}.repulsion must be finite at reach = {law.reach:g}: give the law a smaller reach")
    if law.decays and not (law.attraction(r) < 0).all():
        raise ValueError(f"{name}.attraction must be negative everywhere, or the law must say decays = False")
