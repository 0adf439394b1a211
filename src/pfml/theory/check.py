"""Proposition 1 and Corollary 1 (supplement, Secs. 1 and 2) as a check that runs, on random points.

One class, so attraction only; PFML is Eq. 1, CPML is psi_att = max(r, delta)^2.

    Prop. 1   PFML has a minimum within delta of every datum, CPML within delta of at most one.
    Cor. 1    Proxies at rest are within delta of distinct data under PFML (W2 <= delta), not under CPML.

Both laws are homogeneous in r, so the unit of length is free: here delta = 1, and every length is in units of delta.

What the proofs need and do not say. Away from the data, the Laplacian of the PFML field in D dimensions is

    sum_j  psi'' + (D - 1) psi' / r  =  alpha (D - alpha - 2) sum_j r_j^-(alpha + 2).

For D < alpha + 2 it is negative, so the field has no minimum away from the data, and every proxy ends within delta of
one. For D > alpha + 2 it is positive, and minima away from all data are possible. Corollary 1 is then about proxies
that happen to start in the basin of a datum, and about no others. docs/THEORY.md lists the assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from pfml.energy import class_potential
from pfml.evaluation.alignment import matched_distances
from pfml.field import ContrastiveLaw, DecayLaw, PowerLaw, attraction

__all__ = [
    "LAWS",
    "Outcome",
    "TheoryConfig",
    "ball_minimizers",
    "descent",
    "field_and_gradient",
    "has_radial_minimum",
    "in_their_span",
    "largest_delta",
    "proxies_at_rest",
    "theory_outcomes",
    "theory_table",
]

#: The two laws that are compared, as functions of alpha; delta is the unit of length.
LAWS: dict[str, Callable[[float], DecayLaw]] = {
    "PFML": lambda alpha: PowerLaw(delta=1.0, alpha=alpha),
    "CPML": lambda alpha: ContrastiveLaw(delta=1.0),
}

#: How far beyond delta a proxy may be, relative to delta, and still count as within: it oscillates around the sphere.
SLACK = 1e-3
#: A proxy away from all data is at rest if the pulls on it cancel to this fraction of their sum.
BALANCE = 1e-3
#: delta relative to the bound below which the proof of Prop. 1 holds.
MARGIN = 0.9


@dataclass(frozen=True, kw_only=True)
class TheoryConfig:
    """What is checked: `trials` random point sets in each of the dimensions `dims`.

    Attributes:
        dims: Dimensions D, each >= 2: in one dimension a proxy cannot pass a datum.
        num_points: Data of the class, n.
        num_proxies: Proxies of the class, m; the corollary assumes m << n, and is false for m = 1.
        alpha: Rate of decay of the PFML field.
        trials: Point sets per dimension.
        seed: Of all random numbers; both laws get the same points and proxies.
    """

    dims: tuple[int, ...] = (2, 3, 4, 8, 32, 128, 512)
    num_points: int = 64
    num_proxies: int = 4
    alpha: float = 3.0
    trials: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.dims or min(self.dims) < 2:
            raise ValueError(f"dims must be integers >= 2, got {self.dims}")
        if not 2 <= self.num_proxies <= self.num_points:
            raise ValueError(
                f"num_proxies must lie in [2, num_points], got {self.num_proxies} proxies and {self.num_points} points"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be a positive number, got {self.alpha}")
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")


@dataclass(frozen=True)
class Outcome:
    """What one law did in one trial; lengths are in units of delta.

    Attributes:
        dims: D.
        alpha: Rate of decay of the PFML field.
        law: A key of `LAWS`.
        trial: Number of the point set.
        num_points: n.
        num_proxies: m.
        minima: Prop. 1: data that have a minimum of the field within delta.
        within: Cor. 1: proxies that end within delta of a datum.
        unsettled: Proxies that end neither there nor in balance; the descent was too short if there are any.
        farthest: Largest distance of a proxy to its nearest datum.
        one_to_one: Whether the nearest data of the proxies are distinct, as the proof of Cor. 1 assumes.
        paper_w2: The paper's W2: the mean distance under the best matching of the proxies to distinct data.
        true_w2: The Wasserstein-2 distance: the root mean square distance under its own best matching.
    """

    dims: int
    alpha: float
    law: str
    trial: int
    num_points: int
    num_proxies: int
    minima: int
    within: int
    unsettled: int
    farthest: float
    one_to_one: bool
    paper_w2: float
    true_w2: float


def largest_delta(points: Tensor, *, alpha: float) -> Tensor:
    """The bound on delta, (...), below which the proof of Prop. 1 goes through for `points`, (..., n, D).

    The smaller of two bounds. The first is the proposition's, d_min / (2 (1 + 1/n)). The second is the proof's
    delta < (alpha / gamma_i)^(1 / (alpha + 1)), where gamma_i is the radial pull of all other data at the minimizer in
    the ball around z_i. The minimizer depends on delta, so gamma_i is replaced by what it cannot exceed anywhere in a
    ball of the first bound: gamma_i <= sum_j alpha (d_ij - first)^-(alpha + 1). Then no direction is special, so the
    minimum is one in R^D and not only along a line.
    """
    n = points.shape[-2]
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # (..., n, n)
    distances = distances.masked_fill(torch.eye(n, dtype=torch.bool, device=points.device), math.inf)
    first = distances.amin(dim=(-2, -1)) / (2 * (1 + 1 / n))
    others = (distances - first[..., None, None]).pow(-alpha - 1).sum(dim=-1)  # (..., n), gamma_i / alpha
    second = others.amax(dim=-1).pow(-1 / (alpha + 1))
    return torch.minimum(first, second)


def field_and_gradient(locations: Tensor, points: Tensor, law: DecayLaw) -> tuple[Tensor, Tensor]:
    """Psi_att, (T, k), and its gradient, (T, k, D), at `locations`, each in the field of its own trial's `points`.

    Args:
        locations: Where to measure, (T, k, D).
        points: The data of each trial, (T, n, D).
        law: Their decay law.
    """
    labels = points.new_zeros(points.shape[1], dtype=torch.int64)

    def potential(where: Tensor, charges: Tensor) -> Tensor:
        return class_potential(where, 0, charges, labels, law=law)

    moving = locations.detach().requires_grad_()
    with torch.enable_grad():
        potentials = torch.vmap(potential)(moving, points)
    (gradient,) = torch.autograd.grad(potentials.sum(), moving)
    return potentials.detach(), gradient


def descent(
    start: Tensor, points: Tensor, law: DecayLaw, *, longest: Tensor | float, steps: int, balls: Tensor | None = None
) -> Iterator[Tensor]:
    """The positions, (T, k, D), after each of `steps` steps down the field of `points`.

    The force grows by orders of magnitude toward a datum and vanishes inside it, so its size is of no use as a step.
    A step has the direction of the force and a length of its own: halved after a step that would lead up, which is not
    taken, and raised by half after one that leads down. So nothing jumps over a barrier higher than where it is.

    Args:
        start: Where to begin, (T, k, D).
        points: The data, (T, n, D).
        law: Their decay law.
        longest: Length of the first step, which no step exceeds; a number or (T, 1, 1).
        steps: How many.
        balls: Centers, (T, k, D), of the balls of radius delta that the positions must not leave, if any.
    """
    where = start
    longest = torch.as_tensor(longest, dtype=start.dtype).expand(len(start), 1, 1)
    length = longest.expand(*start.shape[:2], 1)
    height, gradient = field_and_gradient(where, points, law)
    for _ in range(steps):
        ahead = where - length * torch.nn.functional.normalize(gradient, dim=-1, eps=1e-300)
        if balls is not None:
            # Just inside: a datum's own pull acts on its sphere, and the proof asks about the others' alone.
            ahead = balls + _shortened(ahead - balls, law.contact * (1 - 1e-9))
        height_ahead, gradient_ahead = field_and_gradient(ahead, points, law)
        lower = height_ahead < height
        height = torch.where(lower, height_ahead, height)
        where = torch.where(lower[..., None], ahead, where)
        gradient = torch.where(lower[..., None], gradient_ahead, gradient)
        length = torch.where(lower[..., None], (1.5 * length).minimum(longest), 0.5 * length)
        yield where


def _shortened(vectors: Tensor, longest: float) -> Tensor:
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortened: Tensor = vectors * (longest / lengths).clamp_max(1)
    return shortened


def end_of_descent(positions: Iterator[Tensor]) -> Tensor:
    """The last of the positions that `descent` yields."""
    *_, last = positions
    return last


def ball_minimizers(points: Tensor, law: DecayLaw) -> Tensor:
    """z*, (T, n, D): where the field of all `points`, (T, n, D), is lowest in the closed delta-ball around each."""
    delta = law.contact
    return end_of_descent(descent(points, points, law, longest=delta, steps=60, balls=points))


def has_radial_minimum(points: Tensor, minimizers: Tensor, law: DecayLaw) -> Tensor:
    """Whether z* is a minimum of the field on the line through z_i and z*, bool (T, n), for each of `points`.

    The slope along the line must turn from negative to positive as it passes z*. On the sphere that is the proof's
    second case: just outside, the datum's own pull back must exceed the pull of all others. The line matters: on a
    line across the pull of the others, any convex field, CPML's too, has a minimum at every datum.
    """
    offsets = minimizers - points
    radius = torch.linalg.vector_norm(offsets, dim=-1, keepdim=True)  # (T, n, 1)
    any_direction = torch.zeros_like(offsets).index_fill_(-1, torch.tensor([0], device=points.device), 1.0)
    direction = torch.where(radius > 1e-9 * law.contact, offsets / radius, any_direction)
    step = 1e-3 * law.contact

    def slope(distance: Tensor) -> Tensor:
        gradient = field_and_gradient(points + distance * direction, points, law)[1]
        return (gradient * direction).sum(dim=-1)

    return (slope(radius - step) <= 0) & (slope(radius + step) > 0)


def proxies_at_rest(start: Tensor, points: Tensor, law: DecayLaw) -> Tensor:
    """Where proxies from `start`, (T, m, D), come to rest in the field of `points`; they do not act on each other."""
    spread = points.square().sum(dim=-1).mean(dim=1).sqrt()[:, None, None]  # (T, 1, 1)
    return end_of_descent(descent(start, points, law, longest=0.05 * spread, steps=200))


def in_their_span(points: Tensor) -> Tensor:
    """Coordinates of `points`, (T, k, D), in a basis of their own span: (T, k, min(D, k)), the same distances.

    All forces are combinations of differences of points, so nothing ever leaves the span, and D = 512 costs no more
    than D = k. Nothing is approximated.
    """
    coordinates: Tensor = torch.linalg.qr(points.mT).R.mT
    return coordinates


def theory_outcomes(config: TheoryConfig) -> Iterator[list[Outcome]]:
    """The outcomes of all trials, for one dimension and law after the other; deterministic in `config`."""
    for dims in config.dims:
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.trials, config.num_points + config.num_proxies, dims)
        sampled = torch.randn(shape, generator=generator, dtype=torch.float64)
        sampled = in_their_span(sampled)
        data, proxies = sampled[:, : config.num_points], sampled[:, config.num_points :]
        delta = MARGIN * largest_delta(data, alpha=config.alpha)[:, None, None]
        for name in LAWS:
            yield _outcomes(data / delta, proxies / delta, name, dims=dims, alpha=config.alpha)


def _outcomes(data: Tensor, start: Tensor, name: str, *, dims: int, alpha: float) -> list[Outcome]:
    law = LAWS[name](alpha)
    minima = has_radial_minimum(data, ball_minimizers(data, law), law).sum(dim=1)  # (T,)
    proxies = proxies_at_rest(start, data, law)
    distances = torch.cdist(proxies, data, compute_mode="donot_use_mm_for_euclid_dist")  # (T, m, n)
    nearest, owner = distances.min(dim=-1)  # (T, m)
    within = nearest <= law.contact * (1 + SLACK)
    pulls = attraction(law, shifted=False).slope(distances).sum(dim=-1)
    net_pull = torch.linalg.vector_norm(field_and_gradient(proxies, data, law)[1], dim=-1)
    unsettled = ~within & (net_pull > BALANCE * pulls)
    return [
        Outcome(
            dims=dims,
            alpha=alpha,
            law=name,
            trial=trial,
            num_points=data.shape[1],
            num_proxies=proxies.shape[1],
            minima=int(minima[trial]),
            within=int(within[trial].sum()),
            unsettled=int(unsettled[trial].sum()),
            farthest=nearest[trial].max().item(),
            one_to_one=len(set(owner[trial].tolist())) == proxies.shape[1],
            paper_w2=matched_distances(distances[trial], power=1).mean().item(),
            true_w2=matched_distances(distances[trial], power=2).square().mean().sqrt().item(),
        )
        for trial in range(len(data))
    ]


def theory_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per dimension and law, over all trials; lengths in units of delta."""
    groups: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.dims, outcome.law), []).append(outcome)
    if not groups:
        raise ValueError("outcomes must not be empty: there is nothing to show")
    table = Table(title="Proposition 1 and Corollary 1 on random points; lengths in units of delta")
    table.add_column("D", justify="right")
    table.add_column("law")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for (dims, law), group in groups.items():
        rivals = groups.get((dims, "CPML"), []) if law == "PFML" else []
        table.add_row(str(dims), law, *_cells(group, rivals), end_section=law == "CPML")
    first, unsettled = outcomes[0], sum(outcome.unsettled for outcome in outcomes)
    table.caption = (
        f"{first.num_points} data, {first.num_proxies} proxies, alpha = {first.alpha:g}; "
        "W2: mean (largest) over trials; the last three columns count trials"
        + (f"; {unsettled} proxies had not come to rest" if unsettled else "")
    )
    return table


