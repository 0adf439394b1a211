"""The API of the field: the map, the potential under it, and why an image is where it is."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import torch
from fastapi import APIRouter, HTTPException, Query
from torch import Tensor

from pfml.serving.answers import (
    ChargeGroup,
    ClassPull,
    ErrorAnswer,
    MapAnswer,
    PotentialAnswer,
    SourceAnswer,
    WhyAnswer,
)
from pfml.serving.contributions import Contributions, contributions
from pfml.serving.embedding_map import PLANE, EmbeddingMap, plane_potential
from pfml.serving.gallery import Contents, shown_name
from pfml.serving.search_routes import Shared, vector_asked_for
from pfml.serving.service import Service, shown

__all__ = ["router"]

router = APIRouter(tags=["field"], responses={404: {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}})
EXPLANATION = (
    "The potential of this class on the map's plane: charges act where the map put them, images and proxies alike, "
    "by a power law of alpha 2 and delta 4 % of the map's width, in logarithmic shades. Blue attracts, red repels. It "
    'is a picture: the field that trained acts in the embedding itself, and is what "why is this image here" adds up.'
)
GRID = 128


@router.get("/map")
async def embedding_map(service: Shared) -> MapAnswer:
    """Where images and proxies lie on a plane; "computing" until it is made, so ask again."""
    current = await service.searching.run(_current, service)
    if current is None:
        return MapAnswer(state="computing")
    return await service.searching.run(_map_answer, *current)


@router.get("/map/potential")
async def potential(service: Shared, class_name: str) -> PotentialAnswer:
    """The potential of a class on the plane of the map, for a picture."""

    def answer() -> PotentialAnswer:
        current = _current(service)
        if current is None:
            raise HTTPException(503, "the map is still being made: try again in a moment", {"retry-after": "2"})
        contents, made = current
        label = contents.class_names.index(service.class_named(class_name))
        values = _potential(contents, made, label)
        rounded = [round(value, 3) for value in values.flatten().tolist()]
        return PotentialAnswer(
            class_name=class_name, side=GRID, low=PLANE[0], high=PLANE[1], values=rounded, explanation=EXPLANATION
        )

    return await service.searching.run(answer)


@router.get("/why")
async def why(
    service: Shared,
    id: Annotated[int | None, Query(description="An image of the index.")] = None,  # noqa: A002
    upload: Annotated[str | None, Query(description="An earlier upload.")] = None,
    class_name: Annotated[
        str | None, Query(description="Whose potential; by default the image's class, or the one that attracts most.")
    ] = None,
    top: Annotated[int, Query(ge=1, le=100, description="Charges to list on either side.")] = 8,
) -> WhyAnswer:
    """What every image and proxy adds to the potential at an image: exact, because fields superpose."""

    def answer() -> WhyAnswer:
        vector = vector_asked_for(service, id, upload)
        contents = service.gallery.contents()
        if not contents.class_names:
            raise HTTPException(409, "the field needs charges with classes, got an index without classes")
        label = _label(service, contents, vector, id, class_name)
        found = contributions(vector, label, contents, service.gallery.law, without=id)
        return _why_answer(service, contents, found, label, top)

    return await service.searching.run(answer)


def _label(service: Service, contents: Contents, vector: Tensor, image: int | None, class_name: str | None) -> int:
    """The class that is asked about, or the image's own, or the one that attracts most."""
    if class_name is not None:
        return contents.class_names.index(service.class_named(class_name))
    row = None if image is None else contents.row(image)
    if row is not None and int(contents.labels[row]) >= 0:
        return int(contents.labels[row])
    pulls = contributions(vector, 0, contents, service.gallery.law, without=image).class_attractions
    return int(pulls.argmax())


def _why_answer(service: Service, contents: Contents, found: Contributions, label: int, top: int) -> WhyAnswer:
    listed = {side: found.strongest(top, attracting=side) for side in (True, False)}
    shares = found.shares
    pulls = found.class_attractions / found.class_attractions.sum().clamp_min(1e-300)
    best = pulls.argsort(descending=True, stable=True)[:5].tolist()
    others = {side: _others(found, side, listed[side]) for side in (True, False)}
    return WhyAnswer(
        class_name=shown(contents.class_names[label]),
        law=str(service.gallery.law),
        total=found.total,
        total_share=float(shares.sum()),
        constant=found.constant,
        attracting=[_source(service, contents, found, k) for k in listed[True]],
        repelling=[_source(service, contents, found, k) for k in listed[False]],
        other_attracting=others[True],
        other_repelling=others[False],
        classes=[ClassPull(class_name=shown(contents.class_names[k]), share=float(pulls[k])) for k in best],
        left_out=found.left_out,
    )


def _source(service: Service, contents: Contents, found: Contributions, k: int) -> SourceAnswer:
    is_image = k < len(contents.ids)
    number = int(contents.ids[k]) if is_image else k - len(contents.ids)
    label = int(contents.labels[k]) if is_image else int(contents.proxy_labels[number])
    return SourceAnswer(
        kind="image" if is_image else "proxy",
        id=number,
        name=shown_name(service.gallery.index.entry(number)) if is_image else f"proxy {number}",
        class_name=shown(contents.class_names[label]),
        distance=float(found.distances[k]),
        potential=float(found.potentials[k]),
        share=float(found.shares[k]),
    )


def _others(found: Contributions, attracting: bool, listed: list[int]) -> ChargeGroup:
    """The charges of one side that are not listed, together."""
    chosen = (found.same if attracting else ~found.same) & found.acts
    chosen[listed] = False
    return ChargeGroup(
        count=int(chosen.sum()),
        potential=float(found.potentials[chosen].sum()),
        share=float(found.shares[chosen].sum()),
    )


def _current(service: Service) -> tuple[Contents, EmbeddingMap] | None:
    current = service.maps.current()
    if current is None and service.maps.error is not None:
        raise HTTPException(500, f"the map could not be made: {service.maps.error}")
    return current


@lru_cache(maxsize=64)
def _potential(contents: Contents, made: EmbeddingMap, label: int) -> Tensor:
    return plane_potential(made, contents, label, side=GRID)


@lru_cache(maxsize=2)
def _map_answer(contents: Contents, made: EmbeddingMap) -> MapAnswer:
    rows = torch.searchsorted(contents.ids, made.ids)

    def numbers(values: Tensor) -> list[float]:
        return [round(value, 5) for value in values.tolist()]

    return MapAnswer(
        state="ready",
        method=made.method,
        images=len(contents.ids),
        class_names=[shown(name) for name in contents.class_names],
        ids=made.ids.tolist(),
        x=numbers(made.places[:, 0]),
        y=numbers(made.places[:, 1]),
        labels=contents.labels[rows].tolist(),
        proxy_x=numbers(made.proxy_places[:, 0]),
        proxy_y=numbers(made.proxy_places[:, 1]),
        proxy_labels=contents.proxy_labels.tolist(),
    )
