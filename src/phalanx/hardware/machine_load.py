"""How busy this machine is, for time limits that have to hold next to other work."""

from __future__ import annotations

import os


def busy_processes(cores: int) -> float:
    """Processes per core that wanted to run in the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0] / cores
    except OSError:
        return 0.0


def crowded_limit_s(limit_s: float) -> float:
    """A limit for idle cores, as it is now: longer by as much as processes share each core.

    The load of the machine is compared with all of its cores. Ask again when the limit is over: the load average
    follows new neighbours within a minute.
    """
    return limit_s * max(1.0, busy_processes(os.cpu_count() or 1))
