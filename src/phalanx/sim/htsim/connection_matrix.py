"""Connection matrices of htsim: read and write `.cm` files, after a reader for bounded text files.

The files come from other programs, so their size is bounded and every mistake is reported with its file and line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phalanx.errors import UserError, mistake, nearest
from phalanx.io.files import FileTooLargeError, read_bounded
from phalanx.sim.packets.start_times import NONE, Schedule
from phalanx.sim.traffic_matrix import Flows

DIGITS = 15  # longer numbers are taken for typing errors


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLine:
    """The words of a line, with its file and line number."""

    path: Path
    number: int
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        """The place of the line as `file:line`."""
        return f"{self.path}:{self.number}"

    def wrong(self, what: str, *, why: str = "", fix: str = "") -> UserError:
        """Return the error for a mistake in this line."""
        return mistake(self.where, what, why=why, fix=fix)

    def whole(self, at: int, *, least: int = 0, most: int = 10**DIGITS) -> int:
        """Return the word at index `at` as a whole number.

        Raises UserError if it is missing, malformed or out of range.
        """
        name = self.words[at - 1]
        if at >= len(self.words):
            raise self.wrong(f'"{name[:40]}" has no number', fix=f"write {name[:40]} {max(least, 1)}")
        text = self.words[at]
        if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS):
            raise self.wrong(f'{name[:40]} "{text[:40]}" is not a whole number')
        if not least <= int(text) <= most:
            raise self.wrong(f"{name[:40]} {int(text):,} is out of range", fix=f"use {least:,} to {most:,}")
        return int(text)

    def unknown(self, word: str, known: Iterable[str]) -> UserError:
        """Return the error for a word that the format does not have."""
        near, choices = nearest(word, known), ", ".join(known)
        return self.wrong(f'there is no "{word[:40]}"', fix=f"did you mean {near}?" if near else f"use {choices}")


def read_lines(path: Path, *, most_bytes: int) -> list[MatrixLine]:
    """Return the lines with words, without comments; raises UserError for an unreadable or empty file."""
    lines: list[MatrixLine] = []
    for number, text in enumerate(_read_matrix(path, most_bytes).splitlines(), start=1):
        words = tuple(text.split("#", 1)[0].split())
        if words:
            lines.append(MatrixLine(path=path, number=number, words=words))
    if not lines:
        raise mistake(str(path), "is empty", fix="a .topo and a .cm begin with Nodes N")
    return lines


def _read_matrix(path: Path, most_bytes: int) -> str:
    try:
        raw = read_bounded(path, most_bytes)
    except FileTooLargeError as error:
        raise mistake(str(path), str(error), fix="check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise mistake(str(path), f"cannot be read: {reason[:120]}", fix="check the path and its permissions") from None
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise mistake(f"{path}:{line}", "is not plain text", fix="name a .topo or .cm file") from None


# A `.cm` file of htsim (a connection matrix): the sender, receiver, size and start of each transfer.
# It is interpreted as by connection_matrix.cpp of Broadcom/csg-htsim, where start times are in picoseconds.


MOST_BYTES = 64 << 20  # 1.4 million connections
MOST_SIZE = 2**31 - 1  # htsim reads sizes with stoi
COUNTS = ("Nodes", "Connections", "Triggers", "Failures")
KINDS = ("oneshot", "multishot", "barrier")
SWITCHES = ("TOR", "AGG", "CORE")
WORDS = ("id", "start", "size", "trigger", "send_done_trigger", "recv_done_trigger", "prio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """One transfer; numbers are 0 where absent. A connection without `start_ps` is started by a trigger."""

    source: int
    target: int
    nbytes: int
    ident: int = 0
    start_ps: float | None = 0.0
    trigger: int = 0
    # Triggers that the connection fires when the sender or the receiver is done.
    send_done: int = 0
    recv_done: int = 0
    priority: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """A trigger: starts connections one at a time or all at once, or when `count` others are done (barrier)."""

    ident: int
    kind: str
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLink:
    """A dead link of a switch; of an AGG switch it is an uplink."""

    switch: str
    number: int
    link: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The contents of a whole file."""

    nodes: int
    connections: tuple[Connection, ...]
    triggers: tuple[Trigger, ...] = ()
    failures: tuple[DeadLink, ...] = ()

    def flows(self) -> Flows:
        """Return the connections as flows."""
        return Flows(
            source=np.array([connection.source for connection in self.connections], dtype=np.int64),
            target=np.array([connection.target for connection in self.connections], dtype=np.int64),
            nbytes=np.array([connection.nbytes for connection in self.connections], dtype=np.float64),
        )

    def failed(self) -> tuple[str, ...]:
        """Return the failures of AGG uplinks as words of `phalanx fabric simulate --fail`."""
        return tuple(
            f"t1link:0/{failure.number}/{failure.link}" for failure in self.failures if failure.switch == "AGG"
        )

    def schedule(self) -> Schedule | None:
        """Return when the connections start; None where they start together."""
        connections = self.connections
        if not any(connection.trigger or connection.start_ps for connection in connections):
            return None
        index_of = {trigger.ident: index for index, trigger in enumerate(self.triggers)}
        return Schedule(
            start_s=np.array([(connection.start_ps or 0.0) * 1e-12 for connection in connections]),
            waits_for=np.array([index_of.get(connection.trigger, NONE) for connection in connections], dtype=np.int64),
            fires=np.array(
                [index_of.get(connection.recv_done or connection.send_done, NONE) for connection in connections],
                dtype=np.int64,
            ),
            needed=np.array([max(1, trigger.count) for trigger in self.triggers], dtype=np.int64),
        )

    def not_mapped(self, *, timed: bool) -> tuple[str, ...]:
        """Return remarks on what a simulation ignores; `timed` simulations start connections when the file states."""
        notes, connections = list(self._untimed_notes() if not timed else self._inexact_notes()), self.connections
        if ranked := sum(connection.priority is not None for connection in connections):
            notes.append(f"priorities of {ranked:,} connections")
        if unsupported := sum(failure.switch != "AGG" for failure in self.failures):
            notes.append(
                f"{unsupported} failures of TOR or CORE links: htsim itself only fails uplinks of AGG switches"
            )
        return tuple(notes)

    def _untimed_notes(self) -> Iterator[str]:
        transfers = self.connections
        if waits := sum(connection.trigger > 0 for connection in transfers):
            yield f"triggers: {waits:,} of {len(transfers):,} connections wait for others there, and start at once here"
        starts = {connection.start_ps for connection in transfers if connection.start_ps is not None}
        if len(starts) > 1:
            yield f"start times up to {max(starts) / 1e6:g} µs: all connections start together here"

    def _inexact_notes(self) -> Iterator[str]:
        waiting = Counter(connection.trigger for connection in self.connections)
        often = sum(trigger.kind == "multishot" and waiting[trigger.ident] > 1 for trigger in self.triggers)
        if often:
            yield f"multishot: {often} triggers start one connection at a time there, and all with the first here"
        if any(connection.recv_done for connection in self.connections):
            yield "recv_done_trigger: it is pulled here when the sender knows, half a round trip later"
        if count := sum(0 < connection.send_done != connection.recv_done > 0 for connection in self.connections):
            yield f"send_done_trigger of {count} connections that have a recv_done_trigger too: only that one is pulled"


