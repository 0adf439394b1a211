"""Who sent a request: the peer of the connection or, behind a trusted proxy, the client that the proxy names."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import cached_property

from starlette.datastructures import Headers
from starlette.types import Scope

__all__ = ["TrustedProxies"]


class TrustedProxies:
    """Proxies whose forwarded headers are believed; from anyone else these headers say nothing.

    Args:
        names: Addresses or networks, such as 10.0.0.1 or 10.0.0.0/24.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        _ = self.networks  # refused at once

    @cached_property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The networks that `names` describe."""
        try:
            return tuple(ipaddress.ip_network(name) for name in self.names)
        except ValueError as error:
            raise ValueError(
                f"--trusted-proxy must be addresses or networks such as 10.0.0.0/24, got: {error}"
            ) from None

    def trusts(self, address: str) -> bool:
        """Whether a peer is a trusted proxy."""
        found = _address(address)
        return found is not None and any(found in network for network in self.networks)

    def client(self, scope: Scope, headers: Headers) -> str:
        """The address of the client; "" if it is not known.

        Every proxy appends its own peer to X-Forwarded-For. So the client is the last address there that is no trusted
        proxy; whatever stands before it was written by that client.
        """
        address = str((scope.get("client") or ("",))[0])
        if not self.trusts(address):
            return address
        forwarded = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for one in reversed([part.strip() for part in forwarded if part.strip()]):
            found = _address(one)
            if found is None:  # a proxy writes addresses; whoever wrote this is none
                return address
            address = str(found)
            if not self.trusts(address):
                return address
        return address

    def scheme(self, scope: Scope, headers: Headers) -> str:
        """http or https: how the client speaks to the proxy in front, if there is a trusted one."""
        peer = str((scope.get("client") or ("",))[0])
        given = headers.get("x-forwarded-proto", "").strip().lower()
        return given if given in ("http", "https") and self.trusts(peer) else str(scope.get("scheme", "http"))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
