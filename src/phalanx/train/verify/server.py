"""Imported by the server that forks ranks, before torch is: it ends with its caller, also while it still imports.

The only module here that does something when it is imported, and only in that server: multiprocessing runs no other
code of ours there.
"""

import os
import sys
from types import TracebackType

from phalanx.elastic.rank_process import die_with

CALLER = "PHALANX_RANKS_CALLER"  # the process id of whoever starts the server
SERVER_PID = os.getpid()  # as the ranks that it forks see it: their parent, unless it has ended since


def _silent_when_abandoned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A rank that was forked as its caller ended hears nothing of what it was to do: no fault, and no news."""
    if not isinstance(error, EOFError):
        sys.__excepthook__(kind, error, trace)


if caller := os.environ.pop(CALLER, ""):
    sys.excepthook = _silent_when_abandoned
    die_with(int(caller))
