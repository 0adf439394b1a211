"""What routers share: the service as a dependency, and the response models of errors and images."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, Field
from torch import Tensor

from pfml.search import Entry, Hit
from pfml.search.metadata import json_metadata, short_path
from pfml.serving.service import Service, UnknownNameError
from pfml.terminal import readable

__all__ = [
    "UPLOAD_ERRORS",
    "ErrorResponse",
    "ImageResponse",
    "SharedService",
    "class_of",
    "display_name",
    "entry_of",
    "image_response",
    "name_of",
    "query_vector",
    "service_of",
]


def service_of(request: Request) -> Service:
    """The service of the application."""
    service: Service = request.app.state.service
    return service


#: The type of a route's parameter that gets the service.
SharedService = Annotated[Service, Depends(service_of)]


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: str = Field(description="One sentence: what must hold, what was got.")


#: Of routes that take uploads.
UPLOAD_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 404, 413, 415, 422, 503)
}


class ImageResponse(BaseModel):
    """An image of the index."""

    id: int
    name: str
    class_name: str = Field(description="Empty if the class is unknown.")
    metadata: dict[str, str | float | list[str]] = Field(
        default={}, description="What else is known of it, by column; dates are ISO texts."
    )


def image_response(entry: Entry) -> ImageResponse:
    """The response model of an entry of the index."""
    return ImageResponse(
        id=entry.id,
        name=display_name(entry),
        class_name=readable(entry.class_name),
        metadata=json_metadata(entry.metadata),
    )


def display_name(entry: Entry | Hit) -> str:
    """The path of an image relative to the folder that was indexed: responses name no folder of this machine.

    Bytes of a file name that are not UTF-8 are escaped.
    """
    return readable(short_path(entry.path, entry.source))


def entry_of(service: Service, image: int) -> Entry:
    """The entry of an image of the index; UnknownNameError (404) if there is none, also in the newest state."""
    try:
        with suppress(KeyError):
            return service.gallery.index.entry(image)
        service.gallery.refresh()
        return service.gallery.index.entry(image)
    except (KeyError, RuntimeError, OverflowError):  # numbers beyond 64 bits are not ids either
        raise UnknownNameError(f"the index has no image {image}") from None


def class_of(service: Service, name: str) -> str:
    """The class that responses call `name`; UnknownNameError (404) if there is none, also in the newest state."""
    with suppress(UnknownNameError):
        return service.class_named(name)
    service.gallery.refresh()
    return service.class_named(name)


def name_of(service: Service, image: int) -> str:
    """The name of an image that was in the index a moment ago; it may have been deleted since."""
    try:
        return display_name(service.gallery.index.entry(image))
    except KeyError:
        return f"image {image}"


def query_vector(service: Service, image: int | None, upload: str | None) -> Tensor:
    """The embedding (D,) of an image of the index or of an upload, exactly one of which must be given."""
    if (image is None) == (upload is None):
        raise HTTPException(422, "a request must give either id or upload, got both or neither")
    service.gallery.refresh()
    return service.uploads.get(upload) if upload is not None else service.vector_of(image or 0)
