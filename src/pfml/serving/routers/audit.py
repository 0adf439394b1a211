"""Routes of the audit: suspects with their neighbors, copies, and decisions about them."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, Field

from pfml.audit.decisions import DecisionName
from pfml.serving.audit_queue import Copies, Copy, Decision, QueuedSuspect, key_of
from pfml.serving.dependencies import ErrorResponse, SharedService, display_name, name_of
from pfml.serving.service import Service, UnknownNameError
from pfml.terminal import readable

__all__ = ["router"]

router = APIRouter(
    prefix="/api/audit", tags=["audit"], responses={404: {"model": ErrorResponse}, 409: {"model": ErrorResponse}}
)
#: Neighbors that are shown of a suspect.
NEIGHBORS = 8


class NeighborResponse(BaseModel):
    """An indexed image near a suspect."""

    id: int
    name: str
    class_name: str
    distance: float


class DecisionRequest(BaseModel):
    """A decision about a suspect."""

    decision: DecisionName
    label: str = Field(default="", max_length=1024, description="A class, for relabel.")


class DecisionResponse(BaseModel):
    """A decision that was saved."""

    decision: DecisionName
    label: str


class SuspectResponse(BaseModel):
    """A training image whose label may be noise."""

    key: str
    name: str
    image: int | None = Field(description="Its id in the index; null if it is not indexed.")
    given: str
    suggested: str
    score: float
    confidence: float
    listed: bool = Field(description="Whether the audit lists the label as noise.")
    decision: DecisionResponse | None
    neighbors: list[NeighborResponse] = Field(default=[], description="Only in the response for one suspect.")
    evidence: str = Field(description="The neighbors as the audit described them.")


class AuditResponse(BaseModel):
    """The queue, most suspicious first."""

    available: bool = Field(description="Whether pfml audit has been run.")
    decided: int
    class_names: list[str] = Field(description="The classes of the run and its index, for relabel.")
    history: list[str] = Field(description="Keys of the decided suspects, in the order of the decisions.")
    suspects: list[SuspectResponse]


@router.get("")
async def queue(service: SharedService) -> AuditResponse:
    """All suspects, most suspicious first; empty before pfml audit."""

    def respond() -> AuditResponse:
        found, decided = service.audit.suspects(), service.audit.decisions()
        suspects = [_suspect(service, one, decided.get(one.path)) for one in found.values()]
        return AuditResponse(
            available=service.audit.suspects_file.is_file(),
            decided=sum(1 for one in suspects if one.decision is not None),
            class_names=[readable(name) for name in service.audit.class_names()],
            history=[key for path in decided if (key := key_of(path)) in found],
            suspects=suspects,
        )

    return await service.searching.run(respond)


class CopyResponse(BaseModel):
    """An image that others are copies of."""

    key: str
    name: str
    image: int | None = Field(description="Its id in the index; null if it is not indexed.")
    class_name: str
    part: str = Field(description="Where it is used, such as train.")
    decision: DecisionResponse | None


class CopiesResponse(BaseModel):
    """A group of copies."""

    exact: bool = Field(description="Whether all files have the same content.")
    across_classes: bool = Field(description="Whether they have different labels.")
    across_parts: bool = Field(description="Whether some are trained on and some are held out.")
    images: list[CopyResponse]


@router.get("/copies")
async def copies(service: SharedService) -> list[CopiesResponse]:
    """Groups of copies, those in several classes first; empty before pfml audit."""

    def respond() -> list[CopiesResponse]:
        decided = service.audit.decisions()
        return [_copies(service, group, decided) for group in service.audit.copies()]

    return await service.searching.run(respond)


@router.get("/{key}")
async def suspect(service: SharedService, key: str) -> SuspectResponse:
    """A suspect with its neighbors in the index."""

    def respond() -> SuspectResponse:
        one = _named(service, key)
        result = _suspect(service, one, service.audit.decisions().get(one.path))
        result.neighbors = [] if result.image is None else _neighbors(service, result.image)
        return result

    return await service.searching.run(respond)


@router.put("/{key}")
async def decide(service: SharedService, key: str, request: DecisionRequest) -> DecisionResponse:
    """Decide about a suspect or a copy; the decision is on disk before the response."""

    def respond() -> DecisionResponse:
        _require(service, key)
        label = service.class_named(request.label) if request.decision == "relabel" else ""
        return _decision(service.audit.decide(key, request.decision, label))

    return await service.searching.run(respond)


@router.delete("/{key}", status_code=204, response_model=None)
async def withdraw(service: SharedService, key: str) -> None:
    """Withdraw a decision."""

    def respond() -> None:
        _require(service, key)
        service.audit.withdraw(key)

    await service.searching.run(respond)


def _named(service: Service, key: str) -> QueuedSuspect:
    found = service.audit.suspects()
    if key not in found:
        raise UnknownNameError("there is no such suspect: the audit may have been run again; reload the queue")
    return found[key]


def _require(service: Service, key: str) -> None:
    """Refuse a key that neither a suspect nor a copy has."""
    if not service.audit.has(key):
        _named(service, key)


def _copies(service: Service, group: Copies, decided: dict[str, Decision]) -> CopiesResponse:
    return CopiesResponse(
        exact=group.is_exact,
        across_classes=group.is_across_classes,
        across_parts=group.is_across_parts,
        images=[_copy(service, one, decided.get(one.path)) for one in group.images],
    )


def _copy(service: Service, one: Copy, decision: Decision | None) -> CopyResponse:
    image, name = _indexed(service, one.path)
    return CopyResponse(
        key=one.key,
        name=name,
        image=image,
        class_name=readable(one.given),
        part=one.part,
        decision=None if decision is None else _decision(decision),
    )


def _indexed(service: Service, path: str) -> tuple[int | None, str]:
    """The id of an image in the index, None if it is not indexed, and its name."""
    image = service.indexed_as(path)
    if image is None:
        return None, readable(str(Path(*Path(path).parts[-2:])))
    return image, name_of(service, image)


def _suspect(service: Service, one: QueuedSuspect, decision: Decision | None) -> SuspectResponse:
    image, name = _indexed(service, one.path)
    return SuspectResponse(
        key=one.key,
        name=name,
        image=image,
        given=readable(one.given),
        suggested=readable(one.suggested),
        score=one.score,
        confidence=one.confidence,
        listed=one.listed,
        decision=None if decision is None else _decision(decision),
        evidence=readable(one.neighbors),
    )


def _decision(decision: Decision) -> DecisionResponse:
    return DecisionResponse(decision=decision.decision, label=readable(decision.label))


def _neighbors(service: Service, image: int) -> list[NeighborResponse]:
    hits = service.gallery.search(service.vector_of(image), NEIGHBORS, [], without=image)
    return [
        NeighborResponse(
            id=hit.id,
            name=display_name(hit),
            class_name=readable(hit.class_name),
            distance=hit.distance,
        )
        for hit in hits
    ]
