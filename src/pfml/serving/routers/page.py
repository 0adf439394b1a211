"""Routes of the page itself: the page, the documentation of the API, and the login."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from pfml.serving.middleware import COOKIE, Access

__all__ = ["PAGE", "router"]

#: The folder of HTML, JavaScript and CSS, which the application serves under /page.
PAGE = Path(__file__).parents[1] / "page"
WRONG_TOKEN = '<p class="wrong" role="alert">This is not the token of the server.</p>'

router = APIRouter()


@router.get("/", include_in_schema=False)
async def index() -> FileResponse:
    """The page."""
    return FileResponse(PAGE / "index.html")


@router.get("/api/docs", include_in_schema=False)
async def docs() -> FileResponse:
    """The documentation of the API."""
    return FileResponse(PAGE / "docs.html")


@router.get("/login", include_in_schema=False)
async def login_form(request: Request) -> Response:
    """The login form."""
    access: Access = request.app.state.access
    return RedirectResponse("/", 303) if access.admits(request.headers) else HTMLResponse(_login_html())


@router.post("/login", include_in_schema=False)
async def login(request: Request, token: Annotated[str, Form(max_length=1024)] = "") -> Response:
    """A session cookie in exchange for the token."""
    access: Access = request.app.state.access
    if access.token is None:
        return RedirectResponse("/", 303)
    if not access.is_token(token):
        return HTMLResponse(_login_html().replace("<!-- wrong -->", WRONG_TOKEN), 401)
    response = RedirectResponse("/", 303)
    is_secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, access.session(), httponly=True, samesite="strict", secure=is_secure, path="/")
    return response


def _login_html() -> str:
    return (PAGE / "login.html").read_text(encoding="utf-8")
