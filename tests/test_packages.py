"""What an error says to install: the extra, and the packages that pyproject.toml lists under it."""

import ast
import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pfml.packages import pip_install, require_packages

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
USERS = {name: requirements for name, requirements in EXTRAS.items() if name not in ("all", "dev")}


@pytest.fixture
def metadata(monkeypatch):
    """The requirements of pyproject.toml as a wheel of it states them, whatever is installed here."""
    lines = ["torch>=2.9", *(f"{one}; extra == '{name}'" for name, ones in USERS.items() for one in ones)]
    monkeypatch.setattr("pfml.packages.requires", lambda name: lines)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr("pfml.packages.find_spec", lambda name: None)


@pytest.mark.usefixtures("metadata")
@pytest.mark.parametrize("extra", USERS)
def test_an_extra_is_named_with_its_packages_as_a_shell_takes_them(extra):
    by_name, by_packages = pip_install(extra).split(", or ")
    assert shlex.split(by_name) == ["pip", "install", f"pfml[{extra}]"]
    assert shlex.split(by_packages) == ["pip", "install", *USERS[extra]]


@pytest.mark.usefixtures("metadata", "missing")
def test_a_missing_package_is_named_with_both_commands():
    with pytest.raises(ImportError) as failed:
        require_packages("faiss", purpose="approximate search", install="pfml[faiss]")
    assert str(failed.value) == (
        f"approximate search needs the package faiss: pip install 'pfml[faiss]', or pip install '{USERS['faiss'][0]}'"
    )


@pytest.mark.usefixtures("metadata", "missing")
def test_a_package_that_is_no_extra_is_installed_by_its_name():
    with pytest.raises(ImportError, match="needs the package my-database: pip install 'my-database-client'$"):
        require_packages("my_database", purpose="the export", install="my-database-client")


def test_sources_that_are_not_installed_name_the_extra_alone(monkeypatch):
    def none(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pfml.packages.requires", none)
    assert pip_install("faiss") == "pip install 'pfml[faiss]'"


def texts():
    """(file, text) of every string in the sources but docstrings."""
    for file in sorted((ROOT / "src" / "pfml").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
                yield file, node.value


def test_every_extra_that_a_message_names_exists_and_its_command_comes_from_one_function():
    named = [(file, text) for file, text in texts() if re.search(r"pfml\[[a-z]", text)]
    assert {name for _, text in named for name in re.findall(r"pfml\[([a-z]+)\]", text)} <= USERS.keys()
    by_hand = [f"{file.relative_to(ROOT)}: {text}" for file, text in named if "pip install" in text]
    assert not by_hand, "write pfml.packages.pip_install(EXTRA) instead:\n" + "\n".join(by_hand)
    asked = {
        node.args[0].value
        for file in (ROOT / "src" / "pfml").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "pip_install"
        and isinstance(node.args[0], ast.Constant)
    }
    assert "faiss" in asked
    assert asked <= USERS.keys()
