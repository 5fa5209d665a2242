"""Detection of ranks that share a host or a device. Agents know them; without agents every rank sends a card once.

The number of GPUs a process sees does not show it: `srun --gpus-per-task=1` and Kubernetes show each process its own.
Nor does every launcher report how many ranks it started on a host.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

DIGEST_BYTES, ADDRESS_BYTES, SECRET_BYTES = 16, 16, 32
_ENDS = (DIGEST_BYTES, 2 * DIGEST_BYTES, 2 * DIGEST_BYTES + ADDRESS_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharers:
    """Numbers of the job's ranks, this one included, that share a resource."""

    host: int = 1  # on its host, or in its container
    device: int = 1  # on its GPU; on a CPU the same as `host`


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCard:
    """A rank's description of host and device for all others, of a fixed size."""

    host: bytes  # digests, to be compared only
    device: bytes
    address: str = ""  # the address it would listen on
    secret: bytes = bytes(SECRET_BYTES)

    def encode(self) -> bytes:
        """Return the bytes; an invalid or missing address becomes ::."""
        return self.host + self.device + _packed_address(self.address) + self.secret

    @classmethod
    def decode(cls, data: bytes) -> DeviceCard:
        """Return the card in encoded bytes."""
        host, device, address = _ENDS
        ip_address = ipaddress.IPv6Address(data[device:address])
        return cls(
            host=data[:host],
            device=data[host:device],
            address="" if ip_address.is_unspecified else str(ip_address.ipv4_mapped or ip_address),
            secret=data[address:],
        )


def card_of(device: torch.device, *, address: str, secret: bytes) -> DeviceCard:
    """Return this rank's card."""
    host = host_name()
    uuid = ""
    # The other ranks wait for this card
    with suppress(Exception):
        uuid = gpu_uuid(device) if device.type == "cuda" else ""
    # A UUID identifies the device on any host; without one, the host's name and the device number are used.
    return DeviceCard(
        host=_text_digest(host), device=_text_digest(uuid or f"{host} {device}"), address=address, secret=secret
    )


def exchange_cards(card: DeviceCard) -> list[DeviceCard]:
    """Exchange cards among all ranks; return them by rank. Every rank calls this."""
    own_row = torch.frombuffer(bytearray(card.encode()), dtype=torch.uint8)
    rows = [torch.empty_like(own_row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own_row)
    return [DeviceCard.decode(bytes(row.tolist())) for row in rows]


def count_sharers(card: DeviceCard, cards: Sequence[DeviceCard]) -> Sharers:
    """Count the ranks that share host and device with the owner of `card`."""
    return Sharers(
        host=sum(other_card.host == card.host for other_card in cards),
        device=sum(other_card.device == card.device for other_card in cards),
    )


def host_name() -> str:
    """Return a name that is unique to a host or container: hosts that are all called localhost differ by boot id."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID as NVML writes it; empty if torch does not provide it."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    # torch omits it
    prefix = "" if not uuid or uuid.startswith(("GPU-", "MIG-")) else "GPU-"
    return prefix + uuid


def _packed_address(address: str) -> bytes:
    with suppress(ValueError):
        ip_address = ipaddress.ip_address(address.partition("%")[0])
        return ip_address.packed if ip_address.version == 6 else b"\0" * 10 + b"\xff\xff" + ip_address.packed
    return bytes(ADDRESS_BYTES)


def _text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]
