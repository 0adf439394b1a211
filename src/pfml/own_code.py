"""Code of one's own, named `module:attribute`, as uvicorn names an application: my_networks:create.

A run names its network and its loss in files, and files must not make a program run code. So a module is imported only
if its user has said so: by typing the name on the command line, in the environment variable PFML_TRUST, or by `trust`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["TRUST", "UntrustedCodeError", "is_reference", "load_reference", "reference_to", "trust"]

#: The environment variable with the names of modules that may be imported, separated by commas.
TRUST = "PFML_TRUST"
_trusted: set[str] = set()


class UntrustedCodeError(ValueError):
    """A file names code of someone's own that this process was not told to run."""


def is_reference(name: str) -> bool:
    """Whether a name is one of code, and not one of a table or of a hub.

    Example:
        >>> is_reference("my_networks:create"), is_reference("resnet50"), is_reference("hf-hub:timm/resnet50")
        (True, False, False)
    """
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute) and "/" not in name and "\\" not in name


def reference_to(thing: object) -> str:
    """The name of the class of `thing`.

    Example:
        >>> import fractions
        >>> reference_to(fractions.Fraction(1, 2))
        'fractions:Fraction'
    """
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def trust(*names: str) -> None:
    """Let this process import these modules, given by their own name or by that of something in them."""
    _trusted.update(name.partition(":")[0] for name in names)


def load_reference(name: str) -> Any:
    """What `name` stands for; its module is imported, from the working directory too.

    Raises:
        UntrustedCodeError: If nobody has said that the module may be imported.
        ValueError: If there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    allowed = {each.strip() for each in os.environ.get(TRUST, "").split(",")} | _trusted
    if module_name not in allowed:
        raise UntrustedCodeError(
            f"{name} is code outside of pfml, named by a file: if you trust the module {module_name}, "
            f"set {TRUST}={module_name} (pfml.trust({module_name!r}) in Python)"
        )
    if (here := str(Path.cwd())) not in sys.path:  # where a console script does not look
        sys.path.append(here)
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of something that the module imports
        raise ValueError(
            f"{name} must name a module that Python can import, got none called {module_name}: "
            f"start in the folder of {module_name}.py, or add that folder to PYTHONPATH"
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name} must name something in {module_name}, which has no {attribute}")
        found = getattr(found, part)
    return found
