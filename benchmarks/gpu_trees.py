"""The field of two source trees on one device, in turns: did a change of the code cost speed?

git worktree add --detach ../before COMMIT
python benchmarks/gpu_trees.py ../before/src src                about a minute on an H200
python benchmarks/gpu_trees.py ../before/src src --device cpu   tiny sizes, to see that it runs

Each tree has a process of its own, which times a case whenever it is asked: forward and backward, the median of some
runs. The processes take turns, so that whatever slows the machine slows both. Prints one line per case: both times, and
the median of the ratios of neighbors in time. Writes all times to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Case", "Tree", "compare", "main"]


@dataclass(frozen=True)
class Case:
    """A field to time."""

    points: int
    state: str
    normalization: str

    def __str__(self) -> str:
        return f"{self.normalization}, {self.state}, n = {self.points:,}"


def cases(device: str) -> list[Case]:
    """The fields of `gpu_field.field_section`, at the sizes of CUB and of Stanford Online Products."""
    sizes = (1_600, 22_736) if device == "cuda" else (200,)
    return [
        Case(points, state, normalization)
        for points in sizes
        for state in ("random", "trained", "crowded")
        for normalization in ("none", "log", "anchor")
    ]


class Tree:
    """A process that times fields of one source tree."""

    def __init__(self, source: Path, device: str, seconds: float) -> None:
        if not (source / "pfml").is_dir():
            raise FileNotFoundError(f"a source tree must hold the folder pfml, got {source}")
        command = [sys.executable, __file__, str(source), "--worker", "--device", device, "--seconds", f"{seconds}"]
        paths = [str(source.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.package = self._ask("package")

    def milliseconds(self, case: Case) -> float:
        """The median of some runs of a case."""
        return float(self._ask(vars(case)))

    def _ask(self, question: Any) -> Any:
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answered is not None
        asked.write(json.dumps(question) + "\n")
        asked.flush()
        text = answered.readline()
        if not text:
            raise RuntimeError(f"a process of benchmarks/gpu_trees.py has ended with {self._process.wait()}")
        return json.loads(text)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def started(sources: Sequence[Path], device: str, seconds: float) -> Iterator[list[Tree]]:
    """A process for each tree, ended with the block."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Tree(source, device, seconds))) for source in sources]


def compare(trees: Sequence[Tree], todo: Sequence[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Times of every case, in turns; the tree that begins changes."""
    for case in todo:
        times: list[list[float]] = [[] for _ in trees]
        for turn in range(rounds):
            for k in range(len(trees))[:: 1 if turn % 2 else -1]:
                times[k].append(trees[k].milliseconds(case))
        before, after = times[0], times[-1]
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        yield {"case": str(case), "before_ms": before, "after_ms": after, "after_over_before": ratio}


def answer(questions: IO[str], answers: IO[str], device: str, seconds: float) -> None:
    """The process of one tree: a line with a time for every line with a case."""
    import torch

    import pfml
    from charge_sets import charge_set
    from gpu_measure import Setting, times_ms
    from methods import ANCHOR, LOG, PAPER, backend_step

    fields = {"none": PAPER, "log": LOG, "anchor": ANCHOR}
    setting = Setting(torch.device(device))
    backend = "triton" if setting.on_gpu else "tiled"
    last: tuple[Any, Any] = None, None  # charges and the field that were asked about
    for text in questions:
        question = json.loads(text)
        if question == "package":
            found: Any = str(Path(pfml.__file__ or "").parent)
        else:
            case = Case(**question)
            if last[0] != case:
                charges = charge_set(case.points, case.state, setting.device)
                last = case, backend_step(backend, fields[case.normalization])(charges)
            times = times_ms(last[1], setting, at_least=3 if seconds < 0.05 else 10, seconds=seconds)
            found = statistics.median(times)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="the folder src of the tree before, and of that after")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=4, help="turns of each tree per case")
    parser.add_argument("--seconds", type=float, default=0.15, help="of a turn")
    parser.add_argument("--out", type=Path, default=Path("out/bench/gpu_trees.jsonl"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        answer(sys.stdin, sys.stdout, given.device, given.seconds)
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with started(given.sources, given.device, given.seconds) as trees, given.out.open("w") as file:
        for found in compare(trees, cases(given.device), given.rounds):
            file.write(json.dumps(found) + "\n")
            file.flush()
            before, after = (statistics.median(found[f"{which}_ms"]) for which in ("before", "after"))
            print(
                f"{found['case']:38} {before:9.3f} ms {after:9.3f} ms  x {found['after_over_before']:.3f}", flush=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
