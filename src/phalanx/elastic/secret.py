"""The run's secret: 32 random bytes in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from phalanx.errors import mistake
from phalanx.record.secret import SECRET_BYTES
from phalanx.record.secret import read_secret as read_secret  # whoever makes secrets reads them too


def make_secret(path: Path) -> bytes:
    """A new secret, written to `path` for its owner alone; a file already there is never overwritten."""
    secret = secrets.token_bytes(SECRET_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise mistake(
            str(path), "a secret is already there", why="ranks of a living run may use it", fix="delete it first"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # a umask may have taken the owner's own bits
        file.write(secret.hex().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)
    return secret
