"""Routes of the map: the coordinates of images, what colors them, and the potential of a class on it."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Literal

import torch
from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel, Field
from torch import Tensor

from pfml.search.metadata import OWN_COLUMNS
from pfml.serving.dependencies import ErrorResponse, SharedService
from pfml.serving.embedding_map import PLANE, EmbeddingMap, plane_potential
from pfml.serving.gallery import Contents
from pfml.serving.service import Service, UnknownNameError
from pfml.storage.values import Value, microseconds, shown_value
from pfml.terminal import readable
from pfml.typos import did_you_mean

__all__ = ["router"]

router = APIRouter(
    prefix="/api", tags=["map"], responses={404: {"model": ErrorResponse}, 503: {"model": ErrorResponse}}
)
EXPLANATION = (
    "The potential of this class on the plane of the map, on a logarithmic scale: blue attracts, red repels. Images "
    "and proxies act from their points on the map, by a power law with alpha 2 and delta 4 % of the width. This is an "
    'illustration: the field of training acts in the embedding itself; "Why is this image here?" lists its terms.'
)
#: Grid points on a side of the potential.
GRID = 128
NOT_YET = HTTPException(503, "the map is still being computed: try again in a moment", {"retry-after": "2"})


class MapResponse(BaseModel):
    """The coordinates of images and proxies on the map, in columns of equal length."""

    state: Literal["ready", "computing"]
    method: str = ""
    images: int = Field(default=0, description="How many the index has; the map may show a subsample.")
    columns: list[str] = Field(default=[], description="What else the points can be colored by, see /api/map/values.")
    class_names: list[str] = []
    ids: list[int] = []
    x: list[float] = []
    y: list[float] = []
    labels: list[int] = Field(default=[], description="Positions in class_names, -1 for none.")
    proxy_x: list[float] = []
    proxy_y: list[float] = []
    proxy_labels: list[int] = []


class ValuesResponse(BaseModel):
    """A column of the index for the images on the map, in the order of the map."""

    kind: Literal["text", "number"] = Field(description="Dates are numbers: microseconds since 1970. Lists are texts.")
    values: list[float | None] = Field(description="Numbers, or positions in names; null where there is none.")
    names: list[str] = Field(default=[], description="The texts, the most frequent first.")
    low: float = 0.0
    high: float = 0.0
    low_text: str = Field(default="", description="The least value as people write it.")
    high_text: str = ""


class PotentialResponse(BaseModel):
    """The potential of a class on a grid over the map."""

    class_name: str
    side: int
    low: float = Field(description="Where the grid begins on both axes of the map.")
    high: float
    values: list[float] = Field(description="In [-1, 1], logarithmic, row by row from the top; negative attracts.")
    explanation: str


@router.get("/map", response_model=MapResponse)
async def map_of_index(service: SharedService) -> Response:
    """The map: coordinates of images and proxies. The state is "computing" until it is ready; poll."""

    def respond() -> bytes:
        current = _current(service)
        if current is None:
            return MapResponse(state="computing").model_dump_json().encode()
        columns = tuple(name for name in service.gallery.index.columns if name not in OWN_COLUMNS)
        return _map_content(*current, columns)

    return Response(await service.searching.run(respond), media_type="application/json")


@router.get("/map/values")
async def values(
    service: SharedService, column: Annotated[str, Query(description="A column of the index; see /api/columns.")]
) -> ValuesResponse:
    """A column of the index for the images on the map, to color them by."""

    def respond() -> ValuesResponse:
        current = _current(service)
        if current is None:
            raise NOT_YET
        index = service.gallery.index
        known = {readable(name): name for name in index.columns}
        if column not in known:
            raise UnknownNameError(f"the index has no column {column!r}{did_you_mean(column, known)}")
        return _values(index.column(known[column], current[1].ids))

    return await service.searching.run(respond)


@router.get("/map/potential")
async def potential(service: SharedService, class_name: str) -> PotentialResponse:
    """The potential of a class on a grid over the map."""

    def respond() -> PotentialResponse:
        current = _current(service)
        if current is None:
            raise NOT_YET
        contents, found = current
        label = contents.class_names.index(service.class_named(class_name))
        values = _potential(contents, found, label)
        rounded = [round(value, 3) for value in values.flatten().tolist()]
        return PotentialResponse(
            class_name=class_name, side=GRID, low=PLANE[0], high=PLANE[1], values=rounded, explanation=EXPLANATION
        )

    return await service.searching.run(respond)


def _current(service: Service) -> tuple[Contents, EmbeddingMap] | None:
    current = service.maps.current()
    if current is None and service.maps.error is not None:
        raise HTTPException(500, f"the map could not be computed: {service.maps.error}")
    return current


@lru_cache(maxsize=64)
def _potential(contents: Contents, embedding_map: EmbeddingMap, label: int) -> Tensor:
    return plane_potential(embedding_map, contents, label, side=GRID)


def _values(found: list[Value | None]) -> ValuesResponse:
    present = [value for value in found if value is not None]
    if any(isinstance(value, str | tuple) for value in present):
        texts = [None if value is None else readable(shown_value(value)) for value in found]
        names = [text for text, _ in Counter(text for text in texts if text is not None).most_common()]
        code = {name: float(k) for k, name in enumerate(names)}
        return ValuesResponse(kind="text", values=[None if text is None else code[text] for text in texts], names=names)
    if not present:
        return ValuesResponse(kind="number", values=[None] * len(found))
    ordered = sorted(((_number(value), value) for value in present), key=itemgetter(0))
    (low, least), (high, greatest) = ordered[0], ordered[-1]
    return ValuesResponse(
        kind="number",
        values=[None if value is None else _number(value) for value in found],
        low=low,
        high=high,
        low_text=shown_value(least),
        high_text=shown_value(greatest),
    )


def _number(value: Value) -> float:
    return float(microseconds(value)) if isinstance(value, datetime) else float(value)  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def _map_content(contents: Contents, embedding_map: EmbeddingMap, columns: tuple[str, ...]) -> bytes:
    """The map as JSON: 100,000 points take a while, which no other request should wait for twice."""
    rows = torch.searchsorted(contents.ids, embedding_map.ids)
    acts = contents.proxy_labels >= 0

    def numbers(values: Tensor) -> list[float]:
        return [round(value, 5) for value in values.tolist()]

    found = MapResponse(
        state="ready",
        method=embedding_map.method,
        images=len(contents.ids),
        columns=[readable(name) for name in columns],
        class_names=[readable(name) for name in contents.class_names],
        ids=embedding_map.ids.tolist(),
        x=numbers(embedding_map.points[:, 0]),
        y=numbers(embedding_map.points[:, 1]),
        labels=contents.labels[rows].tolist(),
        proxy_x=numbers(embedding_map.proxy_points[acts, 0]),
        proxy_y=numbers(embedding_map.proxy_points[acts, 1]),
        proxy_labels=contents.proxy_labels[acts].tolist(),
    )
    return found.model_dump_json().encode()
