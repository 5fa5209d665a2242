"""Writing and reading the events of a rank: one JSON object per line, appended; readers may follow the growing file.

docs/events.md lists the events and their units. A file that has grown to ROTATE_BYTES is closed and renamed
(`events-00000-0001.jsonl`), and the next one begins under the old name. Readers are given the old name and read all
parts.
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
# Steps that are faster than this share one write (a write takes about 5 µs). Every other event is written at once.
FLUSH_S = 0.05
# Buffered while the disk refuses writes; the oldest events are dropped first.
MOST_PENDING_BYTES = 4 * 2**20
MOST_LINE_BYTES = 2**20  # readers skip longer lines
READ_BYTES = 2**20
ROTATE_BYTES = 256 * 2**20  # half a million steps of a rank

Event = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# NaN and infinity become null. Values that only orjson can encode are encoded by `json_values` instead.
_LINE = (
    orjson.OPT_APPEND_NEWLINE
    | orjson.OPT_NON_STR_KEYS
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


class EventWriter:
    """Appends the events of one rank in whole lines; a full disk never stops the training.

    Threads may share a writer. Events are indexed as they are written (archive/event_index.py). With a `host_file` the
    events go there, next to those of the host's other ranks, unless the rank already has its own file or the file
    system has no locks. `generation` orders two processes that were the same rank. `earlier` are writers of this
    process that could not be closed because the disk was full: they try again as soon as this one can write.
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
        # True while `write_all` collects events for one write.
        self._is_held = False
        self._file = -1
        self._index: IndexWriter | None = None
        # Events dropped because they were too long, or because the disk refused them for too long.
        self.lost = 0
        self._open_file()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; NaN and infinity become null."""
        with self._lock:
            now = self._clock()
            line = {"v": VERSION, "event": event, "t": round(now, 6), "rank": self._rank, **fields}
            data = _encode_line(line)
            if len(data) > MOST_LINE_BYTES:
                self.lost += 1  # readers skip lines of this length
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
        """Write all pending events to the operating system now."""
        with self._lock:
            self._flushed = self._clock()
            data = b"".join(self._pending)
            done = 0
            try:
                while done < len(data):
                    rest = data[done:]
                    done += self._stream.write(rest) if self._stream is not None else os.write(self._file, rest)
            except OSError:
                # Disk full or gone: the next flush tries again with the rest.
                pass
            self._pending = [data[done:]] if done < len(data) else []
            self._bound_pending()
            self._note_written(done)
            if self._earlier and data and not self._pending:
                self._earlier = [writer for writer in self._earlier if not writer.close()]

    def close(self) -> bool:
        """Flush and close; calling it again is allowed.

        While the disk refuses the pending events the writer stays open and returns False; call it again later.
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
        # O_APPEND: a single write of complete lines is not mixed with writes of another process that resumed the run.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size > 0 and os.pread(self._file, 1, size - 1) != b"\n":
            # Ends the line that a killed process left half written.
            self._pending.append(b"\n")
        if self._rank >= 0:  # the coordinator's few events need no index
            self._index = self._make_index(os.fstat(self._file).st_ino)

    def _make_index(self, file_number: int, stream: HostStream | None = None) -> IndexWriter:
        # Imported here because it needs numpy, half of the start-up time of a coordinator, which writes no index.
        from phalanx.record.archive.event_index import IndexWriter

        return IndexWriter(self._path, file_number, stream=stream)

    def _open_stream(self) -> HostStream | None:
        has_own = any(map(os.path.lexists, (self._path, part_path(self._path, 1))))
        with contextlib.suppress(OSError):
            if self._host_file is not None and not has_own:
                return HostStream(self._host_file, rank=self._rank, generation=self._generation)
        self._host_file = None  # from now on this rank has its own file
        return None

    @staticmethod
    def _close_files(file: int, stream: HostStream | None) -> None:
        if stream is not None:
            stream.close()
        if file >= 0:
            os.close(file)

    def _note_written(self, written: int) -> None:
        """Report the written lines to the index, and start another file when this one is large."""
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
            ):  # otherwise another process has already renamed it
                aside = part_path(self._path, 1 + max(part_numbers(self._path), default=0))
                # The events first: an index without its events is ignored.
                os.rename(self._path, aside)
                if self._index is not None:
                    os.rename(self._path.with_suffix(".index"), aside.with_suffix(".index"))
        except OSError:
            pass
        try:
            self._open_file()
        except OSError:
            # No new file: continue in the old one, without an index.
            self._index, self._rotate_at = None, end + self._rotate_bytes
            self._file, self._stream = before, stream
            return
        self._close_files(before, stream)
        # The new file is the old one if that could not be renamed.
        size = self._stream.end if self._stream is not None else os.fstat(self._file).st_size
        self._rotate_at = self._rotate_bytes + (size if size >= self._rotate_bytes else 0)

    def _bound_pending(self) -> None:
        pending = b"".join(self._pending)
        if len(pending) > MOST_PENDING_BYTES:
            # A half-written first line must stay: its beginning is already on the disk.
            first, _, rest = pending.partition(b"\n")
            cut = rest.find(b"\n", len(rest) // 2) + 1
            self.lost += rest[:cut].count(b"\n")
            self._pending = [first + b"\n" + rest[cut:]]
            if self._index is not None:
                self._index.spoil()


def _encode_line(line: Event) -> bytes:
    try:
        return orjson.dumps(line, option=_LINE)
    # Values that JSON cannot represent, integers of more than 64 bits, lone surrogates.
    except (TypeError, ValueError):
        text = _JSON.encode(json_values(line))
    return text.encode("utf-8", errors="replace") + b"\n"


_PART = re.compile(r"(.+)-(\d{4,9})(\.[^.]+)", re.DOTALL)
# Some file systems round change times to a second or more: a folder that changed less than two seconds ago may have
# another change with the same time.
SETTLED_NS = 2_000_000_000


def part_path(path: Path, number: int) -> Path:
    """Return the path of a closed part of an event file."""
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def part_numbers(path: Path) -> list[int]:
    """Return the numbers of the closed parts of an event file, oldest first.

    This is called for every rank: a folder that has not changed for a while is listed once for all of them.
    """
    try:
        folder = os.stat(path.parent)
        is_settled = time.time_ns() - folder.st_mtime_ns > SETTLED_NS
        list_parts = _listed_parts if is_settled else _listed_parts.__wrapped__
        numbers = list_parts(str(path.parent), folder.st_ino, folder.st_mtime_ns).get((path.stem, path.suffix), ())
    except OSError:
        return []
    rank = path.stem.removeprefix("events-")
    sessions = closed_sessions(path.parent, int(rank), now=True) if rank.isdecimal() and len(rank) <= 7 else 0
    return sorted({*numbers, *range(1, sessions + 1)}) if sessions else list(numbers)


@lru_cache(maxsize=4)
def _listed_parts(folder: str, inode: int, changed_ns: int) -> dict[tuple[str, str], list[int]]:
    """Return the numbers of closed parts, by stem and suffix of their event file."""
    numbers_by_file: dict[tuple[str, str], list[int]] = {}
    # With 16,384 ranks nearly all names are growing files (events-00000.jsonl) or host files: skipped without a regex.
    names = [
        name
        for name in os.listdir(folder)
        if not name.startswith("events-") or ("-" in name[7:] and not name.startswith("events-host-"))
    ]
    for match in filter(None, map(_PART.fullmatch, names)):
        numbers_by_file.setdefault((match.group(1), match.group(3)), []).append(int(match.group(2)))
    return {name: sorted(numbers) for name, numbers in numbers_by_file.items()}


def event_files_of(path: Path) -> list[Path]:
    """Return all files with the events of one rank, oldest first; the last one is the file that grows."""
    return [*(part_path(path, number) for number in part_numbers(path)), path]


class LineSplitter:
    """Splits incoming bytes into lines; counts and drops lines that are too long to be an event."""

    def __init__(self) -> None:
        self._partial = b""
        self._overlong = False
        self.skipped = 0
        # Bytes received since the end of the last complete line.
        self.held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their newlines."""
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
        """Count an unfinished last line as skipped, because no process will complete it."""
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
    """Reads a growing event file from where it last stopped; `skipped` counts lines that are not events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Number of the newest closed part that is read to its end.
        self._part = 0
        self._offset = 0
        self._lines = LineSplitter()
        self._bad = 0

    @property
    def skipped(self) -> int:
        """Number of lines so far that are not events."""
        return self._bad + self._lines.skipped

    @property
    def is_torn(self) -> bool:
        """True if the bytes read so far end in the middle of a line."""
        return self._lines.held > 0

    def read(self) -> list[Event]:
        """Return the new complete events; an empty list if the file does not exist yet."""
        return list(self.stream())

    def finish(self) -> list[Event]:
        """Read the new events, and count an unfinished last line as skipped: no process will complete it."""
        events = self.read()
        self._lines.finish()
        return events

    def stream(self, *, only: tuple[bytes, ...] = (b"",)) -> Iterator[Event]:
        """Yield the new events, with one event in memory; `only` keeps lines that contain one of these texts."""
        for line in self._new_lines():
            if not line.strip() or not any(marker in line for marker in only):
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
            # Opened before the check for the next part: if the file was not closed at this time, it is the right one.
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
    """Return all events of a file that no longer grows, and the number of lines that are not events."""
    reader = EventReader(path)
    return reader.finish(), reader.skipped


def parse_event(line: bytes, *, strict: bool = False) -> Event | None:
    """Parse one line; return None if it is not an event.

    Unless `strict`, NaN and integers beyond 64 bits are accepted.
    """
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
