"""The ASGI application: routers, static files, error responses and lifespan, behind the security middleware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from pfml.serving.access_log import AccessLog
from pfml.serving.client_address import TrustedProxies
from pfml.serving.gallery import REFRESH_INTERVAL, RunFileError
from pfml.serving.images import BadUploadError
from pfml.serving.middleware import Access, SecurityMiddleware
from pfml.serving.observer import Observer
from pfml.serving.openapi import COMMON_ERRORS, complete_openapi
from pfml.serving.routers import all_routers
from pfml.serving.routers.page import PAGE
from pfml.serving.service import Service, UnknownNameError
from pfml.serving.workers import BusyError
from pfml.storage.files import DamagedFileError
from pfml.version import __version__

__all__ = ["create_app"]

DESCRIPTION = (
    "Search by image, the map of an embedding, why an image is where it is, the audit of labels, and edits of classes."
)

#: Images up to which the map is computed at the start: all of their vectors are read for it.
MAP_AT_START = 100_000

log = logging.getLogger(__name__)


def create_app(
    service: Service, access: Access | None = None, *, log: AccessLog | None = None, buckets: Path | None = None
) -> Observer:
    """The ASGI application.

    Args:
        service: The gallery and its workers; closed when the application shuts down.
        access: Who may send requests; by default anyone on this machine.
        log: Where each answer is written; None for nowhere.
        buckets: A file in which all processes of a server count the requests of clients; None for memory.
    """
    access = access or Access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if len(service.gallery.index) <= MAP_AT_START:
            service.maps.current()  # starts to compute the map
        following = asyncio.create_task(_follow(service))
        yield
        following.cancel()
        service.close()

    app = FastAPI(
        title="pfml serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
        responses=COMMON_ERRORS,
    )
    app.state.service = service
    app.state.access = access
    for router in all_routers():
        app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    _add_error_handlers(app)
    complete_openapi(app, needs_token=access.token is not None)
    # outside of the application, so that their headers are on every response, errors of the server included
    secured = SecurityMiddleware(app, access, service.limits, access.rate_limiter(buckets))
    return Observer(secured, service, TrustedProxies(access.trusted_proxies), log)


async def _follow(service: Service) -> None:
    """Take up new files and set the gauges of metrics every second, also in a process that gets no requests."""
    while True:
        with suppress(BusyError):
            await service.searching.run(service.gallery.refresh)
        service.read_metrics()
        await asyncio.sleep(REFRESH_INTERVAL)


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error with JSON, {"error": one sentence}."""

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(BadUploadError)
    async def bad_upload(_: Request, error: BadUploadError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status)

    @app.exception_handler(UnknownNameError)
    async def unknown(_: Request, error: UnknownNameError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 404)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 503, {"retry-after": "1"})

    @app.exception_handler(RunFileError)
    async def not_saved(_: Request, error: RunFileError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 507 if error.is_full else 503)

    @app.exception_handler(DamagedFileError)
    async def damaged(_: Request, error: DamagedFileError) -> JSONResponse:
        # the error itself names a path, which only the log may show
        message = "the index was damaged while it was open: restore its files, or index again and restart pfml serve"
        return JSONResponse({"error": message}, 503)

    @app.exception_handler(ValueError)
    async def conflict(request: Request, error: ValueError) -> JSONResponse:
        message = str(error)
        public = _without_folders(message, request.app.state.service)
        if public != message:
            log.warning("%s", message)  # the operator needs the path
        return JSONResponse({"error": public}, 409)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed at this request: see its log"}, 500)


def _without_folders(text: str, service: Service) -> str:
    """`text` with paths relative to the folders that are served: responses name no folder of this machine."""
    added = () if service.additions is None else (service.additions.folder,)
    for folder in (service.gallery.index.path, service.gallery.run, *added):
        for prefix in {str(folder), str(folder.absolute()), str(folder.resolve())} - {"."}:
            text = text.replace(f"{prefix}/", "")
    return text
