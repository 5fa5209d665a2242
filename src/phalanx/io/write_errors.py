"""Errors of files that cannot be written: the file, the reason, the space needed and free, and the remedy."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError
from phalanx.io.path_probes import IMPOSSIBLE, AnyPath, is_file, is_folder, os_reason, path_exists, shown_path
from phalanx.units import format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Errors of the machine or of a path, never of the program: they are reported as such wherever they occur.
ENVIRONMENT = (
    *NO_SPACE,
    *IMPOSSIBLE,
    errno.EACCES,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
    errno.ETXTBSY,
)


def write_failure(
    path: AnyPath, error: OSError, *, needed_bytes: int | None = None, fix: str = "", verb: str = "written"
) -> PhalanxError:
    """Return the error to raise for a file or folder that was not written; a UserError for an impossible path."""
    problem = Problem(
        where=shown_path(path), what=os_reason(error, verb), why=_circumstances(path, error, needed_bytes), fix=fix
    )
    return UserError(problem) if error.errno in IMPOSSIBLE else SystemFailure(problem)


@contextmanager
def errors_name(path: AnyPath) -> Iterator[None]:
    """Set `path` in an OSError without a file name, as raised by an open file's `write` and `flush`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def free_bytes(path: AnyPath) -> float | None:
    """Return the bytes that this user may still write at `path` or in its nearest existing folder; None if unknown."""
    place = Path(path)
    if path_exists(place) and not (is_file(place) or is_folder(place)):
        # A device or pipe: the file system with its name does not limit it.
        return None
    for folder in (place, *place.parents):
        try:
            fs_stat = os.statvfs(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError):
            return None
        return float(fs_stat.f_bavail * fs_stat.f_frsize)
    return None


def _circumstances(path: AnyPath, error: OSError, needed_bytes: int | None) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            free = free_bytes(path)
            parts = [f"{format_bytes(needed_bytes)} are needed"] if needed_bytes is not None else []
            parts += [f"{format_bytes(free)} are free on its file system"] if free is not None else []
            quota = "; the quota of this user or project is used up" if error.errno == errno.EDQUOT else ""
            return " and ".join(parts) + quota
        case errno.EMFILE:
            return f"this process has {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files open (ulimit -n)"
        case errno.ENFILE:
            return "all processes of this machine together have too many files open"
        case errno.EFBIG:
            return "the file would exceed the limit of the process (ulimit -f) or of its file system"
    return ""
