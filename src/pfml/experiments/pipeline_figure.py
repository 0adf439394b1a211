"""The paper's Figure 1 as a drawing of the field itself: charges, their fields, their superposition, the descent."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pfml.energy import class_potential
from pfml.experiments.figures import (
    Scene,
    Window,
    _draw_charges,
    _draw_circles,
    _draw_class_potential,
    _draw_legend,
    _field_legend,
    _frame,
    example_scene,
)
from pfml.field import PowerLaw

__all__ = ["draw_pipeline"]

STEPS, LONGEST = 60, 0.04


def draw_pipeline(path: Path | str, *, delta: float = 0.35, alpha: float = 3.0) -> None:
    """Write to `path` four panels: embeddings and proxies; the field of one; that of all; where forces move them."""
    scene, law = example_scene(), PowerLaw(delta=delta, alpha=alpha)
    window = Window(-4.2, 4.2, -2.9, 2.7)
    figure = Figure(figsize=(15, 3.3), layout="constrained", dpi=160)
    panels: list[Axes] = list(figure.subplots(1, 4))
    alone = Scene(scene.points[:1], scene.labels[:1], scene.is_proxy[:1])
    _draw_class_potential(panels[1], alone, int(alone.labels[0]), law, window)
    _draw_class_potential(panels[2], scene, 0, law, window)
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
        _draw_charges(axes, shown)
        if shown is not moved:  # where circles would hide what has come together
            _draw_circles(axes, shown.points, delta, "#151515")
        _frame(axes, window)
        axes.set_title(title, fontsize=11.5, loc="left")
    _draw_legend(figure, _field_legend(delta)[:5])
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
