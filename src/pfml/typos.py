"""Suggestions for typos in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is nearest to `word`, to end a message with; empty if none is near.

    Example:
        >>> did_you_mean("pfm", ["pfml", "cpml"])
        "; did you mean 'pfml'?"
    """
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
