"""Credentials in what a run wrote: its events, its ranks' logs and the few files of its folder."""

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

# One of these is in every line that can match; most lines have none.
_WORDS = (
    b"pass", b"secret", b"token", b"key", b"credential", b"authoriz", b"bearer", b"://", b"akia", b"asia", b"gh",
    b"hf_", b"sk-", b"xox", b"aiza",
)  # fmt: skip
MOST_FILE_BYTES = 8 * 2**20  # of one log
MOST_BYTES = 64 * 2**20  # of all
MOST_FILES = 4096
MOST_EVENTS = 100_000  # with texts; a run has a few hundred per rank
BLOCK_BYTES = 64 * 2**10
OVERLAP = 512  # of two parts of a line: longer than any form of a key
MOST_LINES = 1_000  # that are no events, of a piece
MOST_CLEAN, SHORT_TEXT = 1_000, 200
_NUMBERS = frozenset((int, float, bool))
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{0,128}")


class Secrets:
    """Counts lines that look like credentials, with the first place."""

    def __init__(self) -> None:
        self.count = 0
        self.spot: Spot | None = None
        self.is_partial = False  # some of it was not searched
        self._looked = 0
        self._clean: set[str] = set()  # short texts that are told again and again
        self._searched: set[str] = set()  # the same with the names of their fields
        self._files: dict[Path, _Place] = {}
        self._bytes = 0

    def look_in(self, events: Sequence[Event], file: str, lines: Sequence[int]) -> None:
        """The texts of events, the names of their fields included."""
        self._looked += len(events)
        if self._looked > MOST_EVENTS:
            self.is_partial = True
            return
        for event, line in zip(events, lines, strict=True):
            if any(self._gives_away(text) for text in _nested_texts(event)):
                self._note_spot(Spot(file=file, line=line))

    def _gives_away(self, text: str) -> bool:
        """Whether a text does; those that are told in every event (`event=step`) are searched once."""
        if text in self._searched:
            return False
        if _is_found(text.encode(errors="replace")):
            return True
        if len(self._searched) < MOST_CLEAN and len(text) < SHORT_TEXT:
            self._searched.add(text)
        return False

    def look_through(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        """Events of numbers: the texts that a writer added, and those of the schema that are no digests."""
        for name in columns.free():
            column = columns.get(name)
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
        """Lines that are no events."""
        lines = piece.data.split(b"\n")
        self.is_partial |= len(numbers) > MOST_LINES
        for number in numbers[:MOST_LINES]:
            if _is_found(lines[number - piece.line]):
                self._note_spot(Spot(file=piece.file, line=number))

    def look_around(self, run: Run, shown: str) -> None:
        """Logs, errors and the few files of the folder itself; what was looked at before is not again."""
        for path in _text_files(run):
            known = self._files.get(path)
            if self._bytes >= MOST_BYTES or (known is None and len(self._files) >= MOST_FILES):
                self.is_partial = True
                return
            try:
                with open_regular(path) as file:
                    self._search_file(file.fileno(), known or _Place(), path, f"{shown}/{path.relative_to(run.path)}")
            except FileNotFoundError:
                continue
            except OSError:  # a link, or not ours to read
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
        held = b""  # of a line whose end was not read
        while (left := end - place.offset - len(held)) > 0:
            block = os.pread(file, min(BLOCK_BYTES, left), end - left)
            if not block:  # it became shorter
                break
            data = held + block
            stop = data.rfind(b"\n") + 1
            if stop:
                self._search_lines(data[: stop - 1], place, name)
                place.offset += stop
            elif len(data) > BLOCK_BYTES:  # a line without an end, as progress bars draw: in parts that overlap
                self._search_line(data, place, name)
                stop = len(data) - OVERLAP
                place.offset += stop
            held = data[stop:]
        self._search_line(held, place, name)  # nobody may ever end it; where somebody does, it is searched again

    def _search_lines(self, data: bytes, place: _Place, name: str) -> None:
        may_be = _may_be(data)
        for text in data.split(b"\n"):
            if may_be:
                self._search_line(text, place, name)
            place.line, place.is_noted = place.line + 1, False

    def _search_line(self, text: bytes, place: _Place, name: str) -> None:
        if not place.is_noted and _is_found(text):
            place.is_noted = True  # once, however often a part of it is seen
            self._note_spot(Spot(file=name, line=place.line))

    def _note_spot(self, spot: Spot) -> None:
        self.count += 1
        self.spot = self.spot or spot


@dataclass(kw_only=True, slots=True)
class _Place:
    """How far a file was searched."""

    seen: int = 0  # bytes that were looked at
    offset: int = 0  # where the line begins that had no end yet
    line: int = 1  # its number
    is_noted: bool = False  # and whether it was counted


def _is_found(text: bytes) -> bool:
    """Whether a line gives something away; a long one is looked at in parts that overlap."""
    if not _may_be(text):
        return False
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
        for key, one in value.items():
            if one is None or type(one) in _NUMBERS:  # most of what a step tells: not worth a generator each
                continue
            if isinstance(one, str):
                yield f"{key}={one}"  # the name says what it is
            else:
                yield from _nested_texts(one, depth + 1)
    elif isinstance(value, list) and depth < 8:
        for one in value[:1000]:
            yield from _nested_texts(one, depth + 1)


def _text_files(run: Run) -> Iterable[Path]:
    """What people and libraries write into; `secret` is the run's own, and nobody else may read it."""
    yield from (run.path / name for name in ("job.toml", "job.json", "launch.json", "status.json"))
    for folder in ("logs", "errors"):
        try:
            names = sorted(os.listdir(run.path / folder))
        except OSError:
            continue
        yield from (run.path / folder / name for name in names)
