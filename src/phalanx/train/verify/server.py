"""Module that the fork server imports before torch, so that the server ends with its caller even while it imports.

It is the only module here with an effect at import, and only in that server: multiprocessing runs no other Phalanx
code there.
"""

import os
import sys
from types import TracebackType

from phalanx.elastic.rank_process import die_with

CALLER = "PHALANX_RANKS_CALLER"  # the process id of the server's caller
# Seen from forked ranks: their parent, unless it has ended
SERVER_PID = os.getpid()


def _silent_when_abandoned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Suppress EOFError: a rank forked while its caller ended receives no task, which is not a fault."""
    if not isinstance(error, EOFError):
        sys.__excepthook__(kind, error, trace)


if caller := os.environ.pop(CALLER, ""):
    sys.excepthook = _silent_when_abandoned
    die_with(int(caller))
