"""Routes of selected images: their table, and the tags that images have."""

from __future__ import annotations

import csv
import io
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from pfml.serving.dependencies import ErrorResponse, SharedService, display_name, entry_of
from pfml.serving.routers.edits import MOST_IMAGES
from pfml.serving.service import Service
from pfml.storage.values import shown_value
from pfml.terminal import readable

__all__ = ["router"]

router = APIRouter(prefix="/api", tags=["images"])


class SelectionRequest(BaseModel):
    """Some images of the index."""

    images: Annotated[list[int], Field(max_length=MOST_IMAGES)]


@router.get("/tags")
async def tags(service: SharedService) -> list[str]:
    """The tags that people gave images, by name."""

    def respond() -> list[str]:
        service.gallery.refresh()
        found = service.gallery.index.edits.tags
        return sorted({readable(tag) for tags in found.values() for tag in tags})

    return await service.searching.run(respond)


@router.post(
    "/images/table",
    response_class=Response,
    responses={
        200: {
            "content": {"text/csv": {"schema": {"type": "string"}}},
            "description": "Columns id, image, class, and those of the metadata.",
        },
        **{code: {"model": ErrorResponse} for code in (404, 422)},
    },
)
async def table(service: SharedService, request: SelectionRequest) -> Response:
    """A CSV of some images: id, name, class and metadata."""
    content = await service.searching.run(_table, service, request.images)
    headers = {"content-disposition": 'attachment; filename="selection.csv"'}
    return Response(content, media_type="text/csv; charset=utf-8", headers=headers)


def _table(service: Service, images: list[int]) -> str:
    entries = [entry_of(service, image) for image in images]
    columns = list(dict.fromkeys(name for entry in entries for name in entry.metadata))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_cell(name) for name in ("id", "image", "class", *columns)])
    for entry in entries:
        known = (shown_value(entry.metadata[name]) if name in entry.metadata else "" for name in columns)
        writer.writerow([entry.id, *map(_cell, (display_name(entry), readable(entry.class_name), *known))])
    return text.getvalue()


def _cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = readable(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
