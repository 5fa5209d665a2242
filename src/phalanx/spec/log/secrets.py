"""Credentials in what a run wrote: a few well-known forms, and words of much entropy beside a name that asks for one.

Digests, hashes and run names are no secrets: entropy alone accuses nobody.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.record.events import Event
from phalanx.record.run import Run
from phalanx.spec.log.feed import Piece, open_inside
from phalanx.spec.outcome import Spot

_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22}"
    r"|\bhf_[A-Za-z0-9]{30,40}\b"
    r"|\bsk-(?:proj-|ant-[a-z0-9]{2,8}-)?[A-Za-z0-9_-]{20,}"
    r"|\bxox[abprs]-[0-9A-Za-z-]{10,}"
    r"|\bAIza[0-9A-Za-z_-]{35}"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
    r"|://[^\s/@:\"']{0,100}:[^\s/@\"']{1,200}@"  # user:password@host
)
_PASSWORD = re.compile(r"""(?:password|passwd|passphrase)["']?\s?[=:]\s?(["']?)([^\s"',;&]{6,200})""", re.IGNORECASE)
_NAMED = re.compile(
    r"""(?:secret|token|api_?key|access_?key|private_?key|credentials?|authorization|bearer)["']?\s?[=: ]\s?["']?"""
    r"""([A-Za-z0-9_+/=.-]{16,400})""",
    re.IGNORECASE,
)
_EMPTY = re.compile(r"\[\w+\]|\*+|<.*>|\$.*|\{.*|none|null|true|false|redacted|x+|\.+", re.IGNORECASE)
# One of these is in every line that can match; most lines have none.
_WORDS = (
    b"pass", b"secret", b"token", b"key", b"credential", b"authoriz", b"bearer", b"://", b"akia", b"asia", b"gh",
    b"hf_", b"sk-", b"xox", b"aiza",
)  # fmt: skip
LEAST_BITS = 3.5  # of entropy per character; English words in a row have less, random letters and digits more
MOST_FILE_BYTES = 8 * 2**20  # of one log
MOST_BYTES = 64 * 2**20  # of all
MOST_FILES = 4096
MOST_EVENTS = 100_000  # with texts; a run has a few hundred per rank
BLOCK_BYTES = 64 * 2**10
MOST_TEXT = 10_000  # characters of a line or of a text


def is_secret(text: str) -> bool:
    """Whether a line looks as if it gave away a credential.

    >>> is_secret("cloning https://me:hunter2@host/x"), is_secret("tokens=4096 digest 9f86d081884c7d659a2feaa0c55ad015")
    (True, False)
    """
    text = text[:MOST_TEXT]
    if _FORMS.search(text):
        return True
    for match in _PASSWORD.finditer(text):
        is_value = "=" in match.group(0) or match.group(1)  # "password: required" is a sentence
        if is_value and not _EMPTY.fullmatch(match.group(2)):
            return True
    return any(_is_random(match.group(1)) for match in _NAMED.finditer(text))


def _is_random(word: str) -> bool:
    """Letters and digits without an order, as keys are; a path, a version or a sentence is not."""
    if _EMPTY.fullmatch(word) or not re.search(r"\d", word) or not re.search(r"[A-Za-z]", word) or word.count("/") > 1:
        return False
    counts = Counter(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    return bits >= min(LEAST_BITS, 0.85 * math.log2(len(word)))


class Secrets:
    """Counts lines that look like credentials, with the first place."""

    def __init__(self) -> None:
        self.count = 0
        self.spot: Spot | None = None
        self._looked = 0
        self._read: dict[Path, int] = {}
        self._bytes = 0

    def look_in(self, events: Sequence[Event], file: str, line: int) -> None:
        """The texts of events, the names of their fields included."""
        self._looked += len(events)
        for place, event in enumerate(events if self._looked <= MOST_EVENTS else ()):
            if any(_may_be(text.encode(errors="replace")) and is_secret(text) for text in _texts(event)):
                self._note(Spot(file=file, line=line + place))

    def look_at(self, piece: Piece, numbers: Sequence[int]) -> None:
        """Lines that are no events."""
        lines = piece.data.split(b"\n")
        for number in numbers[:1000]:
            line = lines[number - piece.line][:MOST_TEXT]
            if _may_be(line) and is_secret(line.decode(errors="replace")):
                self._note(Spot(file=piece.file, line=number))

    def look_around(self, run: Run, shown: str) -> None:
        """Logs, errors and the few files of the folder itself; what was looked at before is not again."""
        for path in _files(run):
            if self._bytes >= MOST_BYTES or len(self._read) >= MOST_FILES:
                return
            try:
                with open_inside(path) as file:
                    self._file(file.fileno(), path, f"{shown}/{path.relative_to(run.path)}")
            except OSError:
                continue

    def _file(self, file: int, path: Path, name: str) -> None:
        begin = self._read.get(path, 0)
        end = min(os.fstat(file).st_size, MOST_FILE_BYTES)
        self._read[path] = max(begin, end)
        line = 0  # its number would need all that was read before
        for offset in range(begin, end, BLOCK_BYTES):
            block = os.pread(file, min(BLOCK_BYTES, end - offset), offset)
            self._bytes += len(block)
            if _may_be(block):
                for number, text in enumerate(block.split(b"\n"), line):
                    if _may_be(text) and is_secret(text.decode(errors="replace")):
                        self._note(Spot(file=name, line=number + 1 if begin == 0 else 0))
            line += block.count(b"\n")

    def _note(self, spot: Spot) -> None:
        self.count += 1
        self.spot = self.spot or spot


def _may_be(data: bytes) -> bool:
    lower = data.lower()
    return any(word in lower for word in _WORDS)


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < 8:
        for key, one in value.items():
            if isinstance(one, str):
                yield f"{key}={one}"  # the name says what it is
            else:
                yield from _texts(one, depth + 1)
    elif isinstance(value, list) and depth < 8:
        for one in value[:1000]:
            yield from _texts(one, depth + 1)


def _files(run: Run) -> Iterable[Path]:
    """What people and libraries write into; `secret` is the run's own, and nobody else may read it."""
    yield from (run.path / name for name in ("job.toml", "job.json", "launch.json", "status.json"))
    for folder in ("logs", "errors"):
        try:
            names = sorted(os.listdir(run.path / folder))
        except OSError:
            continue
        yield from (run.path / folder / name for name in names[:MOST_FILES])
