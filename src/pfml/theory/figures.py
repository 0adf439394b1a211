"""Figures of the field in the plane: the paper's Figure 2, and what Prop. 1 and Corollary 1 say.

Plotted through matplotlib's object interface, so that nothing here touches the global state of pyplot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter, NullLocator
from torch import Tensor

from pfml.energy import class_potential
from pfml.field import ContrastiveLaw, DecayLaw, PowerLaw
from pfml.theory.check import MARGIN, descent, largest_delta

__all__ = ["plot_field", "plot_pipeline", "plot_theory", "write_figures"]

DPI = 160
INK, PAPER, ORANGE = "#151515", "#ffffff", "#f4a300"
DASHES = (0, (3, 2))
#: Marker, face and edge of each class: they differ in shape and in lightness, for print and for color-blind readers.
CLASS_STYLES = (("o", PAPER, INK), ("s", INK, PAPER))


class Scene(NamedTuple):
    """Charges of two classes in the plane."""

    points: Tensor  # (n, 2)
    labels: Tensor  # (n,)
    is_proxy: Tensor  # (n,), bool


class Window(NamedTuple):
    """The part of the plane that is shown."""

    left: float
    right: float
    bottom: float
    top: float

    def grid(self, across: int) -> Tensor:
        """The centers, (rows, across, 2), of square cells that fill the window."""
        cell = (self.right - self.left) / across
        x = self.left + cell * (torch.arange(across, dtype=torch.float64) + 0.5)
        rows = round((self.top - self.bottom) / cell)
        y = self.bottom + cell * (torch.arange(rows, dtype=torch.float64) + 0.5)
        return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)


def example_scene() -> Scene:
    """Two classes of several sub-clusters with two proxies each, and one datum of class 2 among class 1."""
    clusters = [  # class, center, number of data
        (0, (-2.5, 1.45), 5),
        (0, (-1.7, -1.75), 4),
        (0, (2.45, -1.45), 4),
        (1, (0.45, 1.55), 5),
        (1, (3.0, 1.3), 4),
        (1, (-3.2, -0.55), 1),
    ]
    proxies = [(0, (-1.35, 0.45)), (0, (0.75, -1.1)), (1, (1.75, 0.35)), (1, (-0.5, 0.75))]
    generator = torch.Generator().manual_seed(3)
    points, labels = [], []
    for label, center, size in clusters:
        # Evenly spread on a circle, then shaken: sub-clusters that are random and yet leave every marker visible.
        angles = torch.arange(size, dtype=torch.float64) * (2 * torch.pi / size) + label
        ring = torch.stack([angles.cos(), angles.sin()], dim=1) * (0.5 if size > 1 else 0.0)
        shake = 0.12 * torch.randn(size, 2, generator=generator, dtype=torch.float64)
        points.append(torch.tensor(center, dtype=torch.float64) + ring + shake)
        labels += [label] * size
    points.append(torch.tensor([position for _, position in proxies], dtype=torch.float64))
    num_data = len(labels)
    labels += [label for label, _ in proxies]
    return Scene(torch.cat(points), torch.tensor(labels), torch.arange(len(labels)) >= num_data)


def plot_field(path: Path | str, *, delta: float = 0.35, alpha: float = 3.0) -> None:
    """Write the paper's Figure 2 to `path`: the class potentials Psi_1 and Psi_2 of one scene, and their forces.

    Eq. 2 gives every charge of another class the constant delta^-alpha everywhere else. It moves nothing, and without
    it blue attracts and red repels, so the colors show Psi_j without it.
    """
    scene, law = example_scene(), PowerLaw(delta=delta, alpha=alpha)
    window = Window(-4.2, 4.2, -2.9, 2.7)
    figure = Figure(figsize=(13, 4.9), layout="constrained", dpi=DPI)
    panels = figure.subplots(1, 2)
    for label, axes in enumerate(panels):
        contours = _plot_class_potential(axes, scene, label, law, window)
        _plot_forces(axes, scene, label, law, window)
        _plot_circles(axes, scene.points, delta, INK)
        _plot_charges(axes, scene)
        _frame(axes, window)
        axes.set_title(rf"({'ab'[label]}) $\Psi_{label + 1}$, felt by class {label + 1}", fontsize=13, loc="left")
    _add_color_bar(figure, panels, contours, depth=delta**-alpha)
    _add_legend(figure, _field_legend(delta))
    figure.savefig(path)


#: Potentials below this are shown in white; above, color is logarithmic, as the field spans several decades.
FAINT = 0.1


def _log(potential: Tensor) -> Tensor:
    return potential.sign() * (1 + potential.abs() / FAINT).log10()


def _add_color_bar(figure: Figure, panels: Sequence[Axes], contours: QuadContourSet, *, depth: float) -> None:
    names = {-depth: r"$-\delta^{-\alpha}$", -1.0: "\u22121", 0.0: "0", 1.0: "1", depth: r"$\delta^{-\alpha}$"}
    ticks = _log(torch.tensor(list(names), dtype=torch.float64)).tolist()
    bar = figure.colorbar(contours, ax=panels, pad=0.012, aspect=22, shrink=0.9)
    bar.set_ticks(ticks, labels=list(names.values()))
    bar.set_label(r"$\Psi_j - \Psi_j(\infty)$", fontsize=12)


def _plot_class_potential(axes: Axes, scene: Scene, label: int, law: PowerLaw, window: Window) -> QuadContourSet:
    grid = window.grid(420)
    potential = class_potential(grid.reshape(-1, 2), label, scene.points, scene.labels, law=law)
    others = int((scene.labels != label).sum())
    height = _log(potential - others * law.delta**-law.alpha).reshape(grid.shape[:2])
    limit = _log(torch.tensor(5 * law.delta**-law.alpha, dtype=torch.float64)).item()
    levels = torch.linspace(-limit, limit, 42).numpy()
    return axes.contourf(*grid.unbind(-1), height, levels=levels, cmap="RdBu_r", extend="both")


def _forces(locations: Tensor, scene: Scene, label: int, law: DecayLaw) -> Tensor:
    moving = locations.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(class_potential(moving, label, scene.points, scene.labels, law=law).sum(), moving)
    return -gradient


def _plot_forces(axes: Axes, scene: Scene, label: int, law: PowerLaw, window: Window) -> None:
    """Arrows along the force, as long as the log of its size; none where it is weak, or where a marker sits."""
    cells = window.grid(30)
    cell = (cells[0, 1, 0] - cells[0, 0, 0]).item()
    positions = cells.reshape(-1, 2)
    positions = positions[torch.cdist(positions, scene.points).amin(dim=1) > 0.16]
    force = _forces(positions, scene, label, law)
    size = force.norm(dim=1, keepdim=True)
    length = cell * (0.2 + 0.8 * (size.log10() + 1).clamp(0, 2) / 2)  # grows from 0.1 to 10
    arrows = torch.where(size > 1e-2, force / size * length, torch.nan)
    _quiver(axes, positions - arrows / 2, arrows, width=0.0018, color=INK, alpha=0.8)
    own_proxies = scene.points[scene.is_proxy & (scene.labels == label)]
    pulls = _forces(own_proxies, scene, label, law)  # a proxy is not moved by its own field, which is flat where it is
    _quiver(axes, own_proxies, 0.62 * pulls / pulls.norm(dim=1, keepdim=True), width=0.0055, color=ORANGE, alpha=1)


def _quiver(axes: Axes, tails: Tensor, arrows: Tensor, *, width: float, color: str, alpha: float) -> None:
    axes.quiver(
        *tails.T,
        *arrows.T,
        angles="xy",
        scale_units="xy",
        scale=1,
        width=width,
        color=color,
        alpha=alpha,
        headwidth=4,
        headlength=4.5,
        headaxislength=4,
        zorder=3,
    )


def _plot_circles(axes: Axes, centers: Tensor, radius: float, color: str) -> None:
    diameters = [2 * radius] * len(centers)
    circles = EllipseCollection(
        diameters, diameters, [0] * len(centers), units="xy", offsets=centers.numpy(), offset_transform=axes.transData
    )
    circles.set(facecolor="none", edgecolor=color, linewidth=0.7, linestyle=DASHES, alpha=0.8, zorder=2)
    axes.add_collection(circles)


def _plot_charges(axes: Axes, scene: Scene) -> None:
    for label, (marker, face, edge) in enumerate(CLASS_STYLES):
        for is_proxy in (False, True):
            x, y = scene.points[(scene.labels == label) & (scene.is_proxy == is_proxy)].T
            shape, size = ("*", 230) if is_proxy else (marker, 34)
            axes.scatter(x, y, s=size, marker=shape, facecolor=face, edgecolor=edge, linewidth=0.9, zorder=5)


def _add_legend(figure: Figure, entries: list[Line2D]) -> None:
    legend = figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), columnspacing=1.5)
    legend.set_frame_on(False)


def _entry(marker: str, face: str, edge: str, size: float, text: str) -> Line2D:
    line = Line2D([], [], linestyle="none", marker=marker, markersize=size, label=text)
    line.set(markerfacecolor=face, markeredgecolor=edge)
    return line


def _field_legend(delta: float) -> list[Line2D]:
    handles = []
    for label, (marker, face, edge) in enumerate(CLASS_STYLES):
        edge = INK if face == PAPER else face
        handles.append(_entry(marker, face, edge, 6.5, f"data of class {label + 1}"))
        handles.append(_entry("*", face, edge, 14, f"proxies of class {label + 1}"))
    handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=DASHES, label=rf"$\delta$ = {delta:g}"))
    handles.append(_entry(r"$\rightarrow$", INK, INK, 13, "force (length: log of its size)"))
    handles.append(_entry(r"$\rightarrow$", ORANGE, ORANGE, 15, "force on a proxy (direction)"))
    return handles


def _frame(axes: Axes, window: Window) -> None:
    axes.set(xlim=(window.left, window.right), ylim=(window.bottom, window.top), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(NullLocator())
        axis.set_major_formatter(NullFormatter())
    for spine in axes.spines.values():
        spine.set(edgecolor=INK, linewidth=0.8)


def spread_points(size: int, *, separation: float, scale: Tensor, generator: torch.Generator) -> Tensor:
    """Normally distributed points, (size, 2), none closer to another than `separation`: later ones are sampled again.

    Without that, the two closest of the points would make delta too small to be seen.
    """
    points = torch.empty(0, 2, dtype=torch.float64)
    while len(points) < size:
        sampled = scale * torch.randn(1, 2, generator=generator, dtype=torch.float64)
        if len(points) == 0 or torch.cdist(sampled, points).min() > separation:
            points = torch.cat([points, sampled])
    return points


def plot_theory(path: Path | str, *, alpha: float = 3.0, seed: int = 153) -> None:
    """Write to `path` how the same proxies come to rest in the field of the same data under PFML and under CPML.

    The default seed was picked among 300 for a legible figure in which no two proxies rest at the same datum, as the
    proof of Corollary 1 assumes: an illustration, not evidence. How often that holds is in the table of `pfml theory`.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([2.3, 1.4], dtype=torch.float64)
    data = spread_points(16, separation=0.8, scale=scale, generator=generator)
    start = scale * torch.randn(5, 2, generator=generator, dtype=torch.float64)
    delta = MARGIN * largest_delta(data, alpha=alpha).item()
    everything = torch.cat([data, start])
    (left, bottom), (right, top) = (everything.amin(0) - 0.6).tolist(), (everything.amax(0) + 0.6).tolist()
    window = Window(left, right, bottom, top)
    figure = Figure(figsize=(13, 4.9), layout="constrained", dpi=DPI)
    laws: list[tuple[DecayLaw, str]] = [
        (PowerLaw(delta=delta, alpha=alpha), r"PFML, $-\sum\,\max(r, \delta)^{-\alpha}$: a minimum at each datum"),
        (ContrastiveLaw(delta=delta), r"CPML, $\sum\,\max(r, \delta)^2$: a single minimum"),
    ]
    for axes, (law, title) in zip(figure.subplots(1, 2), laws, strict=True):
        _plot_attraction(axes, data, law, window)
        _plot_circles(axes, data, delta, INK)
        axes.scatter(data[:, 0], data[:, 1], s=26, facecolor=PAPER, edgecolor=INK, linewidth=0.9, zorder=4)
        _plot_paths(axes, start, data, law)
        _frame(axes, window)
        axes.set_title(title, fontsize=12, loc="left")
    _add_legend(figure, _theory_legend())
    figure.savefig(path)