@dataclass(kw_only=True, slots=True)
class _MatrixReading:
    """The contents of a file read so far."""

    counts: dict[str, int] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    triggers: dict[int, Trigger] = field(default_factory=dict)
    failures: list[DeadLink] = field(default_factory=list)
    # Triggers, and the lines that first name them.
    used: dict[int, MatrixLine] = field(default_factory=dict)


def read_cm(path: Path) -> Matrix:
    """Read a connection matrix; raises UserError with file and line."""
    reading = _MatrixReading()
    for line in read_lines(path, most_bytes=MOST_BYTES):
        first = line.words[0]
        if "->" in first:
            _take_connection(reading, line)
        elif first in COUNTS:
            if line.words[0] in reading.counts:
                raise line.wrong(f"{line.words[0]} is given twice", fix="keep one of the two")
            reading.counts[line.words[0]] = line.whole(1, least=2 if line.words[0] == "Nodes" else 0, most=10**9)
        elif first in _READERS:
            _READERS[first](reading, line)
        else:
            raise line.unknown(first, (*COUNTS, "SOURCE->TARGET", *_READERS))
    _check_matrix(reading, path)
    return Matrix(
        nodes=reading.counts["Nodes"],
        connections=tuple(reading.connections),
        triggers=tuple(reading.triggers.values()),
        failures=tuple(reading.failures),
    )


