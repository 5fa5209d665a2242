"""Fake hosts for control_plane.py: many of them in one process, each with its own connection, key and rhythm.

They say what agents of 8 slots say and have no processes, only their numbers. What a host would do on its own machine
is kept cheap here, because all of them share this one: frames are signed, but those of the coordinator not checked.
"""

from __future__ import annotations

import errno
import heapq
import resource
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import orjson

from phalanx.elastic import handshake
from phalanx.elastic.coordinator_memory import known_coordinator
from phalanx.elastic.handshake import ANSWER, GREETING_BYTES, MAC_BYTES, OPENING, FrameSigner, Handshake
from phalanx.elastic.heartbeat_board import WATCHER_SIGN_S, WATCHERS, Phase
from phalanx.elastic.host_agent import DISK_S, QUIET_S, SIGN_S
from phalanx.elastic.socket_stream import PREFIX
from phalanx.record.run import Run

SLOTS = 8
BIND_ADDRESS_NO_PORT = 24  # of linux/in.h: the port is chosen when the other end is known
IN_FLIGHT = 2048  # handshakes of one process at a time: on a cluster all hosts come at once
TRAINING = int(Phase.TRAINING)
decode_text = lru_cache(maxsize=64)(orjson.loads)  # most of what hosts are told is the same for all of them


def ready_message(ranks: dict[int, int], generation: int, step: int, world: int) -> dict[str, Any]:
    """As an agent whose host holds its own copies and those of the host before it, of two steps."""
    held: list[Any] = []
    if generation > 1 and ranks:
        first = min(ranks.values())
        before = (first - SLOTS) % world
        spans = [[first, first + SLOTS - 1], [before, before + SLOTS - 1]]
        held = [[1, step - back, world, spans, None] for back in (0, 1)]
    return {
        "kind": "ready",
        "epoch": generation,
        "ports": {str(slot): [7000, 8000 + slot] for slot in ranks},
        "held": held,
        "collectives": {"all_gather of 1048576 float32": sorted(ranks)} if generation > 1 else {},
        "time": time.time(),
    }


