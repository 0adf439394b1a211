"""`import pfml` loads what is asked for, and no more; every public name is the object of its module."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pfml

LAZY = ["pfml", "pfml.losses", "pfml.distributed", "pfml.export", "pfml.plots"]
#: What the loss is made of: modules, and packages that it may load any part of.
NEEDED = {
    "pfml",
    "pfml.lazy",
    "pfml.version",
    "pfml.field",
    "pfml.sphere",
    "pfml.superposition",
    "pfml.energy",
    "pfml.half_precision",
}
LOSSES = ("potential_field", "checks", "diagnostics", "proxy_init", "sample_filter", "subsampling")
NEEDED |= {"pfml.precision", "pfml.tracing", "pfml.losses"}
NEEDED |= {f"pfml.losses.{name}" for name in LOSSES}
HEAVY = {"torchvision", "timm", "matplotlib", "scipy", "sklearn", "PIL", "rich", "safetensors", "jsonargparse", "yaml"}


#: Lines that a new process runs one after the other; `modules_after` has what is loaded after each of them.
LINES = (
    "import pfml",
    "from pfml import PotentialFieldLoss",
    "from pfml import *",
    "pfml.paper.paper_tables",
)


@pytest.fixture(scope="module")
def modules_after():
    """For each of `LINES`, the names of all modules that a new process has loaded after it."""
    program = ["import json, sys", *(f"{line}\nprint(json.dumps(sorted(sys.modules)))" for line in LINES)]
    result = subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, check=True)
    return dict(zip(LINES, map(json.loads, result.stdout.splitlines()), strict=True))


def typed_imports(package):
    """Name -> module, as type checkers see the names of a package."""
    found = {}
    for node in ast.parse(Path(package.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for one in node.body:
                found |= {alias.name: one.module for alias in one.names}
    return found


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_the_object_of_its_module(name):
    package = import_module(name)
    homes = typed_imports(package)
    assert sorted(homes) == sorted(set(package.__all__))
    for public, home in homes.items():
        assert getattr(package, public) is getattr(import_module(home), public), public


def test_every_public_name_is_listed_before_it_is_loaded():
    imports = "\n".join(f"import {name}" for name in LAZY)
    code = f"{imports}\nfor package in ({', '.join(LAZY)}): print(sorted(set(package.__all__) - set(dir(package))))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]"] * len(LAZY)


def test_a_star_import_gives_every_public_name():
    names = {}
    exec("from pfml import *", names)
    assert set(pfml.__all__) <= names.keys()


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pfml' has no attribute 'PotentialFieldLos'"):
        _ = pfml.PotentialFieldLos
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_the_kind'"):
        exec("from pfml import nothing_of_the_kind")
    assert not hasattr(pfml, "__wrapped__")


def test_packages_are_attributes_without_being_imported_by_name(modules_after):
    assert "pfml.paper.tables" not in modules_after["from pfml import *"]
    assert "pfml.paper.tables" in modules_after["pfml.paper.paper_tables"]


def test_an_import_that_fails_inside_of_a_package_is_not_said_to_be_a_missing_name(tmp_path, monkeypatch):
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text(
        "from pfml.lazy import lazy_names\n__getattr__, __dir__ = lazy_names(__name__, {})\n"
    )
    (tmp_path / "outer" / "inner.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    outer = import_module("outer")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        _ = outer.inner


def test_import_pfml_alone_loads_nothing_of_torch(modules_after):
    loaded = modules_after["import pfml"]
    assert [name for name in loaded if name.split(".")[0] == "pfml"] == ["pfml", "pfml.lazy", "pfml.version"]
    assert "torch" not in loaded


def test_all_public_names_load_no_heavy_optional_package(modules_after):
    heavy = {"matplotlib", "scipy", "rich", "jsonargparse", "torchvision", "torch.distributed.fsdp", "sympy"}
    assert not heavy & set(modules_after["from pfml import *"])


def test_the_loss_loads_only_the_field_the_backends_and_itself(modules_after):
    loaded = modules_after["from pfml import PotentialFieldLoss"]
    ours = [name for name in loaded if name.split(".")[0] == "pfml"]
    offenders = [name for name in ours if name not in NEEDED and not name.startswith("pfml.backends")]
    heavy = sorted(HEAVY & {name.split(".")[0] for name in loaded})
    assert not offenders, f"{len(ours)} modules of pfml are loaded, of which the loss does not need {offenders}"
    assert not heavy, f"packages that the loss does not need: {heavy}"
    assert len(ours) <= 30, ours
