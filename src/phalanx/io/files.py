"""Write a file whole or not at all: a reader, a crash or a full disk never leaves half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from phalanx.errors import Problem, SystemFailure


def write_text(path: Path, text: str, *, fix: str = "name a writable file") -> None:
    """`replace_text` for a user's file: raises SystemFailure with `fix` as the way out."""
    try:
        replace_text(path, text)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise SystemFailure(Problem(where=str(path), what=what, fix=fix)) from error


def replace_text(path: Path, text: str) -> None:
    """Put `text` in place of `path` through a flushed temporary file beside it; raises OSError, leaves nothing behind.

    A pipe, a terminal or /dev/null is written into: a rename would put a plain file in its place.
    """
    data = text.encode("utf-8")
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.parent / f".phalanx-{secrets.token_hex(8)}.tmp"  # short: the name itself may be of full length
    try:
        with temporary.open("xb") as stream:  # with the mode the umask gives, which tempfile.mkstemp does not
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