def _take_connection(reading: _MatrixReading, line: MatrixLine) -> None:
    """Read a line SOURCE->TARGET with its size and either a start time or a trigger."""
    source, target = _connection_ends(reading, line)
    values: dict[str, int] = {}
    start: float | None = None
    for index in range(1, len(line.words), 2):
        word = line.words[index]
        if word not in WORDS:
            raise line.unknown(word, WORDS)
        if word in values or (word == "start" and start is not None):
            raise line.wrong(f"{word} is given twice", fix="keep one of the two")
        if word == "start":
            start = _start_time(line, index + 1)
        else:
            values[word] = line.whole(index + 1, least=0 if word == "prio" else 1)
    if (start is None) == ("trigger" not in values):
        raise line.wrong("a connection has either a start or a trigger", fix="write start 0")
    if "size" not in values:
        raise line.wrong("no size: the connection would never end", fix="write size 2000000")
    for word in ("trigger", "send_done_trigger", "recv_done_trigger"):
        if word in values:
            reading.used.setdefault(values[word], line)
    reading.connections.append(
        Connection(
            source=source,
            target=target,
            nbytes=values["size"],
            ident=values.get("id", 0),
            start_ps=start,
            trigger=values.get("trigger", 0),
            send_done=values.get("send_done_trigger", 0),
            recv_done=values.get("recv_done_trigger", 0),
            priority=values.get("prio"),
        )
    )


def _connection_ends(reading: _MatrixReading, line: MatrixLine) -> tuple[int, int]:
    ends = line.words[0].split("->")
    if len(ends) != 2 or not all(end.isdecimal() and len(end) <= 9 for end in ends):
        raise line.wrong(f'"{line.words[0][:40]}" is no connection', fix="write 0->5")
    nodes = reading.counts.get("Nodes")
    if nodes is None:
        raise line.wrong("a connection before Nodes", fix="begin the file with Nodes N")
    source, target = int(ends[0]), int(ends[1])
    if max(source, target) >= nodes:
        raise line.wrong(f"there is no node {max(source, target):,}", fix=f"nodes are 0 to {nodes - 1:,}")
    if source == target:
        raise line.wrong(f"node {source} sends to itself", fix="leave it out: it does not touch the network")
    return source, target


def _start_time(line: MatrixLine, at: int) -> float:
    try:
        start = float(line.words[at][:40])
    except (IndexError, ValueError):
        start = math.nan
    # 1e18 ps are 11 days.
    if not 0 <= start <= 1e18:
        raise line.wrong("start is not a time in picoseconds", fix="write start 0")
    return start


def _take_trigger(reading: _MatrixReading, line: MatrixLine) -> None:
    """Read a line that describes a trigger."""
    ident, kind, count, at = 0, "", 0, 1
    while at < len(line.words):
        word = line.words[at]
        if word in KINDS and not kind:
            kind = word
        elif word == "id":
            at, ident = at + 1, line.whole(at + 1, least=1)
        elif word == "count":
            at, count = at + 1, line.whole(at + 1)
        else:
            raise line.unknown(word, ("id", "count", *KINDS))
        at += 1
    if not ident or not kind:
        raise line.wrong("a trigger needs an id and a kind", fix="write trigger id 1 oneshot")
    if ident in reading.triggers:
        raise line.wrong(f"trigger {ident} is described twice", fix="keep one of the two")
    reading.triggers[ident] = Trigger(ident=ident, kind=kind, count=count)


def _take_failure(reading: _MatrixReading, line: MatrixLine) -> None:
    """Read a line that describes a dead link."""
    kind, numbers = "", {}
    for index in range(1, len(line.words), 2):
        word = line.words[index]
        if word == "switch_type":
            kind = line.words[index + 1] if index + 1 < len(line.words) else ""
        elif word in ("switch_id", "link_id"):
            numbers[word] = line.whole(index + 1, most=10**9)
        else:
            raise line.unknown(word, ("switch_type", "switch_id", "link_id"))
    if kind not in SWITCHES or len(numbers) != 2:
        raise line.wrong("no failure of a link", fix="write failure switch_type AGG switch_id 0 link_id 0")
    reading.failures.append(DeadLink(switch=kind, number=numbers["switch_id"], link=numbers["link_id"]))


_READERS: dict[str, Callable[[_MatrixReading, MatrixLine], None]] = {"trigger": _take_trigger, "failure": _take_failure}


