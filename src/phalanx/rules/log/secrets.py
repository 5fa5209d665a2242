"""Search for credentials in what a run wrote: its events, its ranks' logs, and the small files of its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.io.files import Spot, open_regular
from phalanx.record.event_batches import LineBlock
from phalanx.record.event_schema import EventColumns
from phalanx.record.events import Event
from phalanx.record.run import Run
from phalanx.rules.credential_text import MOST_TEXT, is_secret

# A line can match only if it contains one of these words; most lines contain none, which saves the slow patterns.
_WORDS = (
    b"pass", b"secret", b"token", b"key", b"credential", b"authoriz", b"bearer", b"://", b"akia", b"asia", b"gh",
    b"hf_", b"sk-", b"xox", b"aiza",
)  # fmt: skip
MOST_FILE_BYTES = 8 * 2**20  # searched per log
MOST_BYTES = 64 * 2**20  # searched in all files together
MOST_FILES = 4096
# Events with texts that are searched; a run has a few hundred per rank.
MOST_EVENTS = 100_000
BLOCK_BYTES = 64 * 2**10
# Bytes shared by two parts of a long line: longer than any form of a key.
OVERLAP = 512
MOST_LINES = 1_000  # lines that are not events, searched per block
MOST_CLEAN, SHORT_TEXT = 1_000, 200
_NUMBERS = frozenset((int, float, bool))
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{0,128}")


class Secrets:
    """Counts lines that look like credentials, with the place of the first one."""

    def __init__(self) -> None:
        self.count = 0
        self.spot: Spot | None = None
        self.is_partial = False  # part of the text was not searched
        self._looked = 0
        self._clean: set[str] = set()  # short texts that occur again and again
        self._searched: set[str] = set()  # the same with the names of their fields
        self._files: dict[Path, _Place] = {}
        self._bytes = 0

    def look_in(self, events: Sequence[Event], file: str, lines: Sequence[int]) -> None:
        """Search the texts of events, with the names of their fields."""
        self._looked += len(events)
        if self._looked > MOST_EVENTS:
            self.is_partial = True
            return
        for event, line in zip(events, lines, strict=True):
            if any(self._gives_away(text) for text in _nested_texts(event)):
                self._note_spot(Spot(file=file, line=line))

    def _gives_away(self, text: str) -> bool:
        """Return whether a text contains a credential; texts of every event (`event=step`) are searched once."""
        if text in self._searched:
            return False
        if _is_found(text.encode(errors="replace")):
            return True
        if len(self._searched) < MOST_CLEAN and len(text) < SHORT_TEXT:
            self._searched.add(text)
        return False

    def look_through(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        """Search events of numbers: fields that a writer added, and text fields of the schema other than digests."""
        for name in columns.free():
            column = columns.get(name)
            # Most columns hold few different texts, so distinct values are checked first.
            if all(self._is_known(value) for value in _distinct_values(column)):
                continue
            for value, line in zip(column, lines, strict=True):
                if not self._is_known(value):
                    before = self.count
                    self.look_in([{name: value}], file, [line])
                    if type(value) is str and before == self.count and len(self._clean) < MOST_CLEAN:
                        self._clean.add(value)

    def _is_known(self, value: Any) -> bool:
        if type(value) is str:
            return value in self._clean or _DIGEST.fullmatch(value) is not None
        return value is None or type(value) in _NUMBERS

    def look_at(self, piece: LineBlock, numbers: Sequence[int]) -> None:
        """Search lines that are not events."""
        lines = piece.data.split(b"\n")
        self.is_partial |= len(numbers) > MOST_LINES
        for number in numbers[:MOST_LINES]:
            if _is_found(lines[number - piece.line]):
                self._note_spot(Spot(file=piece.file, line=number))

    def look_around(self, run: Run, shown: str) -> None:
        """Search logs, errors and the small files of the run folder; parts that were searched before are skipped."""
        for path in _text_files(run):
            place = self._files.get(path)
            if self._bytes >= MOST_BYTES or (place is None and len(self._files) >= MOST_FILES):
                self.is_partial = True
                return
            try:
                with open_regular(path) as file:
                    self._search_file(file.fileno(), place or _Place(), path, f"{shown}/{path.relative_to(run.path)}")
            except FileNotFoundError:
                continue
            except OSError:  # a link, or not readable by this user
                self.is_partial = True

    def _search_file(self, file: int, place: _Place, path: Path, name: str) -> None:
        self._files[path] = place
        size = os.fstat(file).st_size
        end = min(size, MOST_FILE_BYTES)
        self.is_partial |= size > end
        if end <= place.seen:
            return
        self._bytes += end - place.seen
        place.seen = end
        rest = b""  # of a line whose end was not read
        while (left_bytes := end - place.offset - len(rest)) > 0:
            block = os.pread(file, min(BLOCK_BYTES, left_bytes), end - left_bytes)
            if not block:  # it became shorter
                break
            data = rest + block
            stop = data.rfind(b"\n") + 1
            if stop:
                self._search_lines(data[: stop - 1], place, name)
                place.offset += stop
            elif len(data) > BLOCK_BYTES:
                # A line without an end, as progress bars draw: it is searched in parts that overlap.
                self._search_line(data, place, name)
                stop = len(data) - OVERLAP
                place.offset += stop
            rest = data[stop:]
        # The line may never end; if it does, it is searched again.
        self._search_line(rest, place, name)

    def _search_lines(self, data: bytes, place: _Place, name: str) -> None:
        may_be = _may_be(data)
        for text in data.split(b"\n"):
            if may_be:
                self._search_line(text, place, name)
            place.line, place.is_noted = place.line + 1, False

    def _search_line(self, text: bytes, place: _Place, name: str) -> None:
        if not place.is_noted and _is_found(text):
            place.is_noted = True  # once, however often a part of the line is searched
            self._note_spot(Spot(file=name, line=place.line))

    def _note_spot(self, spot: Spot) -> None:
        self.count += 1
        self.spot = self.spot or spot


@dataclass(kw_only=True, slots=True)
class _Place:
    """The position up to which a file was searched."""

    seen: int = 0  # bytes searched so far
    offset: int = 0  # start of the line whose end was not read yet
    line: int = 1  # number of that line
    is_noted: bool = False  # whether that line was counted


def _is_found(text: bytes) -> bool:
    """Return whether a line contains a credential; a long line is searched in parts that overlap."""
    if not _may_be(text):
        return False
    # Parts overlap so that a key across a boundary is found.
    starts = range(0, max(1, len(text) - OVERLAP), MOST_TEXT - OVERLAP)
    return any(is_secret(text[start : start + MOST_TEXT].decode(errors="replace")) for start in starts)


def _may_be(data: bytes) -> bool:
    lower = data.lower()
    return any(word in lower for word in _WORDS)


def _distinct_values(column: Sequence[Any]) -> Iterable[Any]:
    try:
        return set(column)
    except TypeError:  # lists and tables
        return column


def _nested_texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < 8:
        for key, item in value.items():
            # Most values of a step; not worth a generator each.
            if item is None or type(item) in _NUMBERS:
                continue
            if isinstance(item, str):
                # The name of the field is part of the pattern.
                yield f"{key}={item}"
            else:
                yield from _nested_texts(item, depth + 1)
    elif isinstance(value, list) and depth < 8:
        for item in value[:1000]:
            yield from _nested_texts(item, depth + 1)


def _text_files(run: Run) -> Iterable[Path]:
    """Yield the files that users and libraries write into.

    The file `secret` belongs to the run itself and is readable only by its user, so it is left out.
    """
    yield from (run.path / name for name in ("job.toml", "job.json", "launch.json", "status.json"))
    for folder in ("logs", "errors"):
        try:
            names = sorted(os.listdir(run.path / folder))
        except OSError:
            continue
        yield from (run.path / folder / name for name in names)
