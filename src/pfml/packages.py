"""Optional packages: what to install if one is missing."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require_packages"]


def require_packages(*modules: str, purpose: str, install: str) -> None:
    """Raise ImportError with what to install unless all `modules` can be imported.

    Args:
        modules: As they are imported, such as "qdrant_client".
        purpose: What needs them, such as "pfml serve".
        install: What pip installs them by, such as "pfml[serve]".
    """
    missing = [module.replace("_", "-") for module in modules if find_spec(module) is None]
    if missing:
        noun = "package" if len(missing) == 1 else "packages"
        raise ImportError(f"{purpose} needs the {noun} {', '.join(missing)}: pip install '{install}'")
