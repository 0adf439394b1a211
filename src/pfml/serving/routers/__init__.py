"""The routers of the application: every module of this package is one.

A new page with an API of its own is a module here (its routes and their response models, with a `router`), a script
`page/NAME.js`, and a section of `page/index.html`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter

__all__ = ["all_routers"]


def all_routers() -> list[APIRouter]:
    """The `router` of every module of this package, by the module's name."""
    names = sorted(found.name for found in iter_modules(__path__))
    return [import_module(f"{__name__}.{name}").router for name in names]
