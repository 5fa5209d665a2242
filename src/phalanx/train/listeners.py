"""Closes the listening sockets of gloo and torch's store to strangers once all ranks are connected.

Gloo accepts every connection and keeps it for ever: 20,000 connections in 3 s used up the descriptors of a rank and
ended the run. The socket itself cannot be closed, since gloo owns it, but it is no longer needed once a group is
made, as every pair of ranks is connected then. So a packet filter that drops everything is attached to it: the kernel
drops the first packet of a new connection, and existing connections are not affected. The filter needs no privilege,
and ends with the socket.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Collection
from contextlib import suppress

SO_ATTACH_FILTER = 26  # asm-generic/socket.h, as on x86-64 and arm64
# BPF_RET | BPF_K, of 0 bytes: the packet is dropped.
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
MOST_DESCRIPTORS = 2**16


def listening_sockets() -> dict[str, int]:
    """Return the listening TCP sockets of this process: their descriptors, by the kernel's name of the socket."""
    descriptors = {}
    with suppress(OSError):  # where there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor that lists them is gone by now
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:") and _is_listening(int(name)):
                    descriptors[target] = int(name)
    return descriptors


def _is_listening(descriptor: int) -> bool:
    """Return True for a TCP socket that accepts connections."""
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
        return is_tcp and bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def refuse_strangers(known: Collection[str]) -> int:
    """Drop new connections to all listening sockets except those `known`; return how many were closed this way.

    Does nothing with TORCH_GLOO_LAZY_INIT, where pairs of ranks connect when they first exchange something.
    """
    # With lazy initialisation pairs of ranks connect only at their first exchange.
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return 0
    program = ctypes.create_string_buffer(DROP, len(DROP))
    count = 0
    for name, descriptor in listening_sockets().items():
        if name not in known:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
                # struct sock_fprog: the number of instructions, and their address
                duplicate.setsockopt(
                    socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
                )
                count += 1
    return count


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit, at most 65,536.

    Strangers' connections before the sockets are closed must not use up the descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
