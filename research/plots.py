"""The plots of docs/REPRODUCTION.md and docs/STUDENTS.md, from the results.

python research/plots.py results/cub-test.jsonl results/cub-validation.jsonl results/transfer-validation.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.plots.theme import LIGHT, Theme, add_legend, new_figure, png_of_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main", "plot_ablations", "plot_methods", "plot_paper", "plot_states", "plot_students"]

#: Candidate -> what readers call it.
NAMES = {
    "g pa": "Proxy Anchor",
    "g recipe": "the recipe: logarithmic field, trust",
    "g pa, trust .3": "Proxy Anchor, trust",
    "g soft-triple": "SoftTriple",
    "g no proxy pairs": "Eq. 6 without proxy pairs",
    "g multi-similarity": "Multi-Similarity, no miner",
    "g proxy-nca": "ProxyNCA",
    "g triplet": "Triplet",
    "g hist": "HIST, not its authors' rates",
    "g literal": "Eq. 6 to the letter",
}
#: Three for each method; of three methods there are more runs.
SEEDS = (0, 1, 2)
#: What is shown over 200 epochs, as the paper trains.
AS_THE_PAPER = {
    "p literal": "Eq. 6, rate 1e-4 (the supplement's)",
    "p literal, 5e-4": "Eq. 6, rate 5e-4 (the text's), proxies 5e-2",
    "p no proxy pairs": "without proxy pairs, rate 1e-4",
}
#: What the paper reports of the same.
PAPER = ({"73.4": 73.4, "66.7, 20 % label noise": 66.7}, {"0.16": 0.16})
#: What is shown over time: both from a random head, as the paper has it.
OVER_TIME = {"t literal": "Eq. 6 to the letter", "t no proxy pairs": "without proxy pairs"}
#: Ablations of the recipe: what is varied, and the value that the recipe has.
SWEEPS = {"M": 5.0, "delta": 1.0, "alpha": 24.0, "delta_rep": 1.3}
#: What is shown over epochs, trained on labels or by teachers: a name and a color of the theme.
LONG = {
    "8 recipe, 100 epochs": ("trained on labels: the recipe", 4),
    "1 rc, 90 epochs": ("trained by four teachers: a student", 2),
}
#: What the state of a field has, under which heading, and where its axis begins.
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "R@1 on test classes, %": lambda entry: 100 * float(entry["test"]["recall_at_1"]),
    "W2 between proxies and data": lambda entry: float(entry["field"]["w2"]),
    "mean distance of a class's proxies": lambda entry: float(entry["field"]["proxy_spread"]),
    "Adam's step of the proxies, |m| / sqrt(v)": lambda entry: float(entry["field"]["step_of_proxies"]),
    "active repulsions of 200 samples": lambda entry: float(entry["field"]["active_repulsions"]),
    "largest force / median force on a sample": lambda entry: (
        entry["field"]["force_quantiles"][5] / max(entry["field"]["force_quantiles"][2], 1e-9)
    ),
}


def plot_methods(lines: list[dict[str, Any]], theme: Theme) -> Figure:
    """R@1 of each method, clean and with label noise: each run a point, the mean a bar; the best first."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["status"] == "done" and line["candidate"] in NAMES and line["seed"] in SEEDS:
            found[line["candidate"]][line["noise"]].append(100 * line["history"][-1]["test"]["recall_at_1"])
    order = sorted(found, key=lambda name: statistics.mean(found[name][0.0]))
    figure = new_figure(theme, width=760, height=360)
    axes = figure.subplots()
    style_axes(axes, theme)
    for rate, label, color in ((0.0, "clean", theme.series[2]), (0.2, "20 % label noise", theme.series[1])):
        for row, name in enumerate(order):
            values = found[name][rate]
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.45, markersize=5)
            mean = statistics.mean(values)
            axes.plot([mean, mean], [row - 0.32, row + 0.32], color=color, linewidth=3, label=label)
    axes.set_yticks(range(len(order)), [NAMES[name] for name in order])
    axes.set_xlabel("R@1 on test classes, %, last epoch", fontsize=9)
    add_legend(figure, theme, columns=2)
    return figure


