"""The API of images: what there is, what is near, and how it looks."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, File, Form, HTTPException, Query, Request, Response, UploadFile
from torch import Tensor

from pfml.search import Entry, Hit, Threshold
from pfml.serving.answers import (
    ClassAnswer,
    ErrorAnswer,
    HitAnswer,
    ImageAnswer,
    ImagesAnswer,
    QueryAnswer,
    SearchAnswer,
    StatusAnswer,
    ThresholdAnswer,
)
from pfml.serving.gallery import shown_name
from pfml.serving.service import Service, UnknownNameError, shown

__all__ = ["Shared", "image_answer", "router", "service_of", "vector_asked_for"]

MOST_HITS = 200


def service_of(request: Request) -> Service:
    """What requests share."""
    service: Service = request.app.state.service
    return service


Shared = Annotated[Service, Depends(service_of)]
Count = Annotated[int, Query(ge=1, le=MOST_HITS, description="How many images to find.")]
Classes = Annotated[list[str], Query(max_length=1000, description="Search these classes only.")]

router = APIRouter(tags=["images"])
ERRORS: dict[int | str, dict[str, type[ErrorAnswer]]] = {404: {"model": ErrorAnswer}, 422: {"model": ErrorAnswer}}
UPLOAD_ERRORS: dict[int | str, dict[str, type[ErrorAnswer]]] = {
    code: {"model": ErrorAnswer} for code in (400, 404, 413, 415, 422, 503)
}


@router.get("/status")
async def status(service: Shared) -> StatusAnswer:
    """What is served."""
    gallery = service.gallery
    contents = await service.searching.run(gallery.contents)
    threshold, field = gallery.threshold, gallery.field
    return StatusAnswer(
        run=shown(gallery.run.resolve().name),
        model=str(gallery.model),
        images=len(contents.ids),
        classes=sum(1 for name in gallery.index.class_counts() if name),
        proxies=len(contents.proxies),
        law=str(gallery.law),
        law_is_of_run=field is not None and field.has_own_law and field.law == gallery.law,
        threshold=_threshold_answer(threshold),
        suspects=len(service.audit.suspects()),
        problem=gallery.problem,
        most_upload_bytes=service.limits.upload_bytes,
        most_upload_pixels=service.limits.upload_pixels,
    )


@router.get("/classes")
async def classes(service: Shared) -> list[ClassAnswer]:
    """The classes of the index and of the training set, by name."""
    await service.searching.run(service.gallery.refresh)
    counts, trained = service.gallery.index.class_counts(), set(service.gallery.trained_classes)
    names = sorted(name for name in {*counts, *trained} if name)
    return [ClassAnswer(name=shown(name), images=counts.get(name, 0), trained=name in trained) for name in names]


@router.get("/images", responses=ERRORS)
async def images(
    service: Shared,
    class_name: Annotated[str | None, Query(description="Of this class only.")] = None,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_HITS)] = 48,
) -> ImagesAnswer:
    """A page of the index, in the order of the ids."""

    def page() -> ImagesAnswer:
        contents = service.gallery.contents()
        ids = contents.ids
        if class_name is not None:
            ids = ids[contents.labels == contents.class_names.index(service.class_named(class_name))]
        found = [service.gallery.index.entry(image) for image in ids[offset : offset + limit].tolist()]
        return ImagesAnswer(total=len(ids), images=[image_answer(entry) for entry in found])

    return await service.searching.run(page)


@router.get("/images/{image}", responses=ERRORS)
async def image(service: Shared, image: int) -> ImageAnswer:
    """An image of the index."""
    return image_answer(_entry(service, image))


@router.get(
    "/images/{image}/picture",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}}}, 404: {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}},
)
async def picture(service: Shared, image: int, size: Literal["thumbnail", "large"] = "thumbnail") -> Response:
    """An image of the index as a JPEG."""
    entry = _entry(service, image)
    try:
        content = await service.drawing.run(service.thumbnails.get, image, entry.path, size)
    except (OSError, ValueError):
        raise HTTPException(404, f"the file of image {image} is gone or cannot be read: index again") from None
    # an id names one version of one file, so that a browser need not ask; but a new index begins at 0: not for ever
    return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})


@router.get("/search", responses=ERRORS)
async def search(
    service: Shared,
    id: Annotated[int | None, Query(description="An image of the index; it is not found itself.")] = None,  # noqa: A002
    upload: Annotated[str | None, Query(description="An earlier upload.")] = None,
    k: Count = 24,
    class_name: Classes = [],  # noqa: B006 - FastAPI copies it
) -> SearchAnswer:
    """The images nearest to an image of the index, or to an earlier upload."""

    def answer() -> SearchAnswer:
        vector = vector_asked_for(service, id, upload)
        query = QueryAnswer(image=None if id is None else image_answer(_entry(service, id)), upload=upload)
        return _found(service, vector, k, class_name, query, without=id)

    return await service.searching.run(answer)


@router.post("/search", responses=UPLOAD_ERRORS)
async def search_by_upload(
    service: Shared,
    file: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, BMP or TIFF; one picture.")],
    k: Annotated[int, Form(ge=1, le=MOST_HITS)] = 24,
    class_name: Annotated[list[str], Form()] = [],  # noqa: B006
) -> SearchAnswer:
    """The images nearest to one that is sent."""
    most = service.limits.upload_bytes
    size = file.size or 0  # most of it is in a temporary file yet
    if size > most:
        raise HTTPException(413, f"an image must have at most {most:,} bytes, got more")
    with service.bodies.held(size):
        vector = await service.embedded(await file.read())
    query = QueryAnswer(upload=service.uploads.add(vector))
    return await service.searching.run(_found, service, vector, k, class_name, query)


def vector_asked_for(service: Service, image: int | None, upload: str | None) -> Tensor:
    """The embedding (D,) of an image of the index, or of an upload: one of the two must be given."""
    if (image is None) == (upload is None):
        raise HTTPException(422, "a request must give either id or upload, got both or neither")
    service.gallery.refresh()
    return service.uploads.get(upload) if upload is not None else service.vector_of(image or 0)


def image_answer(entry: Entry) -> ImageAnswer:
    """An entry as it is sent."""
    return ImageAnswer(id=entry.id, name=shown_name(entry), class_name=shown(entry.class_name))


def _entry(service: Service, image: int) -> Entry:
    try:
        return service.gallery.index.entry(image)
    except (KeyError, RuntimeError, OverflowError):  # numbers beyond 64 bits are no ids either
        raise UnknownNameError(f"the index has no image {image}") from None


def _found(
    service: Service, vector: Tensor, k: int, class_names: list[str], query: QueryAnswer, without: int | None = None
) -> SearchAnswer:
    names = [service.class_named(name) for name in class_names]
    indexed = service.gallery.index.class_counts()
    names, asked = [name for name in names if name in indexed], bool(names)
    hits = service.gallery.search(vector, k, names, without=without) if names or not asked else []
    threshold = service.gallery.threshold
    found = [_hit(service, hit, threshold) for hit in hits]
    # of nothing that was found nothing is near
    unknown = None if threshold is None else not found or bool(found[0].unknown)
    return SearchAnswer(query=query, unknown=unknown, threshold=_threshold_answer(threshold), hits=found)


def _threshold_answer(threshold: Threshold | None) -> ThresholdAnswer | None:
    if threshold is None:
        return None
    return ThresholdAnswer(distance=threshold.distance, false_accept_rate=threshold.false_accept_rate)


def _hit(service: Service, hit: Hit, threshold: Threshold | None) -> HitAnswer:
    unknown = None if threshold is None else threshold.is_unknown(hit.distance)
    name = shown_name(_entry(service, hit.id))
    return HitAnswer(id=hit.id, name=name, class_name=shown(hit.class_name), distance=hit.distance, unknown=unknown)
