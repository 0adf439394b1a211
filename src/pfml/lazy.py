"""Public names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`: names are imported from their modules, modules of the package as such.

    Type checkers do not follow this: the same imports stand under `TYPE_CHECKING`, and a test compares both.

    Args:
        package: Its name.
        homes: Module -> the names that the package takes from it.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def getattribute(name: str) -> Any:
        if name in home_of:
            value = getattr(import_module(home_of[name]), name)
            setattr(sys.modules[package], name, value)  # from now on it is found without this function
            return value
        # `import package` alone makes package.module known, as if all had been imported
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return getattribute, names
