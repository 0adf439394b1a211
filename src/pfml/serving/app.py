"""The application: the page, the API, and what stands before both."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Form, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from pfml.serving import audit_routes, field_routes, search_routes
from pfml.serving.answers import ReadyAnswer
from pfml.serving.audit_queue import AuditFileError
from pfml.serving.gallery import Gallery
from pfml.serving.guard import COOKIE, Access, Guard
from pfml.serving.images import BadUploadError
from pfml.serving.search_routes import Shared
from pfml.serving.service import Service, UnknownNameError
from pfml.serving.workers import BusyError
from pfml.storage.files import DamagedFileError
from pfml.version import __version__

__all__ = ["create_app"]

PAGE = Path(__file__).parent / "page"
DESCRIPTION = "Search by image, the map of an embedding, why an image is where it is, and the audit of labels."

WRONG_TOKEN = '<p class="wrong" role="alert">This is not the token that the server was started with.</p>'

log = logging.getLogger(__name__)


def create_app(service: Service, access: Access | None = None) -> Guard:
    """The whole application, as ASGI.

    Args:
        service: What is served; closed when the application ends.
        access: Who may ask; by default anyone on this machine.
    """
    access = access or Access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.maps.current()  # begins to make the map
        yield
        service.close()

    app = FastAPI(
        title="pfml serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.state.access = access
    for routes in (search_routes, field_routes, audit_routes):
        app.include_router(routes.router, prefix="/api")
    _add_ready(app)
    _add_page(app)
    _add_error_answers(app)
    return Guard(app, access, service.limits.upload_bytes)


def _add_ready(app: FastAPI) -> None:
    @app.get("/ready", tags=["server"], responses={503: {"model": ReadyAnswer}})
    async def ready(service: Shared, response: Response) -> ReadyAnswer:
        """Whether searches are answered; without a token, for probes."""
        await service.searching.run(service.gallery.refresh)
        if not service.gallery.is_searchable:
            response.status_code = 503
        return ReadyAnswer(ready=service.gallery.is_searchable, problem=service.gallery.problem)


def _login_page() -> str:
    return (PAGE / "login.html").read_text(encoding="utf-8")


def _add_page(app: FastAPI) -> None:
    app.mount("/page", StaticFiles(directory=PAGE), name="page")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/api/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    @app.get("/login", include_in_schema=False)
    async def login_form(request: Request) -> Response:
        access: Access = request.app.state.access
        return RedirectResponse("/", 303) if access.admits(request.headers) else HTMLResponse(_login_page())

    @app.post("/login", include_in_schema=False)
    async def login(request: Request, token: Annotated[str, Form(max_length=1024)] = "") -> Response:
        access: Access = request.app.state.access
        if access.token is None:
            return RedirectResponse("/", 303)
        if not access.is_token(token):
            return HTMLResponse(_login_page().replace("<!-- wrong -->", WRONG_TOKEN), 401)
        answer = RedirectResponse("/", 303)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, access.session(), httponly=True, samesite="strict", secure=is_secure, path="/")
        return answer


def _add_error_answers(app: FastAPI) -> None:
    """Every error as JSON, {"error": a sentence}."""

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
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

    @app.exception_handler(AuditFileError)
    async def not_saved(_: Request, error: AuditFileError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 507 if error.is_full else 503)

    @app.exception_handler(DamagedFileError)
    async def damaged(_: Request, error: DamagedFileError) -> JSONResponse:
        # its own words name a path; the log has them
        words = "the index was damaged while it was open: restore its files, or index again and restart pfml serve"
        return JSONResponse({"error": words}, 503)

    @app.exception_handler(ValueError)
    async def refused_value(request: Request, error: ValueError) -> JSONResponse:
        words = str(error)
        answer = _without_folders(words, request.app.state.service.gallery)
        if answer != words:
            log.warning("%s", words)  # whoever looks after the server needs the path
        return JSONResponse({"error": answer}, 409)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed at this request: its terminal says how"}, 500)


def _without_folders(text: str, gallery: Gallery) -> str:
    """`text` with files of the run and of the index named from there on: folders stay on this machine."""
    for folder in (gallery.index.path, gallery.run):
        for place in {str(folder), str(folder.absolute()), str(folder.resolve())} - {"."}:
            text = text.replace(f"{place}/", "")
    return text
