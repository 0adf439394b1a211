"""The tree shows the architecture: imports run one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pfml

SOURCE = Path(pfml.__file__).parent

#: Every layer may import from those before it, and from nothing after it.
LAYERS = [
    "version",
    "lazy",
    "packages",
    "typos",
    "terminal",
    "memory",
    "precision",
    "tracing",
    "storage",
    "half_precision",
    "field",
    "sphere",
    "superposition",
    "backends",
    "energy",
    "losses",
    "distributed",
    "labels",
    "data",
    "models",
    "evaluation",
    "methods",
    "runs",
    "training",
    "suggest",
    "search",
    "audit",
    "export",
    "plots",
    "pages",
    "paper",
    "theory",
    "experiments",
    "serving",
    "cli",
    "__main__",
]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pfml":
            yield from [node.module] if node.module != "pfml" else [f"pfml.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pfml")


def layer(module):
    return module.split(".")[1]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_its_own_layer_and_below(path):
    relative = path.relative_to(SOURCE)
    if relative == Path("__init__.py"):
        return
    own = LAYERS.index(relative.with_suffix("").parts[0])
    for module in imported_modules(path):
        assert LAYERS.index(layer(module)) <= own, f"{relative} imports {module}, which is above it"


def test_importing_all_public_names_is_free_of_heavy_optional_packages():
    code = (
        "import sys; from pfml import *; "
        "heavy = ('matplotlib', 'scipy', 'rich', 'jsonargparse', 'torchvision', 'torch.distributed.fsdp', 'sympy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
