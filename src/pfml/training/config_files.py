"""Configurations as YAML: those that come with the package, and those of runs."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.files import write_atomically
from pfml.training.config import TrainConfig
from pfml.training.config_code import refuse_code
from pfml.words import did_you_mean

if TYPE_CHECKING:
    from pfml.training.run import RunConfig

__all__ = ["plain", "plain_yaml", "read_config", "shipped_config", "shipped_configs", "write_config"]

#: levels of names within names that a configuration may have; it needs five
DEEPEST = 32


def plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts, lists and numbers, as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def write_config(path: Path, config: TrainConfig) -> None:
    """Write the whole configuration as YAML."""
    import yaml

    write_atomically(path, yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True).encode())


def read_config(path: Path) -> RunConfig:
    """The configuration of a run or of a file; unknown keys and wrong values are errors that name them."""
    import yaml
    from jsonargparse import ArgumentError, ArgumentParser

    from pfml.training.run import RunConfig

    if not path.is_file():
        raise FileNotFoundError(f"{path} must be the configuration of a run, but there is no such file")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RunConfig, "run")
    try:
        content = plain_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__}, not names and values")
        if not {"data", "model"} <= content.keys():
            raise TypeError("it does not say its data and model; runs that were started from Python do not")
        refuse_code(content, path.name)
        values = parser.parse_object({"run": content})
    except (yaml.YAMLError, ArgumentError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must be a configuration: {error}") from None
    return parser.instantiate(values).run


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
