"""Routes of the field: why an image is where it is."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, Field
from torch import Tensor

from pfml.serving.contributions import Contributions, contributions
from pfml.serving.dependencies import ErrorResponse, SharedService, name_of, query_vector
from pfml.serving.gallery import Contents
from pfml.serving.service import Service
from pfml.terminal import readable

__all__ = ["router"]

router = APIRouter(
    prefix="/api", tags=["field"], responses={404: {"model": ErrorResponse}, 503: {"model": ErrorResponse}}
)


class SourceResponse(BaseModel):
    """A charge that acts on an image: an image of the index, or a proxy."""

    kind: Literal["image", "proxy"]
    id: int = Field(description="The id of the image, or the number of the proxy.")
    name: str
    class_name: str
    distance: float
    potential: float = Field(description="Its term of the sum: negative if it attracts.")
    share: float = Field(description="Its term over the sum of the absolute values of all terms.")


class ChargeGroup(BaseModel):
    """The sum over the charges that are not listed."""

    count: int
    potential: float
    share: float


class ClassPull(BaseModel):
    """The attraction of a class."""

    class_name: str
    share: float = Field(description="Over the attraction of all classes.")


class WhyResponse(BaseModel):
    """The potential of a class at an image, charge by charge; the terms add up to `total`."""

    class_name: str
    law: str
    total: float
    total_share: float
    constant: float = Field(description="total + constant is Eq. 3: charges that are out of reach add a constant.")
    attracting: list[SourceResponse]
    repelling: list[SourceResponse]
    other_attracting: ChargeGroup
    other_repelling: ChargeGroup
    classes: list[ClassPull] = Field(description="Those that attract most, strongest first.")
    left_out: int = Field(description="Indexed images at a distance of about 0, besides `id`: its duplicates.")


@router.get("/why")
async def why(
    service: SharedService,
    id: Annotated[int | None, Query(description="An image of the index.")] = None,  # noqa: A002
    upload: Annotated[str | None, Query(description="An earlier upload.")] = None,
    class_name: Annotated[
        str | None, Query(description="Whose potential; by default the image's class, or the one that attracts most.")
    ] = None,
    top: Annotated[int, Query(ge=1, le=100, description="Charges to list on either side.")] = 8,
) -> WhyResponse:
    """The term of every image and proxy in the potential at an image: exact, since fields superpose."""

    def respond() -> WhyResponse:
        vector = query_vector(service, id, upload)
        contents = service.gallery.contents()
        if not contents.class_names:
            raise HTTPException(409, "the field needs charges with classes, got an index without classes")
        label = _label(service, contents, vector, id, class_name)
        found = contributions(vector, label, contents, service.gallery.law, without=id)
        return _why_response(service, contents, found, label, top)

    return await service.searching.run(respond)


def _label(service: Service, contents: Contents, vector: Tensor, image: int | None, class_name: str | None) -> int:
    """The class that was asked for, else the class of the image, else the class that attracts most."""
    if class_name is not None:
        return contents.class_names.index(service.class_named(class_name))
    row = None if image is None else contents.row(image)
    if row is not None and int(contents.labels[row]) >= 0:
        return int(contents.labels[row])
    pulls = contributions(vector, 0, contents, service.gallery.law, without=image).class_attractions
    return int(pulls.argmax())


def _why_response(service: Service, contents: Contents, found: Contributions, label: int, top: int) -> WhyResponse:
    listed = {side: found.strongest(top, attracting=side) for side in (True, False)}
    shares = found.shares
    pulls = found.class_attractions / found.class_attractions.sum().clamp_min(1e-300)
    best = pulls.argsort(descending=True, stable=True)[:5].tolist()
    others = {side: _others(found, side, listed[side]) for side in (True, False)}
    return WhyResponse(
        class_name=readable(contents.class_names[label]),
        law=str(service.gallery.law),
        total=found.total,
        total_share=float(shares.sum()),
        constant=found.constant,
        attracting=[_source(service, contents, found, k) for k in listed[True]],
        repelling=[_source(service, contents, found, k) for k in listed[False]],
        other_attracting=others[True],
        other_repelling=others[False],
        classes=[ClassPull(class_name=readable(contents.class_names[k]), share=float(pulls[k])) for k in best],
        left_out=found.left_out,
    )


def _source(service: Service, contents: Contents, found: Contributions, k: int) -> SourceResponse:
    is_image = k < len(contents.ids)
    number = int(contents.ids[k]) if is_image else k - len(contents.ids)
    label = int(contents.labels[k]) if is_image else int(contents.proxy_labels[number])
    return SourceResponse(
        kind="image" if is_image else "proxy",
        id=number,
        name=name_of(service, number) if is_image else f"proxy {number}",
        class_name=readable(contents.class_names[label]),
        distance=float(found.distances[k]),
        potential=float(found.potentials[k]),
        share=float(found.shares[k]),
    )


def _others(found: Contributions, attracting: bool, listed: list[int]) -> ChargeGroup:
    """The sum over the charges of one sign that are not listed."""
    chosen = (found.same if attracting else ~found.same) & found.acts
    chosen[listed] = False
    return ChargeGroup(
        count=int(chosen.sum()),
        potential=float(found.potentials[chosen].sum()),
        share=float(found.shares[chosen].sum()),
    )
