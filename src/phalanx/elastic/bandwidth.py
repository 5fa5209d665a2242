"""How much passes between two hosts: some megabytes over a connection of which both sides have proved the secret.

An agent measures it to the coordinator before it joins, while nothing depends on it. One agent at a time: a thousand
that come together would only measure each other.
"""

from __future__ import annotations

import random
import selectors
import time
from collections.abc import Callable
from contextlib import suppress

from phalanx.elastic.channel import Address, Channel, Closed, Message, Refused, connect
from phalanx.units import MB

ROLE = "link"  # in the hello of a connection that only measures
PIECE_BYTES = 256 * 1024
MOST_BYTES = 8 * MB  # 64 ms at 1 Gbit/s
MOST_S = 0.5  # for one try: a slow link is known before it has moved so much
TRIES = 6  # the best counts: other work on either host can only make the link look slower
ANSWER_S = 2.0
STALL_S = 1.0
WAIT_S = 10.0  # for our turn; whoever waited longer joins unmeasured
AGAIN_S = 0.1
TURN_S = 8.0  # after which the coordinator lets the next one measure
FAILURES = 2  # connections that begin and then carry nothing: small packets pass, and large ones do not


def measure(
    where: Address,
    secret: bytes,
    *,
    host: str,
    bind: str,
    enough: float,
    is_off: Callable[[], bool] = lambda: False,
) -> float | None:
    """Bytes per second from `bind` to the coordinator at `where`, the best of some tries until it is `enough`.

    0 when nothing but small messages passes; None when it could not be measured: nobody there, too many before us, or
    `is_off` turned true.
    """
    until_s, failures = time.monotonic() + WAIT_S, 0
    while time.monotonic() < until_s and not is_off():
        try:
            channel = connect(
                where, secret, {"role": ROLE, "host": host}, timeout_s=ANSWER_S, bind=bind, stall_s=STALL_S
            )
        except OSError:  # nobody there, or a stranger
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
        channel.send({"kind": "data"}, data, crc32=0)  # nobody reads it, so nobody sums it up
        sent += PIECE_BYTES
    channel.send({"kind": "done"})
    channel.wait(ANSWER_S)  # everything before it has arrived
    return sent / (time.perf_counter() - start_s)


class Gauge:
    """The coordinator's side: takes what one agent sends, throws it away, and says when it was all there."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._channel: Channel | None = None
        self._until_s = 0.0

    def admit(self, channel: Channel) -> None:
        """Begin with this one, unless another is at it."""
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
        """Whether an agent may be measuring."""
        return self._channel is not None

    def listen(self) -> None:
        """Take what is there; data is skipped by the channel."""
        if self._channel is None:
            return
        try:
            for message in self._channel.receive():
                if message.get("kind") == "done":
                    _tell(self._channel, {"kind": "got"})
        except (Closed, Refused, OSError):
            self.close()

    def close(self) -> None:
        """Make room for the next."""
        if self._channel is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None


def _tell(channel: Channel, message: Message) -> None:
    with suppress(OSError, TimeoutError):
        channel.send(message)
