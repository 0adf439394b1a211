"""The options of `pfml train` and `pfml tune`: the fields of `RunConfig`, configuration files and published recipes.

Values come in layers, and each overrides those before it: the defaults, --config, --recipe, what is typed. Images of
one's own get a further layer below what is typed, the suggestions (`pfml.suggest`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from pfml.cli.error_reporting import exit_with_error
from pfml.cli.parser import METAVARS, Parser, shown_default, with_declared_spelling
from pfml.own_code import is_reference, trust
from pfml.runs.layers import flattened, merged, with_changes
from pfml.typos import did_you_mean

if TYPE_CHECKING:
    from pfml.runs.config import RunConfig

__all__ = ["add_run_options", "described_recipe", "field_texts", "option_group", "parsed_run_values"]

#: What may follow --data.
DATA_TAKES = "a folder with a folder per class in it, a CSV with the columns path and label, or the name of a data set"
#: Endings of files that hold a group of options.
GROUP_FILES = (".yaml", ".yml", ".json")
#: What of a configuration a recipe decides; the model's backbone and weights, the data and the device are the user's.
DECIDED_BY_RECIPE = (
    "loss", "batch", "optimizer", "schedule", "augmentation", "epochs", "warm_up_epochs", "warm_up_after",
    "head_start", "batch_norm", "average", "model.embedding_dim", "model.pooling", "model.layer_norm",
    "model.parts", "model.relations", "model.sub_blocks", "model.image_size", "model.resize",
)  # fmt: skip
#: What a student follows its teachers by if no loss is named: the choice of validation classes of CUB.
STUDENT_LOSS = "relaxed-contrastive"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `RunConfig`, --config, --recipe and --print_config; only what is typed gets a value."""
    from pfml.runs.config import RunConfig
    from pfml.runs.config_files import shipped_configs

    # of some sixty options, a usage with all of them would hide what is needed
    parser.usage = f"{parser.prog} (--data DATA | --config CONFIG) [options]"
    add = parser.add_argument
    shipped = ", ".join(shipped_configs())
    add(
        "--config",
        action="append",
        default=argparse.SUPPRESS,
        help=f"A YAML file, or a configuration of the package: {shipped}.",
    )
    add(
        "--recipe",
        help="NAME: train this method as it was published for the data set (cub if none is given) and the backbone; "
        "options that are typed override it. `pfml methods --recipe NAME` prints it.",
    )
    add("--print_config", action="store_true", help="Print the configuration that the options amount to, and end.")
    _add_fields(parser, RunConfig, "", "")


