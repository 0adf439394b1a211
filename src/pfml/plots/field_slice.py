"""A field slice: the learned class potential on a two-dimensional slice of the sphere of embeddings.

A plane through the origin meets the unit sphere in a circle. So a slice that is a surface is a sphere of its own, the
unit vectors of a three-dimensional subspace. The plot is its azimuthal equidistant projection: directions from the
center are kept, and a distance from the center is the angle on the sphere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfml.field import repulsion
from pfml.losses import PotentialFieldLoss
from pfml.plots.theme import DARK, Theme, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FieldSlice", "SphereSlice", "best_slice", "measure_field", "neighboring_classes", "plot_field_slice"]

#: Marker of each class: they differ in shape and in color.
MARKERS = ("o", "s", "^", "D")
COLORS = ("#f8fafc", "#facc15", "#f472b6", "#34d399")
INK = "#11151a"


@dataclass(frozen=True, eq=False)
class SphereSlice:
    """The unit vectors of a three-dimensional subspace.

    Args:
        frame: (3, D) float64, orthonormal; the first row is the center of the plot, the others its axes.
    """

    frame: Tensor

    def project(self, points: Tensor) -> Tensor:
        """(n, 2): coordinates of the points of the slice that are nearest to `points`, in radians."""
        inside = points.double() @ self.frame.T
        along, across = inside[:, 0], inside[:, 1:]
        length = across.norm(dim=1)
        return across * (torch.atan2(length, along) / length.clamp(min=1e-12))[:, None]

    def lift(self, coordinates: Tensor) -> Tensor:
        """(n, D): the unit vectors at coordinates (n, 2) of the plot; the inverse of `project` within pi."""
        angle = coordinates.double().norm(dim=1, keepdim=True)
        return angle.cos() * self.frame[:1] + torch.sinc(angle / math.pi) * coordinates.double() @ self.frame[1:]

    def nearness(self, points: Tensor) -> Tensor:
        """(n,): the cosine of the angle between each unit vector and the slice; 1 on it."""
        return (points.double() @ self.frame.T).norm(dim=1)


@dataclass(frozen=True, eq=False)
class FieldSlice:
    """The potential of one class on a slice, with the samples and proxies near it.

    Args:
        slice: The slice.
        classes: Labels of the plotted classes; the potential is that of the first.
        edge: Half of the width of the plot, in radians.
        potential: (n, n): Psi_j of all proxies on the slice, minus its value out of reach of all repulsion but with
            no attraction; rows from bottom to top.
        samples, sample_labels: Embeddings of the classes, (s, D) and (s,).
        proxies, proxy_labels: Proxies of the classes, (p, D) and (p,).
    """

    slice: SphereSlice
    classes: tuple[int, ...]
    edge: float
    potential: Tensor
    samples: Tensor
    sample_labels: Tensor
    proxies: Tensor
    proxy_labels: Tensor


def neighboring_classes(embeddings: Tensor, labels: Tensor, *, first: int, count: int) -> tuple[int, ...]:
    """The class `first` and the `count` - 1 classes whose mean directions are nearest to its own."""
    classes = labels.unique()
    means = torch.stack([embeddings[labels == label].double().mean(0) for label in classes])
    means = means / means.norm(dim=1, keepdim=True)
    similarity = means @ means[(classes == first).nonzero()[0, 0]]
    similarity[classes == first] = 2.0
    return tuple(classes[similarity.argsort(descending=True, stable=True)[:count]].tolist())


def best_slice(points: Tensor) -> SphereSlice:
    """The slice nearest to unit vectors (n, D), n >= 3: their three main directions, without removing the mean.

    The center is the mean of the points; the first axis of the plot is where they spread most.
    """
    directions = torch.linalg.svd(points.double(), full_matrices=False).Vh[:3]
    inside = points.double() @ directions.T
    center = inside.mean(0) / inside.mean(0).norm()
    rest = inside - (inside @ center)[:, None] * center
    axes = torch.linalg.svd(rest, full_matrices=False).Vh[:2]
    frame = torch.stack([center, *axes]) @ directions
    # a main direction has no sign: its largest entry decides, so that the plot is the same everywhere
    signs = frame.gather(1, frame.abs().argmax(1, keepdim=True)).sign()
    signs[0] = 1.0
    return SphereSlice(frame * signs)


def measure_field(
    loss: PotentialFieldLoss, embeddings: Tensor, labels: Tensor, classes: tuple[int, ...], *, cells: int = 120
) -> FieldSlice:
    """The potential of class `classes[0]` on the slice that fits the samples and proxies of `classes` best.

    Args:
        loss: Its proxies are the charges.
        embeddings: (N, D) unit vectors of the training set.
        labels: (N,).
        classes: Those to plot.
        cells: Grid points along each side.
    """
    shown = torch.isin(labels, torch.tensor(classes))
    samples = embeddings[shown].detach().cpu().double()
    proxies = loss.proxy_points().cpu().double()[list(classes)]
    proxy_labels = torch.tensor(classes).repeat_interleave(proxies.shape[1])
    proxies = proxies.flatten(0, 1)
    slice_ = best_slice(torch.cat([samples, proxies]))
    coordinates = slice_.project(torch.cat([samples, proxies]))
    edge = min(1.12 * float(coordinates.abs().amax(1).quantile(0.99)), math.pi / math.sqrt(2))
    line = torch.linspace(-edge, edge, cells, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).view(-1, 2)
    potential = loss.class_potentials(slice_.lift(grid))[:, classes[0]]
    negatives = (loss.num_classes - 1) * loss.proxies_per_class
    potential = potential - negatives * repulsion(loss.field.law, shifted=True).offset
    return FieldSlice(
        slice_, classes, edge, potential.view(cells, cells), samples, labels[shown].cpu(), proxies, proxy_labels
    )


def plot_field_slice(field: FieldSlice, names: dict[int, str], theme: Theme, *, width: int = 470) -> Figure:
    """A plot of the potential as color, samples as small marks and proxies as stars.

    Args:
        field: See `measure_field`.
        names: Label -> what to call the class.
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.colors import LinearSegmentedColormap

    figure = new_figure(theme, width=width, height=round(1.24 * width))
    axes = figure.subplots()
    edge = field.edge
    cells = torch.linspace(-edge, edge, len(field.potential), dtype=torch.float64)
    sizes = field.potential.abs()
    # a cell on a proxy that repels has an infinite potential: it is drawn like the largest finite one
    scale = ColorScale(peak=max(sizes[sizes.isfinite()].max().item(), 1e-9))
    height = scale.height(field.potential.clamp(-scale.peak, scale.peak))
    colors = LinearSegmentedColormap.from_list("field", _poles(theme))
    contours = axes.contourf(cells, cells, height, levels=scale.levels(), cmap=colors)
    axes.contour(cells, cells, height, levels=scale.levels()[::4], colors=theme.muted, linewidths=0.4, linestyles="-")
    _plot_members(axes, field, names)
    axes.set(xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(theme.line)
    bar = figure.colorbar(contours, ax=axes, orientation="horizontal", shrink=0.94, aspect=40, pad=0.02)
    ticks = scale.ticks()
    bar.set_ticks(scale.height(torch.tensor(ticks)).tolist(), labels=[f"{tick:g}" for tick in ticks])
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=theme.muted, labelsize=8, length=0)
    text = f"potential felt by {names[field.classes[0]]}: blue attracts, red repels"
    bar.set_label(text, fontsize=8.5, color=theme.ink)
    figure.legend(loc="outside upper left", ncols=1, fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure


@dataclass(frozen=True)
class ColorScale:
    """Color as a function of the potential: logarithmic, as a field spans decades, but linear near zero.

    Args:
        peak: Largest size of the potential.
        faint: Share of the peak below which the scale is linear.
    """

    peak: float
    faint: float = 0.1

    def height(self, potential: Tensor) -> Tensor:
        """Where a potential lies on the scale: linear near zero, logarithmic above."""
        return potential.sign() * (1 + potential.abs() / (self.faint * self.peak)).log10()

    def levels(self) -> list[float]:
        """The 42 levels between which colors change."""
        top = self.height(torch.tensor(self.peak)).item() * 1.001
        return torch.linspace(-top, top, 42, dtype=torch.float64).tolist()

    def ticks(self) -> list[float]:
        """Zero, and with both signs a number near the peak and one near a fifth of it, of one digit each."""
        high, low = _one_digit(self.peak), _one_digit(self.peak / 5)
        return [-high, -low, 0.0, low, high]


def _one_digit(size: float) -> float:
    """The largest number of one significant digit that does not exceed `size`."""
    unit = 10.0 ** math.floor(math.log10(size))
    return math.floor(size / unit) * unit


def _poles(theme: Theme) -> list[str]:
    """Colors from attraction to repulsion, with the page's own for no potential."""
    if theme is DARK:
        return ["#8ec2ff", "#2f62b8", theme.paper, "#a8433a", "#ffab97"]
    return ["#12418f", "#7fb0e8", theme.paper, "#ee9a86", "#9b1c1c"]


def _plot_members(axes: Axes, field: FieldSlice, names: dict[int, str]) -> None:
    for number, label in enumerate(field.classes):
        marker, color = MARKERS[number % len(MARKERS)], COLORS[number % len(COLORS)]
        x, y = field.slice.project(field.samples[field.sample_labels == label]).T
        axes.scatter(x, y, s=17, marker=marker, c=color, edgecolors=INK, linewidths=0.6, label=names[label], zorder=4)
    for number, label in enumerate(field.classes):
        x, y = field.slice.project(field.proxies[field.proxy_labels == label]).T
        text = None if number else "stars: proxies, each in the color of its class"
        color = COLORS[number % len(COLORS)]
        axes.scatter(x, y, s=190, marker="*", c=color, edgecolors=INK, linewidths=1.0, label=text, zorder=5)
