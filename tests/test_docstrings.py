"""Everything public has a docstring.

Public is what a reader reaches without an underscore: every module, each class and function at its top (in `__all__` or
not), and the methods and properties that such a class defines. A method that overrides a documented one inherits its
docstring, as `help` shows it.
"""

import ast
from pathlib import Path

import pytest

import pfml

SOURCE = Path(pfml.__file__).parent
MODULES = sorted(path for path in SOURCE.rglob("*.py") if not path.name.startswith("_") or path.name == "__init__.py")
#: Methods whose meaning PyTorch or Python defines.
KNOWN = {"forward", "extra_repr"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(tree: ast.Module) -> list[Definition]:
    """Classes and functions at the top of a module that do not begin with an underscore."""
    return [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]


def inherited(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Names that a base of this class, as far as the package defines it, documents."""
    names = set()
    for base in node.bases:
        while isinstance(base, ast.Subscript):
            base = base.value
        parent = classes.get(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ""))
        if parent is not None and parent is not node:  # not a class of another package with the same name
            own = {each.name for each in parent.body if isinstance(each, Definition) and ast.get_docstring(each)}
            names |= own | inherited(parent, classes)
    return names


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def test_every_module_has_a_docstring(trees):
    assert [str(path.relative_to(SOURCE)) for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_everything_public_has_a_docstring(trees):
    classes = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    missing = []
    for path, tree in trees.items():
        for node in public_definitions(tree):
            where = f"{path.relative_to(SOURCE)}: {node.name}"
            if not ast.get_docstring(node):
                missing.append(where)
            if isinstance(node, ast.ClassDef):
                known = inherited(node, classes) | KNOWN
                missing += [
                    f"{where}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not each.name.startswith("_")
                    and each.name not in known
                    and not ast.get_docstring(each)
                ]
    assert missing == []
