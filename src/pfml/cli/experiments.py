"""`pfml experiment`, `report`, `methods`, `demo` and `theory`: what the paper claims, and our results beside it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pfml.cli.console import create_console, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.cli.parser import Parser
    from pfml.theory.check import TheoryConfig

#: Dimensions that `pfml theory` checks.
DIMS = (2, 3, 4, 8, 32, 128, 512)


def experiment(
    name: str | None = None,
    datasets: str | None = None,
    methods: str | None = None,
    backbones: str | None = None,
    seeds: str | None = None,
    epochs: int | None = None,
    root: list[str] | None = None,
    weights: list[str] | None = None,
    out: Path = Path("out/experiments"),
    budget: float | None = None,
    dry_run: bool = False,
    jobs: int = 1,
    gpus: str | None = None,
    device: str = "auto",
    autocast: Literal["none", "bfloat16", "float16"] | None = None,
    keep_checkpoints: bool = False,
    tuned: list[str] | None = None,
) -> None:
    """Run an experiment of the paper, all of it that is not done yet; without a name, list them."""
    from pfml.experiments import command
    from pfml.experiments.catalog import THEORY
    from pfml.experiments.plan import PlanOptions, plan_experiment
    from pfml.experiments.tune import read_study
    from pfml.theory.figures import write_figures
    from pfml.training.shutdown import Interrupted, interruptible

    console = create_console()
    if name is None:
        command.list_experiments(console)
        return
    if name == THEORY:
        theory(out / "theory")
        return
    options = PlanOptions(
        datasets=command.words(datasets),
        methods=command.words(methods),
        backbones=command.words(backbones),
        seeds=command.numbers(seeds, "--seeds"),
        epochs=epochs,
        roots=command.named_paths(root, "--root"),
        weights=command.named_paths(weights, "--weights"),
        device=device,
        autocast=autocast,
        studies=tuple(read_study(Path(folder)) for folder in tuned or ()),
    )
    plan, cards = plan_experiment(name, options), command.numbers(gpus, "--gpus") or ()
    if dry_run:
        command.show_plan(plan, out, console, gpus=cards, jobs=jobs)
        return
    if name == "figures":
        for path in write_figures(out / name):
            print_line(console, f"{path}: written")
    try:
        with interruptible("stopped between two runs"):
            summary = command.run_plan(
                plan, out, console, jobs=jobs, gpus=cards, budget=budget, keep_checkpoints=keep_checkpoints
            )
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone
            print_line(console, f"{interrupt}; the same command resumes")
        sys.exit(128 + interrupt.signal)
    if summary.failed:
        sys.exit(1)


def report(
    store: Path | None = None,
    experiment: str | None = None,
    format: str | None = None,  # noqa: A002 - the option is called --format
    out: Path | None = None,
) -> None:
    """Print the paper's tables beside our results: mean and standard deviation over seeds; empty where nothing was run.

    Args:
        store: The results of experiments, as in results.jsonl; without it, the paper's tables alone.
        experiment: Only this one.
        format: md, latex or html; by default what the ending of --out says, else md.
        out: A file to write instead of printing; a picture of the ablations lies beside it, or in it (html).
    """
    from pfml.experiments.store import ResultsStore
    from pfml.paper.write import format_of, report_of, write_report

    form = format_of(format, out)
    if store is not None and not store.is_file():
        raise FileNotFoundError(f"{store} must be a file of results, but there is no such file")
    records = ResultsStore(store).records() if store is not None else []
    written = write_report(report_of(records, experiment=experiment), form, out)
    if out is None:
        print(written, end="")
    else:
        print_line(create_console(), f"{out}: the paper's tables beside the results of {len(records):,} runs")


def methods(
    markdown: bool = False, recipe: str | None = None, dataset: str = "cub", backbone: str = "resnet50"
) -> None:
    """List the methods that --loss.name may name, with their options."""
    from pfml.cli.methods import markdown_table, recipe_table, recipe_yaml, rich_table

    if recipe is not None:
        print(recipe_yaml(recipe, dataset, backbone), end="")
    elif markdown:
        print(f"{markdown_table()}\n\n{recipe_table()}")
    else:
        create_console().print(rich_table())


def demo(out: Path = Path("out/demo"), epochs: int = 6, seed: int = 0) -> None:
    """Train on the embedded glyphs by several methods, search among unseen letters, write a report as one HTML page."""
    from pfml.experiments.demo import run_demo
    from pfml.training.shutdown import interruptible

    console = create_console()
    with interruptible("stopped; a demo begins anew when it is started again"):
        report = run_demo(out, console=console, epochs=epochs, seed=seed)
    print_line(console, f"{report}: curves, map of the embedding, proxies in the field, retrieval examples")


def theory(
    out: Path = Path("out"),
    seed: int = 0,
    dims: tuple[int, ...] = DIMS,
    points: int = 64,
    proxies: int = 4,
    alpha: float = 3.0,
    trials: int = 10,
) -> None:
    """Check Proposition 1 and Corollary 1 on random points: print a table, write field.png and theory.png."""
    from pfml.theory.check import TheoryConfig
    from pfml.theory.figures import plot_field, plot_theory

    config = TheoryConfig(dims=dims, num_points=points, num_proxies=proxies, alpha=alpha, trials=trials, seed=seed)
    console = create_console()
    out.mkdir(parents=True, exist_ok=True)
    _print_theory(config, console)
    plot_theory(out / "theory.png")
    plot_field(out / "field.png")
    print_line(console, f"{out / 'theory.png'}: the same proxies in the field of PFML and of CPML")
    print_line(console, f"{out / 'field.png'}: the class potentials and forces of the paper's Figure 2")


def add_experiment_arguments(parser: Parser) -> None:
    """Add the arguments of `experiment`: which one, what of it, and how."""
    add = parser.add_argument
    add("name", nargs="?", help="Which one; without a name, they are listed.")
    add("--datasets", help="glyphs,cub,cars,sop: those to take; by default the experiment's own.")
    add("--methods", help="Names between commas, as `pfml methods` lists them.")
    add("--backbones", help="convnet,resnet50,bn_inception,vit_small,dino_small,resnet50_he")
    add("--seeds", help="Numbers between commas, or a range such as 0-4.")
    add("--epochs", type=int, help="Passes over the training images; by default those of the configurations.")
    add("--root", action="append", help="cub=FOLDER: where a data set lies; or the environment variable PFML_CUB.")
    add("--weights", action="append", help="resnet50=FILE: weights of a backbone; or PFML_RESNET50.")
    add("--out", type=Path, default=Path("out/experiments"), help="Folder of results and runs.")
    add("--budget", type=float, help="Minutes: no run is started that is not expected to end within them.")
    add("--dry-run", action="store_true", help="Print the plan and an estimate of its time.")
    add("--jobs", type=int, default=1, help="Processes at once, on each GPU if --gpus are given.")
    add("--gpus", help="Numbers of GPUs between commas.")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N, without --gpus.")
    add(
        "--autocast",
        choices=("none", "bfloat16", "float16"),
        help="By default what the configurations say.",
    )
    add(
        "--tuned",
        action="append",
        help="Folder of a study of `pfml tune`: its best values, for the same method, data set and backbone.",
    )
    add("--keep-checkpoints", action="store_true", help="Keep those of runs that are done.")


def add_methods_arguments(parser: Parser) -> None:
    """Add the arguments of `methods`: what to print instead of the table."""
    text = "As in docs/METHODS.md, with recipes and notes."
    parser.add_argument("--markdown", action="store_true", help=text)
    parser.add_argument("--recipe", help="NAME: how it was published, as a file for `pfml train --config`.")
    parser.add_argument("--dataset", default="cub", help="What the recipe is for: cub, cars, sop, in-shop or another.")
    parser.add_argument("--backbone", default="resnet50", help="The backbone that it is for.")


def add_demo_arguments(parser: Parser) -> None:
    """Add the arguments of `demo`."""
    add = parser.add_argument
    left = "what an earlier demo left there is replaced"
    add("--out", type=Path, default=Path("out/demo"), help=f"Folder for the report and the runs; {left}.")
    add("--epochs", type=int, default=6, help="Passes over the training letters, for each method.")
    add("--seed", type=int, default=0, help="Of everything that is random.")


def add_theory_arguments(parser: Parser) -> None:
    """Add the arguments of `theory`."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("out"), help="Folder for the pictures; made if it does not exist.")
    add("--seed", type=int, default=0, help="Of all random draws.")
    add("--dims", type=tuple[int, ...], default=DIMS, help="Dimensions to check, as in --dims=[2,512].")
    add("--points", type=int, default=64, help="Data of the class.")
    add("--proxies", type=int, default=4, help="Proxies of the class.")
    add("--alpha", type=float, default=3.0, help="Rate of decay of the PFML field.")
    add("--trials", type=int, default=10, help="Random point sets per dimension.")


def _print_theory(config: TheoryConfig, console: Console) -> None:
    import torch
    from rich.progress import Progress

    from pfml.theory.check import LAWS, theory_outcomes, theory_table

    # The matrices are small: with several threads, most of the time goes into waking them.
    torch.set_num_threads(1)
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Checking the theory", total=len(config.dims) * len(LAWS))
        for group in theory_outcomes(config):
            outcomes += group
            progress.advance(bar)
    console.print(theory_table(outcomes))
