"""Options that nobody gave, suggested from one's own images: `pfml train --data FOLDER` needs no other."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, print_line, remarks_printed
from pfml.cli.error_reporting import end
from pfml.cli.parser import DATA_TAKES, with_run_config
from pfml.cli.recipe import given_value
from pfml.cli.train import is_own

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.cli.parser import Parser
    from pfml.data import RetrievalData
    from pfml.models import EmbedderConfig
    from pfml.runs.config import RunConfig
    from pfml.suggest.first_look import InitialDistances
    from pfml.suggest.suggest import Suggestion

__all__ = ["refuse_nothing", "with_long_data", "with_suggestions"]

#: What says already how to train, or trains nothing.
SETTLED = {"config", "recipe", "resume", "help"}
#: Images that are looked at before training.
LOOKED_AT = {"cpu": 96, "cuda": 512}
#: Argument of `suggest` -> the option that it is: what else is suggested depends on it.
DECIDED_FIRST = {
    "validation": ("data", "validation"),
    "batch_size": ("batch", "size"),
    "samples_per_class": ("batch", "samples_per_class"),
}


def refuse_nothing(arguments: list[str]) -> None:
    """End the program with what to give if `train` or `tune` was typed without anything."""
    if len(arguments) == 1:
        sys.stderr.write(
            f"pfml {arguments[0]}: error: give the images to learn from, --data FOLDER (a folder per class in it) or "
            f"--data FILE.csv (columns path and label), or --config glyphs for the letters that come with the package\n"
        )
        sys.exit(2)


def with_long_data(arguments: list[str]) -> list[str]:
    """--data X as --data.name X; a group of options as JSON or in a file stays what it is.

    Without a value the program ends: an empty path would be that of the current folder.
    """
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, separator, value = argument.partition("=")
        if option != "--data":
            found.append(argument)
            continue
        value = value if separator else next(rest, "")
        if not value or value.startswith("--"):
            got = f"got the option {value}" if value else "got nothing"
            end(f"pfml {arguments[0]}", f"--data must be followed by {DATA_TAKES}, {got}", status=2)
        is_group = value.startswith("{") or Path(value).suffix in (".yaml", ".yml", ".json")
        found.append(f"--data={value}" if is_group else f"--data.name={value}")
    return found


def with_suggestions(parser: Parser, arguments: list[str]) -> list[str]:
    """`arguments` with what suits the images put before them, so that what the user gives overrides; prints reasons.

    Nothing is added for data sets by name, for a resumed run, and where a configuration says it all.
    """
    from pfml.distributed.launch import Launch, decided_by_first
    from pfml.runs.folder import RunFolder

    given = given_options(arguments)
    if given & SETTLED:
        return arguments
    # which would print and end before anything is suggested
    values = _parsed(parser, _consistent([each for each in arguments if not each.startswith("--print_config")]))
    user: RunConfig = values["config"]
    if not is_own(user.data.name):
        return arguments
    # torchrun's later starts find the run that its first one has begun
    if arguments[0] == "train" and values["out"] is not None and not Launch.of_process().restarts:
        RunFolder(values["out"]).refuse_run()
    # epochs and crops depend on how fast this machine is just now: every rank would find other ones
    split = values["split"] if arguments[0] == "tune" else None
    added = json.loads(decided_by_first("what it suggests", lambda: json.dumps(_added(user, given, split))))
    return [arguments[0], *added, *arguments[1:]]


def _added(user: RunConfig, given: set[str], split: str | None) -> list[str]:
    """The options that suit the images, but for those that the user has decided; prints reasons."""
    from pfml.methods import METHODS

    # what is printed with --print_config goes to a file, without the reasons
    console = create_console(stderr="print_config" in given)
    is_untrained = user.loss.name in METHODS and not METHODS[user.loss.name].trains
    suggestion = _network_alone() if is_untrained else _suggestion(user, given, split, console)
    added: list[str] = []
    if all(_is_decided(option, given) for option in suggestion.reasons):
        return added
    print_line(console, "suggested for these images; any of it can be given instead:")
    for option, reason in suggestion.reasons.items():
        if _is_decided(option, given) or (option == "data.validation" and split is not None):
            continue  # tune divides the training classes itself
        value = _value(suggestion.config, option)
        added.append(f"--{option}={'null' if value is None else value}")
        print_line(console, f"  {added[-1].replace('=', ' ', 1)}: {reason}")
    return added


def _is_decided(option: str, given: set[str]) -> bool:
    """Whether the user gave `option`, or a group that it is in; options of a loss are those of the named one."""
    parents = {option.rpartition(".")[0], option.split(".")[0]}
    return option in given or bool(parents & given) or ("loss.name" in given and option.startswith("loss."))


def given_options(arguments: list[str]) -> set[str]:
    """Names of the options in `arguments`, without dashes."""
    return {match[1] for argument in arguments if (match := re.match(r"--([\w.-]+)", argument))}


def _consistent(arguments: list[str]) -> list[str]:
    """`arguments` with the other one of size and samples of a batch, where one is given: the default may not fit it."""
    size, each = given_value(arguments, "--batch.size"), given_value(arguments, "--batch.samples_per_class")
    if (size is None) == (each is None):
        return arguments
    fitting = "--batch.samples_per_class=0" if each is None else f"--batch.size={each if each != '0' else 1}"
    return [arguments[0], fitting, *arguments[1:]]


def _parsed(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    parsed = parser.parse_args(arguments)
    return with_run_config(vars(parser.instantiate(parsed)[parsed.command]))


def _network_alone() -> Suggestion:
    """For a run that trains nothing: the network that would be trained, at the resolution that it comes with."""
    from pfml.runs.config import RunConfig
    from pfml.suggest.suggest import Suggestion, suggest_model

    model, reasons = suggest_model(None)
    return Suggestion(RunConfig(model=model), {"model.backbone": reasons["model.backbone"]})


def _suggestion(user: RunConfig, given: set[str], split: str | None, console: Console) -> Suggestion:
    """Look at the images with the network that will be trained, then decide the rest.

    With `split`, it is for the classes that are left to train on when the training classes are divided for tuning.
    """
    from pfml.data import check_data, load_data
    from pfml.data.own_images import own_images
    from pfml.suggest.first_look import typical_short_side
    from pfml.suggest.suggest import suggest, suggest_model
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    config = user.resolved().data  # as the run has it, and names files
    data = load_data(config.name, config.root)
    device = resolve_device(user.device)
    fixed = {
        name: getattr(getattr(user, group), field)
        for name, (group, field) in DECIDED_FIRST.items()
        if f"{group}.{field}" in given or group in given
    }
    if split is not None:
        fixed.pop("validation", None)  # tune divides the training classes itself
    suggest(data, None, device, **fixed)  # what cannot be trained on is said before anything is computed
    track = ProgressMonitor(console).track
    if user.data.unreadable == "refuse":
        check_data(data, track=track)  # all parts, which a run reads one by one
    data = own_images(config.name, data, user.data.unreadable, track)
    for remark in data.remarks:  # what is left out comes first: everything below rests on the rest
        print_line(console, remark)
    remarks_printed.set(data.remarks)
    suggest(data, None, device, **fixed)
    if split is not None:
        data = _divided(data, split)
        suggest(data, None, device, **fixed)
    short_side = typical_short_side(data.train)
    model, _ = suggest_model(short_side)
    chosen = {name.removeprefix("model."): getattr(user.model, name[6:]) for name in given if name.startswith("model.")}
    if "backbone" in chosen and "image_size" not in chosen:
        model = replace(model, image_size=None)
    distances = _distances(replace(model, **chosen), data, str(device), user.seed, console)
    suggestion = suggest(data, distances, device, short_side=short_side, **fixed)
    if "backbone" in chosen:
        suggestion.reasons.pop("model.image_size", None)
    return suggestion


def _divided(data: RetrievalData, split: str) -> RetrievalData:
    """What trials of `pfml tune` train on and are judged by."""
    from pfml.data import with_validation

    divided = with_validation(data, split)
    judges = divided.validation
    if judges is None or divided.train.num_classes < 2 or int(judges.labels.bincount().max()) < 2:
        raise ValueError(
            f"tuning divides the training classes once more, and must keep 2 to train on and one with two images to "
            f"judge by; of {data.train.num_classes} training classes, --split {split} leaves "
            f"{divided.train.num_classes}: add class folders, or take another split (half, fold-0 to fold-3)"
        )
    return replace(divided, test=judges, validation=None, gallery=None)


def _distances(
    model: EmbedderConfig, data: RetrievalData, device: str, seed: int, console: Console
) -> InitialDistances | None:
    """Distances as the network places images before training; None for one without pretrained weights."""
    from pfml.models import Embedder
    from pfml.models.backbone_table import default_weights
    from pfml.suggest.first_look import first_look
    from pfml.training.environment import seeded
    from pfml.training.progress import ProgressMonitor

    weights = default_weights(model.backbone) if model.weights == "default" else model.weights
    if weights == "none":
        return None
    with seeded(seed):
        embedder = Embedder(model).to(device)
    limit = LOOKED_AT["cuda" if device.startswith("cuda") else "cpu"]
    return first_look(embedder, data.train, limit=limit, seed=seed, track=ProgressMonitor(console).track)


def _value(config: RunConfig, option: str) -> Any:
    value: Any = config
    for part in option.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
