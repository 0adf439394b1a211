"""Security of the server, in front of all routes: host, origin, token, size of bodies, and headers of responses.

- The Host header must be a name of this server, against DNS rebinding. Starlette's TrustedHostMiddleware has a fixed
  list of names; a server on a network must also accept any numeric address, which cannot be rebound. So this is ours.
- A request that changes something must come from the server's own page, or from no page (CSRF).
- With a token, every request has it as a bearer token, or has the session cookie of the login.
- A client that sends more requests than its rate limit gets 429.
- The bytes of a body are counted while they arrive.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pfml.serving.client_address import TrustedProxies
from pfml.serving.rate_limit import RateLimit, RateLimiter
from pfml.serving.service import Limits

__all__ = ["Access", "SecurityMiddleware", "is_loopback"]

COOKIE = "pfml_session"
#: Paths that need no token.
OPEN_PATHS = ("/login", "/health", "/ready", "/page/style.css", "/page/icon.svg")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Bytes of a body without an upload, and of the form around an upload.
FORM_BYTES = 2**16
#: Bytes of a list of images that were selected.
SELECTION_BYTES = 2**19
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # "no-referrer" would hide the origin of our own forms, too
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether the address can be reached from this machine only."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


@dataclass(frozen=True)
class Access:
    """Who may send requests.

    Args:
        host: The address that the server is bound to.
        token: What a request must carry; None for anyone who reaches the address, which then must be loopback.
        names: Further names of the server, for the Host header.
        rate_limit: Requests of a client to the API and the login; None for any number.
        trusted_proxies: Addresses or networks of proxies in front of the server, whose X-Forwarded-For is believed.
    """

    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    rate_limit: RateLimit | None = None
    trusted_proxies: tuple[str, ...] = ()
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        TrustedProxies(self.trusted_proxies)
        if self.token is not None and len(self.token) < 16:
            raise ValueError(
                f"a token must have at least 16 characters, got {len(self.token)}: "
                f"python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"without a token the server must be bound to a loopback address (127.0.0.1), got --host {self.host}: "
                f"give --token-file FILE or the environment variable PFML_TOKEN, of at least 16 characters"
            )

    def allows_host(self, host: str) -> bool:
        """Whether a Host header names this server, with any port."""
        name = _host_name(host)
        if is_loopback(name) or name in {one.lower() for one in self.names}:
            return True
        own = (self.host.lower(), socket.gethostname().lower())
        return not is_loopback(self.host) and (_address(name) is not None or name in own)

    def is_token(self, given: str) -> bool:
        """Whether `given` is the token, compared in constant time."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def session(self) -> str:
        """The value of the session cookie: derived from the token, and void when the server ends."""
        return hmac.new(self._secret, (self.token or "").encode(), hashlib.sha256).hexdigest()

    def rate_limiter(self, path: Path | None = None) -> RateLimiter | None:
        """The buckets of clients, in a file that all processes of the server share; None without a rate limit."""
        key = hmac.digest(self._secret, b"rate limit", "sha256")
        return None if self.rate_limit is None else RateLimiter(self.rate_limit, path, key)

    def admits(self, headers: Headers) -> bool:
        """Whether a request has the token or the session cookie, or needs none."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        session = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return hmac.compare_digest(session.encode(), self.session().encode())


class SecurityMiddleware:
    """ASGI middleware: refuses requests that `access` does not allow, and adds security headers to every response.

    Args:
        app: The application behind it.
        access: Who may send requests.
        limits: Of uploads.
        limiter: Counts the requests of clients; None for no limit.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, limiter: RateLimiter | None = None) -> None:
        self.app = app
        self.access = access
        self.limiter = limiter
        self._upload_bytes = {
            "/api/search": limits.upload_bytes,
            "/api/uploads": limits.upload_bytes,
            "/api/embed": limits.request_bytes,
            "/api/images": limits.request_bytes,
            "/api/images/table": SELECTION_BYTES,
            "/api/edits": SELECTION_BYTES,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            return
        send = _with_headers(send, scope["path"])
        refused = self._refusal(scope, Headers(scope=scope))
        if refused is not None:
            await _respond(send, *refused)
            return
        await self.app(scope, _counted(receive, self._most_bytes(scope)), send)

    def _most_bytes(self, scope: Scope) -> int:
        """Largest body of a request."""
        return self._upload_bytes.get(scope["path"], 0) + FORM_BYTES

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Status, message and headers of a refusal; None if the request may pass."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.access.allows_host(hosts[0]):
            return 421, "the Host header must name this server: start pfml serve with --name for further names", []
        if self.limiter is not None and _is_limited(scope["path"]):
            wait = self.limiter.wait(str((scope.get("client") or ("",))[0]))
            if wait > 0:
                retry = [(b"retry-after", str(math.ceil(wait)).encode())]
                return 429, f"a client may send {self.limiter.limit} requests: try again in {wait:.1f} s", retry
        if scope["method"] not in SAFE_METHODS and not _is_same_origin(headers, hosts[0]):
            return 403, "changes must come from the page of this server, got another origin", []
        if scope["path"] not in OPEN_PATHS and not self.access.admits(headers):
            if scope["path"] == "/" and scope["method"] == "GET":
                return 303, "log in first", [(b"location", b"/login")]
            challenge = [(b"www-authenticate", b"Bearer")]
            return 401, "a request must carry the token: Authorization: Bearer TOKEN, or log in at /login", challenge
        if "\0" in scope["path"]:  # which no file system knows, and not every starlette refuses
            return 404, "Not Found", []
        length = headers.get("content-length", "0")
        most = self._most_bytes(scope)
        if not length.isdecimal() or int(length) > most:
            return 413, f"a body must have at most {most:,} bytes, got {length}", [(b"connection", b"close")]
        return None


def _is_limited(path: str) -> bool:
    """Whether a request counts for the rate limit: not the page with its thumbnails, nor probes and metrics."""
    return path == "/login" or (path.startswith("/api/") and not path.endswith("/jpeg"))


def _is_same_origin(headers: Headers, host: str) -> bool:
    """Whether the request comes from our own page; clients that are not browsers send neither header."""
    origin = headers.get("origin")
    if origin is not None:
        scheme, _, netloc = origin.partition("://")
        return scheme in ("http", "https") and netloc.lower() == host.lower()
    return headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def _counted(receive: Receive, most: int) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, f"a body must have at most {most:,} bytes, got more")
        return message

    return counted


def _with_headers(send: Send, path: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            # routes that may be cached say so themselves
            headers.setdefault("cache-control", "no-cache" if path.startswith("/page/") else "no-store")
        await send(message)

    return sending


async def _respond(send: Send, status: int, error: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    body = json.dumps({"error": error}).encode()
    plain = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*plain, *headers]})
    await send({"type": "http.response.body", "body": body})


def _host_name(host: str) -> str:
    """The name in a Host header, without the port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as half an IPv6 address
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
