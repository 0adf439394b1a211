"""Routes of edits: classes renamed, merged and deleted, images deleted, and all of it undone."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Path
from pydantic import BaseModel, Field

from pfml.search import Edit
from pfml.search.edits import EditKind, Edits
from pfml.serving.audit_queue import SimilarClasses
from pfml.serving.dependencies import ErrorResponse, SharedService, entry_of
from pfml.serving.service import Service
from pfml.terminal import readable

__all__ = ["router"]

router = APIRouter(
    prefix="/api",
    tags=["edits"],
    responses={code: {"model": ErrorResponse} for code in (404, 409, 422, 503, 507)},
)
#: Images that one request may be about.
MOST_IMAGES = 20_000
Name = Annotated[str, Field(max_length=1024)]


class EditRequest(BaseModel):
    """An edit of the index; files of images are never moved or deleted."""

    kind: EditKind = Field(
        description="rename: class_name gets the new name into; merge: class_name becomes part of the class into; "
        "delete: class_name leaves the index; leave_out: images leave the index; relabel: images get the class into; "
        "tag, untag: images get or lose the tag."
    )
    class_name: Name = ""
    into: Name = ""
    images: Annotated[list[int], Field(max_length=MOST_IMAGES)] = []
    tag: Name = ""


class EditResponse(BaseModel):
    """An edit that was saved."""

    number: int = Field(description="By which it is undone.")
    kind: EditKind
    class_name: str
    into: str
    images: int = Field(description="How many images it concerned.")
    text: str = Field(description="The edit in words.")
    blocked_by: str | None = Field(description="A later edit that must be undone first, in words; null if none.")


class UndoResponse(BaseModel):
    """An edit that was undone."""

    text: str
    missing: int = Field(description="Images that were compacted away: they return when they are indexed again.")


class SimilarResponse(BaseModel):
    """Two classes that may be one, the smaller one first."""

    class_name: str
    into: str
    images: list[int] = Field(description="How many images the index has of each; 0 for a class that it does not have.")
    share: float = Field(description="How much their images are mixed: 1 as those of one class divided at random.")
    examples: list[int | None] = Field(description="An image of each in the index; null if it is not indexed.")


@router.get("/edits")
async def edits(service: SharedService) -> list[EditResponse]:
    """All edits of the index that were not undone, the newest first."""

    def respond() -> list[EditResponse]:
        service.gallery.refresh()
        found = service.gallery.index.edits
        return [_response(edit, found) for edit in reversed(found.steps)]

    return await service.searching.run(respond)


@router.post("/edits", status_code=201)
async def edit(service: SharedService, request: EditRequest) -> EditResponse:
    """Rename, merge or delete a class, or delete images, in the index; on disk before the response."""

    def respond() -> EditResponse:
        done = service.gallery.edit(_edit(service, request))
        return _response(done, service.gallery.index.edits)

    return await service.searching.run(respond)


@router.delete("/edits/{number}")
async def undo(service: SharedService, number: Annotated[int, Path(ge=1, le=2**53)]) -> UndoResponse:
    """Undo an edit."""

    def respond() -> UndoResponse:
        undone, missing = service.gallery.undo(number)
        return UndoResponse(text=readable(str(undone)), missing=missing)

    return await service.searching.run(respond)


@router.get("/classes/similar")
async def similar(service: SharedService) -> list[SimilarResponse]:
    """Pairs of classes that may be one by pfml audit, most mixed first; without those that were merged since."""

    def respond() -> list[SimilarResponse]:
        service.gallery.refresh()
        return [_similar(service, one) for one in service.audit.similar_classes()]

    return await service.searching.run(respond)


def _edit(service: Service, request: EditRequest) -> Edit:
    name = service.class_named(request.class_name) if request.class_name else ""
    into = service.class_named(request.into) if request.kind == "merge" and request.into else request.into.strip()
    if request.kind == "relabel":  # into a class of any name, as the index writes it if it has it
        into = next((one for one in service.gallery.index.class_counts() if readable(one) == into), into)
    indexed = service.gallery.index.class_counts()
    for one in (name, into if request.kind == "merge" else ""):
        if one and one not in indexed:
            raise HTTPException(409, f"the class {readable(one)!r} must have images in the index, and has none")
    paths = tuple(entry_of(service, image).path for image in request.images)
    try:
        return Edit(request.kind, name, into, paths, tag=request.tag.strip())
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _response(edit: Edit, among: Edits) -> EditResponse:
    later = among.blocker(edit)
    return EditResponse(
        number=edit.number,
        kind=edit.kind,
        class_name=readable(edit.class_name),
        into=readable(edit.into),
        images=edit.images,
        text=readable(str(edit)),
        blocked_by=None if later is None else readable(str(later)),
    )


def _similar(service: Service, one: SimilarClasses) -> SimilarResponse:
    counts = service.gallery.index.class_counts()
    images = [counts.get(name, 0) for name in one.names]
    order = (0, 1) if images[0] <= images[1] else (1, 0)
    class_name, into = (readable(one.names[k]) for k in order)
    return SimilarResponse(
        class_name=class_name,
        into=into,
        images=[images[k] for k in order],
        share=one.share,
        examples=[service.indexed_as(one.examples[k]) for k in order],
    )
