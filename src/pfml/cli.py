"""The command line `pfml`.

Each command is a function, and its arguments are the options; those of `train` are the fields of `RunConfig`. What a
command needs is imported when it runs, so that `pfml --help` adds little to the time that torch takes.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jsonargparse import ArgumentParser

from pfml import __version__
from pfml.words import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.experiments.theory import TheoryConfig
    from pfml.training.run import RunConfig

__all__ = ["main"]

DESCRIPTION = "Potential field based deep metric learning (CVPR 2025)."


def train(config: RunConfig, out: Path | None = None, resume: Path | None = None) -> None:
    """Train an embedder and evaluate it on unseen classes: log, checkpoints, model and results in a run folder."""
    from pfml.training.config_files import read_config
    from pfml.training.interrupts import Interrupted
    from pfml.training.monitor import ProgressMonitor
    from pfml.training.run import RunConfig, run

    console = _console()
    if resume is not None:
        if config != RunConfig() or out is not None:
            raise ValueError("a resumed run goes on as it began: give --resume alone, without other options")
        config, out = read_config(resume / "config.yaml"), resume
    out = out or _free_folder(Path("runs"), f"{Path(config.data.name).stem}-{config.loss.name}")
    _print_line(console, f"{config.loss.name} on {config.data.name}, {config.model.backbone}, in {out}")
    try:
        results = run(config, out, resume=resume is not None, monitor=ProgressMonitor(console))
    except Interrupted as interrupt:
        _print_line(console, f"{interrupt}; go on with: pfml train --resume {out}")
        sys.exit(128 + interrupt.signal)
    _print_results(console, results)
    _print_line(console, f"{out}: config, log, results; the model: pfml.load_embedder({str(out)!r})")


def tune(
    config: RunConfig,
    out: Path | None = None,
    trials: int = 20,
    space: list[str] | None = None,
    split: str = "half",
) -> None:
    """Choose hyper-parameters on classes that are neither trained nor tested on: best.yaml for pfml train --config."""
    from pfml.experiments.tune import Range, space_of
    from pfml.experiments.tune import tune as search

    console = _console()
    out = out or _free_folder(Path("out/tune"), f"{Path(config.data.name).stem}-{config.loss.name}")
    ranges = space_of(config)
    if space:
        ranges = {}
        for each in space:
            name, equals, text = each.partition("=")
            if not equals:
                raise ValueError(f"--space must be OPTION=LOW:HIGH, as in optimizer.lr=log:1e-5:1e-3, got {each!r}")
            ranges[name] = Range.parse(text)
    _print_line(console, f"{config.loss.name} on {config.data.name}: {', '.join(ranges)}; {trials} trials in {out}")

    def show(trial: dict[str, Any]) -> None:
        values = ", ".join(f"{name.rpartition('.')[2]} {value:.4g}" for name, value in trial["values"].items())
        score = "" if trial["score"] is None else f"{config.select_by} {100 * trial['score']:.2f}"
        _print_line(
            console, f"trial {trial['number']}: {values}: {score} {trial['state']} {trial['error'] or ''}".strip()
        )

    tuned = search(config, out, trials=trials, space=ranges, split=split, on_trial=show)
    values = ", ".join(f"{name} {value:.4g}" for name, value in tuned.values.items())
    _print_line(console, f"best on validation classes: {config.select_by} {100 * tuned.score:.2f} with {values}")
    _print_line(console, f"train with it: pfml train --config {out / 'best.yaml'}")


def evaluate(run: Path, data: str | None = None, root: Path | None = None, nmi: bool = False) -> None:
    """Evaluate a trained embedder on classes that it has not seen: print the metrics.

    Args:
        run: Folder of a run, or of a saved embedder.
        data: A data set by name, or the path of a folder of class folders or of a CSV; by default that of the run.
        root: Folder of a data set given by name.
        nmi: Whether to cluster, too.
    """
    from pfml.data import load_data
    from pfml.evaluation import evaluate as metrics_of
    from pfml.models import load_embedder
    from pfml.training.config_files import read_config
    from pfml.training.environment import resolve_device
    from pfml.training.monitor import ProgressMonitor

    console = _console()
    if not run.is_dir():
        raise FileNotFoundError(
            f"{run} must be the folder of a run or of a saved embedder, but there is no such folder"
        )
    if data is None:
        # a model inside of a run's folder belongs to that run
        files = [folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").is_file()]
        if not files:
            raise ValueError(f"{run} does not say its data: name it with --data, and --root if it is not a path")
        config = read_config(files[0]).data
        data, root = config.name, root or config.root
    images = load_data(data, root)
    for remark in images.remarks:
        _print_line(console, remark)
    embedder = load_embedder(run).to(resolve_device("auto"))
    metrics = metrics_of(embedder, images, nmi=nmi, track=ProgressMonitor(console).track)
    title = f"{images.name}: {len(images.test):,} images of {images.test.num_classes:,} unseen classes"
    _print_scores(console, title, {str(run): metrics.as_dict()})


def embed(run: Path, images: list[Path], out: Path = Path("embeddings.npz"), batch_size: int = 128) -> None:
    """Embed images: write their paths and unit vectors to a NumPy archive.

    Args:
        run: Folder of a run, or of a saved embedder.
        images: Image files, or folders whose images are all taken.
        out: The archive, with the arrays `paths` and `embeddings`.
        batch_size: Images that pass through the network at a time.
    """
    from pfml.data import ImageSet
    from pfml.data.readers.folder import image_files
    from pfml.evaluation import embed as embeddings_of
    from pfml.evaluation import write_embeddings
    from pfml.evaluation.archive import refuse_ending
    from pfml.models import load_embedder
    from pfml.training.environment import resolve_device
    from pfml.training.monitor import ProgressMonitor

    console = _console()
    refuse_ending(out)
    files = image_files(images)
    embedder = load_embedder(run).to(resolve_device("auto"))
    track = ProgressMonitor(console).track
    points = embeddings_of(embedder, ImageSet.unlabelled(files), batch_size=batch_size, track=track)
    write_embeddings(out, files, points)
    _print_line(console, f"{out}: {len(files):,} images in {points.shape[1]} dimensions")


def theory(
    out: Path = Path("out"),
    seed: int = 0,
    dims: tuple[int, ...] = (2, 3, 4, 8, 32, 128, 512),
    points: int = 64,
    proxies: int = 4,
    alpha: float = 3.0,
    trials: int = 10,
) -> None:
    """Check Proposition 1 and Corollary 1 on random points: print a table, write field.png and theory.png.

    Args:
        out: Folder for the pictures; made if it does not exist.
        seed: Of all random draws.
        dims: Dimensions to check, as in --dims=[2,512].
        points: Data of the class.
        proxies: Proxies of the class.
        alpha: Rate of decay of the PFML field.
        trials: Random point sets per dimension.
    """
    from pfml.experiments.figures import draw_field, draw_theory
    from pfml.experiments.theory import TheoryConfig

    config = TheoryConfig(dims=dims, num_points=points, num_proxies=proxies, alpha=alpha, trials=trials, seed=seed)
    console = _console()
    out.mkdir(parents=True, exist_ok=True)
    _print_theory(config, console)
    draw_theory(out / "theory.png")
    draw_field(out / "field.png")
    _print_line(console, f"{out / 'theory.png'}: the same proxies in the field of PFML and of CPML")
    _print_line(console, f"{out / 'field.png'}: the class potentials and forces of the paper's Figure 2")


def demo(out: Path = Path("out/demo"), epochs: int = 6, seed: int = 0) -> None:
    """Train on the embedded glyphs by several methods, search among unseen letters, write a report as one HTML page.

    Args:
        out: Folder for the report and the runs; what an earlier demo left there is replaced.
        epochs: Passes over the training letters, for each method.
        seed: Of everything that is random.
    """
    from pfml.experiments.demo import run_demo

    console = _console()
    report = run_demo(out, console=console, epochs=epochs, seed=seed)
    _print_line(console, f"{report}: curves, map of the embedding, proxies in the field, retrieval examples")


def methods(markdown: bool = False) -> None:
    """List the methods that --loss.name may name, with their options."""
    from pfml.training.methods.listing import markdown_table, rich_table

    if markdown:
        print(markdown_table())
    else:
        _console().print(rich_table())


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
    from pfml.report.tables import format_of, report_of, write_report

    form = format_of(format, out)
    if store is not None and not store.is_file():
        raise FileNotFoundError(f"{store} must be a file of results, but there is no such file")
    records = ResultsStore(store).records() if store is not None else []
    written = write_report(report_of(records, experiment=experiment), form, out)
    if out is None:
        print(written, end="")
    else:
        _print_line(_console(), f"{out}: the paper's tables beside the results of {len(records):,} runs")


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
) -> None:
    """Run an experiment of the paper, all of it that is not done yet; without a name, list them."""
    from pfml.experiments import command
    from pfml.experiments.pictures import draw_fields
    from pfml.experiments.plan import PlanOptions, plan_experiment
    from pfml.training.interrupts import Interrupted

    console = _console()
    if name is None:
        command.list_experiments(console)
        return
    if name == "theory":
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
    )
    plan, cards = plan_experiment(name, options), command.numbers(gpus, "--gpus") or ()
    if dry_run:
        command.show_plan(plan, out, console, gpus=cards, jobs=jobs)
        return
    if name == "figures":
        for path in draw_fields(out / name):
            _print_line(console, f"{path}: drawn")
    try:
        summary = command.run_plan(
            plan, out, console, jobs=jobs, gpus=cards, budget=budget, keep_checkpoints=keep_checkpoints
        )
    except Interrupted as interrupt:
        _print_line(console, f"{interrupt}; the same command goes on from there")
        sys.exit(128 + interrupt.signal)
    if summary.failed:
        sys.exit(1)


COMMANDS: dict[str, Any] = {
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "embed": embed,
    "methods": methods,
    "report": report,
    "demo": demo,
    "theory": theory,
    "experiment": experiment,
}


class Parser(ArgumentParser):
    """A parser whose errors are one sentence, and suggest the option that was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'", message)
        if unknown:
            known = {action.dest for parser in self._with_subparsers() for action in parser._actions}
            message += did_you_mean(unknown[1] or unknown[2], known)
        name = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{name}: error: {message}\nFor all options: {name} --help\n")
        sys.exit(2)

    def _with_subparsers(self) -> list[ArgumentParser]:
        action = self._subcommands_action
        return [self, *(action.choices.values() if action is not None else [])]


