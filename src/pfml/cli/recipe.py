"""`--recipe NAME`: a published recipe as options, which those that are typed override."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfml.cli.parser import Parser
    from pfml.runs.config import RunConfig

__all__ = ["add_recipe_argument", "config_content", "described_recipe", "given_value", "with_recipe"]

#: What of a configuration a recipe decides; the model's backbone and weights, the data and the device are the user's.
DECIDED = (
    "loss.name", "loss.options", "batch", "optimizer", "schedule", "augmentation", "epochs", "warm_up_epochs",
    "warm_up_after", "head_start", "batch_norm", "average", "model.embedding_dim", "model.pooling", "model.layer_norm",
    "model.image_size", "model.resize",
)  # fmt: skip


def add_recipe_argument(parser: Parser) -> None:
    """Add --recipe to a command with the fields of `RunConfig`."""
    parser.add_argument(
        "--recipe",
        help="NAME: train this method as it was published for the data set (cub if none is given) and the backbone; "
        "options that are given override it. `pfml methods --recipe NAME` prints it.",
    )


def with_recipe(arguments: list[str]) -> list[str]:
    """`arguments` with the options of the recipe that --recipe names put before the typed ones, which override them.

    The data set and the backbone are those of the options, else of a configuration file, else CUB and ResNet-50.

    Raises:
        ValueError: There is no such recipe, or --loss.name names another method.
    """
    from pfml.models import EmbedderConfig
    from pfml.runs.config import DataConfig, RunConfig
    from pfml.runs.config_files import plain
    from pfml.runs.recipes import recipe_config

    name = given_value(arguments, "--recipe")
    if name is None:
        return arguments
    if given_value(arguments, "--loss.name") not in (None, name):
        raise ValueError(f"--recipe {name} trains {name}: leave out --loss.name")
    file = config_content(given_value(arguments, "--config"))
    dataset = given_value(arguments, "--data.name") or file.get("data", {}).get("name") or "cub"
    backbone = given_value(arguments, "--model.backbone") or file.get("model", {}).get("backbone") or "resnet50"
    base = RunConfig(data=DataConfig(dataset), model=EmbedderConfig(backbone))
    values = plain(recipe_config(name, base, published=True))
    options = [f"--data.name={dataset}", f"--model.backbone={backbone}"]
    for option in DECIDED:
        options += _options(option, _value(values, option))
    return [arguments[0], *options, *arguments[1:]]


def described_recipe(name: str | None, config: RunConfig) -> list[str]:
    """Lines that say what the recipe of a run is, and what of it is not as published; none without a recipe."""
    from pfml.cli.methods import recipe_lines
    from pfml.runs.recipes import published_recipe

    if name is None:
        return []
    return recipe_lines(name, published_recipe(name, config.data.name, config.model.backbone))


def given_value(arguments: list[str], wanted: str) -> str | None:
    """The last value of an option, as --option VALUE or --option=VALUE; None if it is not there."""
    found = None
    for place, argument in enumerate(arguments):
        option, separator, value = argument.partition("=")
        if option == wanted:
            found = value if separator else "".join(arguments[place + 1 : place + 2])
    return found


def config_content(config: str | None) -> dict[str, Any]:
    """What a configuration file says; nothing if it cannot be read, which the parser will say."""
    import yaml

    from pfml.runs.config_files import plain_yaml, shipped_configs

    if config is None:
        return {}
    path = Path(config) if Path(config).exists() else shipped_configs().get(config)
    try:
        content = plain_yaml(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    groups = content if isinstance(content, dict) else {}
    return {name: value for name, value in groups.items() if isinstance(value, dict)}


def _value(values: dict[str, Any], option: str) -> Any:
    for part in option.split("."):
        values = values[part]
    return values


def _options(option: str, value: Any) -> list[str]:
    """--option=value, or one for each field of a group; the options of a loss are one value."""
    if isinstance(value, dict) and option != "loss.options":
        return [each for name, inner in value.items() for each in _options(f"{option}.{name}", inner)]
    return [f"--{option}={value if isinstance(value, str) else json.dumps(value)}"]