_HEADINGS = (
    "data with a\nminimum",
    "proxies\nwithin delta",
    "farthest\nproxy",
    "W2,\npaper's",
    "W2,\ntrue",
    "one proxy\nper datum",
    "W2\n<= delta",
    "W2 lower\nthan CPML",
)


def _cells(group: Sequence[Outcome], rivals: Sequence[Outcome]) -> list[str]:
    paper_w2 = [o.paper_w2 for o in group]
    fewest, most = min(o.minima for o in group), max(o.minima for o in group)
    lower = sum(ours.paper_w2 < theirs.paper_w2 for ours, theirs in zip(group, rivals, strict=False))
    return [
        f"{fewest if fewest == most else f'{fewest} to {most}'} of {group[0].num_points}",
        f"{sum(o.within for o in group) / sum(o.num_proxies for o in group):.0%}",
        f"{max(o.farthest for o in group):.2f}",
        f"{sum(paper_w2) / len(group):.2f} ({max(paper_w2):.2f})",
        f"{sum(o.true_w2 for o in group) / len(group):.2f}",
        f"{sum(o.one_to_one for o in group)} of {len(group)}",
        f"{sum(w2 <= 1 + SLACK for w2 in paper_w2)} of {len(group)}",
        f"{lower} of {len(group)}" if rivals else "",
    ]
