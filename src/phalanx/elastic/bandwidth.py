"""Measure the bandwidth between two hosts: some megabytes over a connection that both sides have authenticated.

An agent measures the link to the coordinator before it joins, while nothing depends on it. One agent measures at a
time: a thousand at once would only measure each other.
"""

from __future__ import annotations

import random
import selectors
import time
from collections.abc import Callable
from contextlib import suppress

from phalanx.elastic.channel import Address, Channel, Closed, Message, Refused, connect
from phalanx.units import MB

# The role in the hello of a connection that only measures.
ROLE = "link"
PIECE_BYTES = 256 * 1024
MOST_BYTES = 8 * MB  # 64 ms at 1 Gbit/s
# Limit of one try: a slow link is known before it has moved MOST_BYTES.
MOST_S = 0.5
# The best try counts: other work on either host can only make the link look slower.
TRIES = 6
ANSWER_S = 2.0
STALL_S = 1.0
# Wait for this agent's turn; an agent that waited longer joins unmeasured.
WAIT_S = 10.0
AGAIN_S = 0.1
# After so long the coordinator lets the next agent measure.
TURN_S = 8.0
# Connections that begin and then carry nothing: small packets pass, and large ones do not.
FAILURES = 2


def measure(
    where: Address,
    secret: bytes,
    *,
    host: str,
    bind: str,
    enough: float,
    is_off: Callable[[], bool] = lambda: False,
) -> float | None:
    """Measure bytes per second from `bind` to the coordinator at `where`: the best of some tries, until it is `enough`.

    Returns 0 when only small messages pass; None when it could not be measured: no coordinator answered, too many
    agents came first, or `is_off` returned true.
    """
    until_s, failures = time.monotonic() + WAIT_S, 0
    while time.monotonic() < until_s and not is_off():
        try:
            channel = connect(
                where, secret, {"role": ROLE, "host": host}, timeout_s=ANSWER_S, bind=bind, stall_s=STALL_S
            )
        except OSError:
            # No process listens there, or it does not share the secret.
            return None
        try:
            if channel.wait(ANSWER_S).get("kind") == "begin":
                return _best(channel, enough)
        except OSError:
            failures += 1
            if failures == FAILURES:
                return 0.0
        finally:
            channel.close()
        time.sleep(AGAIN_S * (0.5 + random.random()))
    return None


def _best(channel: Channel, enough: float) -> float:
    best = 0.0
    for _ in range(TRIES):
        best = max(best, _once(channel))
        if best >= enough:
            break
    return best


def _once(channel: Channel) -> float:
    data, sent, start_s = bytes(PIECE_BYTES), 0, time.perf_counter()
    while sent < MOST_BYTES and time.perf_counter() < start_s + MOST_S:
        # The receiver does not read the data, so no checksum is computed.
        channel.send({"kind": "data"}, data, crc32=0)
        sent += PIECE_BYTES
    channel.send({"kind": "done"})
    # The answer shows that everything before it has arrived.
    channel.wait(ANSWER_S)
    return sent / (time.perf_counter() - start_s)


class Gauge:
    """The coordinator's side of a measurement: discard the data of one agent at a time, and confirm its end."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._channel: Channel | None = None
        self._until_s = 0.0

    def admit(self, channel: Channel) -> None:
        """Begin with this agent; it is answered "busy" while another one measures."""
        if self._channel is not None and time.monotonic() < self._until_s:
            _tell(channel, {"kind": "busy"})
            channel.close()
            return
        self.close()
        self._channel, self._until_s = channel, time.monotonic() + TURN_S
        self._selector.register(channel, selectors.EVENT_READ, self)
        _tell(channel, {"kind": "begin"})

    @property
    def is_busy(self) -> bool:
        """True while an agent may be measuring."""
        return self._channel is not None

    def listen(self) -> None:
        """Read the messages that have arrived; the channel skips the data."""
        if self._channel is None:
            return
        try:
            for message in self._channel.receive():
                if message.get("kind") == "done":
                    _tell(self._channel, {"kind": "got"})
        except (Closed, Refused, OSError):
            self.close()

    def close(self) -> None:
        """Close the connection, so that the next agent can measure."""
        if self._channel is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None


def _tell(channel: Channel, message: Message) -> None:
    with suppress(OSError, TimeoutError):
        channel.send(message)
