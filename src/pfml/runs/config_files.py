"""Configurations as YAML: those that come with the package, and those of runs.

The config.yaml of a run is sealed: its first line, a comment, has the format version of the run folder and a checksum
of the rest. A configuration that was written by hand has no such line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pfml.runs.config import RunConfig, TrainConfig
from pfml.runs.folder import RUN
from pfml.storage.files import DamagedFileError, write_atomically
from pfml.storage.manifest import FormatVersionError
from pfml.typos import did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = [
    "CODE_KEYS",
    "as_it_ran",
    "config_groups",
    "create_config",
    "parse_config",
    "plain",
    "plain_yaml",
    "read_changes",
    "read_config",
    "read_sealed_text",
    "refuse_code",
    "refuse_code_in_text",
    "shipped_config",
    "shipped_configs",
    "write_config",
    "yaml_text",
]

#: How the first line of a sealed configuration starts, and all of it.
SEAL = b"# pfml run, "
SEAL_LINE = re.compile(SEAL + rb"format version (\d{1,9}), sha256 of the next lines: ([0-9a-f]{64})\n")
#: Levels of nesting that a configuration may have; it needs five.
DEEPEST = 32


def plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts, lists and numbers, as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def yaml_text(values: dict[str, Any]) -> str:
    """Plain values as YAML, in their order; by libyaml where it is installed, which is faster."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text


def write_config(path: Path, config: TrainConfig, *, sealed: bool = False) -> None:
    """Write the whole configuration as YAML; `sealed` by version and checksum in its first line, as that of a run."""
    content = yaml_text(plain(config)).encode()
    checksum = hashlib.sha256(content).hexdigest()
    seal = SEAL + f"format version {RUN.version}, sha256 of the next lines: {checksum}\n".encode()
    write_atomically(path, (seal if sealed else b"") + content)


def read_sealed_text(path: Path) -> str:
    """The text of a configuration; of a sealed one, after checking its version and checksum.

    Raises:
        FormatVersionError: If it belongs to a run of another format version.
        DamagedFileError: If the rest of the file is not what was written.
        UnicodeDecodeError: If it is no text.
    """
    content = path.read_bytes()
    if content.startswith(SEAL):
        found = SEAL_LINE.match(content)
        if found and int(found[1]) != RUN.version:
            raise FormatVersionError(
                f"{path} must belong to a run of format version {RUN.version}, got version {int(found[1])}: "
                f"use the pfml that wrote it, or {RUN.remedy}"
            )
        if not found or found[2] != hashlib.sha256(content[found.end() :]).hexdigest().encode():
            raise DamagedFileError(
                f"{path} does not match its own checksum: it was damaged or changed after it was written; "
                f"if you have changed a copy on purpose, remove its first line"
            )
    return content.decode()


