"""The ASGI application: routers, static files, error responses and lifespan, behind the security middleware."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from pfml.serving.gallery import Gallery, RunFileError
from pfml.serving.images import BadUploadError
from pfml.serving.middleware import Access, SecurityMiddleware
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

log = logging.getLogger(__name__)


def create_app(service: Service, access: Access | None = None) -> SecurityMiddleware:
    """The ASGI application.

    Args:
        service: The gallery and its workers; closed when the application shuts down.
        access: Who may send requests; by default anyone on this machine.
    """
    access = access or Access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.maps.current()  # starts to compute the map
        yield
        service.close()

    app = FastAPI(
        title="pfml serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
    )
    app.state.service = service
    app.state.access = access
    for router in all_routers():
        app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    _add_error_handlers(app)
    # outside of the application, so that its headers are on every response, errors of the server included
    return SecurityMiddleware(app, access, service.limits.upload_bytes)


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
        public = _without_folders(message, request.app.state.service.gallery)
        if public != message:
            log.warning("%s", message)  # the operator needs the path
        return JSONResponse({"error": public}, 409)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed at this request: see its log"}, 500)


def _without_folders(text: str, gallery: Gallery) -> str:
    """`text` with paths relative to the run and the index: responses name no folder of this machine."""
    for folder in (gallery.index.path, gallery.run):
        for prefix in {str(folder), str(folder.absolute()), str(folder.resolve())} - {"."}:
            text = text.replace(f"{prefix}/", "")
    return text
