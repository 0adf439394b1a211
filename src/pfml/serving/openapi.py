"""What the OpenAPI document says of every route: who may call it, the headers of answers, and common errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from pfml.serving.dependencies import ErrorResponse
from pfml.serving.middleware import COOKIE, OPEN_PATHS

__all__ = ["COMMON_ERRORS", "complete_openapi"]

#: Errors that any route may answer with.
COMMON_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorResponse, "description": "The request does not carry the token."},
    421: {"model": ErrorResponse, "description": "The Host header names another server."},
    429: {"model": ErrorResponse, "description": "Too many requests of this client; see Retry-After."},
    500: {"model": ErrorResponse, "description": "The server failed; its log says how."},
    503: {"model": ErrorResponse, "description": "Busy, shutting down, or unable to read or write its files."},
}
HEADERS = {
    "X-Pfml-Version": "The version of pfml.",
    "X-Pfml-Index": "The generation of the index: it grows with every change.",
    "X-Request-ID": "The id of the request, as in the access log.",
}
CHANGES = {
    "403": "The request comes from a page of another server.",
    "413": "The body has too many bytes.",
}
METHODS = ("get", "put", "post", "delete", "patch")


def complete_openapi(app: FastAPI, *, needs_token: bool) -> None:
    """Complete the document of an application whose routes are all there.

    Args:
        app: The application.
        needs_token: Whether requests must carry a token.
    """
    generate = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(generate(), needs_token)
        return generate()

    app.openapi = complete  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], needs_token: bool) -> None:
    """Add to the document, in place."""
    components = schema.setdefault("components", {})
    components["headers"] = {
        name: {"description": words, "schema": {"type": "string"}} for name, words in HEADERS.items()
    }
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "Set by the login form."},
    }
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for path, operations in schema["paths"].items():
        for method in operations.keys() & {*METHODS}:
            operation = operations[method]
            operation["summary"] = operation["description"].partition("\n")[0]
            operation["security"] = [{"token": []}, {"session": []}] if needs_token and path not in OPEN_PATHS else []
            if method != "get":
                for status, words in CHANGES.items():
                    operation["responses"].setdefault(status, {"description": words, "content": error})
            for answer in operation["responses"].values():
                answer["headers"] = {**answer.get("headers", {}), **headers}
