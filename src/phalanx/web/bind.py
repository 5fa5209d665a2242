"""The names a browser may call the dashboard by; where it listens is `phalanx.io.listen`, which other servers share."""

from __future__ import annotations

import ipaddress
import socket

from phalanx.io.listen import LOOPBACK_NAMES, Address

DEFAULT = "127.0.0.1:8337"


def allowed_hosts(bound: Address, *, asked: str = "") -> frozenset[str]:
    """Names of a server that listens there, `asked` to by that name.

    A foreign name that resolves to us is an attack (DNS rebinding).
    """
    if _numeric(bound).is_loopback:
        return LOOPBACK_NAMES | {bound.host}
    own = socket.gethostname().lower()
    return LOOPBACK_NAMES | {bound.host, own, own.partition(".")[0], *([asked.lower()] if asked else [])}


def is_any(bound: Address) -> bool:
    """Whether the socket listens on every address of the machine."""
    return _numeric(bound).is_unspecified


def _numeric(bound: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(bound.host.partition("%")[0])  # without the zone of a link-local address
