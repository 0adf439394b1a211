"""Optional packages: what to install if one is missing."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

__all__ = ["pip_install", "require_packages"]


def pip_install(extra: str) -> str:
    """The command that installs an extra, by its name and by its packages: true for a wheel that no index has, too.

    Args:
        extra: Such as "faiss", which gives "pip install 'pfml[faiss]', or pip install 'faiss-cpu>=1.9'".
    """
    by_name = f"pip install 'pfml[{extra}]'"
    packages = _packages_of(extra)
    return f"{by_name}, or pip install {' '.join(map(repr, packages))}" if packages else by_name


def require_packages(*modules: str, purpose: str, install: str) -> None:
    """Raise ImportError with what to install unless all `modules` can be imported.

    Args:
        modules: As they are imported, such as "qdrant_client".
        purpose: What needs them, such as "pfml serve".
        install: What pip installs them by: an extra such as "pfml[serve]", or another package.
    """
    missing = [module.replace("_", "-") for module in modules if find_spec(module) is None]
    if missing:
        noun = "package" if len(missing) == 1 else "packages"
        extra = re.fullmatch(r"pfml\[(.+)\]", install)
        command = pip_install(extra[1]) if extra else f"pip install '{install}'"
        raise ImportError(f"{purpose} needs the {noun} {', '.join(missing)}: {command}")


def _packages_of(extra: str) -> list[str]:
    """The requirements of an extra, as the installed metadata has them; none if pfml is not installed."""
    try:
        requirements = requires("pfml") or []
    except PackageNotFoundError:
        return []
    parts = [requirement.partition(";") for requirement in requirements]
    return [name.strip() for name, _, marker in parts if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker)]