class FakeHost:
    """One host: its connection, in the handshake or after it, and what its agent knows."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"host-{number:05d}"
        self.pids = {slot: 1 + number * SLOTS + slot for slot in range(SLOTS)}
        self.ranks: dict[int, int] = {}
        self.digest, self.generation, self.went = "", 0, 0
        self.term, self.heard_s = 0, 0.0
        self.every_s, self.sign_s, self.is_mute = 0.25, SIGN_S, False
        self.beat_due_s, self.skips_beat = 0.0, False
        self.sock: socket.socket | None = None
        self.seal: FrameSigner | None = None  # once the handshake is done
        self.buffer = bytearray()
        self._opening: tuple[Handshake, bytes] | None = None

    def begin(self, where: tuple[str, int]) -> int:
        """Connect without waiting; the descriptor."""
        self.buffer, self.seal, self._opening = bytearray(), None, None
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Each host has an address, as on a cluster: from one address the kernel searches all even ports for a free one
        # before it takes an odd one, and from the 14,117th connection on each takes 2 ms of the processor.
        self.sock.setsockopt(socket.IPPROTO_IP, BIND_ADDRESS_NO_PORT, 1)
        self.sock.bind((f"127.1.{self.number >> 8}.{self.number & 255}", 0))
        code = self.sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            raise ConnectionError(code)
        return self.sock.fileno()

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        self.sock = self.seal = None

    def take_rhythm(self, every_s: float, sign_s: float) -> None:
        """As HostAgent._take_rhythm."""
        self.every_s = every_s
        self.sign_s = min(sign_s, WATCHER_SIGN_S) if self.number < WATCHERS else sign_s

    def take(self, secret: bytes) -> list[tuple[dict[str, Any], int]] | None:
        """Messages with their bytes, None once the handshake is done; raises OSError when the connection is gone."""
        assert self.sock is not None
        try:
            read = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        if not read:
            raise ConnectionError("closed")
        self.buffer += read
        if self.seal is None:
            return None if self._shake(secret) else []
        return self._frames()

    def _shake(self, secret: bytes) -> bool:
        assert self.sock is not None
        if self._opening is None:
            if len(self.buffer) < GREETING_BYTES:
                return False
            nonce_s, nonce_c = handshake.read_greeting(bytes(self.buffer[:GREETING_BYTES])), handshake.make_nonce()
            del self.buffer[:GREETING_BYTES]
            shaken = Handshake(secret, nonce_s, nonce_c)
            hello = {"role": "agent", "host": self.name, "id": str(self.number), "address": "127.0.0.1"}
            told = {"epoch": self.generation, "digest": self.digest, "went": self.went, "wishes": 0}
            status = {"slots": {str(slot): pid for slot, pid in self.pids.items()}, **told}
            said = {**hello, "epoch": self.generation, "time": time.time(), "problems": [], "link_bytes_per_s": None}
            text = handshake.encode_hello({**said, "status": status})
            self._opening = shaken, text
            self.sock.send(OPENING.pack(handshake.MAGIC, len(text), nonce_c) + text + shaken.client_mac(text))
        if len(self.buffer) < ANSWER.size:
            return False
        (size,) = ANSWER.unpack(self.buffer[: ANSWER.size])
        whole = ANSWER.size + size + MAC_BYTES
        if len(self.buffer) < whole:
            return False
        answer = bytes(self.buffer[ANSWER.size : ANSWER.size + size])
        del self.buffer[:whole]
        shaken, text = self._opening
        told = handshake.decode(answer)
        _, key = shaken.server_mac_and_key(text, answer)
        self.seal, self.term = FrameSigner(key, handshake.FROM_CLIENT), int(told["term"])
        self.take_rhythm(told["every_s"], told["sign_s"])
        self.heard_s = time.monotonic()
        return True

    def _frames(self) -> list[tuple[dict[str, Any], int]]:
        found, at, buffer = [], 0, self.buffer
        while len(buffer) - at >= PREFIX.size:
            size = PREFIX.unpack_from(buffer, at)[0]
            end = at + PREFIX.size + size
            if len(buffer) < end + MAC_BYTES:
                break
            found.append((decode_text(bytes(buffer[at + PREFIX.size : end])), PREFIX.size + size + MAC_BYTES))
            at = end + MAC_BYTES
        if at:
            self.buffer = buffer[at:]
        return found

    def say(self, text: bytes) -> None:
        assert self.sock is not None
        assert self.seal is not None
        frame = PREFIX.pack(len(text), 0, 0) + text
        self.sock.send(frame + self.seal.next(frame))


class FakeHosts:
    """One process with many hosts. It is told what happens to them, and tells how far they are."""

    def __init__(self, line: Connection, run: Run, numbers: Sequence[int], world: int) -> None:
        self.line, self.run, self.world = line, run, world
        self.secret = bytes.fromhex((run.path / "secret").read_text().strip())
        self.poll = select.epoll()
        self.hosts = {number: FakeHost(number) for number in numbers}
        self.by_descriptor: dict[int, FakeHost] = {}
        self.beats: list[tuple[float, int]] = []  # when each host beats next
        self.waiting: deque[FakeHost] = deque()  # to connect
        self.shaking = 0
        self.looks: list[tuple[float, int]] = []  # when each host without a coordinator looks at the run folder next
        self.known: tuple[tuple[str, int], int] | None = None
        self.known_s = -1e9
        self.missing = set(self.hosts)  # have not gone in the newest generation
        self.absent = set(self.hosts)  # without a coordinator
        self.received = self.forms = 0
        self.quiet_s = 0.0  # when it is next looked who hears nothing
        self.began_s = time.monotonic()

    def serve(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while self.known is None:
            self.known = known_coordinator(self.run)
            time.sleep(0.01)
        self.line.recv()
        self.waiting.extend(self.hosts.values())
        while True:
            now = time.monotonic()
            self._connect()
            for descriptor, _ in self.poll.poll(0.002 if self.waiting else 0.01, 4096):
                self._hear(self.by_descriptor[descriptor])
            self._beat(now)
            self._look(now)
            if self.line.poll() and self._obey(self.line.recv()):
                return

    @property
    def step(self) -> int:
        return 10 + int(time.monotonic() - self.began_s)

    def _connect(self) -> None:
        while self.waiting and self.shaking < IN_FLIGHT:
            host = self.waiting.popleft()
            assert self.known is not None
            try:
                descriptor = host.begin(self.known[0])
            except OSError:
                self._lose(host)
                continue
            self.shaking += 1
            self.by_descriptor[descriptor] = host
            self.poll.register(descriptor, select.EPOLLIN)

    def _lose(self, host: FakeHost, *, knows_another: bool = False) -> None:
        """Its connection is gone: it looks for a coordinator at its next look at the disk, within a second.

        Or goes to the one that it has just read of, as HostAgent does.
        """
        if host.sock is not None:
            self.by_descriptor.pop(host.sock.fileno(), None)
            self.shaking -= host.seal is None
        host.close()
        self.absent.add(host.number)
        if knows_another:
            self.waiting.append(host)
            return
        heapq.heappush(self.looks, (time.monotonic() + DISK_S * ((host.number * 0.618) % 1.0), host.number))

    def _look(self, now: float) -> None:
        if now > self.quiet_s:
            self.quiet_s = now + 0.25
            for host in self.hosts.values():  # as HostAgent._watch_coordinator: once a second each
                if host.seal is not None and now - host.heard_s > host.sign_s + QUIET_S:
                    known = self._read_known(now)
                    if known is not None and known[1] > host.term:
                        self._lose(host, knows_another=True)
        while self.looks and self.looks[0][0] <= now:
            _, number = heapq.heappop(self.looks)
            host = self.hosts.get(number)
            if host is None:
                continue
            known = self._read_known(now)
            if known is not None and known[1] > host.term:
                self.waiting.append(host)
            else:
                heapq.heappush(self.looks, (now + DISK_S, number))

    def _read_known(self, now: float) -> tuple[tuple[str, int], int] | None:
        """The hosts of a process share a look of the same tenth of a second; each still acts on its own looks only."""
        if now - self.known_s > 0.1:
            self.known, self.known_s = known_coordinator(self.run) or self.known, now
        return self.known

    def _hear(self, host: FakeHost) -> None:
        try:
            self._answer(host, host.take(self.secret))
        except OSError:  # the coordinator is gone, perhaps before it has read what we say
            self._lose(host)

    def _answer(self, host: FakeHost, messages: list[tuple[dict[str, Any], int]] | None) -> None:
        if messages is None:
            self.shaking -= 1
            self.absent.discard(host.number)
            if not self.absent:
                self.line.send(("joined", time.monotonic()))
            if not host.is_mute:
                # As HostAgent._connect: its hello showed that it lives.
                host.beat_due_s = time.monotonic() + host.every_s * (0.5 + 0.5 * ((host.number * 0.618) % 1.0))
                heapq.heappush(self.beats, (host.beat_due_s, host.number))
            return
        now = time.monotonic()
        for message, num_bytes in messages:
            host.heard_s = now
            kind = message["kind"]
            if kind == "beat":
                host.take_rhythm(message["every_s"], message["sign_s"])
                continue
            self.received += num_bytes
            if kind == "form":
                self.forms += 1
                if "ranks" in message:
                    host.ranks = {int(slot): rank for slot, rank in message["ranks"].items()}
                host.generation, host.digest = message["epoch"], message["digest"]
                host.skips_beat = host.beat_due_s - now < host.every_s / 2  # as HostAgent._tell_ready
                host.say(orjson.dumps(ready_message(host.ranks, host.generation, self.step, self.world)))
            elif kind == "go":
                host.went = message["epoch"]
                self.missing.discard(host.number)
                if not self.missing:
                    self.line.send(("went", time.monotonic(), self.received))
                    self.received, self.missing = 0, set(self.hosts)

    def _beat(self, now: float) -> None:
        while self.beats and self.beats[0][0] <= now:
            due_s, number = heapq.heappop(self.beats)
            host = self.hosts.get(number)
            if host is None or host.seal is None or host.is_mute or due_s != host.beat_due_s:
                continue
            progress = [self.step, TRAINING, 0.1] if host.went else None
            try:
                if not host.skips_beat:
                    host.say(orjson.dumps({"kind": "beat", "epoch": host.generation, "progress": progress}))
            except OSError:
                self._lose(host)
                continue
            host.skips_beat, host.beat_due_s = False, max(due_s + host.every_s, now)
            heapq.heappush(self.beats, (host.beat_due_s, number))

    def _obey(self, order: str) -> bool:
        if order == "end":
            return True
        if order == "forms":  # how many were told of a new membership since the last question
            self.line.send(("forms", self.forms))
            self.forms = 0
        elif order.startswith("spare"):  # one more host, so that a lost one is replaced
            number = int(order.split()[1])
            self.hosts[number] = host = FakeHost(number)
            self.absent.add(number)
            self.missing.add(number)
            self.waiting.append(host)
        elif order == "lose":
            victim = next(iter(self.hosts.values()))
            pid, victim.pids[0] = victim.pids[0], victim.pids[0] + 10**7
            failure = {"rank": 0, "step": self.step, "at_s": time.time(), "kind": "Signal", "message": "killed"}
            lost = {"slot": 0, "pid": pid, "epoch": victim.generation, "leaving": False, "failure": failure}
            victim.say(orjson.dumps({"kind": "lost", **lost, "out_of_memory": False}))
            victim.say(orjson.dumps({"kind": "up", "slots": {"0": victim.pids[0]}}))
        else:  # "leave": it hangs up for good; "mute": its connection stays, and it says nothing any more
            victim = next(one for one in self.hosts.values() if one.ranks and not one.is_mute)
            victim.is_mute = True
            self.missing.discard(victim.number)
            if order == "leave":
                assert victim.sock is not None
                self.by_descriptor.pop(victim.sock.fileno())
                victim.close()
            else:
                assert victim.sock is not None
                self.poll.unregister(victim.sock.fileno())
            self.hosts.pop(victim.number)
            self.muted = victim  # keeps the connection open
        return False


def serve_hosts(line: Connection, run: Run, numbers: Sequence[int], world: int) -> None:
    """The process."""
    FakeHosts(line, run, numbers, world).serve()
