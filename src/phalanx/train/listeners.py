"""Listening sockets of gloo and of torch's store, closed to strangers once all ranks are connected.

Gloo accepts whoever comes and keeps the connection for ever, without a word said: 20,000 connections in 3 s took every
descriptor of a rank, and the run with it. The socket itself cannot be closed, since gloo owns it. But nobody needs it
any more once a group is made, as every pair of ranks is connected then; so a packet filter that lets nothing through is
put on it. A newcomer's first packet is dropped by the kernel before anything of this process is asked, and connections
that are there do not pass by it. That takes no privilege, and ends with the socket.
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
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, of 0 bytes: the packet is dropped
MOST_DESCRIPTORS = 2**16


def listening_sockets() -> dict[str, int]:
    """The TCP sockets of this process that take connections: their descriptors, by the kernel's name of the socket."""
    found = {}
    with suppress(OSError):  # where there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor that lists them is gone by now
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:") and _is_listening(int(name)):
                    found[target] = int(name)
    return found


def _is_listening(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        return is_tcp and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def refuse_strangers(known: Collection[str]) -> int:
    """Let nobody connect to sockets that listen by now, but for those `known`; how many there are of them."""
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):  # then pairs connect when they first meet
        return 0
    program = ctypes.create_string_buffer(DROP, len(DROP))
    count = 0
    for name, descriptor in listening_sockets().items():
        if name not in known:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                # struct sock_fprog: the number of instructions, and where they are
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
                count += 1
    return count


def raise_descriptor_limit() -> None:
    """As many descriptors as this user may have: what comes before the sockets are closed must not use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
