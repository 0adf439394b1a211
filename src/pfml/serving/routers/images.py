"""Routes that add images to the index and remove them from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Form, HTTPException, Path, Response
from pydantic import BaseModel, Field

from pfml.search import Edit
from pfml.serving.added_images import AddedImage, NewImage, file_name
from pfml.serving.dependencies import UPLOAD_ERRORS, ErrorResponse, ImageResponse, SharedService
from pfml.serving.dependencies import image_response as described
from pfml.serving.routers.embedding import Files, embedded_files
from pfml.serving.service import UnknownNameError
from pfml.storage.values import Kind, Value, parse_date, plain_value

__all__ = ["router"]

router = APIRouter(prefix="/api", tags=["images"], responses={507: {"model": ErrorResponse}})


class AddedResponse(ImageResponse):
    """An image of the index that a request added, now or before."""

    is_new: bool = Field(description="False if this image was there already: of the same name, class and content.")


class AdditionResponse(BaseModel):
    """The images of a request, in the order of its files."""

    images: list[AddedResponse]
    generation: int = Field(description="Of the index with these images.")


class RemovalResponse(BaseModel):
    """An image that is no longer in the index."""

    id: int
    name: str
    is_file_deleted: bool = Field(description="Whether its file is gone: it was, if a request had added it.")
    edit: int | None = Field(description="The number of the edit by which it was left out, to undo it; or null.")


@router.post("/images", status_code=201, responses={**UPLOAD_ERRORS, 409: {"model": ErrorResponse}})
async def add(
    service: SharedService,
    response: Response,
    file: Files,
    class_name: Annotated[
        str, Form(max_length=1024, description="The class of all images of the request; empty if it is unknown.")
    ] = "",
    metadata: Annotated[
        str,
        Form(
            max_length=16_384,
            description='What else is known of all of them, as JSON: {"price": 3, "day": "2024-05-01"}.',
        ),
    ] = "",
) -> AdditionResponse:
    """Add uploaded images to the index, all or none; on disk before the answer.

    Metadata of an image that was there already is replaced. 201 if any of them is new, 200 if all were there already.
    The server must be started with --add-to FOLDER.
    """
    additions = service.additions
    if additions is None:
        raise HTTPException(409, "images can only be added to a server that is started with pfml serve --add-to FOLDER")
    known = parsed_metadata(metadata, service.gallery.index.columns)
    found = await embedded_files(service, file)
    new = [
        NewImage(file_name(one.filename, content), class_name, content, vector, known)
        for one, (content, vector) in zip(file, found, strict=True)
    ]
    added = await service.writing.run(additions.add, new)
    if not any(one.is_new for one in added):
        response.status_code = 200
    return AdditionResponse(images=[_added(one) for one in added], generation=service.gallery.index.generation)


@router.delete("/images/{image}", responses={code: {"model": ErrorResponse} for code in (404, 409, 422, 503)})
async def remove(service: SharedService, image: Annotated[int, Path(ge=0, le=2**53)]) -> RemovalResponse:
    """Remove an image from the index, for good; on disk before the answer.

    The file of an image that a request added is deleted. Any other image is left out by an edit, which can be undone;
    its file stays.
    """

    def done() -> RemovalResponse:
        with service.gallery.writing():
            service.gallery.index.refresh(model=service.gallery.model)
            try:  # not by entry_of, which would wait for a refresh that waits for this writer
                entry = service.gallery.index.entry(image)
            except KeyError:
                raise UnknownNameError(f"the index has no image {image}") from None
            name = described(entry).name
            if service.additions is not None and service.additions.remove(entry):
                return RemovalResponse(id=image, name=name, is_file_deleted=True, edit=None)
            edit = service.gallery.index.edit(Edit("leave_out", paths=(entry.path,)))
            return RemovalResponse(id=image, name=name, is_file_deleted=False, edit=edit.number)

    return await service.writing.run(done)


def parsed_metadata(text: str, kinds: Mapping[str, Kind]) -> dict[str, Value]:
    """The metadata of a request; texts are dates where the index has dates, or has no such column and they look so.

    Raises:
        HTTPException: 422 if it is no object, or has a value that no column can hold.
    """
    try:
        given = json.loads(text) if text else {}
        if not isinstance(given, dict):
            raise ValueError("metadata must be a JSON object, column by column")
        found = {}
        for name, value in given.items():
            plain = plain_value(value, f"metadata: {name}")
            is_date = isinstance(plain, str) and kinds.get(name, "date") == "date"
            dated = parse_date(plain) if is_date and isinstance(plain, str) else None
            if is_date and dated is None and name in kinds:
                raise ValueError(f"metadata: {name} must be a date such as 2024-05-01, got {plain!r}")
            if plain is not None:
                found[name] = dated or plain
    except (RecursionError, TypeError, ValueError) as error:
        raise HTTPException(
            422, f"metadata: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        ) from None
    return found


def _added(one: AddedImage) -> AddedResponse:
    return AddedResponse(**described(one.entry).model_dump(), is_new=one.is_new)
