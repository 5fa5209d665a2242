"""How short of memory this process is: what it holds, what it may hold, and how long it stalls for want of more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.hardware.discover import cgroup_folders

# "some avg10=0.12 avg60=0.05 avg300=0.01 total=1234": per cent of the last 10 s in which some task stalled.
_STALL = re.compile(r"^some avg10=(\d{1,3}(?:\.\d+)?) ", re.MULTILINE)
_MOST_CHARS = 1 << 16  # what these files hold is a few lines; more is not what we came for


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Share of the last 10 s in which some task waited for memory, and of whom that is said."""

    share: float
    source: str  # "psi-cgroup": of this container; "psi-host": of the whole machine


def memory_stall(root: Path = Path("/")) -> Stall | None:
    """Pressure stall information of this process's own group, else of the machine; None where the kernel keeps none."""
    files = [(folder / "memory.pressure", "psi-cgroup") for folder in cgroup_folders(root, "memory")[:1]]
    for path, source in (*files, (root / "proc/pressure/memory", "psi-host")):
        found = _STALL.search(_text(path))
        if found:
            return Stall(share=min(1.0, float(found.group(1)) / 100), source=source)
    return None


def anonymous_bytes(root: Path = Path("/")) -> int | None:
    """Memory that is this process's own: pages of files and libraries, which others share, do not count."""
    found = re.search(r"^RssAnon:\s*(\d{1,15}) kB", _text(root / "proc/self/status"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_CHARS)
    except OSError:  # absent, or (EOPNOTSUPP) switched off at boot
        return ""