def plot_states(lines: list[dict[str, Any]], theme: Theme) -> Figure:
    """What the plain sum does over time, with and without its pairs of proxies; means over seeds."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["status"] == "done" and line["candidate"] in OVER_TIME:
            groups[line["candidate"], line["noise"]].append(line)
    figure = new_figure(theme, width=980, height=560)
    for axes, (title, measure) in zip(figure.subplots(2, 3).flat, MEASURES.items(), strict=True):
        style_axes(axes, theme)
        for (name, noise), runs in sorted(groups.items()):
            epochs = [entry["epoch"] for entry in runs[0]["history"]]
            values = [statistics.mean(measure(run["history"][k]) for run in runs) for k in range(len(epochs))]
            axes.plot(
                epochs,
                values,
                color=theme.series[4 if name == "t literal" else 2],
                linestyle="--" if noise else "-",
                marker="o",
                markersize=4,
                label=f"{OVER_TIME[name]}{', 20 % label noise' if noise else ''}",
            )
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
    for axes in figure.axes[3:]:
        axes.set_xlabel("epoch", fontsize=9)
    add_legend(figure, theme, columns=2)
    return figure


def plot_paper(lines: list[dict[str, Any]], theme: Theme) -> Figure:
    """R@1 and W2 over 200 epochs, trained as the paper says, beside what it reports."""
    runs = [line for line in lines if line["status"] == "done" and line["candidate"] in AS_THE_PAPER]
    figure = new_figure(theme, width=980, height=330)
    for axes, title, reported in zip(figure.subplots(1, 2), list(MEASURES)[:2], PAPER, strict=True):
        style_axes(axes, theme)
        for run in sorted(runs, key=lambda line: (line["noise"], line["candidate"])):
            axes.plot(
                [entry["epoch"] for entry in run["history"]],
                [MEASURES[title](entry) for entry in run["history"]],
                color=theme.series[(4, 0, 2)[list(AS_THE_PAPER).index(run["candidate"])]],
                linestyle="--" if run["noise"] else "-",
                marker="o",
                markersize=4,
                label=f"{AS_THE_PAPER[run['candidate']]}{', 20 % label noise' if run['noise'] else ''}",
            )
        for text, value in reported.items():
            axes.axhline(value, color=theme.muted, linestyle=":", linewidth=1.5)
            axes.annotate(
                f"the paper: {text}", (200, value), (0, 3), textcoords="offset points", ha="right", fontsize=8
            )
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("epoch", fontsize=9)
        axes.set_ylim(bottom=0)
    add_legend(figure, theme, columns=2)
    return figure


def plot_ablations(lines: list[dict[str, Any]], theme: Theme) -> Figure:
    """R@1 on validation classes against each value of the recipe, the others as they are: runs and their mean."""
    runs: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["status"] == "done" and not line["noise"] and line["candidate"].startswith("a "):
            runs[line["candidate"]].append(100 * line["history"][-1]["test"]["recall_at_1"])
    figure = new_figure(theme, width=980, height=260)
    for axes, (name, own) in zip(figure.subplots(1, len(SWEEPS), sharey=True), SWEEPS.items(), strict=True):
        style_axes(axes, theme)
        found = {float(key.rpartition(" ")[2]): values for key, values in runs.items() if key.startswith(f"a {name} ")}
        found[own] = runs["a recipe"]
        positions = {value: position for position, value in enumerate(sorted(found))}
        for value, scores in found.items():
            axes.plot([positions[value]] * len(scores), scores, "o", color=theme.series[2], alpha=0.45, markersize=5)
        axes.plot(
            list(positions.values()),
            [statistics.mean(found[value]) for value in positions],
            color=theme.series[2],
            linewidth=2,
        )
        axes.set_xticks(list(positions.values()), [f"{value:g}{' *' if value == own else ''}" for value in positions])
        axes.set_title(name, fontsize=9, loc="left")
    figure.axes[0].set_ylabel("R@1 on validation classes, %", fontsize=9)
    return figure


def plot_students(lines: list[dict[str, Any]], theme: Theme) -> Figure:
    """R@1 on validation classes over epochs, by labels and by teachers; means over seeds."""
    figure = new_figure(theme, width=720, height=330)
    axes = figure.subplots()
    style_axes(axes, theme)
    for name, (label, color) in LONG.items():
        runs = [line["history"] for line in lines if line["candidate"] == name and not line["noise"]]
        scores = [
            statistics.mean(100 * entry["test"]["recall_at_1"] for entry in same) for same in zip(*runs, strict=True)
        ]
        epochs = [entry["epoch"] for entry in runs[0]]
        axes.plot(epochs, scores, color=theme.series[color], marker="o", markersize=4, label=label)
    teachers = [line for line in lines if line["candidate"] in ("teacher pa", "teacher recipe") and not line["noise"]]
    level = statistics.mean(100 * line["history"][-1]["test"]["recall_at_1"] for line in teachers)
    axes.axhline(level, color=theme.muted, linestyle=":", linewidth=1.5)
    axes.annotate(
        "teachers, 8 epochs on labels", (100, level), (0, -11), textcoords="offset points", ha="right", fontsize=8
    )
    axes.set_title("R@1 on validation classes, %", fontsize=9, loc="left")
    axes.set_xlabel("epoch", fontsize=9)
    add_legend(figure, theme, columns=2)
    return figure


def main() -> None:
    """Write all plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tested", type=Path, help="runs on the test classes")
    parser.add_argument("validated", type=Path, help="runs on the validation classes")
    parser.add_argument("taught", type=Path, help="students on the validation classes")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    tested, validated, taught = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (options.tested, options.validated, options.taught)
    )
    for name, plot, lines in (
        ("cub-test", plot_methods, tested),
        ("cub-eq6", plot_states, tested),
        ("cub-paper", plot_paper, tested),
        ("cub-ablation", plot_ablations, validated),
        ("cub-students", plot_students, validated + taught),
    ):
        path = options.out / f"{name}.png"
        path.write_bytes(png_of_figure(plot(lines, LIGHT)))
        print(path)


if __name__ == "__main__":
    main()
