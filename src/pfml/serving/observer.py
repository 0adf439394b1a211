"""What is true of every request: its client and id, the version in its answer, metrics and the access log."""

from __future__ import annotations

import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pfml.serving.access_log import AccessLog
from pfml.serving.client_address import TrustedProxies
from pfml.serving.service import Service
from pfml.version import __version__

__all__ = ["Observer", "route_of"]

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
#: An id that a proxy may give.
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
#: Routes whose bodies are images, and the statuses of refused ones.
UPLOADS = ("/api/search", "/api/embed", "/api/images")
REJECTED = (400, 413, 415, 422)


class Observer:
    """ASGI middleware around all others.

    Args:
        app: The application behind it.
        service: Whose metrics count, and whose index is named.
        proxies: By whose word a client is another one than the peer.
        log: Where each answer is written; None for nowhere.
    """

    def __init__(self, app: ASGIApp, service: Service, proxies: TrustedProxies, log: AccessLog | None = None) -> None:
        self.app = app
        self.service = service
        self.proxies = proxies
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = self.proxies.client(scope, headers)
        request_id = self._request_id(scope, headers)
        scope = {**scope, "client": (client, 0), "scheme": self.proxies.scheme(scope, headers)}
        status, sent, began = None, 0, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = int(message["status"])
                answer = MutableHeaders(scope=message)
                answer["x-pfml-version"] = __version__
                answer["x-pfml-index"] = str(self.service.gallery.index.generation)
                answer["x-request-id"] = request_id
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        metrics = self.service.metrics
        metrics.in_progress.inc()
        try:
            await self.app(scope, receive, sending)
        finally:
            metrics.in_progress.dec()
            seconds = time.perf_counter() - began
            route = route_of(scope)
            method = scope["method"] if scope["method"] in METHODS else "other"
            metrics.answered(method, route or "none", status or 0, seconds)
            if method == "POST" and scope["path"] in UPLOADS and status in REJECTED:
                metrics.rejected.labels(str(status)).inc()
            if self.log is not None:
                self.log.write(
                    method=method,
                    route=route,
                    status=status,
                    seconds=seconds,
                    sent=sent,
                    client=client,
                    request_id=request_id,
                )

    def _request_id(self, scope: Scope, headers: Headers) -> str:
        """An id: that of a trusted proxy, or a new one."""
        given = headers.get("x-request-id", "")
        peer = str((scope.get("client") or ("",))[0])
        return given if REQUEST_ID.fullmatch(given) and self.proxies.trusts(peer) else secrets.token_hex(8)


def route_of(scope: Scope) -> str | None:
    """The template of the route that answered, such as /api/images/{image}; None if there was none."""
    path = str(scope["path"])
    if path.startswith("/page/"):
        return "/page/{file}"
    # those that were refused before a route was looked for
    return getattr(scope.get("route"), "path", path if path in UPLOADS else None)
