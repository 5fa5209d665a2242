"""Leave a process group whose members are gone: shut its sockets.

gloo ignores abort() while an operation is in flight, and a rank that is not a neighbour of the dead one waits for the
whole timeout. Shutting the connected sockets wakes everybody within milliseconds (shared/feasibility/09). Listening
sockets are left alone: shutting gloo's listener ends the process.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is gone by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def cut(descriptors: set[int]) -> int:
    """Shut those of the descriptors that are connected network sockets; returns how many."""
    count = 0
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
