"""Probes for paths from users and files that never raise.

A path may be longer than any file system allows, contain a NUL byte, lead in a circle of links, or lie in a folder
that may not be searched. pathlib raises for some of these, depending on the version of Python. The functions here
report that nothing exists at such a path; reading or writing it then reports the reason (`io.files.read_text`,
`io.files.write_text`).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

AnyPath = str | os.PathLike[str]
# Characters of a path in a message; the longest path that a file system accepts has 4,096.
MAX_SHOWN = 300

# Errors of a path that no file can have: the call is wrong. Other errors are the machine's (permissions, devices,
# networks).
IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


def path_exists(path: AnyPath) -> bool:
    """Return True if anything exists at `path`.

    >>> path_exists("/"), path_exists("9" * 5000), path_exists("a\\0b")
    (True, False, False)
    """
    return os.path.exists(path)


def is_file(path: AnyPath) -> bool:
    """Return True if a regular file exists at `path`."""
    return os.path.isfile(path)


def is_folder(path: AnyPath) -> bool:
    """Return True if a folder exists at `path`."""
    return os.path.isdir(path)


def resolve_path(path: AnyPath) -> Path:
    """Return the absolute path with links resolved, or the plain absolute path if the links cannot be followed."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):
        # RuntimeError: a circle of links, until Python 3.13.
        return Path(os.path.abspath(path))


def unreachable(path: AnyPath) -> str:
    """Return the reason why `path` cannot be looked up; empty if it exists or may exist.

    >>> unreachable("9" * 5000), unreachable("a\\0b"), unreachable("absent")
    ('is not a possible path: File name too long', 'is not a possible path: it holds a NUL byte', '')
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return os_reason(error)
    except ValueError:
        # A NUL byte, or a character that the file system's encoding lacks.
        return "is not a possible path: it holds a NUL byte"
    return ""


def os_reason(error: OSError, verb: str = "looked up") -> str:
    """Return a clause about a failed system call: an impossible path, or the error of a possible one."""
    reason = error.strerror or str(error)
    return f"is not a possible path: {reason}" if error.errno in IMPOSSIBLE else f"cannot be {verb}: {reason}"


def shown_path(path: AnyPath) -> str:
    """Return a path as shown in a message: shortened in the middle if no file system allows a path so long.

    >>> len(shown_path("9" * 5000)), shown_path("job.toml")
    (300, 'job.toml')
    """
    text = os.fspath(path)
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[: half - 1]}…{text[-half:]}"
