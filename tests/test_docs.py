"""The docs name what exists: links and anchors, files, commands and their options."""

import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from pfml.cli.commands import COMMANDS
from pfml.cli.parser import create_parser

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("src", "tests", "benchmarks", "research", "results", "tools", "examples", "docs")


def text_of(page):
    return page.read_text(encoding="utf-8")


def anchors(page):
    """The anchors of its headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, a heading that does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)}|pfml)/[\w./*-]+)`", text_of(page)):
        if "NAME" not in name:
            place = ROOT / "src" if name.startswith("pfml/") else ROOT
            assert list(place.glob(name)), f"{page.name} names {name}, which does not exist"
    packages = "|".join(path.name for path in (ROOT / "src" / "pfml").iterdir() if path.is_dir())
    for name in re.findall(rf"`((?:{packages})/[\w/]+\.\w+)`", text_of(page)):
        if "NAME" not in name:
            assert (ROOT / "src" / "pfml" / name).exists(), f"{page.name} names {name}, which does not exist"


def test_the_architecture_names_every_module_and_package():
    text = text_of(ROOT / "docs" / "ARCHITECTURE.md")
    for path in (ROOT / "src" / "pfml").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        if not name.startswith("__") and name != "py.typed":
            assert f"`{name}`" in text, f"docs/ARCHITECTURE.md must name {name}"


def resolve(name):
    """The object of a dotted name; raises if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if importlib.util.find_spec(parts[0]) and _is_module(module):
            return functools.reduce(getattr, parts[length:], importlib.import_module(module))
    raise ImportError(name)


def exists(name):
    """Whether a dotted name has an object."""
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_functions_and_classes_exist(page):
    text = text_of(page) if page.name != "CONTRIBUTING.md" else ""  # tests/test_contributing.py runs its examples
    names = re.findall(r"`(pfml(?:\.\w+)+)", text)
    for module, imported in re.findall(r"from (pfml[\w.]*) import ([\w, ]+)", text):
        names += [f"{module}.{name.strip()}" for name in imported.split(",")]
    missing = [name for name in names if not exists(name)]
    assert not missing, f"{page.name} names {missing}, which do not exist"


def commands(page):
    """The words of each `pfml COMMAND ...` on a page, in code blocks and in sentences."""
    text = re.sub(r" *\\\n\s*", " ", text_of(page))
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        for part in re.findall(r"\bpfml ([a-z]+\b[^;|>`]*)", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quote that is closed in another place
                continue
            if words and words[0] in COMMANDS:
                yield words


@pytest.fixture(scope="module")
def options():
    """Command -> its options, spelled with _."""
    parsers = {name: create_parser(name, command) for name, command in COMMANDS.items()}
    return {
        name: {each.replace("-", "_") for each in parser._option_string_actions} for name, parser in parsers.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_shown(page, options):
    for name, *words in commands(page):
        for word in words:
            option = word.partition("=")[0].replace("-", "_")
            if word.startswith("--") and not option.startswith("__loss.options"):
                assert option in options[name], f"{page.name}: pfml {name} has no option {word}"
