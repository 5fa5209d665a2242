"""SHA256SUMS: the digests of a folder's files, in the format that `sha256sum -c SHA256SUMS` checks.

A name may have several lines, and each digest is valid: while files are replaced, both the old and the new one are.
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
# The hash of one core is slower than a fast disk.
HASH_THREADS = 4


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write SHA256SUMS in a folder atomically; raise OSError if it cannot be written."""
    replace_text(folder / CHECKSUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))


def add_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Add digests to those in the file, before the files are replaced. Raise OSError."""
    digests_and_names = {
        (digest, name) for name, known_digests in _known_digests(folder).items() for digest in known_digests
    }
    lines = sorted(
        digests_and_names | {(digest, name) for name, digest in digests.items()},
        key=lambda digest_and_name: digest_and_name[::-1],
    )
    replace_text(folder / CHECKSUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))


def _known_digests(folder: Path) -> dict[str, set[str]]:
    try:
        return read_checksums(folder)
    except (UserError, FileNotFoundError):
        return {}


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in blocks; raise OSError if it cannot be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_checksums(folder: Path) -> dict[str, set[str]]:
    """Return the digests of every file in SHA256SUMS; raise FileNotFoundError, or UserError if it is damaged."""
    path = folder / CHECKSUMS
    try:
        text = read_bounded(path, MOST_CHECKSUM_BYTES).decode("ascii")
    except FileNotFoundError:
        raise
    except (OSError, FileTooLargeError, ValueError) as error:
        raise _damaged_file(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    digests: dict[str, set[str]] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise _damaged_file(path, f"line {number} is not a digest, two spaces and a file name")
        digests.setdefault(match.group(2), set()).add(match.group(1))
    return digests


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
    """Return the problem of a file with this digest, given the `known` digests; None if the digest is right."""
    if name not in known:
        message = f"has no line for {name}"
        return Problem(where=str(folder / CHECKSUMS), what=message, why="it was written for every file", fix=fix)
    if digest in known[name]:
        return None
    recorded = next(iter(sorted(known[name])))
    message = f"has changed since it was written: its sha256 is {digest[:12]}…, and {CHECKSUMS} says {recorded[:12]}…"
    return Problem(where=str(folder / name), what=message, fix=fix)


def verify_checksums(folder: Path, *, fix: str) -> tuple[int, list[Problem]]:
    """Compare every file in SHA256SUMS with its digest; return the number of files and all problems."""
    checksums = read_checksums(folder)

    def look_at(name: str) -> Problem | None:
        try:
            digest = file_sha256(folder / name)
        except FileNotFoundError:
            return Problem(where=str(folder / name), what=f"is missing, and {CHECKSUMS} lists it", fix=fix)
        except OSError as error:
            return Problem(where=str(folder / name), what=f"cannot be read: {error.strerror or error}", fix=fix)
        return compare_digest(folder, name, digest, checksums, fix=fix)

    # Imported here: the import takes 10 ms, and few callers need it.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        results = list(pool.map(look_at, sorted(checksums)))
    return len(checksums), [problem for problem in results if problem is not None]
