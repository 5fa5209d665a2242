"""Events of a rank: one JSON object per line, appended; a reader may follow the file while it grows.

docs/events.md lists the events and their units. A file that has grown large is closed and renamed
(`events-00000-0001.jsonl`), and the next one begins under the old name; readers are given that name and read them all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from phalanx.io.codec import json_values
from phalanx.record.host_extents import HostStream
from phalanx.record.host_file import EventBytes, closed_sessions, has_events, open_events

if TYPE_CHECKING:
    from phalanx.record.archive.event_index import IndexWriter

VERSION = 1
# Steps quicker than this share one write (a write takes about 5 µs); every other event is written at once.
FLUSH_S = 0.05
MOST_PENDING_BYTES = 4 * 2**20  # kept while the disk refuses them; older events go first
MOST_LINE_BYTES = 2**20  # a longer line is no event of ours
READ_BYTES = 2**20
ROTATE_BYTES = 256 * 2**20  # half a million steps of a rank

Event = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# NaN and infinity become null; values that only orjson knows are written as `json_values` says.
_LINE = (
    orjson.OPT_APPEND_NEWLINE
    | orjson.OPT_NON_STR_KEYS
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


class EventWriter:
    """Appends the events of one rank; whole lines only, and a full disk never stops the training.

    Threads may share one. A rank's events are indexed as they are written (archive/index.py). With a `host_file` they
    go there, beside those of the host's other ranks, unless the rank has a file of its own from before or the file
    system has no locks; `generation` tells which of two processes was this rank later. `earlier` are writers of this
    process that a full disk has kept from closing: they try again as soon as this one can write.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        clock: Callable[[], float] = time.time,
        rotate_bytes: int = ROTATE_BYTES,
        host_file: Path | None = None,
        generation: int = 0,
        earlier: Sequence[EventWriter] = (),
    ) -> None:
        self._path = path
        self._earlier = list(earlier)
        self._host_file, self._generation = host_file, generation
        self._stream: HostStream | None = None
        self._rank = rank
        self._clock = clock
        self._rotate_bytes = self._rotate_at = rotate_bytes
        self._lock = threading.RLock()
        self._pending: list[bytes] = []
        self._flushed = -math.inf
        self._is_held = False  # while several are written at once
        self._file = -1
        self._index: IndexWriter | None = None
        self.lost = 0  # events dropped because the disk refused them for too long, or too long themselves
        self._open_file()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; NaN and infinity become null."""
        with self._lock:
            now = self._clock()
            line = {"v": VERSION, "event": event, "t": round(now, 6), "rank": self._rank, **fields}
            data = _encode_line(line)
            if len(data) > MOST_LINE_BYTES:
                self.lost += 1  # no reader would take it
                return
            self._pending.append(data)
            if self._index is not None:
                self._index.add(line, len(data))
            if not self._is_held and (event != "step" or now - self._flushed >= FLUSH_S):
                self.flush()

    def write_all(self, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Append several events, each with its fields, in one write."""
        with self._lock:
            self._is_held = True
            try:
                for event, fields in events:
                    self.write(event, **fields)
            finally:
                self._is_held = False
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system now."""
        with self._lock:
            self._flushed = self._clock()
            data = b"".join(self._pending)
            done = 0
            try:
                while done < len(data):
                    rest = data[done:]
                    done += self._stream.write(rest) if self._stream is not None else os.write(self._file, rest)
            except OSError:  # disk full or gone: keep the rest, the next flush tries again
                pass
            self._pending = [data[done:]] if done < len(data) else []
            self._bound_pending()
            self._note_written(done)
            if self._earlier and data and not self._pending:
                self._earlier = [one for one in self._earlier if not one.close()]

    def close(self) -> bool:
        """Flush and close; calling it twice is fine.

        Not while the disk refuses what is left: then it stays open, answers False, and may be asked again later.
        """
        with self._lock:
            if self._file >= 0 or self._stream is not None:
                self.flush()
                if self._pending:
                    return False
                if self._index is not None:
                    self._index.close()
                self._close_files(self._file, self._stream)
                self._file, self._stream = -1, None
            return True

    def _open_file(self) -> None:
        self._stream = self._open_stream()
        if self._stream is not None:
            self._index = self._make_index(-1, self._stream)
            return
        # O_APPEND: a write of whole lines lands whole, also when a run is resumed by another process.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size > 0 and os.pread(self._file, 1, size - 1) != b"\n":
            self._pending.append(b"\n")  # ends the line that a killed process left half written
        if self._rank >= 0:  # the supervisor's few events need no index
            self._index = self._make_index(os.fstat(self._file).st_ino)

    def _make_index(self, file_number: int, stream: HostStream | None = None) -> IndexWriter:
        # Imported here: it needs numpy, half of the time in which a coordinator starts, and that writes no index.
        from phalanx.record.archive.event_index import IndexWriter

        return IndexWriter(self._path, file_number, stream=stream)

    def _open_stream(self) -> HostStream | None:
        has_own = any(map(os.path.lexists, (self._path, part_path(self._path, 1))))
        with contextlib.suppress(OSError):
            if self._host_file is not None and not has_own:
                return HostStream(self._host_file, rank=self._rank, generation=self._generation)
        self._host_file = None  # from now on it has a file of its own
        return None

    @staticmethod
    def _close_files(file: int, stream: HostStream | None) -> None:
        if stream is not None:
            stream.close()
        if file >= 0:
            os.close(file)

    def _note_written(self, written: int) -> None:
        """Tell the index where the lines are, and begin another file when this one is large."""
        if not written:
            return
        # The kernel left the position of an O_APPEND file at the end of what was just written.
        end = self._stream.end if self._stream is not None else os.lseek(self._file, 0, os.SEEK_CUR)
        if self._index is not None:
            if self._pending:
                self._index.spoil()
            else:
                self._index.flushed(end)
        if end >= self._rotate_at and not self._pending:
            self._rotate_file(end)

    def _rotate_file(self, end: int) -> None:
        if self._index is not None:
            self._index.close()
        before, stream = self._file, self._stream
        if stream is not None:
            self._file = -1
        try:
            if stream is None and os.path.samestat(
                os.fstat(self._file), os.stat(self._path)
            ):  # else another process has done it
                aside = part_path(self._path, 1 + max(part_numbers(self._path), default=0))
                os.rename(self._path, aside)  # the events first: an index without its events is ignored
                if self._index is not None:
                    os.rename(self._path.with_suffix(".index"), aside.with_suffix(".index"))
        except OSError:
            pass
        try:
            self._open_file()
        except OSError:  # no new file: go on in the old one, without an index
            self._index, self._rotate_at = None, end + self._rotate_bytes
            self._file, self._stream = before, stream
            return
        self._close_files(before, stream)
        # Of the old one still, where it could not be renamed.
        size = self._stream.end if self._stream is not None else os.fstat(self._file).st_size
        self._rotate_at = self._rotate_bytes + (size if size >= self._rotate_bytes else 0)

    def _bound_pending(self) -> None:
        held = b"".join(self._pending)
        if len(held) > MOST_PENDING_BYTES:
            # A half-written first line must stay: its beginning is already on the disk.
            first, _, rest = held.partition(b"\n")
            cut = rest.find(b"\n", len(rest) // 2) + 1
            self.lost += rest[:cut].count(b"\n")
            self._pending = [first + b"\n" + rest[cut:]]
            if self._index is not None:
                self._index.spoil()


def _encode_line(line: Event) -> bytes:
    try:
        return orjson.dumps(line, option=_LINE)
    except (TypeError, ValueError):  # what JSON has no word for, numbers of more than 64 bits, half of a character
        text = _JSON.encode(json_values(line))
    return text.encode("utf-8", errors="replace") + b"\n"


_PART = re.compile(r"(.+)-(\d{4,9})(\.[^.]+)", re.DOTALL)
SETTLED_NS = 2_000_000_000  # a file system may count changes in steps of a second: a younger one may have more to come


def part_path(path: Path, number: int) -> Path:
    """Where a closed part of a file of events is."""
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def part_numbers(path: Path) -> list[int]:
    """Numbers of the closed parts of a file of events, oldest first.

    Asked for every rank: a folder that has not changed for a while is listed once for all of them.
    """
    try:
        folder = os.stat(path.parent)
        is_settled = time.time_ns() - folder.st_mtime_ns > SETTLED_NS
        listed = _listed_parts if is_settled else _listed_parts.__wrapped__
        found = listed(str(path.parent), folder.st_ino, folder.st_mtime_ns).get((path.stem, path.suffix), ())
    except OSError:
        return []
    rank = path.stem.removeprefix("events-")
    sessions = closed_sessions(path.parent, int(rank), now=True) if rank.isdecimal() and len(rank) <= 7 else 0
    return sorted({*found, *range(1, sessions + 1)}) if sessions else list(found)


@lru_cache(maxsize=4)
def _listed_parts(folder: str, inode: int, changed_ns: int) -> dict[tuple[str, str], list[int]]:
    """Numbers of closed parts, by stem and ending of the file they were parts of."""
    found: dict[tuple[str, str], list[int]] = {}
    # Of 16,384 ranks nearly all names are of files that grow, events-00000.jsonl, or of hosts: told without a pattern.
    names = [
        name
        for name in os.listdir(folder)
        if not name.startswith("events-") or ("-" in name[7:] and not name.startswith("events-host-"))
    ]
    for match in filter(None, map(_PART.fullmatch, names)):
        found.setdefault((match.group(1), match.group(3)), []).append(int(match.group(2)))
    return {name: sorted(numbers) for name, numbers in found.items()}


def event_files_of(path: Path) -> list[Path]:
    """All files that hold the events of one rank, oldest first; the last is the one that grows."""
    return [*(part_path(path, number) for number in part_numbers(path)), path]


class LineSplitter:
    """Cuts what comes in pieces into lines; one that is too long to be an event is counted, not kept."""

    def __init__(self) -> None:
        self._partial = b""
        self._overlong = False
        self.skipped = 0
        self.held = 0  # bytes taken in since the end of the last whole line

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        *lines, rest = data.split(b"\n")
        if not lines:
            self._keep_partial(rest)
            return []
        first = self._partial + lines[0]
        self.held, self._partial = 0, b""
        if self._overlong or len(first) > MOST_LINE_BYTES:
            self.skipped += 1
            first = b""
        self._overlong = False
        self._keep_partial(rest)
        return [first, *lines[1:]]

    def finish(self) -> None:
        """Nobody is going to complete the last line: count it."""
        if self._overlong or self._partial.strip():
            self.skipped += 1
        self._partial, self._overlong, self.held = b"", False, 0

    def _keep_partial(self, rest: bytes) -> None:
        self.held += len(rest)
        if not self._overlong:
            self._partial += rest
            if len(self._partial) > MOST_LINE_BYTES:
                self._partial, self._overlong = b"", True


class EventReader:
    """Reads a growing file from where it last stopped; lines that are no events are counted in `skipped`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = 0  # number of the newest closed part that is read to its end
        self._offset = 0
        self._lines = LineSplitter()
        self._bad = 0

    @property
    def skipped(self) -> int:
        """Lines so far that were no events."""
        return self._bad + self._lines.skipped

    @property
    def is_torn(self) -> bool:
        """Whether what was read ends within a line."""
        return self._lines.held > 0

    def read(self) -> list[Event]:
        """The events that are new and complete; a file that does not exist yet has none."""
        return list(self.stream())

    def finish(self) -> list[Event]:
        """`read`, and count an unfinished last line: nobody is going to complete it."""
        events = self.read()
        self._lines.finish()
        return events

    def stream(self, *, only: tuple[bytes, ...] = (b"",)) -> Iterator[Event]:
        """`read`, one by one, in the memory of one event; `only` those whose line holds one of these."""
        for line in self._new_lines():
            if not line.strip() or not any(one in line for one in only):
                continue
            event = parse_event(line)
            if event is None:
                self._bad += 1
            else:
                yield event

    def _new_lines(self) -> Iterator[bytes]:
        if not self._part and not self._offset:
            self._part = min(part_numbers(self._path), default=1) - 1
        while True:
            after = part_path(self._path, self._part + 1)
            # Opened before the look at the next part: was the file not yet closed then, this is the right one.
            file = _open_or_none(self._path)
            closed = has_events(after)
            if closed:
                if file is not None:
                    file.close()
                file = _open_or_none(after)
            if file is not None:
                with file:
                    yield from self._rest_lines(file)
            if not closed:
                return
            self._lines.finish()
            self._part, self._offset = self._part + 1, 0

    def _rest_lines(self, file: EventBytes) -> Iterator[bytes]:
        file.seek(self._offset)
        while data := file.read(READ_BYTES):
            self._offset += len(data)
            yield from self._lines.feed(data)


def _open_or_none(path: Path) -> EventBytes | None:
    try:
        return open_events(path)
    except OSError:
        return None


def read_events(path: Path) -> tuple[list[Event], int]:
    """All events of a file that no longer grows, and how many lines were none."""
    reader = EventReader(path)
    return reader.finish(), reader.skipped


def parse_event(line: bytes, *, strict: bool = False) -> Event | None:
    """One line; None when it is no event. Where JSON is not `strict`, NaN and numbers beyond 64 bits are taken too."""
    if len(line) > MOST_LINE_BYTES:
        return None
    try:
        event = orjson.loads(line)
    except ValueError:
        try:
            event = None if strict else json.loads(line)
        except (ValueError, RecursionError):
            return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
