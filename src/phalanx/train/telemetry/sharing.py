"""Who shares a host and a device with this rank. Agents know it; without them every rank tells the others once.

How many GPUs a process sees says nothing: `srun --gpus-per-task=1` and Kubernetes show each its own. Nor does every
launcher say how many ranks it started on a host.
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
    """Ranks of the job, this one included."""

    host: int = 1  # on its host, or in its container
    device: int = 1  # on its GPU; on a CPU the same as above


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCard:
    """What a rank tells all others, at a fixed size."""

    host: bytes  # digests: to be compared, not to be read
    device: bytes
    address: str = ""  # that it would listen on
    secret: bytes = bytes(SECRET_BYTES)

    def encode(self) -> bytes:
        """Bytes; an address that is none becomes ::."""
        return self.host + self.device + _packed_address(self.address) + self.secret

    @classmethod
    def decode(cls, data: bytes) -> DeviceCard:
        """The reverse."""
        host, device, address = _ENDS
        place = ipaddress.IPv6Address(data[device:address])
        return cls(
            host=data[:host],
            device=data[host:device],
            address="" if place.is_unspecified else str(place.ipv4_mapped or place),
            secret=data[address:],
        )


def card_of(device: torch.device, *, address: str, secret: bytes) -> DeviceCard:
    """This rank's own."""
    host = host_name()
    uuid = ""
    with suppress(Exception):  # the others wait for this card
        uuid = gpu_uuid(device) if device.type == "cuda" else ""
    # A UUID is the device's on whatever host; where there is none, the host's number of it must do.
    return DeviceCard(
        host=_text_digest(host), device=_text_digest(uuid or f"{host} {device}"), address=address, secret=secret
    )


def exchange_cards(card: DeviceCard) -> list[DeviceCard]:
    """The cards of all ranks, by rank; every rank calls this."""
    mine = torch.frombuffer(bytearray(card.encode()), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [DeviceCard.decode(bytes(row.tolist())) for row in rows]


def count_sharers(card: DeviceCard, cards: Sequence[DeviceCard]) -> Sharers:
    """With how many of them the holder of a card shares."""
    return Sharers(
        host=sum(one.host == card.host for one in cards), device=sum(one.device == card.device for one in cards)
    )


def host_name() -> str:
    """The same for the ranks of a host or container, and for no others: hosts that are all called localhost differ."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def gpu_uuid(device: torch.device) -> str:
    """As NVML writes it; empty where torch does not say."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    prefix = "" if not uuid or uuid.startswith(("GPU-", "MIG-")) else "GPU-"  # torch leaves it out
    return prefix + uuid


def _packed_address(address: str) -> bytes:
    with suppress(ValueError):
        place = ipaddress.ip_address(address.partition("%")[0])
        return place.packed if place.version == 6 else b"\0" * 10 + b"\xff\xff" + place.packed
    return bytes(ADDRESS_BYTES)


def _text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]
