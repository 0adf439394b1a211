"""Entries of an index as other programs take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

from torch import Tensor

from pfml.search.index_state import Entry
from pfml.search.metadata import json_metadata, valid_text

__all__ = ["Points", "payload", "point_id"]

#: Of the UUIDs that `point_id` makes.
NAMESPACE = UUID("5f0c1e0a-8c1b-4d7e-9d4f-2b1c6a7e3d90")


@dataclass(frozen=True, eq=False)
class Points:
    """Some entries as other programs take them, such as a vector database.

    Args:
        ids: UUIDs, each a function of the path: an image has the same one in every export.
        vectors: (n, D) float32 of unit length.
        payloads: {"path", "class_name" (None if it is unknown), "model" (its digest), "metadata" (column -> text,
            number, ISO date or list of texts)}, in valid Unicode.
    """

    ids: tuple[str, ...]
    vectors: Tensor
    payloads: tuple[dict[str, Any], ...]


def payload(entry: Entry, model_digest: str) -> dict[str, Any]:
    """What other programs are told of an entry; see `Points`."""
    return {
        "path": valid_text(entry.path),
        "class_name": valid_text(entry.class_name) or None,
        "model": model_digest,
        "metadata": json_metadata(entry.metadata),
    }


def point_id(path: str) -> str:
    """The id of an image in other programs: a UUID that is a function of its path."""
    return str(uuid5(NAMESPACE, valid_text(path)))
