"""Published recipes against facts/NAME.toml: the same values as they were read in the sources once more.

A facts file has a `[[fact]]` for a value: `key` (a field of `Recipe`, or options.NAME), `value` and `source`, where it
stands. `dataset` and `backbone` say which recipe it is about; without them it is about all of the file. Values that a
recipe states and no source confirms are in the list `unconfirmed` at the top.
"""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import pfml.methods
from pfml.methods import METHODS
from pfml.methods.recipe import Recipe, read_recipes

RECIPES = Path(pfml.methods.__file__).parent / "recipes"
FACTS = Path(__file__).parent / "facts"
#: What a recipe says about itself, in place of a value that is published.
ABOUT = {"dataset", "backbone", "source", "departs", "options", "recipe"}
FIELDS = {field.name for field in fields(Recipe)} - ABOUT


def names_in(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.toml"))


NAMES = sorted(set(names_in(RECIPES)) & set(names_in(FACTS)))


def read_facts(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The facts of a file, and the keys that it says are unconfirmed."""
    content = tomllib.loads((FACTS / f"{name}.toml").read_text(encoding="utf-8"))
    unknown = content.keys() - {"fact", "unconfirmed"}
    assert not unknown, f"facts/{name}.toml: only [[fact]] and unconfirmed, not {', '.join(sorted(unknown))}"
    return content.get("fact", []), content.get("unconfirmed", [])


def is_about(fact: dict[str, Any], recipe: Recipe) -> bool:
    return all(fact.get(key) in (None, getattr(recipe, key)) for key in ("dataset", "backbone"))


def same(one: Any, other: Any) -> bool:
    """Equal but for the rounding of a float and for lists and tuples; True is no 1."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def values_of(name: str, recipe: Recipe, key: str) -> list[Any]:
    """What a recipe says for a key; an option that it leaves out is the default of each method of the recipe."""
    if not key.startswith("options."):
        return [getattr(recipe, key)] if key in FIELDS else []
    option = key.removeprefix("options.")
    if option in recipe.options:
        return [recipe.options[option]]
    defaults = [method.options() for method in METHODS.values() if method.recipe_file == name]
    return [values[option] for values in defaults if option in values]


def disagreements(name: str, recipes: tuple[Recipe, ...], facts: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the facts, or with the recipes that they are about."""
    for fact in facts:
        setting = " with ".join(filter(None, [fact.get("dataset"), fact.get("backbone")])) or "all recipes"
        where = f"{name}, {setting}, {fact.get('key')}"
        if extra := fact.keys() ^ ({"key", "value", "source"} | fact.keys() & {"dataset", "backbone"}):
            yield f"{where}: a fact has key, value, source and perhaps dataset and backbone: see {sorted(extra)}"
            continue
        if sum(letter.isalpha() for letter in fact["source"]) <= 10:
            yield f"{where}: say where it stands, with more than {fact['source']!r}"
        about = [recipe for recipe in recipes if is_about(fact, recipe)]
        if not about:
            yield f"{where}: recipes/{name}.toml has no such recipe"
        for recipe in about:
            values = values_of(name, recipe, fact["key"])
            if not values:
                yield f"{where}: neither a field of Recipe nor an option of a method of recipes/{name}.toml"
            for value in values:
                if not same(value, fact["value"]):
                    yield f"{where}: {recipe.setting} has {value!r}, but {fact['value']!r} stands in {fact['source']}"


def stated(content: dict[str, Any]) -> Iterator[tuple[str | None, str | None, str]]:
    """Data set, backbone and key of each value that a recipe file states."""
    for row in content["recipe"]:
        options = {**content.get("options", {}), **row.get("options", {})}
        for key in [*sorted((content.keys() | row.keys()) - ABOUT), *(f"options.{option}" for option in options)]:
            yield row.get("dataset", content.get("dataset")), row.get("backbone", content.get("backbone")), key


def without_facts(
    name: str, content: dict[str, Any], facts: list[dict[str, Any]], unconfirmed: list[str]
) -> Iterator[str]:
    """The values of a recipe file that nothing confirms."""
    for dataset, backbone, key in stated(content):
        about = Recipe("", 0.0, "", dataset=dataset, backbone=backbone)
        if key not in unconfirmed and not any(fact.get("key") == key and is_about(fact, about) for fact in facts):
            yield f"{name}, {about.setting}, {key}: no fact in facts/{name}.toml; add one, or the key to unconfirmed"


def recipe_content(name: str) -> dict[str, Any]:
    return tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))


def test_every_recipe_file_has_a_facts_file_and_the_reverse():
    assert not set(names_in(RECIPES)) - set(names_in(FACTS)), "recipes without tests/methods/facts/NAME.toml"
    assert not set(names_in(FACTS)) - set(names_in(RECIPES)), "facts without src/pfml/methods/recipes/NAME.toml"
    assert len(NAMES) >= 17


@pytest.mark.parametrize("name", NAMES)
def test_recipes_have_the_values_that_stand_in_their_sources(name):
    facts, _ = read_facts(name)
    problems = list(disagreements(name, read_recipes(name), facts))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_recipe_has_a_fact_or_is_said_to_be_unconfirmed(name):
    problems = list(without_facts(name, recipe_content(name), *read_facts(name)))
    assert not problems, "\n".join(problems)


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value[:-1], other(value[-1]))
    return value + "x" if isinstance(value, str) else value * 1.01 + 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_any_confirmed_value_is_found(name):
    facts, unconfirmed = read_facts(name)
    recipes = read_recipes(name)
    for place, recipe in enumerate(recipes):
        keys = {key for *setting, key in stated(recipe_content(name)) if setting == [recipe.dataset, recipe.backbone]}
        assert keys
        for key in keys - set(unconfirmed):
            if key.startswith("options."):
                option = key.removeprefix("options.")
                changed = replace(recipe, options={**recipe.options, option: other(recipe.options[option])})
            else:
                changed = replace(recipe, **{key: other(getattr(recipe, key))})
            problems = list(disagreements(name, (*recipes[:place], changed, *recipes[place + 1 :]), facts))
            assert problems, f"{recipe.setting}, {key}"
            assert all(f", {key}: {recipe.setting} has " in problem for problem in problems)


ONE = Recipe("adam", 1e-4, "a", dataset="cub", backbone="resnet50", milestones=(6, 11), options={"alpha": 1.1})
SOURCE = "README, command for CUB"


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ({"key": "lr", "value": 1e-4, "source": SOURCE}, ""),
        ({"key": "lr", "value": 1e-4, "source": SOURCE, "dataset": "cub", "backbone": "resnet50"}, ""),
        ({"key": "milestones", "value": [6, 11], "source": SOURCE}, ""),
        ({"key": "options.alpha", "value": 1.1, "source": SOURCE}, ""),
        ({"key": "options.tau", "value": 32, "source": SOURCE}, ""),  # a default of the method
        ({"key": "lr", "value": 1.1e-4, "source": SOURCE}, "resnet50 has 0.0001, but 0.00011 stands in README"),
        ({"key": "milestones", "value": [6, 12], "source": SOURCE}, "has (6, 11), but [6, 12]"),
        ({"key": "milestones", "value": [6], "source": SOURCE}, "has (6, 11), but [6]"),
        ({"key": "options.alpha", "value": True, "source": SOURCE}, "has 1.1, but True"),
        ({"key": "options.tau", "value": 16, "source": SOURCE}, "has 32.0, but 16"),
        ({"key": "options.gamma", "value": 16, "source": SOURCE}, "nor an option"),
        ({"key": "rate", "value": 1e-4, "source": SOURCE}, "neither a field of Recipe"),
        ({"key": "lr", "value": 1e-4, "source": SOURCE, "dataset": "cars"}, "has no such recipe"),
        ({"key": "lr", "value": 1e-4, "source": SOURCE, "backbone": "resnet18"}, "has no such recipe"),
        ({"key": "lr", "value": 1e-4, "source": "--lr 0.0001"}, "say where it stands"),
        ({"key": "lr", "value": 1e-4}, "see ['source']"),
        ({"key": "lr", "value": 1e-4, "source": SOURCE, "data": "cub"}, "see ['data']"),
    ],
)
def test_what_is_wrong_with_a_fact_is_said(fact, said):
    problems = list(disagreements("hist", (ONE,), [fact]))
    assert len(problems) == bool(said)
    assert all(said in problem for problem in problems)


def test_a_value_without_a_fact_is_found():
    content = {"lr": 1e-4, "source": "a", "recipe": [{"dataset": "cub"}, {"dataset": "cars", "options": {"alpha": 1}}]}
    facts = [{"key": "lr", "dataset": "cub"}]
    problems = list(without_facts("hist", content, facts, []))
    assert [problem.split(":")[0] for problem in problems] == ["hist, cars, lr", "hist, cars, options.alpha"]
    assert len(list(without_facts("hist", content, facts, ["options.alpha"]))) == 1
    assert not list(without_facts("hist", content, [{"key": "lr"}], ["options.alpha"]))
