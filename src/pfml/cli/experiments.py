"""`pfml experiment`, `pfml theory` and `pfml demo`: the experiments of the paper, its theory, and a tour."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pfml.cli.console import create_console, print_json
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

    from pfml.experiments.plan import Plan
    from pfml.experiments.run import Estimate, Summary
    from pfml.theory.check import Outcome, TheoryConfig

#: Dimensions that `pfml theory` checks.
DIMS = (2, 3, 4, 8, 32, 128, 512)


def experiment(
    name: str | None = None,
    datasets: list[str] | None = None,
    methods: list[str] | None = None,
    backbones: list[str] | None = None,
    seeds: list[str] | None = None,
    epochs: int | None = None,
    root: list[str] | None = None,
    weights: list[str] | None = None,
    out: Path = Path("out/experiments"),
    budget: float | None = None,
    dry_run: bool = False,
    jobs: int = 1,
    gpus: list[int] | None = None,
    device: str = "auto",
    autocast: Literal["none", "bfloat16", "float16"] | None = None,
    keep_checkpoints: bool = False,
    tuned: list[str] | None = None,
    quiet: bool = False,
) -> None:
    """Run an experiment of the paper, all of it that is not done yet; without a name, list them."""
    from pfml.experiments.catalog import THEORY
    from pfml.experiments.plan import PlanOptions, plan_experiment
    from pfml.experiments.tune import read_study
    from pfml.theory.figures import write_figures
    from pfml.training.shutdown import Interrupted, interruptible

    console = create_console(quiet=quiet)
    if name is None:
        _list_experiments(console)
        return
    if name == THEORY:
        theory(out / "theory", quiet=quiet)
        return
    options = PlanOptions(
        datasets=None if datasets is None else tuple(datasets),
        methods=None if methods is None else tuple(methods),
        backbones=None if backbones is None else tuple(backbones),
        seeds=None if seeds is None else _numbers(seeds, "--seeds"),
        epochs=epochs,
        roots=_named_paths(root, "--root"),
        weights=_named_paths(weights, "--weights"),
        device=device,
        autocast=autocast,
        studies=tuple(read_study(Path(folder)) for folder in tuned or ()),
    )
    plan, cards = plan_experiment(name, options), tuple(gpus or ())
    if dry_run:
        _show_plan(plan, out, console, gpus=cards, jobs=jobs)
        return
    if name == "figures":
        for path in write_figures(out / name):
            print_line(console, f"{path}: written")
    try:
        with interruptible("stopped between two runs"):
            summary = _run_plan(
                plan, out, console, jobs=jobs, gpus=cards, budget=budget, keep_checkpoints=keep_checkpoints
            )
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone
            print_line(console, f"{interrupt}; the same command resumes")
        sys.exit(128 + interrupt.signal)
    if summary.failed:
        sys.exit(1)


def _list_experiments(console: Console) -> None:
    """Print the table of experiments."""
    from rich.table import Table

    from pfml.experiments.catalog import EXPERIMENTS, THEORY

    table = Table("experiment", "what", "paper", "methods", "data sets", "seeds")
    for name, row in EXPERIMENTS.items():
        methods = f"{len(row.methods)}" if len(row.methods) > 7 else ", ".join(row.methods)
        table.add_row(name, row.description, row.answers, methods, ", ".join(row.datasets), f"{len(row.seeds)}")
    table.add_row(THEORY, "Proposition 1 and Corollary 1 on random points", "Sec. 3.3", "", "", "")
    console.print(table)


def _show_plan(plan: Plan, out: Path, console: Console, *, gpus: Sequence[int] = (), jobs: int = 1) -> None:
    """Print each run of the plan, what is left of it, and how long that may take."""
    from rich.table import Column, Table

    from pfml.experiments.run import states
    from pfml.experiments.store import ResultsStore

    records = ResultsStore(out / "results.jsonl").records()
    state, estimates = states(plan, records), _estimates(plan, records, gpus)
    headings = ("data set", "method", "backbone", "dim", "seed", "epochs", "settings", "state", "time")
    table = Table(Column("key", no_wrap=True), *headings)
    for run in plan.runs:
        settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
        seconds = estimates[run.key].seconds if state[run.key] == "to do" else 0.0
        cells = (run.dataset, run.method, run.backbone, run.dim, run.seed, run.epochs, settings)
        table.add_row(run.key, *map(str, cells), state[run.key], _duration(seconds) if seconds else "")
    if plan.runs:
        console.print(table)
    for remark in plan.remarks:
        print_line(console, remark)
    left = [run for run in plan.runs if state[run.key] == "to do"]
    total = sum(estimates[run.key].seconds for run in left) / max(len(gpus), 1) / jobs
    rough = any(estimates[run.key].is_rough for run in left)
    how = "a rough guess from other machines' speeds" if rough else "from runs of the same kind in the store"
    print_line(
        console,
        f"{plan.experiment}: {len(plan.runs)} runs, {len(left)} to do"
        + (f", about {_duration(total)} ({how})" if left else ""),
    )


def _run_plan(plan: Plan, out: Path, console: Console, **options: Any) -> Summary:
    """Do what is left of the plan, and print how it ended."""
    from pfml.experiments.run import execute

    for remark in plan.remarks:
        print_line(console, remark)
    summary = execute(plan, out, console=console, **options)
    print_line(
        console, f"{plan.experiment}: {summary.done} of {len(plan.runs)} runs are done, in {out / 'results.jsonl'}"
    )
    for run, error in summary.failed:
        print_line(console, f"failed: {run} ({run.key}): {error}")
    if summary.left:
        print_line(
            console,
            f"not done: {len(summary.left)} runs (over the budget, in another process, or waiting for another run)",
        )
    return summary


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _numbers(given: Sequence[str], option: str) -> tuple[int, ...]:
    """Whole numbers, and those of ranges such as 0-4."""
    found: list[int] = []
    for one in given:
        first, dash, last = one.partition("-")
        try:
            found += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ValueError(f"{option} must be numbers such as 0 1, or ranges such as 0-4, got {one!r}") from None
    return tuple(found)


def _named_paths(given: Sequence[str] | None, option: str) -> dict[str, Path]:
    """NAME=PATH, as often as given."""
    paths: dict[str, Path] = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not equals or not path:
            raise ValueError(f"{option} must be NAME=PATH, got {one!r}")
        paths[name] = Path(path)
    return paths


def _estimates(plan: Plan, records: Sequence[dict[str, Any]], gpus: Sequence[int]) -> dict[str, Estimate]:
    """Key of a run -> how long it will take."""
    from pfml.experiments.run import Estimator, device_kind

    estimator = Estimator(records, device_kind(plan, gpus))
    return {run.key: estimator.estimate(run) for run in plan.runs}


def demo(
    out: Path = Path("out/demo"), epochs: int = 6, seed: int = 0, device: str = "auto", quiet: bool = False
) -> None:
    """Train on the embedded glyphs by several methods, search among unseen glyphs, write a report as one HTML page."""
    from pfml.experiments.demo import run_demo
    from pfml.training.shutdown import interruptible

    console = create_console(quiet=quiet)
    with interruptible("stopped; a demo starts from the beginning when it is run again"):
        report = run_demo(out, console=console, epochs=epochs, seed=seed, device=device)
    print_line(console, f"{report}: curves, map of the embedding, proxies in the field, retrieval examples")


def theory(
    out: Path = Path("out"),
    seed: int = 0,
    dims: Sequence[int] = DIMS,
    points: int = 64,
    proxies: int = 4,
    alpha: float = 3.0,
    trials: int = 10,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Check Proposition 1 and Corollary 1 on random points: print a table, write field.png and theory.png."""
    from pfml.theory.check import TheoryConfig
    from pfml.theory.figures import plot_field, plot_theory

    config = TheoryConfig(
        dims=tuple(dims), num_points=points, num_proxies=proxies, alpha=alpha, trials=trials, seed=seed
    )
    console = create_console(stderr=as_json, quiet=quiet)
    out.mkdir(parents=True, exist_ok=True)
    outcomes = _print_theory(config, console)
    plot_theory(out / "theory.png")
    plot_field(out / "field.png")
    print_line(console, f"{out / 'theory.png'}: the same proxies in the field of PFML and of CPML")
    print_line(console, f"{out / 'field.png'}: the class potentials and forces of the paper's Figure 2")
    if as_json:
        print_json([asdict(outcome) for outcome in outcomes])


