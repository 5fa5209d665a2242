"""Which network interface has an address: gloo and NCCL are told names, people write addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The name of the interface with this address; None when no interface of this host has it.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    if ":" in address:
        return _interface_of_6(socket.inet_pton(socket.AF_INET6, address).hex())
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:  # no such name; whoever binds the address says so
        return None
    if wanted[0] == 127:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if answer[20:24] == wanted:
                return name
    return None


def _interface_of_6(wanted: str) -> str | None:
    for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
        found, *_, name = line.split()
        if found == wanted:
            return name
    return None
