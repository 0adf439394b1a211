"""No file that pfml reads can run code: nothing on a load path unpickles, evaluates, or starts a shell."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "src" / "pfml").rglob("*.py"))
#: Modules that run what they read. pickle may be imported for the name of its error only.
MODULES = {"cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
CALLS |= {f"pickle.{name}" for name in ("load", "loads", "Unpickler")}
CALLS |= {"builtins.eval", "builtins.exec", "pandas.read_pickle", "torch.jit.load", "torch.package.PackageImporter"}


def called(node):
    """The dotted name of what is called, "" if it has none."""
    parts, place = [], node.func
    while isinstance(place, ast.Attribute):
        parts.append(place.attr)
        place = place.value
    return ".".join([place.id, *reversed(parts)]) if isinstance(place, ast.Name) else ""


def is_given(node, name, value):
    given = (one.value for one in node.keywords if one.arg == name)
    return any(isinstance(one, ast.Constant) and one.value is value for one in given)


def dangers(tree):
    """(line, what) of everything that could run code of a file."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((node.lineno, f"import {name}") for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "os", "yaml", "builtins"):
            yield from (
                (node.lineno, f"from {node.module} import {alias.name}")
                for alias in node.names
                if f"{node.module}.{alias.name}" in CALLS
            )
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        if name in CALLS:
            yield node.lineno, name
        if name == "torch.load" and not is_given(node, "weights_only", True):
            yield node.lineno, "torch.load without weights_only=True"
        if name in ("numpy.load", "np.load") and not is_given(node, "allow_pickle", False):
            yield node.lineno, f"{name} without allow_pickle=False"
        if name in ("Image.open", "PIL.Image.open") and not any(one.arg == "formats" for one in node.keywords):
            yield node.lineno, f"{name} without formats=, which may start a program"
        if any(one.arg == "shell" and not is_given(node, "shell", False) for one in node.keywords):
            yield node.lineno, "a shell"
        if any(one.arg == "trust_remote_code" for one in node.keywords):
            yield node.lineno, "code of a hub"


@pytest.mark.parametrize(
    "line",
    [
        "import dill",
        "from joblib import load",
        "import pickle; pickle.loads(content)",
        "from pickle import loads",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
        "import numpy; numpy.load(path)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "import subprocess; subprocess.run(command, shell=True)",
        "import os; os.system(command)",
        "from os import system",
        "from PIL import Image; Image.open(path)",
    ],
)
def test_the_scan_sees_what_it_must_see(line):
    assert list(dangers(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.load(path, weights_only=True)",
        "import numpy; numpy.load(path, allow_pickle=False)",
        "import yaml; yaml.safe_load(text)",
        "embedder.eval()",
        "from PIL import Image; Image.open(path, formats=FORMATS)",
        "import pickle; pickle.UnpicklingError",
    ],
)
def test_the_scan_lets_safe_calls_pass(line):
    assert not list(dangers(ast.parse(line)))


def test_no_pickle_eval_or_shell_is_on_any_load_path():
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(path.parents[3])}:{line}: {what}"
        for path in SOURCES
        for line, what in dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
