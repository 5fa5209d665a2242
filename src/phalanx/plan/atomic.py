"""Write a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from phalanx.errors import Problem, WorldError


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` through a temporary file beside it; raises WorldError and leaves nothing behind."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        problem = Problem(where=str(path), what=f"cannot be written: {error.strerror}", fix="name a writable file")
        raise WorldError(problem) from error


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    return mask
