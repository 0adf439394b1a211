"""The plot of `gpu.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from charge_sets import DIMS
from gpu_measure import Row

__all__ = ["draw_curves"]


def draw_curves(rows: Sequence[Row], path: Path, device: str) -> None:
    """Two panels, time and extra memory over n, log-log, one line per method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.method for row in rows if row.section == "plot"))
    if not names:
        return
    panels = (("p50_ms", "forward and backward, ms"), ("mib", "extra memory, MiB"))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, (quantity, label) in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            found = [row for row in rows if row.section == "plot" and row.method == name and not row.note]
            line = sorted((row.points, getattr(row, quantity)) for row in found)
            line = [(points, value) for points, value in line if value > 0]
            if line:
                dashed = "--" if name.startswith("product") else "-"
                axis.plot(*zip(*line, strict=True), dashed, marker="o", markersize=4, color=f"C{number}", label=name)
        sizes = sorted({row.points for row in rows if row.section == "plot"})
        axis.set(xscale="log", yscale="log", xlabel="points n", ylabel=label)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right")
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"The field in {DIMS} dimensions, 1 % of pairs inside delta, {device}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
