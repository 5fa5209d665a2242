"""SHA256SUMS: the digests of a folder's files, in the form that `sha256sum -c SHA256SUMS` checks.

A name may have several lines, and each digest counts: while files are replaced, the old and the new are both right.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.files import FileTooLargeError, read_bounded, replace_text

CHECKSUMS = "SHA256SUMS"
MOST_CHECKSUM_BYTES = 2**20
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]{0,254})")
HASH_THREADS = 4  # sha256 of one core is slower than a fast disk


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Put SHA256SUMS in a folder, whole or not at all; raises OSError."""
    replace_text(folder / CHECKSUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))


def add_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Let these digests count beside those that are there: before files are replaced. Raises OSError."""
    known = {(digest, name) for name, found in _known_digests(folder).items() for digest in found}
    lines = sorted(known | {(digest, name) for name, digest in digests.items()}, key=lambda one: one[::-1])
    replace_text(folder / CHECKSUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))


def _known_digests(folder: Path) -> dict[str, set[str]]:
    try:
        return read_checksums(folder)
    except (UserError, FileNotFoundError):
        return {}


def text_digest(text: str) -> str:
    """sha256 of a text as it is written to a file."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in blocks; raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_checksums(folder: Path) -> dict[str, set[str]]:
    """The digests of every file that SHA256SUMS names; raises FileNotFoundError, and UserError for a damaged one."""
    path = folder / CHECKSUMS
    try:
        text = read_bounded(path, MOST_CHECKSUM_BYTES).decode("ascii")
    except FileNotFoundError:
        raise
    except (OSError, FileTooLargeError, ValueError) as error:
        raise _damaged_file(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found: dict[str, set[str]] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise _damaged_file(path, f"line {number} is not a digest, two spaces and a file name")
        found.setdefault(match.group(2), set()).add(match.group(1))
    return found


def _damaged_file(path: Path, what: str) -> UserError:
    return mistake(
        str(path),
        what,
        why="it vouches for the files beside it",
        fix="put it back from a copy, or delete it to go on without",
    )


def compare_digest(
    folder: Path, name: str, digest: str, known: Mapping[str, Collection[str]], *, fix: str
) -> Problem | None:
    """What is wrong with a file of this digest, by the digests that are `known`; None when nothing is."""
    if name not in known:
        what = f"has no line for {name}"
        return Problem(where=str(folder / CHECKSUMS), what=what, why="it was written for every file", fix=fix)
    if digest in known[name]:
        return None
    said = next(iter(sorted(known[name])))
    what = f"has changed since it was written: its sha256 is {digest[:12]}…, and {CHECKSUMS} says {said[:12]}…"
    return Problem(where=str(folder / name), what=what, fix=fix)


def verify_checksums(folder: Path, *, fix: str) -> tuple[int, list[Problem]]:
    """Read every file that SHA256SUMS names and compare it: how many there are, and all that is wrong with them."""
    known = read_checksums(folder)

    def look_at(name: str) -> Problem | None:
        try:
            digest = file_sha256(folder / name)
        except FileNotFoundError:
            return Problem(where=str(folder / name), what=f"is missing, and {CHECKSUMS} lists it", fix=fix)
        except OSError as error:
            return Problem(where=str(folder / name), what=f"cannot be read: {error.strerror or error}", fix=fix)
        return compare_digest(folder, name, digest, known, fix=fix)

    from concurrent.futures import ThreadPoolExecutor  # 10 ms, needed by few calls

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        found = list(pool.map(look_at, sorted(known)))
    return len(known), [problem for problem in found if problem is not None]
