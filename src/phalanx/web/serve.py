"""Run the dashboard's server until it is stopped, and determine the host names it accepts."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.io.listen import LOOPBACK_NAMES, Address
from phalanx.web.app import AccessPolicy, create_app
from phalanx.web.event_stream import NewsHub
from phalanx.web.request_guard import MOST_HEADER_BYTES
from phalanx.web.run_store import RunStore

# A client has this long, at most twice this, to finish a request or to receive sent data.
LOOK_S = 10.0
# Less than LOOK_S: idle connections end regularly.
KEEP_ALIVE_S = 8
MOST_CONNECTIONS = 512
SHUTDOWN_S = 1  # for answers that are being sent


def serve_dashboard(
    listener: socket.socket, store: RunStore, *, door: AccessPolicy, complain: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM, which is then handled as usual."""
    # A walk over a long run holds the interpreter lock; a request that reads ten files waits for it ten times. A
    # switch interval of 1 ms instead of 5 ms keeps these waits short.
    sys.setswitchinterval(0.001)
    asyncio.run(serving(listener, store, door=door, complain=complain))


async def serving(
    listener: socket.socket,
    store: RunStore,
    *,
    door: AccessPolicy,
    complain: Callable[[str], None],
    stop: threading.Event | None = None,
) -> None:
    """Run the server inside an event loop; ends also if `stop` is set."""
    hub = NewsHub(store)
    server = uvicorn.Server(_server_config(create_app(store, hub, door=door, complain=complain)))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not task.done() and not server.should_exit and not (stop is not None and stop.is_set()):
        await asyncio.sleep(0.05)
    # uvicorn waits for open answers, and a stream does not end by itself.
    server.should_exit = True
    hub.close()
    store.memo.close()
    await task


def _server_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_watched_protocol,  # type: ignore[arg-type]  # called like the class it makes
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )


def _watched_protocol(**settings: Any) -> H11Protocol:
    """Create a connection that is checked regularly: uvicorn itself waits forever for a slow client."""
    protocol = H11Protocol(**settings)
    protocol.loop.call_later(LOOK_S, _drop_idle_client, protocol, _Seen(cycle=None, pending=0, idle=True))
    return protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """The state of a connection at the last check."""

    cycle: object  # the newest request, compared by identity
    pending: int  # bytes that the client has not received
    idle: bool  # no request is being answered


def _drop_idle_client(protocol: H11Protocol, before: _Seen) -> None:
    """Drop a client that finished no request, or received no byte, between two checks."""
    transport = protocol.transport
    if transport is None or protocol not in protocol.connections:
        return
    pending = transport.get_write_buffer_size()
    now = _Seen(cycle=protocol.cycle, pending=pending, idle=protocol.cycle is None or protocol.cycle.response_complete)
    is_stuck = 0 < before.pending <= now.pending
    is_silent = before.idle and now.idle and before.cycle is now.cycle and not pending
    if is_stuck or is_silent:
        # close() would wait until the client has received the data.
        transport.abort()
        return
    protocol.loop.call_later(LOOK_S, _drop_idle_client, protocol, now)


# ---- host names of the dashboard -------------------------------------------------------------------------------------


DEFAULT = "127.0.0.1:8337"


def allowed_hosts(bound: Address, *, asked: str = "") -> frozenset[str]:
    """Return the host names of a server bound to an address; `asked` is the name given by the user.

    Any other name that resolves to this server is a DNS rebinding attack.
    """
    if _numeric_address(bound).is_loopback:
        return LOOPBACK_NAMES | {bound.host}
    own = socket.gethostname().lower()
    return LOOPBACK_NAMES | {bound.host, own, own.partition(".")[0], *([asked.lower()] if asked else [])}


def is_any(bound: Address) -> bool:
    """Return True if the socket listens on every address of the machine."""
    return _numeric_address(bound).is_unspecified


def _numeric_address(bound: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # partition: without the zone of a link-local address.
    return ipaddress.ip_address(bound.host.partition("%")[0])
