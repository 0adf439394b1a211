"""`pfml methods`: the table of methods and their published recipes, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, print_json
from pfml.cli.parser import add_json_option

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.table import Table

    from pfml.methods import Method
    from pfml.methods.recipe import PublishedRecipe, Recipe

__all__ = ["add_methods_arguments", "markdown_table", "methods", "recipe_lines", "recipe_table", "recipe_yaml"]


def methods(
    markdown: bool = False,
    recipe: str | None = None,
    dataset: str = "cub",
    backbone: str = "resnet50",
    as_json: bool = False,
) -> None:
    """List the methods that --loss.name may name, with their options."""
    if as_json:
        from pfml.methods.table import METHODS

        about = {name: (method.description, method.source, method.options()) for name, method in METHODS.items()}
        print_json(
            {
                name: {"loss": loss, "source": source, "options": values}
                for name, (loss, source, values) in about.items()
            }
        )
    elif recipe is not None:
        print(recipe_yaml(recipe, dataset, backbone), end="")
    elif markdown:
        print(f"{markdown_table()}\n\n{recipe_table()}")
    else:
        create_console().print(_rich_table())


def add_methods_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `methods`: what to print instead of the table."""
    text = "As in docs/METHODS.md, with recipes and notes."
    parser.add_argument("--markdown", action="store_true", help=text)
    parser.add_argument("--recipe", help="NAME: how it was published, as a file for `pfml train --config`.")
    parser.add_argument(
        "--data",
        "--dataset",
        dest="dataset",
        default="cub",
        help="What the recipe is for: cub, cars, sop, in-shop or another.",
    )
    parser.add_argument("--backbone", default="resnet50", help="The backbone that it is for.")
    add_json_option(parser)


def _rich_table() -> Table:
    """Name, what it is, its options and source, for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    from pfml.methods.table import METHODS

    table = Table("name", "loss", "options", "source")
    for name, method in METHODS.items():
        table.add_row(name, *(escape(cell) for cell in (_loss(method), _options(method), method.source)))
    return table


def markdown_table() -> str:
    """The whole table."""
    from pfml.methods.table import METHODS

    headings = ("name", "loss", "chooses from the batch", "learns", "options", "source", "notes")
    rows = [
        (f"`{name}`", method.description, method.miner, method.learns, _options(method), method.source, method.note)
        for name, method in METHODS.items()
    ]
    return _markdown(headings, rows)


def recipe_table() -> str:
    """What the published recipes are for, where their values stand and what they leave out, a row for each file."""
    from pfml.methods.recipe import read_recipes
    from pfml.methods.table import METHODS

    headings = ("methods", "recipes", "source", "not as published")
    sharing: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        sharing.setdefault(method.recipe_file, []).append(f"`{name}`")
    sharing.pop("", None)
    rows = []
    for file, names in sharing.items():
        recipes = read_recipes(file)
        sources = _by_setting(recipes, [[recipe.source] for recipe in recipes])
        departures = _by_setting(recipes, [recipe.departs.split("; ") for recipe in recipes])
        rows.append((", ".join(names), _setting(recipes, ()), sources, departures))
    return _markdown(headings, rows)


def _by_setting(recipes: Sequence[Recipe], remarks: Sequence[Sequence[str]]) -> str:
    """Each remark once: first those about all recipes, then the others under the recipes that they are about."""
    about: dict[str, list[Recipe]] = {}
    for recipe, said in zip(recipes, remarks, strict=True):
        for remark in filter(None, said):
            about.setdefault(remark, []).append(recipe)
    groups: dict[str, list[str]] = {"": []}
    for remark, those in about.items():
        setting = _setting(those, recipes) if len(those) < len(recipes) else ""
        groups.setdefault(setting, []).append(remark)
    texts = [(f"{setting}: " if setting else "") + "; ".join(group) for setting, group in groups.items() if group]
    return "<br>".join(texts)


def _setting(recipes: Sequence[Recipe], among: Sequence[Recipe]) -> str:
    """The backbones of recipes, with their data sets unless these are all `among` others, or the data sets alone."""
    datasets: dict[str, list[str]] = {}
    for recipe in recipes:
        datasets.setdefault(recipe.backbone or "any backbone", []).append(recipe.dataset or "any data set")
    backbones = {recipe.backbone for recipe in among}
    whole = [one for one in among if one.backbone in {recipe.backbone for recipe in recipes}]
    if len(whole) == len(recipes):
        return ", ".join(datasets)
    if len(backbones) == 1:
        return ", ".join(dict.fromkeys(recipe.dataset or "any data set" for recipe in recipes))
    return "; ".join(f"{backbone} on {', '.join(names)}" for backbone, names in datasets.items())


def recipe_yaml(name: str, dataset: str = "cub", backbone: str = "resnet50") -> str:
    """The published recipe of a method as a configuration file; where it is silent, the defaults of `RunConfig`."""
    import yaml

    from pfml.models import EmbedderConfig
    from pfml.runs.config import DataConfig, RunConfig
    from pfml.runs.config_files import plain
    from pfml.runs.recipes import published_recipe, recipe_config

    base = RunConfig(data=DataConfig(dataset), model=EmbedderConfig(backbone))
    content = plain(recipe_config(name, base, published=True))
    lines = recipe_lines(name, published_recipe(name, dataset, backbone))
    return (
        "\n".join(f"# {line}" for line in lines) + "\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    )


def recipe_lines(name: str, published: PublishedRecipe) -> list[str]:
    """What a recipe is, whose values it has if its authors give none for what was asked, and what it lacks."""
    recipe = published.recipe
    lines = [f"{name}, {recipe.setting}: {recipe.describe()}", published.remark]
    return [*filter(None, lines), *([f"not as published: {recipe.departs}"] if recipe.departs else [])]


def _markdown(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _loss(method: Method) -> str:
    return method.description + (f"; {method.miner}" if method.miner else "")


def _options(method: Method) -> str:
    """All options, or of many the first four and those that the name sets."""
    options = method.options()
    shown = {name: value for number, (name, value) in enumerate(options.items()) if number < 4 or name in method.values}
    few = len(options) <= 8
    text = ", ".join(f"{name} {_value(value)}" for name, value in (options if few else shown).items())
    return text if few else f"{text}, ..."


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
