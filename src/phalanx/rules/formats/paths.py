"""File names as other programs want them: told from the root of a checkout, with forward slashes."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def relative(file: str, root: str) -> str:
    """A file below `root` as seen from there; any other by its whole path.

    >>> relative("/src/jobs/a.toml", "/src"), relative("a.toml", "/src"), relative("/etc/a.toml", "/src")
    ('jobs/a.toml', 'a.toml', '/etc/a.toml')
    """
    path = os.path.normpath(os.path.join(root, file))
    inside = os.path.relpath(path, root)
    return path if inside == ".." or inside.startswith(f"..{os.sep}") else Path(inside).as_posix()


def as_uri(file: str, root: str) -> str:
    """The same as a URI reference: relative below `root`, else absolute.

    >>> as_uri("a b.toml", "/src"), as_uri("/etc/a.toml", "/src")
    ('a%20b.toml', 'file:///etc/a.toml')
    """
    name = relative(file, root)
    escaped = quote(name.encode("utf-8", "surrogateescape"), safe="/")
    return f"file://{escaped}" if name.startswith("/") else escaped
