"""`pfml train` and `pfml tune`: a run, and the choice of its hyper-parameters."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, print_line, print_results, print_scores, remarks_printed
from pfml.cli.error_reporting import end
from pfml.cli.recipe import add_recipe_argument, described_recipe
from pfml.cli.students import add_student_arguments
from pfml.terminal import shell_words

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.cli.parser import Parser
    from pfml.distributed import World
    from pfml.distributed.launch import Launch
    from pfml.runs.config import RunConfig
    from pfml.suggest.comparison import Untrained
    from pfml.training.ensemble import Ensemble
    from pfml.training.progress import Monitor


def train(
    config: RunConfig,
    out: Path | None = None,
    resume: Path | None = None,
    recipe: str | None = None,
    ensemble: int | None = None,
    student_epochs: int | None = None,
) -> None:
    """Train an embedder and evaluate it on unseen classes: log, checkpoints, model and results in a run folder."""
    from pfml.distributed.launch import FailedElsewhereError, open_world
    from pfml.models.embedder import learned_by
    from pfml.pages.run import write_run_page
    from pfml.runs.config import RunConfig
    from pfml.runs.config_files import read_config
    from pfml.runs.folder import RunFolder
    from pfml.suggest.comparison import comparison
    from pfml.training.ensemble import Ensemble, is_ensemble, read_ensemble
    from pfml.training.environment import resolve_device
    from pfml.training.shutdown import Interrupted

    shape = None if ensemble is None else Ensemble(ensemble, student_epochs)
    if student_epochs is not None and shape is None:
        raise ValueError("--student_epochs is about the student of --ensemble N, which must be given")
    if resume is not None:
        if config != RunConfig() or out is not None or shape is not None:
            raise ValueError("a resumed run goes on as it began: give --resume alone, without other options")
        if is_ensemble(resume):
            config, shape = read_ensemble(resume)
        else:
            config = read_config(resume / "config.yaml")
        out = resume
    elif _is_restarted(config, out, shape):
        resume = out
    console = create_console()
    for line in described_recipe(recipe, config):
        print_line(console, line)
    try:
        with open_world(resolve_device(config.device)) as world:
            console.quiet = not world.is_first
            name = f"{Path(config.data.name).stem}-{config.loss.name if shape is None else 'student'}"
            out = Path(world.by_first(lambda: str(out or free_folder(Path("runs"), name))))
            if resume is None:
                world.by_first(RunFolder(out).refuse_run)  # before anything is said or computed
            results, untrained = _trained(config, out, resume is not None, console, world, shape)
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone, whose end is SIGHUP
            print_line(console, f"{interrupt}; go on with: pfml train --resume {shell_words(str(out))}")
        sys.exit(128 + interrupt.signal)
    except FailedElsewhereError as error:
        is_there = out is not None and RunFolder(out).config.is_file()
        advice = f". Go on with --resume {out}, on any number of ranks" if is_there else ""
        end("pfml train", f"{error}{advice}")
    if not world.is_first:
        return
    print_results(console, results)
    if untrained is not None:
        if not RunFolder(out).entries("untrained"):
            RunFolder(out).append(
                "untrained", 0, test=untrained.scores, image_size=untrained.image_size
            )  # for the report
        print_line(console, comparison(untrained, results, config))
    learned = learned_by(out)
    which = f" ({learned.moment})" if learned is not None and learned.moment else ""
    print_line(console, f"{out}: config, log, results; the model{which}: pfml.load_embedder({str(out)!r})")
    if is_own(config.data.name):
        print_line(console, f"{write_run_page(out)}: curves, what queries find, a map, the hardest classes")
    else:
        print_line(console, f"a page about it: pfml report {shell_words(str(out))}")


def _trained(
    config: RunConfig, out: Path, resume: bool, console: Console, world: World, shape: Ensemble | None
) -> tuple[dict[str, Any], Untrained | None]:
    """The results of the run, and what the untrained network finds, if that is asked."""
    from pfml.runs.folder import RunFolder
    from pfml.suggest.comparison import Untrained
    from pfml.training.ensemble import run_ensemble
    from pfml.training.progress import ProgressMonitor
    from pfml.training.runner import run

    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    print_line(console, f"{config.loss.name} on {config.data.name}, {config.model.backbone}, in {out}{ranks}")
    monitor = ProgressMonitor(console, said=remarks_printed.get())
    # a run that was interrupted before its end has not noted what the untrained network finds
    noted = [Untrained(e["test"], e.get("image_size")) for e in RunFolder(out).entries("untrained")] if resume else []
    untrained = noted[-1] if noted else _untrained(config, monitor, world)
    if shape is None:
        return run(config, out, resume=resume, monitor=monitor, world=world), untrained
    scores = run_ensemble(config, out, shape, resume=resume, monitor=monitor, world=world)
    print_scores(console, "unseen classes: teachers and their student", scores)
    return RunFolder(out).read_results(), untrained


def _is_restarted(config: RunConfig, out: Path | None, shape: Ensemble | None) -> bool:
    """Whether torchrun has started all ranks anew, and `out` holds what they have begun."""
    from pfml.distributed.launch import Launch
    from pfml.training.ensemble import is_ensemble

    if shape is None:
        return is_restarted(config, out, Launch.of_process())
    return out is not None and Launch.of_process().restarts > 0 and is_ensemble(out)


def is_restarted(config: RunConfig, out: Path | None, launch: Launch) -> bool:
    """Whether torchrun has started all ranks anew, and the run in `out` is the one that they have begun."""
    from pfml.distributed.launch import decided_by_first
    from pfml.runs.folder import RunFolder
    from pfml.training.runner import is_begun

    if launch.may_restart and out is None:
        raise ValueError("with --max-restarts the folder of the run must be named by --out, to be found again")
    if out is None or not launch.may_restart:
        return False
    folder = RunFolder(out)

    def state() -> str:
        return "taken" if folder.config.exists() or folder.checkpoints.exists() else "free"

    # the first start refuses a folder that holds a run, and so must the next one: that run is not of this torchrun
    if launch.by_agent and decided_by_first(f"whether {out} is free", state, launch) == "taken":
        return False
    return launch.restarts > 0 and is_begun(config, out)


def is_own(name: str) -> bool:
    """Whether data of this name are images of one's own: a folder or a table."""
    from pfml.data.own_images import is_own as is_own_data

    return is_own_data(name)


