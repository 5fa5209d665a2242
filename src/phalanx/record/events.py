"""Events of a rank: one JSON object per line, appended; a reader may follow the file while it grows.

docs/events.md lists the events and their units.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
# Steps quicker than this share one write (a write takes about 5 µs); every other event is written at once.
FLUSH_S = 0.05
MOST_PENDING_BYTES = 4 * 2**20  # kept while the disk refuses them; older events go first
MOST_LINE_BYTES = 2**20  # a longer line is no event of ours
READ_BYTES = 2**22

Event = dict[str, Any]


class EventWriter:
    """Appends the events of one rank; whole lines only, and a full disk never stops the training."""

    def __init__(self, path: Path, *, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._rank = rank
        self._clock = clock
        self._pending: list[bytes] = []
        self._flushed = -math.inf
        self.lost = 0  # events dropped because the disk refused them for too long
        # O_APPEND: a write of whole lines lands whole, also when a run is resumed by another process.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if _torn(self._file):
            self._pending.append(b"\n")  # ends the line that a killed process left half written

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; NaN and infinity become null."""
        now = self._clock()
        line = {"v": VERSION, "event": event, "t": round(now, 6), "rank": self._rank, **fields}
        text = json.dumps(_finite(line), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._pending.append(text.encode("utf-8") + b"\n")
        if event != "step" or now - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system now."""
        self._flushed = self._clock()
        data = b"".join(self._pending)
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:  # disk full or gone: keep the rest, the next flush tries again
            pass
        self._pending = [data[done:]] if done < len(data) else []
        self._bound()

    def close(self) -> None:
        """Flush and close; calling it twice is fine."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1

    def _bound(self) -> None:
        held = b"".join(self._pending)
        if len(held) > MOST_PENDING_BYTES:
            # A half-written first line must stay: its beginning is already on the disk.
            first, _, rest = held.partition(b"\n")
            cut = rest.find(b"\n", len(rest) // 2) + 1
            self.lost += rest[:cut].count(b"\n")
            self._pending = [first + b"\n" + rest[cut:]]


def _torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class EventReader:
    """Reads a growing file from where it last stopped; lines that are no events are counted in `skipped`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self.skipped = 0

    def read(self) -> list[Event]:
        """The events that are new and complete; a file that does not exist yet has none."""
        events: list[Event] = []
        for line in self._new_lines():
            event = _parse(line)
            if event is None:
                self.skipped += 1
            else:
                events.append(event)
        return events

    def finish(self) -> list[Event]:
        """`read`, and count an unfinished last line: nobody is going to complete it."""
        events = self.read()
        if self._partial.strip():
            self.skipped += 1
            self._partial = b""
        return events

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(READ_BYTES)
                chunks = [data]
                while data:
                    data = stream.read(READ_BYTES)
                    chunks.append(data)
                self._offset = stream.tell()
        except OSError:
            return []
        *lines, self._partial = (self._partial + b"".join(chunks)).split(b"\n")
        if len(self._partial) > MOST_LINE_BYTES:
            self._partial = self._partial[:1]  # still no event when its end arrives, without holding it all
        return [line for line in lines if line.strip()]


def read_events(path: Path) -> tuple[list[Event], int]:
    """All events of a file that no longer grows, and how many lines were none."""
    reader = EventReader(path)
    return reader.finish(), reader.skipped


def _parse(line: bytes) -> Event | None:
    if len(line) > MOST_LINE_BYTES:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