def read_config(path: Path) -> RunConfig:
    """The configuration of a run or of a file; unknown keys and wrong values are errors that name them."""
    import yaml
    from jsonargparse import ArgumentError

    if not path.is_file():
        raise FileNotFoundError(f"{path} must be the configuration of a run, but there is no such file")
    try:
        content = plain_yaml(read_sealed_text(path))
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__}, not names and values")
        if not {"data", "model"} <= content.keys():
            raise TypeError("it does not say its data and model; runs that were started from Python do not")
        refuse_code(content, path.name)
        config = create_config(as_it_ran(content, path))
    except DamagedFileError:
        raise
    except (yaml.YAMLError, ArgumentError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must be a configuration: {error}") from None
    return config


def read_changes(path: Path) -> dict[str, Any]:
    """What a file says of a configuration, of which it may be a part; unknown keys and wrong types are errors.

    Raises:
        ValueError: If it cannot be read, would take all memory or import code, or was damaged since a run wrote it.
        jsonargparse.ArgumentError: As `parse_config`.
    """
    import yaml
    from jsonargparse import get_loader

    try:
        text = read_sealed_text(path)
        refuse_code_in_text(text, str(path))
        content = get_loader("yaml")(text)  # which takes 1e-3 for a number
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a configuration: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a configuration, names and values, got {type(content).__name__}")
    content = {name: value for name, value in content.items() if value is not None or name not in config_groups()}
    parse_config(content)
    return as_it_ran(content, path)


def is_sealed(path: Path) -> bool:
    """Whether a configuration is that of a run, not one that was written by hand."""
    with path.open("rb") as file:
        return file.read(len(SEAL)) == SEAL


def as_it_ran(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a configuration; of that of a run, with what held before there were options that it lacks.

    Classes were divided in order, and students had all dimensions of their teachers.
    """
    if not is_sealed(path):
        return content
    content, data = {"teacher_dims": None, **content}, content.get("data")
    return {**content, "data": {"split_seed": None, **data}} if isinstance(data, dict) else content


def parse_config(content: dict[str, Any]) -> Callable[[], RunConfig]:
    """A function that makes a configuration of nested dicts, whose names and types are checked here.

    `content` must have passed `refuse_code`.

    Raises:
        jsonargparse.ArgumentError: For an unknown name or a value of the wrong type.
    """
    parser = _config_parser()
    parsed = parser.parse_object({"run": content})

    def create() -> RunConfig:
        config: RunConfig = parser.instantiate(parsed).run
        return config

    return create


@cache
def _config_parser() -> ArgumentParser:
    """The parser of `RunConfig`, which takes a tenth of a second to make."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RunConfig, "run")
    return parser


def create_config(content: dict[str, Any]) -> RunConfig:
    """The configuration of nested dicts: the errors of `parse_config`, and ValueError for a value out of range."""
    return parse_config(content)()


def plain_yaml(text: str) -> Any:
    """What YAML says; aliases and deep nesting, by which a small file takes all memory, are YAMLErrors."""
    import yaml

    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}: write its value out")
        depth += isinstance(event, yaml.events.CollectionStartEvent)
        depth -= isinstance(event, yaml.events.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} is nested more than {DEEPEST} deep")
    reader = loader(text)
    try:
        return reader.get_single_data()
    finally:
        reader.dispose()


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configurations that come with the package."""
    folder = Path(str(resources.files("pfml"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def shipped_config(name: str) -> RunConfig:
    """The configuration `name` of the package."""
    configs = shipped_configs()
    if name not in configs:
        hint = did_you_mean(name, configs)
        raise ValueError(f"the package must have a configuration of that name, got {name!r}{hint}")
    return read_config(configs[name])


#: Keys by which jsonargparse imports a class and calls it.
CODE_KEYS = ("class_path", "init_args", "dict_kwargs")


@cache
def config_groups() -> frozenset[str]:
    """The dotted names of those options of a run that are groups of options, such as "data" and "data.noise"."""
    return frozenset(_groups(RunConfig, ""))


def refuse_code(content: Any, where: str, at: str = "") -> None:
    """Raise ValueError at a key by which the parser would import code, and at a group that is no mapping.

    Args:
        content: What YAML or JSON says.
        where: The file or option that says it, for messages.
        at: The dotted name of `content` itself; "" for a whole configuration.
    """
    if at in config_groups() and content is not None and not isinstance(content, dict):
        raise ValueError(f"{at!r} of {where} must be names and values, got {content!r}: write its options out")
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        name = f"{at}.{key}" if at else str(key)
        _refuse_key(name, where)
        refuse_code(value, where, name)


def refuse_code_in_text(text: str, where: str, at: str = "") -> None:
    """`refuse_code` for YAML or JSON that is yet to be parsed; YAMLError if it cannot be, or is not plain.

    The parser of configurations may read a text otherwise than `plain_yaml`: both readings are checked.
    """
    from jsonargparse import get_loader

    for content in (plain_yaml(text), get_loader("yaml")(text)):
        refuse_code(content, where, at)


def refuse_code_option(option: str) -> None:
    """Raise ValueError at an option, such as "data.class_path", by which the parser would import code."""
    _refuse_key(option, "the command line")


def _refuse_key(name: str, where: str) -> None:
    for key in CODE_KEYS:
        if key in name.split("."):
            raise ValueError(f"{name!r} in {where} is refused: a configuration has plain values, and {key} names code")


def _groups(config: type, prefix: str) -> list[str]:
    found: list[str] = []
    hints = get_type_hints(config)
    for one in dataclasses.fields(config):
        if dataclasses.is_dataclass(kind := hints[one.name]):
            name = f"{prefix}{one.name}"
            found += [name, *_groups(kind, f"{name}.")]  # type: ignore[arg-type]
    return found
