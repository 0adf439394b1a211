"""The tables of docs/REPRODUCTION.md, from the results.

python research/tables.py results/cub-test.jsonl --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["main", "rows_of"]

METRICS = {"R@1": "recall_at_1", "MAP@R": "map_at_r"}


def rows_of(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each candidate, stage and noise: last and best epoch, means over seeds; the best last epoch first."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["stage"], line["noise"], line["candidate"]].append(line)
    rows = []
    for (stage, noise, name), runs in groups.items():
        done = [run for run in runs if run["status"] == "done"]
        if not done:
            rows.append(
                (-1.0, (stage, f"{noise:.0%}", name, "0", "failed", runs[0]["error"].split(":")[0], "", "", ""))
            )
            continue
        last = {label: [100 * run["history"][-1]["test"][key] for run in done] for label, key in METRICS.items()}
        best = [max(100 * each["test"]["recall_at_1"] for each in run["history"]) for run in done]
        alignment = [run["alignment"]["paper"] for run in done if run["alignment"]]
        rows.append(
            (
                statistics.mean(last["R@1"]),
                (
                    stage,
                    f"{noise:.0%}",
                    name,
                    str(len(done)),
                    *(_spread(values) for values in last.values()),
                    _spread(best),
                    _spread(alignment, 2) if alignment else "",
                    str(done[0]["epochs"]),
                ),
            )
        )
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _spread(values: list[float], digits: int = 1) -> str:
    """Mean, and standard deviation of several."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", help="only runs with these seeds")
    options = parser.parse_args()
    lines = [json.loads(line) for path in options.results for line in path.read_text().splitlines()]
    if options.seeds is not None:
        lines = [line for line in lines if line["seed"] in options.seeds]
    heading = ("stage", "noise", "candidate", "runs", "R@1, last", "MAP@R, last", "R@1, best", "W2", "epochs")
    for row in (heading, ("---",) * len(heading), *rows_of(lines)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