def create_parser() -> Parser:
    """The parser of `pfml`, one subcommand for each of `COMMANDS`."""
    parser = Parser(prog="pfml", description=DESCRIPTION, version=__version__)
    subcommands = parser.add_subcommands(dest="command")
    for name, command in COMMANDS.items():
        summary = command.__doc__.split("\n")[0]
        subparser = Parser(description=summary)
        if command is train:
            _add_train_arguments(subparser)
        elif command is tune:
            _add_tune_arguments(subparser)
        elif command is experiment:
            _add_experiment_arguments(subparser)
        elif command is embed:
            subparser.add_argument("run", type=Path, help="Folder of a run, or of a saved embedder.")
            subparser.add_argument("images", type=Path, nargs="+", help="Image files, or folders with images in them.")
            subparser.add_function_arguments(command, skip={"run", "images"})
        elif command is methods:
            text = "As in docs/METHODS.md, with recipes and notes."
            subparser.add_argument("--markdown", action="store_true", help=text)
        else:
            subparser.add_function_arguments(command, as_positional=True)
        subcommands.add_subcommand(name, subparser, help=summary)
    return parser


def _add_train_arguments(parser: Parser) -> None:
    _add_run_config(parser)
    parser.add_argument("--out", type=Path, help="Folder of the run; by default a new one in runs.")
    parser.add_argument("--resume", type=Path, help="Go on with the run in this folder.")


