"""Jinja2 templates of packages: HTML for pages, Markdown for model cards. A value that is missing is an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["create_environment", "markdown_escaped"]


def create_environment(*packages: str, html: bool = False) -> Environment:
    """The environment of the templates in the `templates` folders of these packages; the first that has one wins.

    Args:
        packages: Such as "pfml.runs".
        html: Whether all values are escaped as in HTML; in Markdown, a template asks for it by `| markdown`.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    environment.filters |= {"count": _count, "markdown": markdown_escaped, "percent": _percent}
    return environment


def markdown_escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", " ".join(text.split()))


def _count(number: int) -> str:
    return f"{number:,}"


def _percent(share: float, decimals: int = 1) -> str:
    return f"{share:.{decimals}%}"
