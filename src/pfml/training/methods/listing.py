"""The table of methods, to be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pfml.training.methods.method import Method
from pfml.training.methods.table import METHODS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["markdown_table", "recipe_yaml", "rich_table"]


def rich_table() -> Table:
    """Name, what it is, its options and source, for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "loss", "options", "source")
    for name, method in METHODS.items():
        table.add_row(name, *(escape(cell) for cell in (_loss(method), _options(method), method.source)))
    return table


def markdown_table() -> str:
    """The whole table."""
    headings = ("name", "loss", "chooses from the batch", "learns", "options", "published with", "source", "notes")
    lines = [headings, ("---",) * len(headings)]
    for name, method in METHODS.items():
        recipe = method.recipe
        notes = "; ".join(filter(None, [method.note, recipe.departs and f"recipe: {recipe.departs}" if recipe else ""]))
        published = recipe.describe() if recipe else ""
        cells = (method.description, method.miner, method.learns, _options(method), published, method.source, notes)
        lines.append((f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def recipe_yaml(name: str) -> str:
    """The published recipe of a method as a configuration file, for CUB with ResNet-50 where the recipe is silent."""
    import yaml

    from pfml.training.config_files import plain, shipped_config
    from pfml.training.methods.recipes import recipe_config

    base = shipped_config("cub-resnet50-512")
    content = plain(recipe_config(name, base, published=True))
    recipe = METHODS[name].recipe
    assert recipe is not None
    lines = [f"# {name}: {recipe.describe()}", *([f"# not as published: {recipe.departs}"] if recipe.departs else [])]
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _loss(method: Method) -> str:
    return method.description + (f"; {method.miner}" if method.miner else "")


def _options(method: Method) -> str:
    """All options, or of many the first four and those that the name sets."""
    options = method.options()
    shown = {name: value for place, (name, value) in enumerate(options.items()) if place < 4 or name in method.values}
    few = len(options) <= 8
    text = ", ".join(f"{name} {_value(value)}" for name, value in (options if few else shown).items())
    return text if few else f"{text}, ..."


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
