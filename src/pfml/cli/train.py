"""`pfml train` and `pfml tune`: a run, and the choice of its hyper-parameters."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, print_json, print_results, print_scores, print_validated
from pfml.cli.error_reporting import exit_with_error
from pfml.cli.parser import add_json_option, add_quiet_option
from pfml.cli.run_options import add_run_options, described_recipe, option_group
from pfml.own_code import is_reference, trust
from pfml.terminal import print_line, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

    from pfml.distributed import World
    from pfml.distributed.launch import Launch
    from pfml.ensemble import Ensemble
    from pfml.runs.config import RunConfig
    from pfml.runs.data import PreparedData
    from pfml.suggest.comparison import Untrained
    from pfml.suggest.folder import Prepared
    from pfml.training.progress import Monitor

__all__ = ["add_train_arguments", "add_tune_arguments", "train", "tune"]


def train(
    config: RunConfig,
    given: Collection[str] | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    final: Path | None = None,
    from_run: Path | None = None,
    recipe: str | None = None,
    ensemble: Sequence[tuple[str, int]] | None = None,
    student_epochs: int | None = None,
    student_options: dict[str, Any] | None = None,
    correct_labels: bool = False,
    print_config: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Train an embedder and evaluate it on what was held out: log, model and results in a run folder.

    On images of one's own, without options of the training, candidates of rising cost are tried, and what validation
    proves to be better than the pretrained backbone is kept (--effort).
    """
    from pfml.distributed.launch import FailedElsewhereError, Launch, open_world
    from pfml.ensemble import is_ensemble, read_ensemble
    from pfml.ladder.run import ignored_by_ladder
    from pfml.runs.config_files import read_config
    from pfml.runs.final import read_validated
    from pfml.runs.folder import RunFolder, free_folder
    from pfml.suggest.folder import Prepared
    from pfml.training.environment import resolve_device
    from pfml.training.final import plan_final
    from pfml.training.progress import ProgressMonitor
    from pfml.training.setup import require_loss_packages
    from pfml.training.shutdown import Interrupted

    require_loss_packages(config.loss)
    launch, shape = Launch.of_process(), _shape(config, ensemble, student_epochs, student_options, correct_labels)
    student = {"student_epochs": student_epochs, "student_options": student_options}
    _refuse_combinations(config, out, resume, final, from_run, shape, student, correct_labels)
    suits_ladder = config.effort is None and shape is None and resume is None and _suits_ladder(config, given)
    if suits_ladder and launch.size == 1:
        config = replace(config, effort="minutes")
    _require_one_process(config, launch)
    # the output of --print_config or --json goes to a file or a program, so that all else goes to stderr
    console = create_console(stderr=print_config or as_json, quiet=quiet or launch.rank > 0)
    prepared, planned = Prepared(), None
    if config.effort is not None and (ignored := ignored_by_ladder(config)):
        print_line(console, f"the ladder decides by itself, whatever --config says: {', '.join(ignored)}")
    if suits_ladder and launch.size > 1:
        ranks = f"on {launch.size} ranks these images train directly"
        print_line(console, f"{ranks}: the ladder (--effort) runs in one process, without torchrun")
    if final is not None:
        planned = plan_final(final, ProgressMonitor(console).track)
        config, out, prepared.data = planned.config, planned.folder, planned.loaded
        resume = out if planned.is_begun else None
        for line in () if planned.loaded is None else planned.loaded.remarks:
            print_line(console, line)
        state = "trained already" if planned.is_done else "resumed" if planned.is_begun else "begun"
        if planned.description or not print_config:
            print_line(console, planned.description or f"the final model {out} is {state}")
        if planned.is_done and not print_config:
            print_validated(console, out)
            if as_json:
                print_json({"run": str(out), "results": RunFolder(out).read_results()})
            return
    elif resume is not None:
        config, shape = read_ensemble(resume) if is_ensemble(resume) else (read_config(resume / "config.yaml"), None)
        out = resume
    elif given is not None:
        loads_first = config.effort is not None and not print_config
        config = _with_suggestions(config, given, console, prepared, out=out, loads_first=loads_first)
        # other teachers follow the suggestions too
        shape = _shape(config, ensemble, student_epochs, student_options, correct_labels)
    if print_config:
        is_final = final is not None or (resume is not None and read_validated(resume) is not None)
        _print_config(config, out.parent if is_final and out is not None else None)
        return
    _require_one_process(config, launch)
    if resume is None and _resumes_after_restart(config, out, shape, launch):
        resume = out
    for line in described_recipe(recipe, config):
        print_line(console, line)
    try:
        with open_world(resolve_device(config.device)) as world:
            console.quiet = quiet or not world.is_first
            method = "-student" if shape is not None else "" if config.effort else f"-{config.loss.name}"
            name = f"{Path(config.data.name).stem}{method}"
            out = Path(world.by_first(lambda: str(out or free_folder(Path("runs"), name))))
            if resume is None:
                world.by_first(RunFolder(out).refuse_run)  # before anything is printed or computed
            if planned is not None:
                world.by_first(planned.begin)
            results = _run(config, out, resume is not None, console, world, shape, prepared)
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone, whose end is SIGHUP
            print_line(console, f"{interrupt}; {_about_resuming(out)}")
        sys.exit(128 + interrupt.signal)
    except FailedElsewhereError as error:
        is_there = out is not None and RunFolder(out).config.is_file()
        advice = f". Resume with --resume {out}, on any number of ranks" if is_there else ""
        exit_with_error("pfml train", f"{error}{advice}")
    if world.is_first and as_json:
        print_json({"run": str(out), "results": results})


