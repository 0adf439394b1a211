"""The wheel holds every file of the package: modules, templates, page assets, configurations."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What hatchling reads besides the package.
PROJECT = ("pyproject.toml", "README.md", "LICENSE", ".gitignore")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources, built offline by the declared backend."""
    project, out = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("dist")
    for name in PROJECT:
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    program = "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=project, check=True, capture_output=True)
    [path] = out.iterdir()
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = [path for path in (ROOT / "src" / "pfml").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sorted({str(path.relative_to(ROOT / "src")) for path in files} - wheel) == []


def test_templates_assets_and_configurations_are_in_the_wheel(wheel):
    for name in ("configs/glyphs.yaml", "pages/templates/base.html", "pages/templates/style.css", "paper/tables.yaml"):
        assert f"pfml/{name}" in wheel
    for suffix in (".js", ".css", ".html", ".svg"):
        assert any(name.startswith("pfml/serving/page/") and name.endswith(suffix) for name in wheel), suffix
    assert "pfml/py.typed" in wheel


def test_the_wheel_holds_nothing_else(wheel):
    outside = {name for name in wheel if not name.startswith("pfml/")}
    assert all(name.partition("/")[0].endswith(".dist-info") for name in outside), outside
    assert any(name.endswith("licenses/LICENSE") for name in outside)
