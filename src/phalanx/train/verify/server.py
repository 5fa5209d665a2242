"""Imported by the server that forks ranks, before torch is: it ends with its caller, also while it still imports.

The only module here that does something when it is imported, and only in that server: multiprocessing runs no other
code of ours there.
"""

import os

from phalanx.elastic.rank_process import die_with

CALLER = "PHALANX_RANKS_CALLER"  # the process id of whoever starts the server
SERVER_PID = os.getpid()  # as the ranks that it forks see it: their parent, unless it has ended since

if caller := os.environ.pop(CALLER, ""):
    die_with(int(caller))
