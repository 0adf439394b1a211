"""Packages that only some exports need."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(package: str, *, extra: str) -> None:
    """Raise ImportError with what to install if `package` is missing."""
    if find_spec(package) is None:
        raise ImportError(f"this export must have the package {package}, which is missing: pip install 'pfml[{extra}]'")
