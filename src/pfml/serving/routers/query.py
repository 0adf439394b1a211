"""Routes of queries of several images, of crops, and of the columns that a filter can name."""

from __future__ import annotations

from typing import Annotated

import torch
from fastapi import APIRouter, File, Form, HTTPException, UploadFile
from pydantic import BaseModel, Field
from torch import Tensor

from pfml.search import Query
from pfml.search.queries import Combination
from pfml.serving.dependencies import UPLOAD_ERRORS, ErrorResponse, SharedService, entry_of, image_response
from pfml.serving.images import Crop
from pfml.serving.routers.search import MOST_HITS, QueryResponse, SearchResponse, found, received
from pfml.serving.service import Service
from pfml.storage.values import shown_value
from pfml.terminal import readable

__all__ = ["router"]

#: Images of a query, of each kind.
MOST_IMAGES = 32
#: Images whose metadata are looked through for examples, and examples of a column.
LOOKED_AT, EXAMPLES = 500, 3

router = APIRouter(prefix="/api", tags=["images"])


class CropRequest(BaseModel):
    """A part of an image as it is shown, in fractions of its width and height."""

    x: float = Field(ge=0, le=1)
    y: float = Field(ge=0, le=1)
    width: float = Field(gt=0, le=1)
    height: float = Field(gt=0, le=1)

    def crop(self) -> Crop:
        """The crop; HTTPException (422) if it leaves the image."""
        return crop_of(self.x, self.y, self.width, self.height)


class QueryImage(BaseModel):
    """An image of a query: one of the index by its id, or an earlier upload by its key."""

    id: int | None = None
    upload: str | None = None
    crop: CropRequest | None = Field(
        default=None, description="Search by this part of an image of the index; an upload is cropped when it is sent."
    )


class QueryRequest(BaseModel):
    """A query: like these, not like those."""

    like: list[QueryImage] = Field(min_length=1, max_length=MOST_IMAGES)
    unlike: list[QueryImage] = Field(default=[], max_length=MOST_IMAGES)
    combine: Combination = Field(default="mean", description="By the mean of `like`, or by the nearest of them.")
    k: int = Field(default=24, ge=1, le=MOST_HITS)
    class_name: list[str] = Field(default=[], max_length=1000)
    where: str = Field(default="", description="A filter, such as price < 20 and brand in (a, b).")


class UploadResponse(BaseModel):
    """An upload that queries can name."""

    upload: str = Field(description="Its key, valid for a while.")


class ColumnResponse(BaseModel):
    """A column that a filter can name."""

    name: str
    type: str = Field(description="text, number, date or list.")
    examples: list[str] = Field(description="A few of its values.")


@router.get("/columns")
async def columns(service: SharedService) -> list[ColumnResponse]:
    """The columns that a filter can name, with their types: class and path, then the metadata."""

    def respond() -> list[ColumnResponse]:
        service.gallery.refresh()
        index = service.gallery.index
        values: dict[str, dict[str, None]] = {name: {} for name in index.columns}
        for entry, _ in zip(index.entries(), range(LOOKED_AT), strict=False):
            for name, value in entry.metadata.items():
                if name in values and len(values[name]) < EXAMPLES:
                    values[name][readable(shown_value(value))] = None
        return [
            ColumnResponse(name=readable(name), type=kind, examples=list(values[name]))
            for name, kind in index.columns.items()
        ]

    return await service.searching.run(respond)


@router.post("/uploads", responses=UPLOAD_ERRORS)
async def upload(
    service: SharedService,
    file: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, BMP or TIFF; one image.")],
    crop: Annotated[str, Form(description="Of this part only: x,y,width,height, fractions of the shown image.")] = "",
) -> UploadResponse:
    """Send an image for queries, without searching yet."""
    vector = await received(service, file, parsed_crop(crop))
    return UploadResponse(upload=service.uploads.add(vector))


@router.post("/query", responses={code: {"model": ErrorResponse} for code in (404, 422, 503)})
async def query(service: SharedService, request: QueryRequest) -> SearchResponse:
    """The images nearest to a query of several images, which are left out of the results."""
    like = torch.stack([await _vector(service, one) for one in request.like])
    unlike = [await _vector(service, one) for one in request.unlike]
    ids = tuple(one.id for one in (*request.like, *request.unlike) if one.id is not None)
    asked = Query(like, torch.stack(unlike) if unlike else None, request.combine, ids)
    try:
        asked.points()
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    only = request.like[0] if len(request.like) == 1 else None
    described = QueryResponse(
        image=None if only is None or only.id is None else image_response(entry_of(service, only.id)),
        upload=None if only is None else only.upload,
    )
    return await service.searching.run(found, service, asked, request.k, request.class_name, request.where, described)


async def _vector(service: Service, image: QueryImage) -> Tensor:
    if (image.id is None) == (image.upload is None):
        raise HTTPException(422, "an image of a query must have either id or upload, got both or neither")
    if image.upload is not None:
        if image.crop is not None:
            raise HTTPException(422, "an upload must be cropped when it is sent: give crop to /api/uploads")
        return service.uploads.get(image.upload)
    assert image.id is not None
    await service.searching.run(service.gallery.refresh)
    if image.crop is None:
        return service.vector_of(image.id)
    return await service.embedded_file(entry_of(service, image.id).path, image.crop.crop())


def parsed_crop(text: str) -> Crop | None:
    """The crop of a form, None for an empty text; HTTPException (422) for anything else."""
    if not text:
        return None
    try:
        x, y, width, height = map(float, text.split(","))
    except ValueError:
        raise HTTPException(422, f"a crop must be four numbers, x,y,width,height, got {text[:60]!r}") from None
    return crop_of(x, y, width, height)


def crop_of(x: float, y: float, width: float, height: float) -> Crop:
    """The crop; HTTPException (422) if it leaves the image."""
    try:
        return Crop(x, y, width, height)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