def _plot_attraction(axes: Axes, data: Tensor, law: DecayLaw, window: Window) -> None:
    grid = window.grid(420)
    labels = torch.zeros(len(data), dtype=torch.int64)
    potential = class_potential(grid.reshape(-1, 2), 0, data, labels, law=law).reshape(grid.shape[:2])
    # Levels at equal steps of log |Psi| for PFML, and of the root of Psi for CPML: each law's own scale of length.
    height = -(-potential).log() if law.decays else potential.sqrt()
    levels = torch.linspace(height.min().item(), height.max().item(), 22).numpy()
    x, y = grid.unbind(-1)
    darkest = levels[0] - 0.35 * (levels[-1] - levels[0])  # leaves out the end of the map on which no line is visible
    axes.contourf(x, y, height, levels=levels, cmap="Blues_r", vmin=darkest)
    axes.contour(x, y, height, levels=levels, colors=INK, linewidths=0.3, linestyles="solid", alpha=0.35)


def _plot_paths(axes: Axes, start: Tensor, data: Tensor, law: DecayLaw) -> None:
    paths = torch.cat([start[None], *descent(start[None], data[None], law, longest=0.05, steps=300)])  # (steps, m, 2)
    outlined = [withStroke(linewidth=3.2, foreground=PAPER)]
    for path in paths.unbind(1):
        axes.plot(*path.T, color=ORANGE, linewidth=1.8, zorder=5, path_effects=outlined)
    first, last = paths[0], paths[-1]
    axes.scatter(first[:, 0], first[:, 1], s=36, facecolor=ORANGE, edgecolor=PAPER, linewidth=0.9, zorder=6)
    axes.scatter(last[:, 0], last[:, 1], s=240, marker="*", facecolor=ORANGE, edgecolor=INK, linewidth=0.9, zorder=7)


