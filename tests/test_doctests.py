"""Every `>>>` example of the package and of the front pages runs and prints what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import pfml

ROOT = Path(__file__).parents[1]
#: Pages whose `>>>` examples are run too.
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if ">>>" in path.read_text()]
#: Names that examples may use without an import, as a reader would.
NAMES = {"torch": torch}
#: Modules whose examples another test runs: `tests/data/test_glyphs.py` has all glyphs, which take seconds to draw.
ELSEWHERE = {"pfml.data.datasets"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    """Modules whose source has an example: the others need not be imported."""
    names = []
    for module in pkgutil.walk_packages(pfml.__path__, "pfml."):
        path = Path(module.module_finder.path) / (module.name.rpartition(".")[2] + (".py" if not module.ispkg else ""))
        source = path / "__init__.py" if module.ispkg else path
        if ">>>" in source.read_text(encoding="utf-8"):
            names.append(module.name)
    return names


@pytest.mark.parametrize("name", sorted({*modules_with_examples()} - ELSEWHERE))
def test_examples_of_a_module(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert run_examples(name) > 0


def run_examples(name):
    """Run the examples in the docstrings of a module; how many there are, and none of them fails."""
    module = importlib.import_module(name)
    lazy = {public: getattr(module, public) for public in getattr(module, "__all__", ())}
    result = doctest.testmod(module, extraglobs={**NAMES, **lazy}, optionflags=FLAGS)
    assert result.attempted, f"{name} has an example that doctest does not find: is it in a docstring?"
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} print something else"
    return result.attempted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(page), module_relative=False, globs=dict(NAMES), optionflags=FLAGS)
    assert result.failed == 0
