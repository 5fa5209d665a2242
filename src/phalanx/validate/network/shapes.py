"""The fabric that a row's words describe: hosts, planes, ports, tiers."""

from __future__ import annotations

import re

from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.sizing import Shape, most_hosts, size
from phalanx.network.fabric.types import Fabric
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, number, pair, said

BOX_GBPS = 51_200  # the boxes of arXiv:2605.04333: 512 ports of 100G, 64 of 800G
NIC_GBPS = 800.0
MOST_NIC_GBPS = 1600  # `8x100G` up to here is a NIC in planes, `64x800G` beyond is a switch
MOST_PORTS = 4096  # of one switch: none has more than 1,024
MOST_TIERS = 4
HOSTS = r"(?:hosts?|NICs?|GPUs?)(?! per\b)"


def words(row: Row) -> str:
    """Conditions first: where both name a number, they are the more exact."""
    return f"{row.conditions}, {row.quantity}"


def planes(row: Row) -> int:
    """Planes of a NIC; 1 where nothing is said."""
    text = words(row)
    found = count(text, "planes?")
    if found is None and (nic := _nic_in_planes(text)):
        found = nic[0]
    if found is None and (speed := number(text, r"(\d+)G plane")):
        found = int(NIC_GBPS / speed) if 0 < speed <= NIC_GBPS else None
    return found or 1


def said_planes(row: Row) -> int:
    """The same where it must be said."""
    text = words(row)
    if not (count(text, "planes?") or _nic_in_planes(text) or number(text, r"(\d+)G plane")):
        raise NotSaid("how many planes")
    return planes(row)


def radix(row: Row) -> int:
    """Ports of a switch: said, or those of a 51.2T box at the speed of a port."""
    text = words(row)
    ports = count(text, "ports?") or _after(text, r"(?:radix|k ?=) ?(\d+)")
    if not ports and (box := _switch(text)):
        ports = box[0]
    if not ports:
        ports = int(_box_gbps(text) / said(_port_gbps(text), "ports, planes or the speed of a port"))
    if not 2 <= ports <= MOST_PORTS:
        raise NotSaid(f"a switch: {ports:,} ports are none")
    return ports


def tiers(row: Row, *, default: int | None = None) -> int:
    """One to four."""
    found = count(words(row), "tiers?") or default
    if found is None or not 1 <= found <= MOST_TIERS:
        raise NotSaid(f"how many tiers (1 to {MOST_TIERS})")
    return found


def ratio(row: Row) -> float:
    """Oversubscription; 1 where nothing is said."""
    return number(row.conditions, r"(?<![\d-])(\d+(?:\.\d+)?):1\b") or 1.0


def shape(row: Row, *, default_tiers: int | None = None) -> Shape:
    """Planes, tiers and oversubscription."""
    return Shape(planes=planes(row), tiers=tiers(row, default=default_tiers), oversubscription=ratio(row))


def fabric(row: Row) -> Fabric:
    """The fabric a row describes; full when it names no hosts."""
    made, ports = shape(row, default_tiers=2), radix(row)
    hosts = count(row.conditions, HOSTS) or most_hosts(ports, made)
    # The speed of a NIC changes no count: any that the planes divide will do.
    return size(hosts, 100.0 * made.planes, unnamed(ports, 100.0), made)


def _box_gbps(text: str) -> float:
    return 1000.0 * (number(text, r"(\d+(?:\.\d+)?)T\b(?! IB)") or BOX_GBPS / 1000)


def _port_gbps(text: str) -> float | None:
    if speed := number(text, r"planes? ?(?:x|×|of) ?(\d+)G") or number(text, r"(\d+)G (?:planes?|ports?)"):
        return speed
    if nic := _nic_in_planes(text):
        return float(nic[1])
    parts = count(text, "planes?")
    return (number(text, r"(\d+)G NIC") or NIC_GBPS) / parts if parts else None


def _nic_in_planes(text: str) -> tuple[int, int] | None:
    found = pair(text, "G")
    return found if found and found[0] * found[1] <= MOST_NIC_GBPS else None


def _switch(text: str) -> tuple[int, int] | None:
    found = pair(text, "G")
    return found if found and found[0] * found[1] > MOST_NIC_GBPS else None


def _after(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1][:9]) if found else None
