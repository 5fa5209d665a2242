"""Leave a process group whose members are gone: shut its sockets.

gloo ignores abort() while an operation is in flight, and a rank that is not a neighbour of the dead one waits for the
whole timeout. Shutting the connected sockets wakes everybody within milliseconds (shared/feasibility/09). Listening
sockets are left alone: shutting gloo's listener ends the process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress


def sockets() -> dict[str, int]:
    """The sockets of this process, each by a name that no other has while this one lives, with its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is gone by now
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def cut(kept: Collection[str]) -> int:
    """Shut every connected network socket but those kept; returns how many."""
    count = 0
    for name, descriptor in sockets().items():
        if name in kept:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
