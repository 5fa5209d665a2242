"""Which version of a package is installed here, read from its metadata: nothing of it is imported."""

from __future__ import annotations

from functools import cache


@cache
def installed_version(name: str) -> str:
    """Of a package; empty where it is not installed. Asked once in a process: each answer walks the path of imports.

    >>> installed_version("no-such-package")
    ''
    """
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