def _untrained(config: RunConfig, monitor: Monitor, world: World) -> Untrained | None:
    """What the pretrained network finds by itself among one's own images; None where there is no such network."""
    from pfml.data.decoding import UnreadableImagesError, check_data
    from pfml.methods import METHODS
    from pfml.models.backbone_table import default_weights
    from pfml.runs.data import prepare_data
    from pfml.suggest.comparison import untrained_scores

    weights = default_weights(config.model.backbone) if config.model.weights == "default" else config.model.weights
    if not is_own(config.data.name) or weights == "none" or not METHODS[config.loss.name].trains:
        return None
    try:
        return untrained_scores(config, monitor, world)
    except UnreadableImagesError:
        check_data(prepare_data(config.data)[0], track=monitor.track)  # lists training images as well
        raise


def tune(
    config: RunConfig,
    out: Path | None = None,
    trials: int = 20,
    space: list[str] | None = None,
    split: str = "half",
    recipe: str | None = None,
) -> None:
    """Choose hyper-parameters on classes that are neither trained nor tested on: best.yaml for pfml train --config."""
    from pfml.experiments.tune import Range, space_of
    from pfml.experiments.tune import tune as search
    from pfml.training.shutdown import Interrupted, interruptible

    console = create_console()
    out = out or free_folder(Path("out/tune"), f"{Path(config.data.name).stem}-{config.loss.name}")
    ranges = space_of(config)
    for line in described_recipe(recipe, config):
        print_line(console, line)
    if space:
        ranges = {}
        for each in space:
            name, equals, text = each.partition("=")
            if not equals:
                raise ValueError(f"--space must be OPTION=LOW:HIGH, as in optimizer.lr=log:1e-5:1e-3, got {each!r}")
            ranges[name] = Range.parse(text)
    print_line(console, f"{config.loss.name} on {config.data.name}: {', '.join(ranges)}; {trials} trials in {out}")

    def show(trial: dict[str, Any]) -> None:
        values = ", ".join(f"{name.rpartition('.')[2]} {value:.4g}" for name, value in trial["values"].items())
        score = "" if trial["score"] is None else f"{config.select_by} {100 * trial['score']:.2f}"
        print_line(
            console, f"trial {trial['number']}: {values}: {score} {trial['state']} {trial['error'] or ''}".strip()
        )

    try:
        with interruptible("stopped between two trials"):
            tuned = search(config, out, trials=trials, space=ranges, split=split, on_trial=show)
    except Interrupted as interrupt:
        with suppress(OSError):
            print_line(console, f"{interrupt}; the same command goes on with the study, with --out {out}")
        sys.exit(128 + interrupt.signal)
    values = ", ".join(f"{name} {value:.4g}" for name, value in tuned.values.items())
    print_line(console, f"best on validation classes: {config.select_by} {100 * tuned.score:.2f} with {values}")
    print_line(console, f"train with it: pfml train --config {shell_words(str(out / 'best.yaml'))}")


def add_train_arguments(parser: Parser) -> None:
    """Add the arguments of `train` beside the fields of `RunConfig`."""
    parser.add_argument("--out", type=Path, help="Folder of the run; by default a new one in runs.")
    parser.add_argument("--resume", type=Path, help="Go on with the run in this folder.")
    add_recipe_argument(parser)
    add_student_arguments(parser)


def add_tune_arguments(parser: Parser) -> None:
    """Add the arguments of `tune` beside the fields of `RunConfig`."""
    parser.add_argument("--out", type=Path, help="Folder of the study; a study that is there goes on.")
    parser.add_argument("--trials", type=int, default=20, help="How many there are to be in all.")
    parser.add_argument(
        "--space", nargs="+", help="What to tune, as in optimizer.lr=log:1e-5:1e-3 loss.options.delta=0.2:1.0."
    )
    parser.add_argument("--split", default="half", help="How the training classes are divided: half, fold-0 to fold-3.")
    add_recipe_argument(parser)


def free_folder(parent: Path, name: str) -> Path:
    """A folder in `parent` that does not exist yet: name-1, name-2, ..."""
    return next(folder for number in count(1) if not (folder := parent / f"{name}-{number}").exists())
