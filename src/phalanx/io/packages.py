"""Which version of a package is installed here, read from its metadata: nothing of it is imported."""

from __future__ import annotations

import os
import re
import sys
from functools import cache


@cache
def installed_version(name: str) -> str:
    """Of a package; empty where it is not installed. Asked once in a process: each answer walks the path of imports.

    >>> installed_version("no-such-package")
    ''
    """
    if found := version_on_path(name):
        return found
    from importlib.metadata import PackageNotFoundError, version  # with the email package: 20 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def version_on_path(name: str) -> str:
    """What the package's .dist-info says, the first on the path; empty where importlib.metadata must be asked."""
    wanted = _normal_name(name)
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue  # no folder: a zip file, or nothing
        for entry in entries:
            stem, kind = os.path.splitext(entry)
            if kind not in (".dist-info", ".egg-info") or _normal_name(stem.partition("-")[0]) != wanted:
                continue
            try:
                with open(os.path.join(folder, entry, "METADATA"), encoding="utf-8") as file:
                    return next((line[8:].strip() for line in file if line.startswith("Version:")), "")
            except (OSError, ValueError):
                return ""
    return ""


def _normal_name(name: str) -> str:
    """Names of one package are written with any of -, _ and . (PEP 503)."""
    return re.sub(r"[-_.]+", "_", name).lower()
