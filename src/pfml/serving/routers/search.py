"""Routes of images: status, classes, lists of images, thumbnails, and search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated, Literal

import torch
from fastapi import APIRouter, File, Form, HTTPException, Query, Response, UploadFile
from pydantic import BaseModel, Field
from torch import Tensor

from pfml.search import Hit, Threshold, Verdict, WhereError, verdict_of
from pfml.search import Query as ImageQuery
from pfml.search.metadata import json_metadata
from pfml.search.neighborhood import NEIGHBORS
from pfml.serving.dependencies import (
    UPLOAD_ERRORS,
    ErrorResponse,
    ImageResponse,
    SharedService,
    class_of,
    display_name,
    entry_of,
    image_response,
    query_vector,
)
from pfml.serving.images import Crop
from pfml.serving.service import Service, UnknownNameError
from pfml.terminal import readable

__all__ = ["router"]

MOST_HITS = 200
Count = Annotated[int, Query(ge=1, le=MOST_HITS, description="Number of results.")]
Where = Annotated[str, Query(description="A filter, such as price < 20 and brand in (a, b).")]
Classes = Annotated[list[str], Query(max_length=1000, description="Search these classes only.")]

router = APIRouter(prefix="/api", tags=["images"])
ERRORS: dict[int | str, dict[str, type[ErrorResponse]]] = {404: {"model": ErrorResponse}, 422: {"model": ErrorResponse}}


class RateResponse(BaseModel):
    """A measured share of images, with its 95 % interval."""

    value: float
    low: float
    high: float


class ThresholdResponse(BaseModel):
    """The score below which an image is unknown, and the false accept rate that was asked for and measured."""

    score: str = Field(description="What is scored, such as margin or combination.")
    value: float = Field(description="The smallest score that is known; some classes may have their own.")
    false_accept_rate: float = Field(description="The asked rate.")
    false_accepts: RateResponse = Field(description="The measured rate.")
    is_measured: bool = Field(
        description="Whether the rate is of the index's classes: false if some were merged since."
    )


class StatusResponse(BaseModel):
    """The run, its index and the limits of uploads."""

    run: str
    model: str
    images: int
    classes: int
    proxies: int
    law: str
    law_is_of_run: bool
    threshold: ThresholdResponse | None
    suspects: int
    problem: str | None = Field(description="What is wrong with the files of the index; null if nothing is.")
    generation: int = Field(description="Grows with every change of the index.")
    most_upload_bytes: int
    most_upload_pixels: int


class ClassResponse(BaseModel):
    """A class of the index or of the training set."""

    name: str
    images: int = Field(description="How many of its images the index has.")
    trained: bool = Field(description="Whether the run was trained on it.")
    example: int | None = Field(description="One of its images; null if the index has none.")
    given: list[str] = Field(description="What the sources of its images call it: another name if it was renamed.")


class ImagesResponse(BaseModel):
    """A page of the list of indexed images."""

    total: int
    images: list[ImageResponse]


class HitResponse(ImageResponse):
    """A result of a search."""

    distance: float = Field(description="Euclidean, on the unit sphere: 0 to 2.")


class VerdictResponse(BaseModel):
    """What the nearest images of all classes say about the query, whatever classes are searched."""

    class_name: str | None = Field(description="The most likely class; null if no image near the query has one.")
    votes: int = Field(description="Of the nearest images, how many are of this class.")
    of: int = Field(description="Of the nearest images, how many have a class.")
    potential: float = Field(description="The share of this class in their attraction, 0 to 1.")
    margin: float = Field(description="The same less the share of the second class.")
    is_known: bool | None = Field(description="Whether the score reaches the threshold; null before pfml calibrate.")
    score: float | None = Field(description="The score of the neighborhood; null before pfml calibrate.")


class QueryResponse(BaseModel):
    """The query of a search: an image of the index, or an upload."""

    image: ImageResponse | None = None
    upload: str | None = Field(default=None, description="A key of the upload for further searches, valid for a while.")


class SearchResponse(BaseModel):
    """The results of a search, nearest first."""

    query: QueryResponse
    verdict: VerdictResponse
    unknown: bool | None = Field(
        description="Whether the verdict is unknown; null without a threshold, and for several images."
    )
    threshold: ThresholdResponse | None = Field(description="The threshold that was applied.")
    hits: list[HitResponse]


@router.get("/status")
async def status(service: SharedService) -> StatusResponse:
    """The run, its index and the limits of uploads."""
    gallery = service.gallery
    await service.searching.run(gallery.refresh)
    threshold, field = gallery.threshold, gallery.field
    return StatusResponse(
        run=readable(gallery.run.resolve().name),
        model=str(gallery.model),
        images=len(gallery.index),
        classes=sum(1 for name in gallery.index.class_counts() if name),
        proxies=gallery.num_proxies,
        law=str(gallery.law),
        law_is_of_run=field is not None and field.has_own_law and field.law == gallery.law,
        threshold=_threshold_response(threshold, gallery.is_measured),
        suspects=len(service.audit.suspects()),
        problem=gallery.problem,
        generation=gallery.index.generation,
        most_upload_bytes=service.limits.upload_bytes,
        most_upload_pixels=service.limits.upload_pixels,
    )


@router.get("/classes")
async def classes(service: SharedService) -> list[ClassResponse]:
    """The classes of the index and of the training set, by name."""

    def respond() -> list[ClassResponse]:
        gallery = service.gallery
        contents = gallery.contents()
        counts, trained = gallery.index.class_counts(), set(gallery.trained_classes)
        # of equal keys the last counts, and a class is shown by its first image
        first = dict(zip(contents.labels.flip(0).tolist(), contents.ids.flip(0).tolist(), strict=True))
        example = {name: first.get(label) for label, name in enumerate(contents.class_names)}
        given: dict[str | None, list[str]] = {}
        for one, now in sorted(gallery.index.given_classes.items()):
            given.setdefault(now, []).append(readable(one))
        return [
            ClassResponse(
                name=readable(name),
                images=counts.get(name, 0),
                trained=name in trained,
                example=example.get(name),
                given=given.get(name, []),
            )
            for name in sorted({*counts, *trained} - {""})
        ]

    return await service.searching.run(respond)


@router.get("/images", responses=ERRORS)
async def images(
    service: SharedService,
    class_name: Annotated[str | None, Query(description="Of this class only.")] = None,
    order: Annotated[Literal["id", "mixed"], Query(description="By id, or one of each class in turn.")] = "id",
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_HITS)] = 48,
    where: Where = "",
) -> ImagesResponse:
    """The images of the index in pages."""

    def page() -> ImagesResponse:
        name = None if class_name is None else class_of(service, class_name)
        contents = service.gallery.contents()
        ids = contents.ids
        if name is not None:
            ids = ids[contents.labels == contents.class_names.index(name)]
        elif order == "mixed":
            ids = ids[_one_of_each(contents.labels)]
        if where:
            with refused_filters():
                ids = ids[torch.isin(ids, service.gallery.index.matching(where))]
        found = []
        for image in ids[offset : offset + limit].tolist():
            with suppress(UnknownNameError):  # one that was deleted in this moment
                found.append(image_response(entry_of(service, image)))
        return ImagesResponse(total=len(ids), images=found)

    return await service.searching.run(page)


@router.get("/images/{image}", responses=ERRORS)
async def image(service: SharedService, image: int) -> ImageResponse:
    """An image of the index."""
    return image_response(await service.searching.run(entry_of, service, image))


@router.get(
    "/images/{image}/jpeg",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}}}, 404: {"model": ErrorResponse}, 503: {"model": ErrorResponse}},
)
async def jpeg(
    service: SharedService, image: int, size: Literal["thumbnail", "large", "full"] = "thumbnail"
) -> Response:
    """An image of the index as a JPEG file: scaled down, or in its full size up to 8,192 pixels."""
    entry = await service.searching.run(entry_of, service, image)
    try:
        content = await service.scaling.run(service.thumbnails.get, image, entry.path, size)
    except (OSError, ValueError):
        raise HTTPException(404, f"the file of image {image} is missing or cannot be read: index again") from None
    # an id stands for one version of one file; but a new index begins at 0 again, so not forever
    return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})


@router.get("/search", responses=ERRORS)
async def search(
    service: SharedService,
    id: Annotated[int | None, Query(description="An image of the index; it is left out of the results.")] = None,  # noqa: A002
    upload: Annotated[str | None, Query(description="An earlier upload.")] = None,
    k: Count = 24,
    class_name: Classes = [],  # noqa: B006 - FastAPI copies it
    where: Where = "",
) -> SearchResponse:
    """The images nearest to an image of the index, or to an earlier upload."""

    def respond() -> SearchResponse:
        vector = query_vector(service, id, upload)
        query = QueryResponse(image=None if id is None else image_response(entry_of(service, id)), upload=upload)
        asked = ImageQuery(vector[None], without=() if id is None else (id,))
        return found(service, asked, k, class_name, where, query)

    return await service.searching.run(respond)


@router.post("/search", responses=UPLOAD_ERRORS)
async def search_by_upload(
    service: SharedService,
    file: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, BMP or TIFF; one image.")],
    k: Annotated[int, Form(ge=1, le=MOST_HITS)] = 24,
    class_name: Annotated[list[str], Form()] = [],  # noqa: B006
    where: Annotated[str, Form()] = "",
) -> SearchResponse:
    """The images nearest to an uploaded image."""
    vector = await received(service, file)
    query = QueryResponse(upload=service.uploads.add(vector))
    return await service.searching.run(found, service, ImageQuery(vector[None]), k, class_name, where, query)


async def received(service: Service, file: UploadFile, crop: Crop | None = None) -> Tensor:
    """The embedding (D,) of an upload, or of a part of it."""
    most = service.limits.upload_bytes
    size = file.size or 0  # most of it is still in a temporary file
    if size > most:
        raise HTTPException(413, f"an image must have at most {most:,} bytes, got more")
    with service.upload_bytes.held(size):
        return await service.embedded(await file.read(), crop)


@contextmanager
def refused_filters() -> Iterator[None]:
    """A filter that cannot be applied within the block is an error of the request (422)."""
    try:
        yield
    except WhereError as error:
        raise HTTPException(422, readable(str(error))) from None


def found(
    service: Service, asked: ImageQuery, k: int, class_names: list[str], where: str, query: QueryResponse
) -> SearchResponse:
    """The results of a search.

    Args:
        service: What is searched.
        asked: The query.
        k: How many.
        class_names: Search these classes only; all if there are none.
        where: A filter, "" for none.
        query: What the response says of the query.
    """
    names, restricted = [service.class_named(name) for name in class_names], bool(class_names)
    if restricted:
        indexed = service.gallery.index.class_counts()
        names = [name for name in names if name in indexed]
    near = service.gallery.find(asked, max(k, NEIGHBORS))
    hits = near[:k]
    if restricted or where:
        with refused_filters():
            hits = service.gallery.find(asked, k, names, where) if names or not restricted else []
    threshold = service.gallery.threshold if asked.is_plain else None
    verdict = verdict_of(near, threshold=threshold, spread_of=service.gallery.index.class_spread)
    return SearchResponse(
        query=query,
        verdict=_verdict_response(verdict),
        unknown=None if verdict.is_known is None else not verdict.is_known,
        threshold=_threshold_response(service.gallery.threshold, service.gallery.is_measured),
        hits=[_hit(hit) for hit in hits],
    )


def _verdict_response(verdict: Verdict) -> VerdictResponse:
    name = None if verdict.class_name is None else readable(verdict.class_name)
    return VerdictResponse(**{**asdict(verdict), "class_name": name})


def _one_of_each(labels: Tensor) -> Tensor:
    """An order of images that takes one of each class in turn."""
    by_class = labels.argsort(stable=True)
    _, counts = labels[by_class].unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    turns = torch.empty_like(by_class)
    turns[by_class] = torch.arange(len(labels)) - starts.repeat_interleave(counts)
    return turns.argsort(stable=True)


def _threshold_response(threshold: Threshold | None, is_measured: bool) -> ThresholdResponse | None:
    if threshold is None:
        return None
    rate = threshold.false_accepts
    return ThresholdResponse(
        score=threshold.scoring.name,
        value=threshold.value,
        false_accept_rate=threshold.false_accept_rate,
        false_accepts=RateResponse(value=rate.value, low=rate.low, high=rate.high),
        is_measured=is_measured,
    )


def _hit(hit: Hit) -> HitResponse:
    return HitResponse(
        id=hit.id,
        name=display_name(hit),
        class_name=readable(hit.class_name),
        distance=hit.distance,
        metadata=json_metadata(hit.metadata),
    )
