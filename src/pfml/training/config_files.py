"""Configurations as YAML: those that come with the package, and those of runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.files import DamagedFileError, write_atomically
from pfml.training.config import TrainConfig
from pfml.training.config_code import refuse_code
from pfml.words import did_you_mean

if TYPE_CHECKING:
    from pfml.training.run import RunConfig

__all__ = [
    "plain",
    "plain_yaml",
    "read_config",
    "read_sealed_text",
    "shipped_config",
    "shipped_configs",
    "write_config",
]

#: what the first line of a sealed configuration begins with
SEAL = b"# sha256 of what follows: "
#: levels of names within names that a configuration may have; it needs five
DEEPEST = 32


def plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts, lists and numbers, as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def write_config(path: Path, config: TrainConfig, *, sealed: bool = False) -> None:
    """Write the whole configuration as YAML; `sealed` by a checksum in its first line, as that of a run is."""
    import yaml

    content = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True).encode()
    seal = SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n" if sealed else b""
    write_atomically(path, seal + content)


def read_sealed_text(path: Path) -> str:
    """The text of a configuration, after comparing the checksum in its first line, if it has one.

    Raises:
        DamagedFileError: If the rest of the file is not what was written.
        UnicodeDecodeError: If it is no text.
    """
    content = path.read_bytes()
    if content.startswith(SEAL):
        digits = len(SEAL) + 64
        body = content[digits + 1 :]
        if content[len(SEAL) : digits + 1] != hashlib.sha256(body).hexdigest().encode() + b"\n":
            raise DamagedFileError(
                f"{path} does not match its own checksum: it was damaged or changed after it was written; "
                f"if you have changed a copy on purpose, remove its first line"
            )
    return content.decode()


def read_config(path: Path) -> RunConfig:
    """The configuration of a run or of a file; unknown keys and wrong values are errors that name them."""
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser

    from pfml.training.run import RunConfig

    if not path.is_file():
        raise FileNotFoundError(f"{path} must be the configuration of a run, but there is no such file")
    try:
        content = plain_yaml(read_sealed_text(path))
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__}, not names and values")
        if not {"data", "model"} <= content.keys():
            raise TypeError("it does not say its data and model; runs that were started from Python do not")
        refuse_code(content, path.name)
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(RunConfig, "run")
        config: RunConfig = parser.instantiate(parser.parse_object({"run": content})).run
    except DamagedFileError:
        raise
    except (yaml.YAMLError, ArgumentError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must be a configuration: {error}") from None
    return config


def plain_yaml(text: str) -> Any:
    """What YAML says; aliases and deep nesting, by which a small file takes all memory, are YAMLErrors."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}: write its value out")
        depth += isinstance(event, yaml.events.CollectionStartEvent)
        depth -= isinstance(event, yaml.events.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} is nested more than {DEEPEST} deep")
    return yaml.safe_load(text)


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