def parsed_run_values(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """The arguments of a command's function: `config`, the names of the options in it that were typed, and the others.

    `given` is None where a configuration file, a recipe or a run to resume says how to train: nothing is to be
    suggested then. A mistake in what was typed, or in a file, ends the program with status 2.
    """
    from jsonargparse import ArgumentError

    from pfml.runs.config_files import create_config

    if not arguments:
        what = "give the images to learn from, --data FOLDER (a folder per class in it) or --data FILE.csv (columns "
        exit_with_error(parser.prog, f"{what}path and label), or --config glyphs for the embedded glyphs", status=2)
    _add_loss_options(parser, arguments)
    values = vars(parser.parse_args(arguments))
    try:
        typed, others = _typed(values, parser)
        if (continued := others.get("from_run")) is not None:
            content = _continued(continued, typed, others)
        else:
            content = _layers(typed, others.pop("config", []), others["recipe"], parser)
        begun = [others.get(name) is not None for name in ("resume", "final", "from_run")]
        decided = others["recipe"] is not None or "config" in values or any(begun)
        given = None if decided else frozenset(flattened(typed))
        config = create_config(_with_fitting_batch(content, given))
        _refuse_beside_an_effort(config, typed, values)
    except ArgumentError as error:
        parser.error(str(error))
    return {"config": config, "given": given, **others}


def described_recipe(name: str | None, config: RunConfig) -> list[str]:
    """Lines that say what the recipe of a run is, and what of it is not as published; none without a recipe."""
    from pfml.cli.methods import recipe_lines
    from pfml.runs.recipes import published_recipe

    if name is None:
        return []
    return recipe_lines(name, published_recipe(name, config.data.name, config.model.backbone))


# --- options from the fields of dataclasses


def _add_fields(parser: Any, config: type, prefix: str, title: str) -> None:
    """An option for each field, and a section of the help for each group of them."""
    texts, hints = field_texts(config), get_type_hints(config)
    section = parser.add_argument_group(title or "the run")
    if prefix:
        _add_group_option(section, prefix)
    groups = []
    for field in dataclasses.fields(config):
        name = f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            groups.append((hints[field.name], name))
        elif name == "loss.options":
            _add_group_option(section, name, texts[field.name])
        else:
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[operator]
            _add_field(section, name, hints[field.name], default, texts[field.name])
    for group, name in groups:
        _add_fields(parser, group, name, (group.__doc__ or "").split("\n")[0].rstrip("."))


def _add_field(section: Any, name: str, hint: Any, default: Any, text: str) -> None:
    kinds = [one for one in get_args(hint) if one is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    note = shown_default(default) if not isinstance(default, str) or default else ""
    options: dict[str, Any] = {"help": f"{text} (default: {note})" if note else text, "default": argparse.SUPPRESS}
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(hint) is tuple:
        kind, *others = get_args(hint)
        options |= {"nargs": "*" if others == [...] else 1 + len(others), "type": kind, "metavar": _metavar(name, kind)}
    elif get_origin(kinds[0]) is Literal:
        options["choices"] = get_args(kinds[0])
    else:
        kind, *others = kinds
        words = {word: word for one in others if get_origin(one) is Literal for word in get_args(one)}
        words |= {"null": None} if NoneType in get_args(hint) else {}
        options |= {"type": _or_word(kind, words) if words else kind, "metavar": _metavar(name, kind)}
    action = section.add_argument(f"--{name}", **options)
    if name == "teachers":
        action.nargs, action.takes = "+", "the folders of runs"


def _add_group_option(section: Any, name: str, text: str = "") -> None:
    help_ = f"{text} One by one as --{name}.NAME VALUE." if text else "A YAML or JSON file of the options below."
    metavar, kind, takes = "FILE", option_group(name), "a YAML or JSON file, or JSON"
    if name == "data":
        metavar, kind, takes = "DATA", _data, DATA_TAKES
        help_ = f"The images: {DATA_TAKES} (see --data.name); or a YAML or JSON file of the options below."
    elif text:
        metavar = "JSON"
    action = section.add_argument(f"--{name}", type=kind, metavar=metavar, help=help_, default=argparse.SUPPRESS)
    action.takes = takes


def _add_loss_options(parser: Parser, arguments: list[str]) -> None:
    """Each loss has options of its own: those that are typed become options of the parser."""
    for argument in with_declared_spelling(arguments, parser._option_string_actions):
        option = argument.partition("=")[0]
        if option.startswith("--loss.options.") and option not in parser._option_string_actions:
            parser.add_argument(option, type=_yaml_value(option[2:]), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def field_texts(config: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of its bases say about its fields, in words of the command line."""
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        for argument in parse(base.__doc__ or "").params:
            # YAML and the command line write null where Python has None
            words = " ".join((argument.description or "").split())
            texts[argument.arg_name] = words.replace("None ", "null ").replace("None;", "null;")
    return texts


def _metavar(name: str, kind: Any) -> str:
    return METAVARS.get(kind) or name.rpartition(".")[2].upper()


def _or_word(kind: Callable[[str], Any], words: Mapping[str, Any]) -> Callable[[str], Any]:
    """A converter that returns the value of a word, and converts other texts by `kind`."""

    def convert(text: str) -> Any:
        return words[text] if text in words else kind(text)

    convert.__name__ = kind.__name__  # for argparse's "invalid int value"
    return convert


def _yaml_value(name: str) -> Callable[[str], Any]:
    """A converter of the value of an option that may have any type."""

    def convert(text: str) -> Any:
        import yaml

        from pfml.runs.config_files import plain_yaml

        for kind in (int, float):  # YAML takes 1e-3 for a text
            try:
                return kind(text)
            except ValueError:
                continue
        try:
            return plain_yaml(text)
        except yaml.YAMLError as error:
            raise argparse.ArgumentTypeError(f"{name!r} must be plain YAML or JSON: {error}") from None

    return convert


def option_group(name: str) -> Callable[[str], Any]:
    """A converter of the value of a group of options: a file, or its content."""

    def convert(text: str) -> Any:
        import yaml

        from pfml.runs.config_files import plain_yaml, refuse_code

        where = "the command line"
        try:
            if Path(text).suffix in GROUP_FILES and not text.startswith("{"):
                where, text = text, Path(text).read_text(encoding="utf-8")
            content = plain_yaml(text)
            refuse_code(content, where, name)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{name!r} must be plain YAML or JSON, got {where}: {error}") from None
        except OSError as error:
            message = f"{name!r} must be a file that can be read, got {where}: {error.strerror}"
            raise argparse.ArgumentTypeError(message) from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return content

    return convert


def _data(text: str) -> Any:
    """Converts the value of --data: the name of the images, or the group of all options of them."""
    if not text:  # which pathlib takes for the working directory
        raise argparse.ArgumentTypeError(f"must be followed by {DATA_TAKES}, got an empty name")
    if text.startswith("{") or Path(text).suffix in GROUP_FILES:
        return option_group("data")(text)
    return {"name": text}


# --- values in layers


def _typed(values: dict[str, Any], parser: Parser) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `RunConfig` that were typed, as nested dicts, and the other options."""
    from pfml.runs.config import RunConfig
    from pfml.runs.config_files import refuse_code

    fields = {field.name for field in dataclasses.fields(RunConfig)}
    typed: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: name.count(".")):  # groups before the options in them
        if name.partition(".")[0] in fields:
            value = str(values[name]) if isinstance(values[name], Path) else values[name]
            typed = merged(typed, _nested(name, value))
    trust(*(name for name in (values.get("model.backbone"), values.get("loss.name")) if name and is_reference(name)))
    try:
        refuse_code(typed, "the command line")
    except ValueError as error:
        parser.error(str(error))
    return typed, {name: value for name, value in values.items() if name.partition(".")[0] not in fields}


def _layers(typed: dict[str, Any], files: list[str], recipe: str | None, parser: Parser) -> dict[str, Any]:
    """The values of files, the recipe and the command line; each overrides those before it."""
    content: dict[str, Any] = {}
    for name in files:
        content = merged(content, _file_content(name, parser))
    if "name" in typed.get("data", {}) and content.get("data", {}).get("split_seed", 0) is None:
        del content["data"]["split_seed"]  # by which an older run divided its own images
    loss = typed.get("loss", {}).get("name")
    if recipe is not None:
        if merged(content, typed).get("effort") is not None:
            raise ValueError("the ladder decides by itself how to train: leave out --recipe, or leave out the effort")
        if loss not in (None, recipe):
            raise ValueError(f"--recipe {recipe} trains {recipe}: leave out --loss.name")
        content = merged(content, _recipe_content(recipe, merged(content, typed)))
    elif "teachers" in typed and loss is None and not _is_student(content.get("loss", {}).get("name")):
        content = {**content, "loss": {"name": STUDENT_LOSS}}
    return with_changes(content, typed)


def _continued(run: Path, typed: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The values of a run that continues `run` with the images of --data, those that are typed above its own."""
    from pfml.runs.config_files import plain
    from pfml.training.start import continued_config

    if others.get("config") or others["recipe"] is not None:
        raise ValueError("--from has the settings of its run: leave out --config and --recipe")
    data = dict(typed.get("data", {}))
    more = data.pop("name", None)
    if more is None:
        raise ValueError(f"--from {run} needs the images to add: --data FOLDER, or --data FILE.csv")
    fixed = [f"--data.{name}" for name in data if name not in ("corrections", "unreadable")]
    fixed += [f"--{name}" for name in ("model", "start", "effort") if name in typed]
    if fixed:
        raise ValueError(f"--from continues {run}, its division and its model: leave out {', '.join(sorted(fixed))}")
    return with_changes(plain(continued_config(run, more)), {**typed, "data": data})


def _refuse_beside_an_effort(config: RunConfig, typed: dict[str, Any], values: dict[str, Any]) -> None:
    """Refuse typed options that the ladder would ignore, whether the effort is typed or that of a file or a run."""
    from pfml.ladder.run import refuse_other_options

    if config.effort is None:
        return
    asked = [*flattened(typed), *(["ensemble"] if values.get("ensemble") is not None else [])]
    where = "--effort" if "effort" in typed else "the effort in --config" if "config" in values else None
    refuse_other_options(asked, where)


def _file_content(name: str, parser: Parser) -> dict[str, Any]:
    """The values of a configuration file.

    A file that would take all memory or import code, or was damaged since a run wrote it, ends the program.
    """
    from pfml.runs.config_files import read_changes, shipped_configs

    shipped = shipped_configs()
    file = Path(name) if Path(name).exists() else shipped.get(name)
    if file is None:
        hint = did_you_mean(name, shipped) or f"; the package has {', '.join(shipped)}"
        parser.error(f"{name!r} is neither a file nor a configuration of the package{hint}")
    try:
        return read_changes(file)
    except ValueError as error:
        parser.error(str(error))


def _recipe_content(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The published recipe for the data set and the backbone of `content`, else CUB and ResNet-50."""
    from pfml.models import EmbedderConfig
    from pfml.runs.config import DataConfig, RunConfig
    from pfml.runs.config_files import plain
    from pfml.runs.recipes import recipe_config

    dataset = content.get("data", {}).get("name") or "cub"
    backbone = content.get("model", {}).get("backbone") or "resnet50"
    base = RunConfig(data=DataConfig(dataset), model=EmbedderConfig(backbone))
    values = plain(recipe_config(name, base, published=True))
    found = merged(_nested("data.name", dataset), _nested("model.backbone", backbone))
    for option in DECIDED_BY_RECIPE:
        value: Any = values
        for part in option.split("."):
            value = value[part]
        found = merged(found, _nested(option, value))
    return found


def _is_student(loss: str | None) -> bool:
    from pfml.methods import METHODS

    return loss in METHODS and METHODS[loss].from_teachers


def _with_fitting_batch(content: dict[str, Any], given: frozenset[str] | None) -> dict[str, Any]:
    """`content` where suggestions follow, with a batch that is valid until then: a default may not fit what is given.

    A batch size need not be a multiple of the default of samples per class, and the other way round.
    """
    size, each = "batch.size", "batch.samples_per_class"
    from pfml.data.own_images import is_own

    if given is None or (size in given) == (each in given) or not is_own(content.get("data", {}).get("name", "glyphs")):
        return content
    batch = content["batch"]
    other = {"samples_per_class": 0} if size in given else {"size": batch["samples_per_class"] or 1}
    return {**content, "batch": {**batch, **other}}


def _nested(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for part in reversed(name.split(".")):
        value = {part: value}
    result: dict[str, Any] = value
    return result
