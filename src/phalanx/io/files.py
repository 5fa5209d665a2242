"""Write files atomically; read only regular files that are small enough and, where required, text."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.path_probes import IMPOSSIBLE, is_file, os_reason, path_exists, shown_path
from phalanx.io.write_errors import errors_name, write_failure
from phalanx.units import MIB

if TYPE_CHECKING:
    import csv

# Limit of a file that Phalanx wrote: plans of the largest jobs are below 1 MB.
MOST_JSON_BYTES = 64 * MIB


def write_text(path: Path, text: str, *, fix: str = "name a writable file") -> None:
    """Replace a user's file; raise SystemFailure, or UserError for an impossible path, with `fix` as the remedy."""
    data = text.encode("utf-8")
    try:
        replace_bytes(path, data)
    except OSError as error:
        raise write_failure(path, error, needed_bytes=len(data), fix=fix) from error


def replace_text(path: Path, text: str) -> None:
    """Replace a file with a text, like `replace_bytes`."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace `path` by a flushed temporary file in the same folder; raise OSError and leave no temporary file behind.

    `mode` sets the permissions, in place of the umask's default. A pipe, a terminal or /dev/null is written to: a
    rename would replace it with a plain file.
    """
    if path_exists(path) and not is_file(path):
        with errors_name(path):
            path.write_bytes(data)
        return
    # short, because the target's name may have the maximum length
    temporary = path.parent / f".phalanx-{os.urandom(8).hex()}.tmp"
    try:
        # With the mode from the umask, which tempfile.mkstemp ignores.
        with temporary.open("xb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            # Name the file of the caller: a failed write names no file, and a failed open the temporary one.
            error.filename, error.filename2 = str(path), None
        raise


# ---- reading ---------------------------------------------------------------------------------------------------------

# The largest published job configurations are a few kB.
MOST_BYTES = MIB


def shipped_text(module_file: str, name: str) -> str:
    """Return a data file of the package, by the `__file__` of a module and the file's name relative to it.

    importlib.resources would take a tenth of the time of a short command: it imports tempfile, zipfile and random.
    """
    return Path(module_file).parent.joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A line of a file of the run, from 1; line 0 means the complete file."""

    file: str
    line: int = 0


class FileTooLargeError(ValueError):
    """A file has more bytes than any file of its kind should have."""


def open_regular(path: Path, *, buffering: int = 0, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading; raise OSError for anything else.

    Opening a pipe could block forever, and a link in a run folder may lead to a file outside the run.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(file, "rb", buffering=buffering)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return all bytes of a regular file; raise OSError for other files, FileTooLargeError beyond `most_bytes`."""
    with open_regular(path, buffering=-1, follow_links=True) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read() if size <= most_bytes else b""
    if max(size, len(data)) > most_bytes:
        limit_text = f"{most_bytes // MIB} MiB" if most_bytes >= MIB else f"{most_bytes:,} bytes"
        raise FileTooLargeError(f"is larger than {limit_text}")
    return data


def load_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the value in a JSON file; raise OSError, or ValueError also if it is too large or nested too deeply."""
    try:
        return json.loads(read_bounded(path, most_bytes).decode())
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def read_head(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a regular file, to detect its kind; empty if the file cannot be read."""
    try:
        with open_regular(path, follow_links=True) as file:
            return file.read(most_bytes)
    except OSError:
        return b""


def read_text(path: Path, *, noun: str = "file", most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a user's file; raise UserError unless it is a small UTF-8 text file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            tomls = [name for name in _folder_names(path) if name.endswith((".toml", ".json"))]
            inside = f"name a file in it, such as {path / tomls[0]}" if tomls else ""
            raise mistake(str(path), f"is a folder, not a {noun}", fix=inside)
        if not stat.S_ISREG(mode):
            raise mistake(str(path), f"is a device or pipe, not a {noun}", fix="name a regular file")
        raw = read_bounded(path, most_bytes)
    except FileNotFoundError as error:
        raise _missing_file(path, noun) from error
    except NotADirectoryError as error:
        raise mistake(str(path), f"is not there: {path.parent} is a file, not a folder") from error
    except FileTooLargeError as error:
        why = f"a {noun} is a page of text" if most_bytes == MOST_BYTES else ""
        raise mistake(str(path), str(error), why=why) from error
    except ValueError as error:  # a NUL byte in the name itself
        raise mistake(repr(shown_path(path)), "is not a file name") from error
    except OSError as error:
        raise read_failure(path, error) from error
    return _decode_text(raw, path, noun)


def read_failure(path: Path, error: OSError) -> PhalanxError:
    """Return the error to raise for a file that was not read; a UserError for an impossible path."""
    problem = Problem(where=shown_path(path), what=os_reason(error, "read"))
    return UserError(problem) if error.errno in IMPOSSIBLE else SystemFailure(problem)


# Columns of a CSV table: the widest published one in use has 40.
MOST_COLUMNS = 512


def csv_columns(reader: csv.DictReader[str], where: str) -> list[str]:
    """Return the columns in a table's first line; raise UserError if there are too many, csv.Error if it is not CSV."""
    names = list(reader.fieldnames or ())
    if len(names) > MOST_COLUMNS:
        message = f"has {len(names):,} columns; at most {MOST_COLUMNS} are read"
        raise mistake(f"{where}:1", message, fix="check that its lines end where they should")
    return names


def _decode_text(raw: bytes, path: Path, noun: str) -> str:
    if b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        raise mistake(
            f"{path}:{line}", "holds a NUL byte", why=f"a {noun} is UTF-8 text, this looks like a binary file"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise mistake(f"{path}:{line}", message, why=f"a {noun} is UTF-8 text", fix="save the file as UTF-8") from error


def _missing_file(path: Path, noun: str) -> UserError:
    close = nearest(path.name, _folder_names(path.parent))
    fix = f"did you mean {path.parent / close}?" if close else ""
    if not close and noun == "job file":
        fix = f"phalanx init {shown_path(path)} writes one"
    return mistake(shown_path(path), f"there is no such {noun}", fix=fix)


def _folder_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())[:10_000]
    except OSError:
        return []
