"""Read a file a stranger wrote: small, regular, text, or a clear refusal."""

from __future__ import annotations

import stat
from pathlib import Path

from phalanx.errors import Problem, SystemFailure, UserError, mistake, nearest
from phalanx.units import MIB

MOST_BYTES = MIB  # the largest published job configurations are a few kB


def read_text(path: Path, *, noun: str) -> str:
    """The text of `path`. Raises UserError for anything that is not a small UTF-8 text file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise mistake(str(path), f"is a folder, not a {noun}", fix=_inside(path))
        if not stat.S_ISREG(mode):
            raise mistake(str(path), f"is a device or pipe, not a {noun}", fix="name a regular file")
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise _missing(path, noun) from error
    except NotADirectoryError as error:
        raise mistake(str(path), f"is not there: {path.parent} is a file, not a folder") from error
    except ValueError as error:  # a NUL byte in the name itself
        raise mistake(repr(str(path)), "is not a file name") from error
    except OSError as error:
        raise SystemFailure(Problem(where=str(path), what=f"cannot be read: {error.strerror or error}")) from error
    return _decode(raw, path, noun)


def _decode(raw: bytes, path: Path, noun: str) -> str:
    if len(raw) > MOST_BYTES:
        raise mistake(str(path), f"is larger than {MOST_BYTES // MIB} MiB", why=f"a {noun} is a page of text")
    if b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        raise mistake(
            f"{path}:{line}", "holds a NUL byte", why=f"a {noun} is UTF-8 text, this looks like a binary file"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise mistake(f"{path}:{line}", what, why=f"a {noun} is UTF-8 text", fix="save the file as UTF-8") from error


def _missing(path: Path, noun: str) -> UserError:
    close = nearest(path.name, _names(path.parent))
    fix = f"did you mean {path.parent / close}?" if close else ""
    if not close and noun == "job file":
        fix = f"phalanx init {path} writes one"
    return mistake(str(path), f"there is no such {noun}", fix=fix)


def _inside(folder: Path) -> str:
    tomls = [name for name in _names(folder) if name.endswith((".toml", ".json"))]
    return f"name a file in it, such as {folder / tomls[0]}" if tomls else ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())[:10_000]
    except OSError:
        return []