def _check_matrix(reading: _MatrixReading, path: Path) -> None:
    """Raise UserError where counts differ from the file's contents, or a trigger is not described."""
    actual_counts = {
        "Connections": len(reading.connections),
        "Triggers": len(reading.triggers),
        "Failures": len(reading.failures),
    }
    if "Nodes" not in reading.counts:
        raise mistake(str(path), "Nodes is missing", fix="begin the file with Nodes N")
    for name, number in actual_counts.items():
        if reading.counts.get(name, 0) != number:
            problem = f"{name} {reading.counts.get(name, 0):,}, but the file has {number:,}"
            raise mistake(str(path), problem, why="it may be cut short", fix=f"write {name} {number}")
    if not reading.connections:
        raise mistake(str(path), "it has no connection", fix="add 0->1 id 1 start 0 size 2000000")
    for ident, line in reading.used.items():
        if ident not in reading.triggers:
            raise line.wrong(f"trigger {ident} is named but not described", fix=f"add trigger id {ident} oneshot")
    _check_triggers(reading)


def _check_triggers(reading: _MatrixReading) -> None:
    """Raise UserError for connections that would wait forever."""
    awaited = {connection.trigger for connection in reading.connections} - {0}
    pull_counts = Counter(connection.recv_done or connection.send_done for connection in reading.connections)
    for ident in awaited:
        trigger, needed = reading.triggers[ident], max(1, reading.triggers[ident].count)
        if pull_counts[ident] < needed:
            raise reading.used[ident].wrong(
                f"a connection waits for trigger {ident}, which {pull_counts[ident]} of {needed} connections pull",
                why="it would never start",
                fix=f"add send_done_trigger {ident} to another"
                if trigger.kind != "barrier"
                else f"use count {pull_counts[ident]}",
            )


def matrix_of(flows: Flows, nodes: int, *, parts: int = 1) -> tuple[Matrix, tuple[str, ...]]:
    """Return flows as a matrix with 1/`parts` of their bytes (one of equal planes), and remarks on the changes."""
    exact = flows.nbytes / parts
    nbytes = np.ceil(exact)
    if nbytes.max() > MOST_SIZE:
        raise mistake(
            "flows as a .cm file",
            f"a connection of {nbytes.max():,.0f} bytes",
            why=f"htsim reads sizes up to {MOST_SIZE:,}",
            fix="send fewer bytes",
        )
    remarks = [f"every connection has 1/{parts} of its bytes: the rest is on the other planes"] if parts > 1 else []
    if (nbytes != exact).any():
        remarks.append("sizes are rounded up to whole bytes")
    rows = zip(flows.source.tolist(), flows.target.tolist(), nbytes.tolist(), strict=True)
    connections = (
        Connection(source=a, target=b, nbytes=int(c), ident=ident) for ident, (a, b, c) in enumerate(rows, start=1)
    )
    return Matrix(nodes=nodes, connections=tuple(connections)), tuple(remarks)


def write_cm(matrix: Matrix) -> str:
    """Return the text of a `.cm` file."""
    lines = [f"Nodes {matrix.nodes}", f"Connections {len(matrix.connections)}"]
    lines += [f"Triggers {len(matrix.triggers)}"] if matrix.triggers else []
    lines += [f"Failures {len(matrix.failures)}"] if matrix.failures else []
    lines += [_matrix_line(connection) for connection in matrix.connections]
    for trigger in matrix.triggers:
        count = f" count {trigger.count}" if trigger.count else ""
        lines.append(f"trigger id {trigger.ident} {trigger.kind}{count}")
    for failure in matrix.failures:
        lines.append(f"failure switch_type {failure.switch} switch_id {failure.number} link_id {failure.link}")
    return "\n".join(lines) + "\n"


def _matrix_line(one: Connection) -> str:
    words = [f"{one.source}->{one.target}"]
    words += [f"id {one.ident}"] if one.ident else []
    words.append(f"trigger {one.trigger}" if one.start_ps is None else f"start {one.start_ps:.0f}")
    words.append(f"size {one.nbytes}")
    words += [f"send_done_trigger {one.send_done}"] if one.send_done else []
    words += [f"recv_done_trigger {one.recv_done}"] if one.recv_done else []
    words += [f"prio {one.priority}"] if one.priority is not None else []
    return " ".join(words)
