"""The documentation site: its pages are all in the navigation, its generated pages are whole, and it loads nothing."""

import ast
import base64
import dataclasses
import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import get_type_hints

import pytest
import yaml

import pfml
from pfml.cli.commands import COMMANDS
from pfml.runs.config import RunConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = run_path(str(ROOT / "tools" / "docs_site.py"))
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))


def pages_in(nav):
    """The pages of a navigation, in its order."""
    for entry in nav:
        for target in entry.values():
            yield from pages_in(target) if isinstance(target, list) else [target]


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    notebooks = [f"notebooks/{path.stem}.md" for path in (DOCS / "notebooks").glob("*.ipynb")]
    assert notebooks
    assert sorted(pages_in(config["nav"])) == sorted([*pages, *notebooks, *SITE["GENERATED"], *SITE["ROOT_PAGES"]])


def test_the_page_of_commands_has_the_help_of_every_command():
    sections = re.split(r"^### pfml ", SITE["cli_page"](), flags=re.MULTILINE)[1:]
    texts = {section.split("\n")[0]: section for section in sections}
    assert texts.keys() == COMMANDS.keys()
    for name, text in texts.items():
        assert f"usage: pfml {name}" in text
        assert "-h, --help" in text
    assert "--optimizer.lr" in texts["train"]
    assert "--false-accept-rate" in texts["calibrate"]


def keys_of(config, group=""):
    for name, kind in get_type_hints(config).items():
        if dataclasses.is_dataclass(kind):
            yield from keys_of(kind, f"{group}{name}.")
        else:
            yield f"{group}{name}"


def test_the_page_of_configuration_keys_has_every_key_with_its_meaning():
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| `.*` \| (.+) \|$", SITE["config_page"](), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(keys_of(RunConfig))
    assert ("optimizer.clip_norm", "float or null") in [(name, kind) for name, kind, _ in rows]
    assert all(meaning.strip() for _, _, meaning in rows)


def test_every_public_name_is_on_a_page_of_the_reference_and_every_entry_exists():
    named = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
    assert {f"pfml.{name}" for name in pfml.__all__} - set(named) == set()
    assert len(named) == len(set(named))
    for name in named:
        pkgutil.resolve_name(name)


def test_the_page_of_formats_has_every_format_with_its_version():
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \|", (DOCS / "FORMATS.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    for file in (ROOT / "src" / "pfml").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Format":
                kind, version, _ = (ast.literal_eval(argument) for argument in node.args)
                found.append((kind, str(version)))
    assert sorted(rows) == sorted(found)


def test_the_page_of_a_notebook_has_its_text_its_code_and_its_outputs(tmp_path):
    def code(source, *outputs, **metadata):
        return {"cell_type": "code", "source": source, "outputs": outputs, "metadata": metadata}

    image = {
        "output_type": "display_data",
        "data": {"image/png": base64.b64encode(b"PNG").decode(), "text/plain": "<Figure>"},
        "metadata": {"image/png": {"width": 320}},
    }
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "Its text.\n"]},
        code(["x = 1\n", "print(x)"], {"output_type": "stream", "name": "stdout", "text": ["1\n"]}),
        code("%%sh\npfml --version"),
        code("plot()", image, alt="A line that rises"),
        code("x", {"output_type": "execute_result", "data": {"text/plain": "``` 2"}, "metadata": {}}),
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    files = SITE["notebook_files"](path)
    assert files.keys() == {"notebooks/a.md", "notebooks/a-0.png"}
    assert files["notebooks/a-0.png"] == b"PNG"
    page = files["notebooks/a.md"]
    assert page.startswith("# A title\n\n*A notebook")
    assert '<a href="a.ipynb" download>' in page
    for block in (
        "\nIts text.\n",
        "````python\nx = 1\nprint(x)\n````\n\n````{.text .output}\n1\n````\n",
        "````bash\npfml --version\n````\n",
        '![A line that rises](a-0.png){width="320"}\n',
        "````{.text .output}\n``` 2\n````\n",
    ):
        assert block in page
    assert "<Figure>" not in page


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("[a](../CONTRIBUTING.md#a-loss)", "[a](CONTRIBUTING.md#a-loss)"),
        ("[a](docs/LOSS.md#options)", "[a](LOSS.md#options)"),
        ("[a](README.md)", "[a](index.md)"),
        ("[MIT](../LICENSE)", "MIT"),
        ("[a](notebooks/loss.ipynb)", "[a](notebooks/loss.md)"),
        ("[a](loss.ipynb#an-anchor)", "[a](loss.md#an-anchor)"),
        ("[a](LOSS.md), [b](../LOSS.md)", "[a](LOSS.md), [b](../LOSS.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(text, site):
    assert SITE["with_site_links"](text) == site


def test_headings_have_the_anchors_of_github():
    assert SITE["github_anchor"]("500,000 classes, 2 proxies each") == "500000-classes-2-proxies-each"
    assert SITE["github_anchor"]("What fails in Eq. 6") == "what-fails-in-eq-6"


@pytest.mark.parametrize(
    ("file", "text", "address"),
    [
        ("a.html", '<script src="https://unpkg.com/x.js"></script>', "https://unpkg.com/x.js"),
        ("a.html", '<link rel="preconnect" href="//fonts.gstatic.com">', "//fonts.gstatic.com"),
        ("a.html", '<img src="https://img.shields.io/x.svg">', "https://img.shields.io/x.svg"),
        ("a.css", "@import url('https://fonts.googleapis.com/css');", "https://fonts.googleapis.com/css"),
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path, file, text, address):
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert SITE["external_resources"](tmp_path) == [f"{file}: {address}"]


def test_links_and_own_files_are_no_external_resources(tmp_path):
    text = '<a href="https://example.org">x</a><link rel="stylesheet" href="a.css"><script src="b.js"></script>'
    (tmp_path / "a.html").write_text(text, encoding="utf-8")
    assert SITE["external_resources"](tmp_path) == []


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    missing = [name for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers") if not find_spec(name)]
    if missing:
        pytest.skip(f"the extra docs is not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert SITE["external_resources"](tmp_path) == []
    for page in ("index.html", "reference/cli.html", "reference/loss.html", "CONTRIBUTING.html"):
        assert (tmp_path / page).is_file()
    loss = (tmp_path / "reference" / "loss.html").read_text(encoding="utf-8")
    for notebook in (DOCS / "notebooks").glob("*.ipynb"):
        page = (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        shown = re.findall(r'<img alt="([^"]+)" src="([^"]+)"', page)
        assert all((tmp_path / "notebooks" / name).is_file() for _, name in shown)
        assert len(shown) == notebook.read_text(encoding="utf-8").count('"image/png": "')
        assert (tmp_path / "notebooks" / notebook.name).is_file()  # which the page offers
    assert "proxies_per_class" in loss  # the docstring, not only the heading
    assert "&gt;&gt;&gt;" in loss
