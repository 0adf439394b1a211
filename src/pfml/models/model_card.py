"""The model card of a saved embedder: the README.md beside its weights."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pfml.templates import create_environment

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["model_card"]


def model_card(description: dict[str, Any]) -> str:
    """A model card in Markdown, of what `Embedder.save` knows; a run writes more (`pfml.runs.card`)."""
    return _template().render(description=description)


@cache
def _template() -> Template:
    return create_environment("pfml.models").get_template("model.md")
