"""Read a secret: 32 random bytes in hexadecimal, in a file that only its owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from phalanx.errors import UserError, mistake

SECRET_BYTES = 32
HEX_BYTES = 2 * SECRET_BYTES
WHY = "whoever reads it can give orders to every rank of the run"


def read_secret(path: Path) -> bytes:
    """Return the secret in `path`; raise UserError if other users can access the file or it is malformed."""
    try:
        # NONBLOCK: opening a pipe in its place must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise mistake(str(path), f"the run's secret cannot be read: {error.strerror}", fix=_secret_fix(path)) from None
    try:
        _check_file(path, os.fstat(descriptor))
        return _decode_secret(path, os.read(descriptor, HEX_BYTES + 2))
    finally:
        os.close(descriptor)


def _check_file(path: Path, state: os.stat_result) -> None:
    mode = stat.S_IMODE(state.st_mode)
    if not stat.S_ISREG(state.st_mode):
        raise mistake(str(path), "the run's secret is not a regular file", why=WHY, fix=_secret_fix(path))
    if state.st_uid != os.geteuid():
        message = f"the run's secret belongs to user {state.st_uid}, not to {os.geteuid()}"
        raise mistake(str(path), message, why=WHY, fix="start the run as the user who owns its folder")
    if mode & 0o177:
        message = f"the run's secret has mode {mode:04o}, not 0600"
        raise mistake(str(path), message, why=WHY, fix=f"chmod 600 {path}, or {_secret_fix(path)}")


def _decode_secret(path: Path, text: bytes) -> bytes:
    digits = text.removesuffix(b"\n")
    if len(digits) != HEX_BYTES:
        raise _malformed_secret(path, f"{len(digits)}{' or more' if len(text) > HEX_BYTES + 1 else ''} characters")
    try:
        return bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        raise _malformed_secret(path, "something else") from None


def _malformed_secret(path: Path, found: str) -> UserError:
    return mistake(
        str(path), f"the run's secret is not {HEX_BYTES} hexadecimal digits but {found}", fix=_secret_fix(path)
    )


def _secret_fix(path: Path) -> str:
    return f"delete {path} and start the run again: phalanx train makes a new one"
