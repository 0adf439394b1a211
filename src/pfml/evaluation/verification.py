"""Verification: whether two images show the same class, by one threshold on their distance.

Every pair of images is a trial. A pair of one class is genuine, a pair of two classes an impostor. A threshold accepts
the pairs that are closer, and makes two kinds of error:

    FMR, the false match rate: the share of impostors that are accepted;
    FNMR, the false non-match rate: the share of genuine pairs that are rejected.

The receiver operating characteristic (ROC) is the one as a function of the other. The equal error rate (EER) is where
both are equal. (NIST's face recognition tests and ISO/IEC 19795 use these words; FMR is also called FAR, and FNMR FRR.)

Errors change at the similarities of genuine pairs only, so these are sorted, and impostors are counted between them,
tile by tile: no list of all pairs is held, and the rates are exact. Beyond `MOST_THRESHOLDS` genuine pairs, every n-th
of them is a threshold.

Pairs are not independent: an image is in many. Intervals therefore come from leaving out whole classes (the jackknife
over `GROUPS` groups of classes).

Pairs grow with the square of the images. `most_images` compares a random sample of so many: some of the classes, and
some of the images of each. All genuine pairs have one chance to be in it and all impostors another, so that the rates
estimate those of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation.nearest_neighbors import directions
from pfml.precision import full_precision

__all__ = ["Estimate", "Verification", "verification_metrics"]

#: False match rates at which the false non-match rate is reported.
RATES = (1e-2, 1e-3, 1e-4)
#: Thresholds at most; with more genuine pairs, the false non-match rate is known to 1 / MOST_THRESHOLDS.
MOST_THRESHOLDS = 2**16
#: Groups of classes for the intervals.
GROUPS = 20
#: Points of the curve at most.
CURVE_POINTS = 400
#: Images of an average class that a sample keeps; it has fewer classes rather than fewer images of each.
SAMPLED_PER_CLASS = 20
#: Pairs that are counted at once.
PAIRS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class Estimate:
    """A rate and its 95 % interval; the interval is None where there are fewer than three classes to leave out."""

    value: float
    interval: tuple[float, float] | None

    def as_dict(self) -> dict[str, float | list[float] | None]:
        """For JSON."""
        return {"value": self.value, "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True, eq=False)
class Verification:
    """How well pairs of one class are told from pairs of two.

    Args:
        eer: The equal error rate.
        fnmr_at: False match rate -> false non-match rate. Rates that so few impostors cannot show are left out.
        threshold_at: False match rate -> the distance between unit vectors up to which pairs are accepted.
        auroc: The probability that a genuine pair is closer than an impostor.
        genuine: Number of pairs of one class.
        impostors: Number of pairs of two classes.
        images: Number of images that were compared, those of the gallery included.
        curve: (P, 2) float64: rising false match rates and their false non-match rates.
        curve_interval: (P, 2) float64: the 95 % interval of each false non-match rate of the curve, low and high; None
            where there are fewer than three classes to leave out.
    """

    eer: Estimate
    fnmr_at: dict[float, Estimate]
    threshold_at: dict[float, float]
    auroc: float
    genuine: int
    impostors: int
    images: int
    curve: Tensor
    curve_interval: Tensor | None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "eer": self.eer.as_dict(),
            "fnmr_at": {f"{rate:g}": estimate.as_dict() for rate, estimate in self.fnmr_at.items()},
            "threshold_at": {f"{rate:g}": threshold for rate, threshold in self.threshold_at.items()},
            "auroc": self.auroc,
            "genuine": self.genuine,
            "impostors": self.impostors,
            "images": self.images,
            "curve": self.curve.tolist(),
            "curve_interval": None if self.curve_interval is None else self.curve_interval.tolist(),
        }


def verification_metrics(
    embeddings: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    rates: Sequence[float] = RATES,
    groups: int = GROUPS,
    most_images: int | None = None,
    seed: int = 0,
) -> Verification:
    """The errors of telling same from different over all pairs of images, or over all pairs with a gallery.

    Args:
        embeddings: (N, D), normalized here.
        labels: (N,) int64.
        gallery: (G, D) to compare with; None to compare the embeddings with each other, each pair once.
        gallery_labels: (G,) int64.
        rates: False match rates at which to report the false non-match rate.
        groups: Groups of classes for the intervals.
        most_images: How many images to compare at most, a random sample of them; None for all.
        seed: Of the division into groups, and of the sample.

    Raises:
        ValueError: If no two images are of one class, or all are.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> verification_metrics(points, torch.tensor([0, 0, 1, 1]), rates=()).eer.value
        0.0
    """
    for rate in rates:
        if not 0 < rate < 1:
            raise ValueError(f"rates must lie between 0 and 1, got {rate}")
    queries = directions(embeddings, "embeddings")
    items = None if gallery is None else directions(gallery, "gallery")
    labels = labels.to(queries.device)
    gallery_labels = None if gallery_labels is None else gallery_labels.to(queries.device)
    known = labels if gallery_labels is None else torch.cat([labels, gallery_labels])
    if most_images is not None and len(known) > most_images:
        kept = _sample(known, most_images, seed)
        of_queries, of_items = kept.split([len(labels), len(known) - len(labels)])
        queries, labels, known = queries[of_queries], labels[of_queries], known[kept]
        if items is not None and gallery_labels is not None:
            items, gallery_labels = items[of_items], gallery_labels[of_items]
    classes = known.unique()
    groups = min(groups, len(classes))
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    group_of = shuffled % max(groups, 1)
    pairs = _Pairs(queries, labels, items, gallery_labels, group_of[torch.searchsorted(classes, known)], groups)
    with full_precision(queries.device):
        similarities, group = pairs.genuine()
        if not len(similarities):
            raise ValueError("verification needs two images of one class to compare, and there are none")
        similarities, order = similarities.sort()
        every = -(-len(similarities) // MOST_THRESHOLDS)
        thresholds = similarities[::every].unique()
        accepted = pairs.impostors(thresholds)  # (groups, thresholds): with an image of the group
    rejected = torch.searchsorted(similarities, thresholds)  # genuine pairs below
    genuine_group = group[order]
    total = accepted.pop("all")
    counts = _Counts(len(similarities) - rejected, len(similarities), total[0], int(total[1]))
    if not counts.impostors:
        raise ValueError("verification needs images of two classes to compare, and there is one class")
    without = []
    for each in range(groups if groups > 2 else 0):
        theirs = genuine_group == each
        below = torch.searchsorted(similarities[theirs], thresholds)
        left = _Counts(
            counts.genuine_accepted - (int(theirs.sum()) - below),
            counts.genuine - int(theirs.sum()),
            counts.impostors_accepted - accepted[each][0],
            counts.impostors - int(accepted[each][1]),
        )
        if left.genuine and left.impostors:
            without.append(left)

    def estimate(rate_of: Callable[[_Counts], float]) -> Estimate:
        return _estimate(rate_of, counts, without)

    shown = [rate for rate in rates if counts.impostors * rate >= 1]
    positions = {rate: counts.first_with(rate) for rate in shown}
    curve = counts.curve()
    return Verification(
        eer=estimate(_equal_error_rate),
        fnmr_at={rate: estimate(lambda some, rate=rate: some.fnmr_at(rate)) for rate in shown},  # type: ignore[misc]
        threshold_at={
            rate: math.sqrt(max(2 - 2 * float(thresholds[position]), 0.0))
            for rate, position in positions.items()
            if position < len(thresholds)
        },
        auroc=counts.auroc(),
        genuine=counts.genuine,
        impostors=counts.impostors,
        images=len(known),
        curve=curve,
        curve_interval=_curve_interval(curve, without),
    )


def _sample(labels: Tensor, most: int, seed: int) -> Tensor:
    """(N,) bool: about `most` images, by as many images of each class as a class needs and as many classes as fit."""
    random = torch.Generator().manual_seed(seed)
    classes, position, counts = labels.unique(return_inverse=True, return_counts=True)
    share = most / len(labels)
    of_class = min(max(share, SAMPLED_PER_CLASS * len(classes) / len(labels)), 1.0)
    # images take turns within their class
    turn = torch.rand(len(labels), generator=random).to(labels.device).argsort()
    turn = turn[position[turn].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(position)
    rank[turn] = torch.arange(len(labels), device=labels.device) - first[position[turn]]
    taken = (of_class * counts).ceil().long()
    order = torch.randperm(len(classes), generator=random).to(labels.device)
    fits = taken[order].cumsum(0) <= most
    fits[:2] = True  # of one class alone, no pair is an impostor
    is_taken = torch.zeros(len(classes), dtype=torch.bool, device=labels.device)
    is_taken[order[fits]] = True
    return is_taken[position] & (rank < taken[position])


@dataclass(frozen=True, eq=False)
class _Counts:
    """Pairs that are accepted at each threshold, from the widest one to the narrowest."""

    genuine_accepted: Tensor  # (T,) int64
    genuine: int
    impostors_accepted: Tensor  # (T,) int64
    impostors: int

    @property
    def fmr(self) -> Tensor:
        return self.impostors_accepted.double() / self.impostors

    @property
    def fnmr(self) -> Tensor:
        return 1 - self.genuine_accepted.double() / self.genuine

    def first_with(self, rate: float) -> int:
        """The widest threshold whose false match rate is at most `rate`; T if there is none."""
        return int((self.fmr > rate).sum())  # it falls from threshold to threshold

    def fnmr_at(self, rate: float) -> float:
        """The lowest false non-match rate with a false match rate of at most `rate`."""
        position = self.first_with(rate)
        return float(self.fnmr[position]) if position < len(self.fnmr) else 1.0

    def fnmr_within(self, rates: Tensor) -> Tensor:
        """The lowest false non-match rate with a false match rate of at most each of `rates`."""
        fmr, fnmr = self._rising()
        return fnmr[torch.searchsorted(fmr, rates.to(fmr).contiguous(), right=True) - 1].cpu()

    def auroc(self) -> float:
        """The area under the curve, by trapezoids."""
        fmr, tmr = (self._with_ends(values) for values in (self.fmr, 1 - self.fnmr))
        return float(torch.trapezoid(tmr.flip(0), fmr.flip(0)))

    def curve(self) -> Tensor:
        """Points of the curve, evenly spaced in the logarithm of the false match rate."""
        fmr, fnmr = self._rising()
        wanted = torch.logspace(math.log10(1 / self.impostors), 0, CURVE_POINTS, dtype=torch.float64)
        last = torch.searchsorted(fmr, wanted.to(fmr), right=True) - 1  # the lowest FNMR within that FMR
        points = torch.stack([fmr, fnmr], dim=1)[last.unique().clamp_min(0)]
        return points.cpu()

    def _rising(self) -> tuple[Tensor, Tensor]:
        """FMR and FNMR, from accepting nothing to accepting everything."""
        return self._with_ends(self.fmr).flip(0), 1 - self._with_ends(1 - self.fnmr).flip(0)

    @staticmethod
    def _with_ends(values: Tensor) -> Tensor:
        """From accepting everything to accepting nothing."""
        return torch.cat([values.new_ones(1), values, values.new_zeros(1)])


def _curve_interval(curve: Tensor, without: Sequence[_Counts]) -> Tensor | None:
    """The interval of each false non-match rate of a curve, by the jackknife."""
    if len(without) < 3:
        return None
    left = torch.stack([some.fnmr_within(curve[:, 0]) for some in without])  # (groups, P)
    error = ((len(left) - 1) * left.var(0, correction=0)).sqrt()
    return torch.stack([curve[:, 1] - 1.96 * error, curve[:, 1] + 1.96 * error], dim=1).clamp(0, 1)


def _equal_error_rate(counts: _Counts) -> float:
    """Where both rates cross, on a straight line between the two thresholds around it."""
    fmr = torch.cat([counts.fmr, counts.fmr.new_zeros(1)])
    fnmr = torch.cat([counts.fnmr, counts.fnmr.new_ones(1)])
    after = int((fnmr < fmr).sum())  # one falls and one rises
    if after == 0:
        return float(torch.minimum(fmr, fnmr)[0])
    gap_before, gap_after = (float(fmr[k] - fnmr[k]) for k in (after - 1, after))
    part = gap_before / (gap_before - gap_after)
    return float(fnmr[after - 1] + part * (fnmr[after] - fnmr[after - 1]))


def _estimate(rate_of: Callable[[_Counts], float], counts: _Counts, without: Sequence[_Counts]) -> Estimate:
    """The rate, and its interval by the jackknife."""
    value = rate_of(counts)
    if len(without) < 3:
        return Estimate(value, None)
    left = [rate_of(some) for some in without]
    mean = math.fsum(left) / len(left)
    error = math.sqrt((len(left) - 1) / len(left) * math.fsum((each - mean) ** 2 for each in left))
    return Estimate(value, (max(value - 1.96 * error, 0.0), min(value + 1.96 * error, 1.0)))


class _Pairs:
    """All pairs of images, or of images and a gallery, in tiles of two groups of classes."""

    def __init__(
        self,
        queries: Tensor,
        labels: Tensor,
        items: Tensor | None,
        item_labels: Tensor | None,
        groups: Tensor,
        num: int,
    ) -> None:
        self.alone = items is None or item_labels is None
        self.num_groups = num
        self.queries = _Sorted.by_group(queries, labels, groups[: len(labels)], num)
        self.items = self.queries
        if items is not None and item_labels is not None:
            self.items = _Sorted.by_group(items, item_labels, groups[len(labels) :], num)

    def genuine(self) -> tuple[Tensor, Tensor]:
        """Similarity and group of each pair of one class."""
        found, groups = [self.queries.points.new_empty(0)], [self.queries.labels.new_empty(0)]
        columns = {int(rows.label): rows for rows in self.items.classes()}
        for rows in self.queries.classes():
            other = columns.get(rows.label)
            if other is None:
                continue
            tile = self.queries.points[rows.span] @ self.items.points[other.span].T
            values = tile[torch.ones_like(tile, dtype=torch.bool).triu(1)] if self.alone else tile.flatten()
            found.append(values)
            groups.append(torch.full(values.shape, rows.group, device=values.device))
        return torch.cat(found), torch.cat(groups)

    def impostors(self, thresholds: Tensor) -> dict[int | str, tuple[Tensor, int]]:
        """Group -> impostor pairs with an image of it: accepted at each threshold, and in all; "all": of all groups."""
        size = len(thresholds) + 1
        counted = torch.zeros(self.num_groups + 1, size, dtype=torch.int64, device=thresholds.device)
        for first in range(self.num_groups):
            for second in range(first if self.alone else 0, self.num_groups):
                counts = torch.zeros(size, dtype=torch.int64, device=thresholds.device)
                for tile, kept in self._tiles(first, second):
                    above = torch.searchsorted(thresholds, tile[kept], right=True)  # thresholds that accept it
                    counts += torch.bincount(above, minlength=size)
                for group in {first, second, self.num_groups}:
                    counted[group] += counts
        # accepted at threshold t: pairs that at least t + 1 thresholds accept
        accepted = counted.flip(1).cumsum(1).flip(1)
        return {
            ("all" if group == self.num_groups else group): (accepted[group, 1:], int(accepted[group, 0]))
            for group in range(self.num_groups + 1)
        }

    def _tiles(self, first: int, second: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Similarities of a group and a group, and which of the pairs are impostors and counted here."""
        rows, columns = self.queries.group(first), self.items.group(second)
        width = max(columns.stop - columns.start, 1)
        step = max(PAIRS_AT_ONCE[self.queries.points.device.type] // width, 1)
        for start in range(rows.start, rows.stop, step):
            some = slice(start, min(start + step, rows.stop))
            tile = self.queries.points[some] @ self.items.points[columns].T
            kept = self.queries.labels[some, None] != self.items.labels[None, columns]
            if self.alone and first == second:
                position = torch.arange(columns.start, columns.stop, device=tile.device)
                kept &= position[None] > torch.arange(some.start, some.stop, device=tile.device)[:, None]
            yield tile, kept


@dataclass(frozen=True)
class _Class:
    label: int
    group: int
    span: slice


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Points in the order of their groups, and of their classes within a group."""

    points: Tensor
    labels: Tensor
    groups: Tensor
    first: list[int]

    @classmethod
    def by_group(cls, points: Tensor, labels: Tensor, groups: Tensor, num: int) -> _Sorted:
        """... of which there are `num`."""
        order = labels.argsort(stable=True)
        order = order[groups[order].argsort(stable=True)]
        first = torch.searchsorted(groups[order].contiguous(), torch.arange(num + 1, device=groups.device))
        return cls(points[order], labels[order], groups[order], first.tolist())

    def group(self, number: int) -> slice:
        """Where the points of a group lie."""
        return slice(self.first[number], self.first[number + 1])

    def classes(self) -> Iterator[_Class]:
        """Each class, and where its points lie."""
        labels, counts = self.labels.unique_consecutive(return_counts=True)
        stop = counts.cumsum(0)
        for label, count, end in zip(labels.tolist(), counts.tolist(), stop.tolist(), strict=True):
            yield _Class(label, int(self.groups[end - 1]), slice(end - count, end))
