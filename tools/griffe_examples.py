"""Sections "Example:" of docstrings shown as examples: an extension of griffe, named in mkdocs.yml.

griffe knows Google's section "Examples:", and takes "Example:" for a remark, whose `>>>` would become a quotation.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the section in what griffe has read; the sources stay as they are."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename it in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