def _theory_legend() -> list[Line2D]:
    return [
        _entry("o", PAPER, INK, 6, "data"),
        Line2D([], [], color=INK, linewidth=0.8, linestyle=DASHES, label=r"$\delta$ around a datum"),
        _entry("o", ORANGE, ORANGE, 6, "proxy at the start"),
        Line2D([], [], color=ORANGE, linewidth=1.8, label="its way down the field"),
        _entry("*", ORANGE, INK, 14, "proxy at rest"),
    ]


STEPS, LONGEST = 60, 0.04


def plot_pipeline(path: Path | str, *, delta: float = 0.35, alpha: float = 3.0) -> None:
    """Write to `path` four panels: embeddings and proxies; the field of one; that of all; where forces move them."""
    scene, law = example_scene(), PowerLaw(delta=delta, alpha=alpha)
    window = Window(-4.2, 4.2, -2.9, 2.7)
    figure = Figure(figsize=(15, 3.3), layout="constrained", dpi=DPI)
    panels: list[Axes] = list(figure.subplots(1, 4))
    alone = Scene(scene.points[:1], scene.labels[:1], scene.is_proxy[:1])
    _plot_class_potential(panels[1], alone, int(alone.labels[0]), law, window)
    _plot_class_potential(panels[2], scene, 0, law, window)
    moved = Scene(_moved(scene, law), scene.labels, scene.is_proxy)
    for before, after in zip(scene.points, moved.points, strict=True):
        panels[3].plot(*torch.stack([before, after]).T, color="#f4a300", linewidth=1.4, zorder=3)
    titles = (
        "1  embeddings and proxies are charges",
        "2  each has a field that decays",
        r"3  fields add up to $\Psi_1$, felt by class 1",
        "4  all move down the field of their class",
    )
    for axes, title, shown in zip(panels, titles, (scene, alone, scene, moved), strict=True):
        _plot_charges(axes, shown)
        if shown is not moved:  # where circles would hide what has come together
            _plot_circles(axes, shown.points, delta, "#151515")
        _frame(axes, window)
        axes.set_title(title, fontsize=11.5, loc="left")
    _add_legend(figure, _field_legend(delta)[:5])
    figure.savefig(path)


def _moved(scene: Scene, law: PowerLaw) -> Tensor:
    """The charges after some steps down the potentials of their classes, each step as long at most as `LONGEST`."""
    points = scene.points
    for _ in range(STEPS):
        moving = points.detach().requires_grad_()
        energy = torch.stack(
            [
                class_potential(moving[scene.labels == label], label, points, scene.labels, law=law).sum()
                for label in range(2)
            ]
        ).sum()
        (gradient,) = torch.autograd.grad(energy, moving)
        length = gradient.norm(dim=1, keepdim=True)
        points = points - gradient / length.clamp(min=1e-12) * (0.01 * length).clamp(max=LONGEST)
    return points.detach()


def write_figures(out: Path) -> list[Path]:
    """Write field.png, theory.png and pipeline.png into the folder `out`, if they are not there; the new paths."""
    out.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Path], None]] = {
        "field.png": plot_field,
        "theory.png": plot_theory,
        "pipeline.png": plot_pipeline,
    }
    missing = [out / name for name in plots if not (out / name).exists()]
    for path in missing:
        plots[path.name](path)
    return missing