def _add_tune_arguments(parser: Parser) -> None:
    _add_run_config(parser)
    parser.add_argument("--out", type=Path, help="Folder of the study; a study that is there goes on.")
    parser.add_argument("--trials", type=int, default=20, help="How many there are to be in all.")
    parser.add_argument(
        "--space", nargs="+", help="What to tune, as in optimizer.lr=log:1e-5:1e-3 loss.options.delta=0.2:1.0."
    )
    parser.add_argument("--split", default="half", help="How the training classes are divided: half, fold-0 to fold-3.")


def _add_experiment_arguments(parser: Parser) -> None:
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
    add("--dry-run", "--dry_run", action="store_true", help="Print the plan and an estimate of its time.")
    add("--jobs", type=int, default=1, help="Processes at once, on each GPU if --gpus are given.")
    add("--gpus", help="Numbers of GPUs between commas.")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N, without --gpus.")
    add(
        "--autocast",
        choices=("none", "bfloat16", "float16"),
        help="By default what the configurations say.",
    )
    add("--keep-checkpoints", "--keep_checkpoints", action="store_true", help="Keep those of runs that are done.")


def _add_run_config(parser: Parser) -> None:
    from pfml.training.config_files import shipped_configs
    from pfml.training.run import RunConfig

    shipped = ", ".join(shipped_configs())
    parser.add_argument("--config", action="config", help=f"A YAML file, or a configuration of the package: {shipped}.")
    parser.add_class_arguments(RunConfig)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process if None.

    A mistake of the user ends with a sentence and status 2 if the arguments cannot be read, 1 if what they ask for
    cannot be done.
    """
    from pfml.training.loop import NonFiniteLossError

    parser = create_parser()
    parsed = parser.parse_args(_with_config_first(sys.argv[1:] if arguments is None else arguments))
    command = parsed.command
    try:
        values = vars(parser.instantiate(parsed)[command])
        COMMANDS[command](**_with_run_config(values) if command in ("train", "tune") else values)
    except (ValueError, OSError, ImportError, NonFiniteLossError) as error:
        sys.exit(f"pfml {command}: error: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"pfml {command}: interrupted\n")
        sys.exit(130)


def _with_config_first(arguments: list[str]) -> list[str]:
    """--config moved before the other options, so that these override it wherever it stands; names made files.

    Options of a loss make no sense for another one: those of the configuration are dropped if --loss.name names one.
    """
    configs, others, loss = [], [], None
    rest = iter(arguments)
    for argument in rest:
        option, separator, value = argument.partition("=")
        if option in ("--config", "--loss.name"):
            value = value if separator else next(rest, "")
        if option == "--config":
            configs.append(_config_file(value))
            continue
        others += [f"{option}={value}"] if option == "--loss.name" else [argument]
        loss = value if option == "--loss.name" else loss
    fresh = ["--loss.options={}"] if loss is not None and any(_loss_name(file) != loss for file in configs) else []
    return [*others[:1], *(f"--config={file}" for file in configs), *fresh, *others[1:]]


def _loss_name(config_file: str) -> str | None:
    """The loss that a configuration names; None if it cannot be read, which the parser will say."""
    import yaml

    try:
        return yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))["loss"]["name"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def _config_file(name: str) -> str:
    from pfml.training.config_files import shipped_configs

    shipped = shipped_configs()
    if Path(name).exists():
        return name
    if name not in shipped:
        hint = did_you_mean(name, shipped) or f"; the package has {', '.join(shipped)}"
        sys.stderr.write(f"pfml: error: {name!r} is neither a file nor a configuration of the package{hint}\n")
        sys.exit(2)
    return str(shipped[name])


def _with_run_config(values: dict[str, Any]) -> dict[str, Any]:
    """The parsed fields of `RunConfig` put together, and the other options."""
    from pfml.training.run import RunConfig

    names = {one.name for one in fields(RunConfig)}
    config = RunConfig(**{name: value for name, value in values.items() if name in names})
    others = {name: value for name, value in values.items() if name not in names and name != "config"}
    return {"config": config, **others}


def _free_folder(parent: Path, name: str) -> Path:
    """A folder in `parent` that does not exist yet: name-1, name-2, ..."""
    return next(folder for number in count(1) if not (folder := parent / f"{name}-{number}").exists())


def _print_results(console: Console, results: dict[str, Any]) -> None:
    rows = {
        "last epoch": results["last"],
        "best on test (chosen on what it reports)": results["best_on_test"],
        f"chosen by validation {results['selected_by']}": results["validation_selected"],
    }
    scores = {f"{name}, epoch {entry['epoch']}": entry["test"] for name, entry in rows.items() if entry is not None}
    _print_scores(console, "unseen classes", scores)
    if "alignment" in results:
        alignment = results["alignment"]
        distances = f"{alignment['paper']:.3f} (the paper's form), {alignment['wasserstein2']:.3f} (true W2)"
        _print_line(console, f"distance of proxies to their data: {distances}")


def _print_scores(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    """A table of metrics in %, one row for each name."""
    from rich.table import Table

    headings = {"r_precision": "RP", "map_at_r": "MAP@R", "nmi": "NMI"}
    first = next(iter(rows.values()))
    recalls = {key: f"R@{key.removeprefix('recall_at_')}" for key in first if key.startswith("recall_at_")}
    shown = {**recalls, **{key: heading for key, heading in headings.items() if key in first}}
    table = Table("", *shown.values(), title=title)
    for name, scores in rows.items():
        table.add_row(name, *(f"{100 * scores[key]:.1f}" for key in shown))
    console.print(table)


def _print_theory(config: TheoryConfig, console: Console) -> None:
    import torch
    from rich.progress import Progress

    from pfml.experiments.theory import LAWS, theory_outcomes, theory_table

    # The matrices are small: with several threads, most of the time goes into waking them.
    torch.set_num_threads(1)
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Checking the theory", total=len(config.dims) * len(LAWS))
        for group in theory_outcomes(config):
            outcomes += group
            progress.advance(bar)
    console.print(theory_table(outcomes))


def _console() -> Console:
    from rich.console import Console

    # Without a terminal rich assumes 80 columns, and would break the tables.
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _print_line(console: Console, line: str) -> None:
    # A path may hold brackets, which rich would read as markup, and may not be broken.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