def add_experiment_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `experiment`: which one, what of it, and how."""
    add = parser.add_argument
    add("name", nargs="?", help="Which one; without a name, they are listed.")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--datasets", **several, metavar="NAME", help="Of glyphs, cub, cars, sop; by default the experiment's own.")
    add("--methods", **several, metavar="NAME", help="As `pfml methods` lists them.")
    add(
        "--backbones",
        **several,
        metavar="NAME",
        help="Of convnet, resnet50, bn_inception, vit_small, dino_small, resnet50_he.",
    )
    add("--seeds", **several, metavar="N", help="Numbers, or ranges such as 0-4.")
    add("--epochs", type=int, help="Passes over the training images; by default those of the configurations.")
    add(
        "--root",
        **several,
        metavar="NAME=FOLDER",
        help="Where data sets lie, as in cub=CUB_200_2011; or the environment variable PFML_CUB.",
    )
    add(
        "--weights", **several, metavar="NAME=FILE", help="Weights of backbones, as in resnet50=FILE; or PFML_RESNET50."
    )
    add("--out", type=Path, default=Path("out/experiments"), help="Folder of results and runs.")
    add("--budget", type=float, help="Minutes: no run is started that is not expected to end within them.")
    add("--dry-run", action="store_true", help="Print the plan and an estimate of its time.")
    add("--jobs", type=int, default=1, help="Processes at once, on each GPU if --gpus are given.")
    add("--gpus", **several, type=int, metavar="N", help="Numbers of GPUs.")
    add_device_option(parser)
    add(
        "--autocast",
        choices=("none", "bfloat16", "float16"),
        help="By default what the configurations say.",
    )
    add(
        "--tuned",
        **several,
        metavar="FOLDER",
        help="Studies of `pfml tune`: their best values, for the same method, data set and backbone.",
    )
    add("--keep-checkpoints", action="store_true", help="Keep those of runs that are done.")
    add_quiet_option(parser)


def add_demo_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    add = parser.add_argument
    left = "what an earlier demo left there is replaced"
    add("--out", type=Path, default=Path("out/demo"), help=f"Folder for the report and the runs; {left}.")
    add("--epochs", type=int, default=6, help="Passes over the training glyphs, for each method.")
    add("--seed", type=int, default=0, help="Of everything that is random.")
    add_device_option(parser)
    add_quiet_option(parser)


def add_theory_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `theory`."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("out"), help="Folder for the figures; made if it does not exist.")
    add("--seed", type=int, default=0, help="Of all random numbers.")
    add("--dims", type=int, nargs="+", default=DIMS, help="Dimensions to check.")
    add("--points", type=int, default=64, help="Data of the class.")
    add("--proxies", type=int, default=4, help="Proxies of the class.")
    add("--alpha", type=float, default=3.0, help="Rate of decay of the PFML field.")
    add("--trials", type=int, default=10, help="Random point sets per dimension.")
    add_json_option(parser)
    add_quiet_option(parser)


def _print_theory(config: TheoryConfig, console: Console) -> list[Outcome]:
    import torch
    from rich.progress import Progress

    from pfml.theory.check import LAWS, theory_outcomes, theory_table

    # The matrices are small: with several threads, most of the time goes into waking them.
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Checking the theory", total=len(config.dims) * len(LAWS))
        for group in theory_outcomes(config):
            outcomes += group
            progress.advance(bar)
    console.print(theory_table(outcomes))
    return outcomes
