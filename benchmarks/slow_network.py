"""Two network namespaces joined by a slow link: rate by the kernel's token bucket, latency and loss by a relay.

The kernels we test on have `tbf` but no `netem`. Where latency or loss is asked for, the link is a pair of TUN devices
with a relay between them that holds every packet for half the round trip and forgets some: TCP itself sees the loss.
Needs root.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

SET_INTERFACE, TUN, NO_INFO = 0x400454CA, 0x0001, 0x1000
BURST = "16kb"  # of the token bucket: a few packets, so that an exchange cannot ride on saved tokens
QUEUE = "400ms"
MTU = 1500


@dataclass(kw_only=True)
class SlowNetwork:
    """Namespaces `names[0]` and `names[1]` with addresses 10.77.0.1 and 10.77.0.2, joined by one slow link."""

    mbit_s: float
    latency_s: float = 0.0  # round trip
    loss: float = 0.0  # share of packets, each way
    congestion: str = "reno"  # what TCP goes by, or bbr; a namespace may not have cubic, which does the same here
    tag: str = field(default_factory=lambda: f"px{os.getpid() % 10000}")
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    @property
    def names(self) -> tuple[str, str]:
        """Of the namespaces."""
        return f"{self.tag}a", f"{self.tag}b"

    @property
    def devices(self) -> tuple[str, str]:
        """Of the link's ends."""
        return f"{self.tag}-a", f"{self.tag}-b"

    def __enter__(self) -> SlowNetwork:
        for name in self.names:
            _call("ip", "netns", "add", name)
        try:
            self._join()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _join(self) -> None:
        left, right = self.devices
        self._stop = threading.Event()
        self._thread = None
        if self.latency_s or self.loss:
            ends = [_open_tun(name) for name in self.devices]
            self._thread = threading.Thread(target=self._relay, args=(ends,), daemon=True)
        else:
            _call("ip", "link", "add", left, "type", "veth", "peer", "name", right)
        for name, device, address, other in zip(
            self.names, self.devices, self.addresses, reversed(self.addresses), strict=True
        ):
            _call("ip", "link", "set", device, "netns", name)
            self.run(name, "ip", "link", "set", "lo", "up")
            self.run(name, "sh", "-c", f"echo {self.congestion} > /proc/sys/net/ipv4/tcp_congestion_control")
            self.run(name, "ip", "link", "set", device, "mtu", str(MTU), "up")
            self.run(name, "ip", "addr", "add", f"{address}/32", "peer", f"{other}/32", "dev", device)
            rate = f"{self.mbit_s:g}mbit"
            self.run(name, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", BURST,
                     "latency", QUEUE)  # fmt: skip
        if self._thread is not None:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=5)

    def run(self, namespace: str, *command: str) -> str:
        """What a command in a namespace prints."""
        return _call("ip", "netns", "exec", namespace, *command)

    def start(self, side: int, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """A process at one end of the link."""
        whole = ["ip", "netns", "exec", self.names[side], *command]
        return subprocess.Popen(whole, text=True, **options)  # type: ignore[call-overload,no-any-return]

    def sent_bytes(self, side: int) -> int:
        """What one end has sent, by the counter of its interface: headers of the link's packets are in it."""
        path = f"/sys/class/net/{self.devices[side]}/statistics/tx_bytes"
        return int(self.run(self.names[side], "cat", path))

    def _relay(self, ends: list[int]) -> None:
        """Packets from each end to the other, late; some never."""
        draw, held, counted = random.Random(1), [], 0  # type: random.Random, list[tuple[float, int, int, bytes]], int
        delay_s = self.latency_s / 2
        try:
            while not self._stop.is_set():
                wait = min(0.2, max(0.0, held[0][0] - time.monotonic())) if held else 0.2
                for end in select.select(ends, [], [], wait)[0]:
                    packet = os.read(end, 65536)
                    if draw.random() < self.loss:
                        continue
                    counted += 1
                    heapq.heappush(held, (time.monotonic() + delay_s, counted, ends[ends[0] == end], packet))
                while held and held[0][0] <= time.monotonic():
                    _, _, other, packet = heapq.heappop(held)
                    os.write(other, packet)
        except OSError as error:
            if not self._stop.is_set():
                print(f"relay: {error}", file=sys.stderr)
        finally:
            for end in ends:
                os.close(end)


def _open_tun(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(handle, SET_INTERFACE, struct.pack("16sH", name.encode(), TUN | NO_INFO))
    return handle


def _call(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode} (root is needed)")
    return done.stdout
