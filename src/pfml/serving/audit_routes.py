"""The API of the audit: suspects, their neighbors, and what a person decides about them."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from pfml.serving.answers import (
    AuditAnswer,
    DecisionAnswer,
    DecisionRequest,
    ErrorAnswer,
    NeighborAnswer,
    SuspectAnswer,
)
from pfml.serving.audit_queue import Decision, QueuedSuspect, key_of
from pfml.serving.gallery import shown_name
from pfml.serving.search_routes import Shared
from pfml.serving.service import Service, UnknownNameError, shown

__all__ = ["router"]

router = APIRouter(
    prefix="/audit", tags=["audit"], responses={404: {"model": ErrorAnswer}, 409: {"model": ErrorAnswer}}
)
NEIGHBOURS = 8


@router.get("")
async def queue(service: Shared) -> AuditAnswer:
    """All suspects, most suspicious first; empty before pfml audit."""

    def answer() -> AuditAnswer:
        found, decided = service.audit.suspects(), service.audit.decisions()
        suspects = [_suspect(service, one, decided.get(one.path)) for one in found.values()]
        return AuditAnswer(
            available=service.audit.suspects_file.is_file(),
            decided=sum(1 for one in suspects if one.decision is not None),
            class_names=[shown(name) for name in service.audit.class_names],
            history=[key for path in decided if (key := key_of(path)) in found],
            suspects=suspects,
        )

    return await service.searching.run(answer)


@router.get("/{key}")
async def suspect(service: Shared, key: str) -> SuspectAnswer:
    """A suspect with its neighbors in the index."""

    def answer() -> SuspectAnswer:
        one = _named(service, key)
        result = _suspect(service, one, service.audit.decisions().get(one.path))
        result.neighbors = [] if result.image is None else _neighbors(service, result.image)
        return result

    return await service.searching.run(answer)


@router.put("/{key}")
async def decide(service: Shared, key: str, request: DecisionRequest) -> DecisionAnswer:
    """Decide about a suspect; it is on disk when this answers."""

    def answer() -> DecisionAnswer:
        _named(service, key)
        label = service.class_named(request.label) if request.decision == "relabel" else ""
        return _decision(service.audit.decide(key, request.decision, label))

    return await service.searching.run(answer)


@router.delete("/{key}", status_code=204)
async def withdraw(service: Shared, key: str) -> None:
    """Take back what was decided."""

    def answer() -> None:
        _named(service, key)
        service.audit.withdraw(key)

    await service.searching.run(answer)


def _named(service: Service, key: str) -> QueuedSuspect:
    found = service.audit.suspects()
    if key not in found:
        raise UnknownNameError("there is no such suspect: the audit may have been run again; load the queue again")
    return found[key]


def _suspect(service: Service, one: QueuedSuspect, decision: Decision | None) -> SuspectAnswer:
    image = service.indexed_as(one.path)
    name = (
        shown(str(Path(*Path(one.path).parts[-2:])))
        if image is None
        else shown_name(service.gallery.index.entry(image))
    )
    return SuspectAnswer(
        key=one.key,
        name=name,
        image=image,
        given=shown(one.given),
        suggested=shown(one.suggested),
        score=one.score,
        confidence=one.confidence,
        listed=one.listed,
        decision=None if decision is None else _decision(decision),
        evidence=shown(one.neighbors),
    )


def _decision(decision: Decision) -> DecisionAnswer:
    return DecisionAnswer(decision=decision.decision, label=shown(decision.label))


def _neighbors(service: Service, image: int) -> list[NeighborAnswer]:
    hits = service.gallery.search(service.vector_of(image), NEIGHBOURS, [], without=image)
    return [
        NeighborAnswer(
            id=hit.id,
            name=shown_name(service.gallery.index.entry(hit.id)),
            class_name=shown(hit.class_name),
            distance=hit.distance,
        )
        for hit in hits
    ]
