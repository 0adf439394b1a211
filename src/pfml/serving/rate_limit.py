"""Rate limits: a token bucket per client, shared by all processes of the server.

A bucket is one number, the time at which it will be full again (the generic cell rate algorithm): a request is admitted
if that lies at most one period ahead, and moves it on. The buckets lie in a table of fixed size, which the processes
map from one file. A client's place in it is a keyed hash of the address, so that nobody can choose to share a bucket.
"""

from __future__ import annotations

import hashlib
import ipaddress
import mmap
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["RateLimit", "RateLimiter"]

PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0}
#: Buckets: of 1,000 clients at a time, one in 65 shares its bucket with another.
BUCKETS = 2**16
#: Bits of an IPv6 address that make a client: a provider gives each customer at least so many.
CLIENT_BITS = 64


@dataclass(frozen=True)
class RateLimit:
    """Requests that a client may send.

    Args:
        requests: In a period; as many may come at once.
        seconds: The period.
    """

    requests: int
    seconds: float

    def __post_init__(self) -> None:
        if self.requests < 1 or not self.seconds > 0:
            raise ValueError(f"a rate limit must be at least one request in a period, got {self}")

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """The limit that is written as 10/s, 600/m or 1000/h."""
        found = re.fullmatch(r"([1-9]\d{0,8})/([smh])", text)
        if found is None:
            raise ValueError(f"a rate limit must be a number of requests per s, m or h, such as 10/s, got {text!r}")
        return cls(int(found[1]), PERIODS[found[2]])

    def __str__(self) -> str:
        unit = next((name for name, seconds in PERIODS.items() if seconds == self.seconds), f"{self.seconds:g} s")
        return f"{self.requests}/{unit}"


@dataclass
class RateLimiter:
    """Token buckets of clients.

    Args:
        limit: Of each.
        path: A file that all processes share; None for the memory of this one.
        key: Of the hash, the same in all processes.
        clock: Seconds that never go back, the same in all processes.
    """

    limit: RateLimit
    path: Path | None = None
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        size = 8 * BUCKETS
        if self.path is None:
            self._full_at = memoryview(bytearray(size)).cast("d")
            return
        with open(self.path, "a+b") as file:
            file.truncate(size)
            self._full_at = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def wait(self, client: str) -> float:
        """Seconds until a request of the client is admitted; 0 if it is now, which takes a token.

        No lock is held: of two processes that admit a request of one client in the same microsecond, one may not count.
        """
        bucket = int.from_bytes(hashlib.blake2b(_client(client), key=self.key, digest_size=4).digest(), "big") % BUCKETS
        now = self.clock()
        full_at = max(self._full_at[bucket], now)
        token = self.limit.seconds / self.limit.requests
        early = full_at + token - now - self.limit.seconds
        if early > 1e-9:
            return early
        self._full_at[bucket] = full_at + token
        return 0.0


def _client(address: str) -> bytes:
    """What counts as one client: an IPv4 address, or a network of IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address.encode(errors="surrogateescape")
    return found.packed if found.version == 4 else found.packed[: CLIENT_BITS // 8]
