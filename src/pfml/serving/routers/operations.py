"""Routes of operations: liveness, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from pfml.serving.dependencies import SharedService
from pfml.version import __version__

__all__ = ["router"]

router = APIRouter(tags=["operations"])


class HealthResponse(BaseModel):
    """That the process answers."""

    alive: bool = True
    version: str = Field(description="Of pfml.")


class ReadyResponse(BaseModel):
    """The readiness of the server."""

    ready: bool = Field(description="Whether searches are answered: the model is loaded and the index can be read.")
    problem: str | None = Field(description="What is wrong with the files of the index; null if nothing is.")


@router.get("/health")
async def health() -> HealthResponse:
    """The liveness probe; reads nothing and needs no token."""
    return HealthResponse(version=__version__)


@router.get("/ready", responses={503: {"model": ReadyResponse}})
async def ready(service: SharedService, response: Response) -> ReadyResponse:
    """The readiness probe; needs no token.

    The server accepts connections before its model is loaded, and answers them once it is.
    """
    gallery = service.gallery
    await service.searching.run(gallery.refresh)
    if not gallery.is_searchable:
        response.status_code = 503
    return ReadyResponse(ready=gallery.is_searchable, problem=gallery.problem)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus's text format."}},
)
async def metrics(service: SharedService) -> Response:
    """Metrics of all processes for Prometheus, which needs the token like any client."""
    service.read_metrics()
    text, media_type = await service.scaling.run(service.metrics.text)
    return Response(text, media_type=media_type)
