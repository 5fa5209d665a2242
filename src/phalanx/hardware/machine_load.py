"""The load of this machine, for time limits that have to hold next to other work."""

from __future__ import annotations

import os


def busy_processes(cores: int) -> float:
    """Return the processes per core that wanted to run in the last minute; 0 if the system does not report it."""
    try:
        return os.getloadavg()[0] / cores
    except OSError:
        return 0.0


def crowded_limit_s(limit_s: float) -> float:
    """Return a limit for idle cores, lengthened by the number of processes that share each core now.

    The load of the machine is compared with all of its cores. Call it again when the limit is over: the load average
    follows new neighbours within a minute.
    """
    return limit_s * max(1.0, busy_processes(os.cpu_count() or 1))
