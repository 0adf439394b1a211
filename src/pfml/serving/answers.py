"""What the API answers, as types: FastAPI checks answers against them and writes them into openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

__all__ = [
    "AuditAnswer",
    "ChargeGroup",
    "ClassAnswer",
    "ClassPull",
    "DecisionAnswer",
    "DecisionRequest",
    "ErrorAnswer",
    "HitAnswer",
    "ImageAnswer",
    "ImagesAnswer",
    "MapAnswer",
    "NeighborAnswer",
    "PotentialAnswer",
    "QueryAnswer",
    "ReadyAnswer",
    "SearchAnswer",
    "SourceAnswer",
    "StatusAnswer",
    "SuspectAnswer",
    "ThresholdAnswer",
    "WhyAnswer",
]


class ErrorAnswer(BaseModel):
    """What every error answers."""

    error: str = Field(description="One sentence: what must hold, what was got.")


class ThresholdAnswer(BaseModel):
    """The distance beyond which an image is unknown."""

    distance: float
    false_accept_rate: float


class StatusAnswer(BaseModel):
    """What is served."""

    run: str
    model: str
    images: int
    classes: int
    proxies: int
    law: str
    law_is_of_run: bool
    threshold: ThresholdAnswer | None
    suspects: int
    problem: str | None = Field(description="What is wrong with the files of the index; null if nothing.")
    most_upload_bytes: int
    most_upload_pixels: int


class ReadyAnswer(BaseModel):
    """Whether searches are answered."""

    ready: bool
    problem: str | None = Field(description="What is wrong with the files of the index; null if nothing.")


class ClassAnswer(BaseModel):
    """A class of the index or of the training set."""

    name: str
    images: int = Field(description="Images of it in the index.")
    trained: bool = Field(description="Whether the run was trained on it.")


class ImageAnswer(BaseModel):
    """An image of the index."""

    id: int
    name: str
    class_name: str = Field(description="Empty if the class is unknown.")


class ImagesAnswer(BaseModel):
    """A page of the index."""

    total: int
    images: list[ImageAnswer]


class HitAnswer(ImageAnswer):
    """An image that was found."""

    distance: float = Field(description="Euclidean, on the unit sphere: 0 to 2.")
    unknown: bool | None = Field(description="Farther than the threshold; null without a threshold.")


class QueryAnswer(BaseModel):
    """What was searched by: an image of the index, or an upload."""

    image: ImageAnswer | None = None
    upload: str | None = Field(default=None, description="Names an upload for a while, for further searches by it.")


class SearchAnswer(BaseModel):
    """What was found, nearest first."""

    query: QueryAnswer
    unknown: bool | None = Field(description="Whether nothing in the index is near; null without a threshold.")
    threshold: ThresholdAnswer | None = Field(description="What this was judged by.")
    hits: list[HitAnswer]


class SourceAnswer(BaseModel):
    """A charge that acts on an image."""

    kind: Literal["image", "proxy"]
    id: int = Field(description="Of the image, or the number of the proxy.")
    name: str
    class_name: str
    distance: float
    potential: float = Field(description="Its term of the sum: negative if it attracts.")
    share: float = Field(description="Its term as a part of the sum of the sizes of all terms.")


class ChargeGroup(BaseModel):
    """All charges that are not listed one by one."""

    count: int
    potential: float
    share: float


class ClassPull(BaseModel):
    """How strongly a class attracts."""

    class_name: str
    share: float = Field(description="Of the attraction of all classes.")


class WhyAnswer(BaseModel):
    """The potential of a class at an image, charge by charge; the terms add up to `total`."""

    class_name: str
    law: str
    total: float
    total_share: float
    constant: float = Field(description="total + constant is Eq. 3: charges that are out of reach add a constant.")
    attracting: list[SourceAnswer]
    repelling: list[SourceAnswer]
    other_attracting: ChargeGroup
    other_repelling: ChargeGroup
    classes: list[ClassPull] = Field(description="Those that attract most, first.")
    left_out: int = Field(description="Indexed images at a distance of about 0, besides `id`: this very image.")


class MapAnswer(BaseModel):
    """Where images and proxies lie on a plane; columns of equal length."""

    state: Literal["ready", "computing"]
    method: str = ""
    images: int = Field(default=0, description="In the index; the map may show a sample.")
    class_names: list[str] = []
    ids: list[int] = []
    x: list[float] = []
    y: list[float] = []
    labels: list[int] = Field(default=[], description="Positions in class_names, -1 for none.")
    proxy_x: list[float] = []
    proxy_y: list[float] = []
    proxy_labels: list[int] = []


class PotentialAnswer(BaseModel):
    """The potential of a class on a grid of the map's plane, as a picture."""

    class_name: str
    side: int
    low: float = Field(description="Where the grid begins on either axis of the map.")
    high: float
    values: list[float] = Field(description="Shades in [-1, 1], row by row from the top; negative attracts.")
    explanation: str


class NeighborAnswer(BaseModel):
    """An indexed image near a suspect."""

    id: int
    name: str
    class_name: str
    distance: float


class DecisionRequest(BaseModel):
    """What a person decides about a suspect."""

    decision: Literal["accept", "reject", "relabel", "drop"]
    label: str = Field(default="", max_length=1024, description="A training class, for relabel.")


class DecisionAnswer(BaseModel):
    """What was decided."""

    decision: Literal["accept", "reject", "relabel", "drop"]
    label: str


class SuspectAnswer(BaseModel):
    """A training image whose label looks wrong."""

    key: str
    name: str
    image: int | None = Field(description="Its id, if it is in the index.")
    given: str
    suggested: str
    score: float
    confidence: float
    listed: bool = Field(description="Whether the audit calls the label wrong.")
    decision: DecisionAnswer | None
    neighbors: list[NeighborAnswer] = Field(default=[], description="Only where one suspect is asked for.")
    evidence: str = Field(description="What the audit wrote about its neighbors.")


class AuditAnswer(BaseModel):
    """The queue, most suspicious first."""

    available: bool = Field(description="Whether pfml audit has been run.")
    decided: int
    class_names: list[str] = Field(description="Those that relabel may take.")
    history: list[str] = Field(description="Keys of the decided suspects, the newest decision last.")
    suspects: list[SuspectAnswer]