def tune(
    config: RunConfig,
    given: Collection[str] | None = None,
    out: Path | None = None,
    trials: int = 20,
    space: list[str] | None = None,
    split: str = "half",
    recipe: str | None = None,
    print_config: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Choose hyper-parameters on what is neither trained nor tested on: best.yaml for pfml train --config."""
    from pfml.experiments.tune import Range, space_of
    from pfml.experiments.tune import tune as search
    from pfml.runs.folder import free_folder
    from pfml.suggest.folder import Prepared
    from pfml.training.shutdown import Interrupted, interruptible

    console = create_console(stderr=print_config or as_json, quiet=quiet)
    prepared = Prepared()
    if config.effort is not None:
        raise ValueError("pfml tune chooses settings of a training: leave out --effort, which is for pfml train")
    if given is not None:
        config = _with_suggestions(config, given, console, prepared, split=split)
    ranges = space_of(config)
    if space:
        ranges = {}
        for each in space:
            name, equals, text = each.partition("=")
            if not equals:
                raise ValueError(f"--space must be OPTION=LOW:HIGH, as in optimizer.lr=log:1e-5:1e-3, got {each!r}")
            ranges[name] = Range.parse(text)
    judges = "held-out training images" if config.data.split == "images" else "validation classes"
    if print_config:
        by = "" if config.data.split == "images" else f" (--split {split})"
        print(f"# {trials} trials choose these values, by {config.select_by} on {judges}{by}:")
        for name, values in ranges.items():
            print(f"#   {name}={values}")
        print("# with all others as here:")
        _print_config(config)
        return
    out = out or free_folder(Path("out/tune"), f"{Path(config.data.name).stem}-{config.loss.name}")
    for line in described_recipe(recipe, config):
        print_line(console, line)
    print_line(
        console,
        f"{config.loss.name} on {config.data.name}: {', '.join(ranges)}; {trials} trial{'s' * (trials != 1)} in {out}",
    )

    def show(trial: dict[str, Any]) -> None:
        values = ", ".join(f"{name.rpartition('.')[2]} {value:.4g}" for name, value in trial["values"].items())
        score = "" if trial["score"] is None else f"{config.select_by} {100 * trial['score']:.2f}"
        print_line(
            console, f"trial {trial['number']}: {values}: {score} {trial['state']} {trial['error'] or ''}".strip()
        )

    try:
        with interruptible("stopped between two trials"):
            tuned = search(config, out, trials=trials, space=ranges, split=split, on_trial=show, loaded=prepared.data)
    except Interrupted as interrupt:
        with suppress(OSError):
            print_line(console, f"{interrupt}; the same command resumes the study, with --out {out}")
        sys.exit(128 + interrupt.signal)
    chosen = ", ".join(f"{name} {value:.4g}" for name, value in tuned.values.items())
    print_line(console, f"best on {judges}: {config.select_by} {100 * tuned.score:.2f} with {chosen}")
    print_line(console, f"train with it: pfml train --config {shell_words(str(out / 'best.yaml'))}")
    if as_json:
        best = {"select_by": config.select_by, "score": tuned.score, "values": tuned.values}
        print_json({"study": str(out), "config": str(out / "best.yaml"), "best": best})


def add_train_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `train` beside the fields of `RunConfig`."""
    add = parser.add_argument
    add("--out", type=Path, help="Folder of the run; by default a new one in runs.")
    add("--resume", type=Path, help="Resume the run in this folder.")
    add(
        "--final",
        type=Path,
        metavar="RUN",
        help="Train the final model of a run, RUN/final: its settings once more on all of its images, as many steps "
        "per class, evaluated by nothing. index, search, serve and export then use it. Again: resumes.",
    )
    add(
        "--from",
        dest="from_run",
        type=Path,
        metavar="RUN",
        help="Continue RUN with further images, --data FOLDER: its settings, its images and these; the division of the "
        "images before stays, embedder and proxies start as those of RUN.",
    )
    teachers = add(
        "--ensemble",
        nargs="+",
        action="extend",
        type=_counted,
        metavar=("N", "NAME=N"),
        help="N: train N teachers with seeds of their own, then one student that follows them in place of labels; "
        "the folder's model is the student, its teachers are in teachers/. Then NAME=N: N more of another backbone, of "
        "a YAML file that changes the configuration, or of a configuration of the package.",
    )
    teachers.takes = "how many teachers, N, and then NAME=N for those of another configuration"  # type: ignore[attr-defined]
    add("--student_epochs", type=int, help="Epochs of the student of --ensemble; four times a teacher's by default.")
    student = add(
        "--student_options",
        type=option_group("student_options"),
        metavar="JSON",
        help="Options of the loss of the student of --ensemble, as in '{\"sigma\": 1.3}'.",
    )
    student.takes = "a YAML or JSON file, or JSON"  # type: ignore[attr-defined]
    add(
        "--correct_labels",
        action="store_true",
        help="For label noise: first train two teachers and a short student of them, and correct the labels that an "
        "audit by that student lists as noise; the teachers of --ensemble then train on the corrected labels.",
    )
    add_json_option(parser)
    add_quiet_option(parser)
    add_run_options(parser)


def add_tune_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `tune` beside the fields of `RunConfig`."""
    add = parser.add_argument
    add("--out", type=Path, help="Folder of the study; a study that is there is resumed.")
    add("--trials", type=int, default=20, help="Number of trials in all.")
    add(
        "--space",
        nargs="+",
        action="extend",
        metavar="RANGE",
        help="What to tune, as in optimizer.lr=log:1e-5:1e-3 loss.options.delta=0.2:1.0.",
    )
    add(
        "--split",
        default="half",
        help="How the training classes are divided: half, fold-0 to fold-3. With --data.split images, a fifth of the "
        "training images of every class is held out instead.",
    )
    add_json_option(parser)
    add_quiet_option(parser)
    add_run_options(parser)


def _counted(text: str) -> tuple[str, int]:
    """Name and number of NAME=N, and of N, without a name."""
    name, equals, number = text.rpartition("=")
    if not number.lstrip("-").isdecimal() or (equals and not name):
        raise ArgumentTypeError(f"must be N, and then NAME=N for teachers of another configuration, got {text!r}")
    return name, int(number)


def _shape(
    config: RunConfig,
    ensemble: Sequence[tuple[str, int]] | None,
    student_epochs: int | None,
    student_options: dict[str, Any] | None,
    correct_labels: bool,
) -> Ensemble | None:
    """The ensemble that was typed beside `config`; None if none was."""
    from pfml.ensemble import Ensemble, TeacherGroup, other_config

    if ensemble is None:
        return None
    (first, count), *others = ensemble
    names = [name for name, _ in others]
    if first:
        typed = " ".join(f"{name}={number}" if name else str(number) for name, number in ensemble)
        raise ValueError(f"--ensemble starts with the number of teachers of the run itself, as in 4 {typed}")
    if "" in names:
        raise ValueError("--ensemble takes one number without a name: further teachers are NAME=N")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"--ensemble must name the teachers of {twice} once: add up their numbers")
    trust(*filter(is_reference, names))
    groups = tuple(TeacherGroup(other_config(config, name), number) for name, number in others)
    return Ensemble(
        count, student_epochs, student_options=student_options or {}, others=groups, correct_labels=correct_labels
    )


def _refuse_combinations(
    config: RunConfig,
    out: Path | None,
    resume: Path | None,
    final: Path | None,
    from_run: Path | None,
    shape: Ensemble | None,
    student: Mapping[str, Any],
    correct_labels: bool,
) -> None:
    """Refuse options of an ensemble without one, and options beside one that must be given alone."""
    from pfml.runs.config import RunConfig

    for option, value in student.items():
        if value is not None and shape is None:
            raise ValueError(f"--{option} is about the student of --ensemble N, which must be given")
    if correct_labels and shape is None and resume is None:
        raise ValueError("--correct_labels is about the labels of teachers: give --ensemble N too")
    if from_run is not None and (shape is not None or resume is not None or final is not None):
        raise ValueError("--from continues one run with further images: leave out --ensemble, --resume and --final")
    has_others = config != RunConfig() or out is not None or shape is not None or correct_labels
    if final is not None and (has_others or resume is not None):
        raise ValueError("a final model has the settings of its run: give --final alone, without other options")
    if resume is not None and has_others:
        raise ValueError("a run resumes with its own configuration: give --resume alone, without other options")


def _about_resuming(out: Path | None) -> str:
    """How to resume an interrupted run."""
    from pfml.ensemble import is_ensemble
    from pfml.runs.folder import RunFolder

    if out is not None and (RunFolder(out).config.is_file() or is_ensemble(out)):
        return f"resume with: pfml train --resume {shell_words(str(out))}"
    return "nothing is stored yet: the same command begins again"


def is_restarted(config: RunConfig, out: Path | None, launch: Launch) -> bool:
    """Whether torchrun has restarted all ranks, and the run in `out` is the one that they have begun."""
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


def _resumes_after_restart(config: RunConfig, out: Path | None, shape: Ensemble | None, launch: Launch) -> bool:
    """Whether the run or the ensemble in `out` was begun before torchrun restarted all ranks."""
    from pfml.ensemble import is_ensemble

    if shape is None:
        return is_restarted(config, out, launch)
    return out is not None and launch.restarts > 0 and is_ensemble(out)


def _suits_ladder(config: RunConfig, given: Collection[str] | None) -> bool:
    """Whether a bare command works up the ladder: on one's own images, where no option says how to train."""
    from pfml.data.own_images import is_own
    from pfml.ladder.run import leaves_to_ladder
    from pfml.models.backbone_table import default_weights

    model = config.model
    weights = default_weights(model.backbone) if model.weights == "default" else model.weights
    is_pretrained = "model.backbone" not in (given or ()) or weights != "none"
    return given is not None and is_own(config.data.name) and leaves_to_ladder(given) and is_pretrained


def _require_one_process(config: RunConfig, launch: Launch) -> None:
    """Refuse the ladder on several ranks, before anything is computed."""
    if config.effort is not None and launch.size > 1:
        ranks = f"got {launch.size} ranks: leave out torchrun"
        raise ValueError(f"the ladder (effort {config.effort}) runs in one process, {ranks}")


def _with_suggestions(
    config: RunConfig,
    given: Collection[str],
    console: Console,
    prepared: Prepared,
    *,
    out: Path | None = None,
    split: str | None = None,
    loads_first: bool = False,
) -> RunConfig:
    """`config` with what suits one's own images in place of what is not given; prints the reasons.

    `loads_first` lists and checks the images even if no suggestion needs them: what is wrong with them is said first.
    """
    from pfml.data.own_images import is_own
    from pfml.distributed.launch import Launch, decided_by_first
    from pfml.runs.data import load_checked
    from pfml.runs.folder import RunFolder
    from pfml.suggest.folder import suggest_for_folder
    from pfml.suggest.suggestion import with_values
    from pfml.training.progress import ProgressMonitor

    if not is_own(config.data.name):
        return config
    # torchrun's later starts find the run that its first one has begun
    if out is not None and not Launch.of_process().restarts:
        RunFolder(out).refuse_run()
    if loads_first:
        prepared.data = load_checked(config.resolved().data, ProgressMonitor(console).track, storage=config.storage)
        for remark in prepared.data.remarks:
            print_line(console, remark)

    def suggested() -> dict[str, Any]:
        suggestion = suggest_for_folder(config, given, prepared, ProgressMonitor(console), split=split)
        values = {} if suggestion is None else suggestion.besides(given)
        if suggestion is not None and values:
            print_line(console, "suggested for these images; any of it can be given instead:")
            for option, value in values.items():
                shown = "null" if value is None else value
                print_line(console, f"  --{option} {shown}: {suggestion.reasons[option]}")
        return values

    # epochs and crops depend on how fast this machine is just now: every rank would find other ones
    return with_values(config, json.loads(decided_by_first("what it suggests", lambda: json.dumps(suggested()))))


def _print_config(config: RunConfig, final_of: Path | None = None) -> None:
    """Print a file for --config: all that is used, which is less where the ladder decides.

    Args:
        config: What to print.
        final_of: The run whose final model it is, if it is one.
    """
    import yaml

    from pfml.ladder.run import described_ladder, used_by_ladder
    from pfml.runs.config_files import plain

    if final_of is not None:
        print(f"# {_about_final(config, final_of)}")
    elif config.effort is not None:
        for line in described_ladder(config):
            print(f"# {line}")
    values = plain(config) if config.effort is None else used_by_ladder(config)
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")


def _about_final(config: RunConfig, run: Path) -> str:
    """A comment on the settings of the final model of a run, for --print_config."""
    from pfml.ladder.run import kept_rung

    if config.effort is not None:
        kept = kept_rung(run)["candidate"]
        return f"what the ladder of {run} has kept is fitted to all images: {kept}; --config would choose anew"
    corrections = config.data.corrections
    is_there = corrections is None or corrections.exists()
    return f"the settings of {run} on all images" + ("" if is_there else f"; training starts by writing {corrections}")


def _run(
    config: RunConfig,
    out: Path,
    resume: bool,
    console: Console,
    world: World,
    shape: Ensemble | None,
    prepared: Prepared,
) -> dict[str, Any]:
    """The results of the run; prints them, the comparison with the untrained model, and what to do next."""
    from pfml.data.image_set import PROTOCOLS
    from pfml.data.own_images import is_own
    from pfml.ensemble import run_ensemble
    from pfml.models.embedder import learned_by
    from pfml.pages.run import contents_of, write_run_page
    from pfml.runs.config_files import read_config
    from pfml.runs.data import load_checked, prepare_data
    from pfml.runs.final import read_validated
    from pfml.runs.folder import RunFolder
    from pfml.suggest.comparison import comparison
    from pfml.training.progress import ProgressMonitor
    from pfml.training.runner import create_run_embedder, run
    from pfml.training.start import with_moved_corrections

    ranks = f" on {world.size} ranks" if world.size > 1 else ""
    what = config.loss.name if config.effort is None else f"the ladder ({config.effort})"
    print_line(console, f"{what} on {config.data.name}, {config.model.backbone}, in {out}{ranks}")
    monitor = ProgressMonitor(console, said=() if prepared.data is None else prepared.data.remarks)
    if config.effort is not None and read_validated(out) is not None:
        return _finish_ladder(out, console, monitor)
    data, embedder = None, None
    if is_own(config.data.name):
        prepared.data = prepared.data or load_checked(config.resolved().data, monitor.track, storage=config.storage)
        if not resume:
            config = with_moved_corrections(config, out, prepared.data)
        data = prepare_data(config.resolved().data, monitor.track, loaded=prepared.data)
        if prepared.untrained is not None:
            prepared.untrained.cpu()  # the memory of a GPU is for the training
    if config.effort is not None:
        return _run_ladder(config, out, data, resume, console, monitor)
    if shape is None:
        embedder = None if data is None or config.start is not None else create_run_embedder(config)
        results = run(config, out, data=data, embedder=embedder, resume=resume, monitor=monitor, world=world)
    else:
        scores = run_ensemble(
            config, out, shape, data=data, loaded=prepared.data, resume=resume, monitor=monitor, world=world
        )
        if data is not None and shape.correct_labels:  # the comparison and the page have the labels of the student
            data = prepare_data(read_config(RunFolder(out).config).data, monitor.track, loaded=prepared.data)
        if scores:
            title = f"{PROTOCOLS[config.data.split]}: teachers and their student"
            print_scores(console, title, scores)
        results = RunFolder(out).read_results()
    # after the training, so that nobody waits for its first batch
    untrained = None if data is None else _untrained(config, data, out, monitor, world, prepared)
    if not world.is_first:
        return results
    print_results(console, results)
    print_validated(console, out)
    if untrained is not None:
        if not RunFolder(out).entries("untrained"):  # for the report, and for a run that is resumed
            RunFolder(out).append("untrained", 0, test=untrained.scores, image_size=untrained.image_size)
        print_line(console, comparison(untrained, results, config))
    learned = learned_by(out)
    which = f" ({learned.moment})" if learned is not None and learned.moment else ""
    print_line(console, f"{out}: config, log, results; the model{which}: pfml.load_embedder({str(out)!r})")
    if data is not None:
        page = write_run_page(out, data=data.data, embedder=embedder)
        print_line(console, f"{page}: {contents_of(out)}")
    else:
        print_line(console, f"a page about it: pfml report {shell_words(str(out))}")
    return results


def _run_ladder(
    config: RunConfig, out: Path, data: PreparedData | None, resume: bool, console: Console, monitor: Monitor
) -> dict[str, Any]:
    """The results of a run that works up the ladder; prints them, and what was kept."""
    from pfml.ladder.run import run_ladder
    from pfml.pages.run import contents_of, write_run_page
    from pfml.runs.folder import RunFolder
    from pfml.training.shutdown import interruptible

    with interruptible("interrupted"):
        done = run_ladder(config, out, data=data, resume=resume, monitor=monitor)
    untrained = RunFolder(out).entries("untrained")
    print_results(console, done.results, before=untrained[-1]["test"] if untrained else None)
    print_line(console, done.conclusion)
    print_line(console, f"{out}: config, log, results; the model: pfml.load_embedder({str(out)!r})")
    if data is not None:
        page = write_run_page(out, data=data.data, embeddings=done.embeddings)
        print_line(console, f"{page}: {contents_of(out)}")
    return done.results


def _finish_ladder(out: Path, console: Console, monitor: Monitor) -> dict[str, Any]:
    """The results of the final model of a run that worked up the ladder, whose folder is around `out`."""
    from pfml.ladder.run import finish_ladder
    from pfml.runs.folder import RunFolder

    RunFolder(out).config.unlink(missing_ok=True)  # of one that was interrupted: it is fitted again
    results = finish_ladder(out.parent, out, monitor=monitor)
    print_validated(console, out)
    print_line(console, f"{out}: config, log, results; the model: pfml.load_embedder({str(out)!r})")
    return results


def _untrained(
    config: RunConfig, data: PreparedData, out: Path, monitor: Monitor, world: World, prepared: Prepared
) -> Untrained | None:
    """The metrics of the pretrained model; None without one, or where nothing trains or is held out."""
    from pfml.data.decoding import listing_all_unreadable
    from pfml.runs.folder import RunFolder
    from pfml.suggest.comparison import Untrained, untrained_embedder, untrained_scores

    if not config.loss.trains or data.data.protocol == "none":
        return None
    # a run that was interrupted before its end has not noted them
    noted = RunFolder(out).entries("untrained")
    if noted:
        return Untrained(noted[-1]["test"], noted[-1].get("image_size"))
    embedder = prepared.untrained or untrained_embedder(config)
    if embedder is None:
        return None
    with listing_all_unreadable(data.data, track=monitor.track):  # training images as well
        return untrained_scores(embedder, data.data, config, monitor, world)
