"""How near each GPU is to the network card it would use, read from the PCI tree of sysfs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from phalanx.hardware.types import Gpu, Machine, Nic
from phalanx.rules.facts.host import NicPath

ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, in nvidia-smi's words
_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def nic_paths(machine: Machine, *, root: Path = Path("/")) -> tuple[NicPath, ...] | None:
    """The nearest card of every GPU; None where the tree does not show it, empty without GPUs or cards."""
    real = [nic for nic in machine.nics if nic.bytes_per_s > 0]  # a virtual card does not say how fast it is
    cards = [nic for nic in real if nic.kind == "infiniband"] or real
    if not machine.gpus or not cards:
        return ()
    found = [_nearest(gpu, cards, root) for gpu in machine.gpus]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(found) else None


def _nearest(gpu: Gpu, cards: Sequence[Nic], root: Path) -> NicPath | None:
    here = _ancestors(_gpu_folder(gpu, root))
    if not here:
        return None
    near = [
        (path_kind(here, there, same_node=_same_node(gpu, card)), card.name) for card, there in _placed(cards, root)
    ]
    if not near:
        return None
    kind, name = min(near, key=lambda one: ORDER.index(one[0]))
    return NicPath(device=f"GPU {gpu.index}", nic=name, path=kind)


def path_kind(first: Sequence[str], second: Sequence[str], *, same_node: bool) -> str:
    """What two PCI devices have between them; each is given by its ancestors from the host bridge down, itself last.

    >>> root, switch = "pci0000:00", "0000:00:01.0"
    >>> path_kind([root, switch, "up", "a", "gpu"], [root, switch, "up", "b", "nic"], same_node=True)
    'PIX'
    >>> path_kind([root, switch, "gpu"], [root, "0000:00:02.0", "nic"], same_node=True)
    'PHB'
    """
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if shared == 0:
        return "NODE" if same_node else "SYS"
    if shared == 1:
        return "PHB"  # up to the host bridge
    between = max(len(first), len(second)) - 1 - shared  # bridges below what they share
    return "PIX" if between <= 1 else "PXB"


def _same_node(gpu: Gpu, card: Nic) -> bool:
    return gpu.numa_node == card.numa_node and gpu.numa_node >= 0


def _gpu_folder(gpu: Gpu, root: Path) -> Path | None:
    address = gpu.pci_address.lower()
    if not _ADDRESS.fullmatch(address):
        return None
    domain, _, rest = address.partition(":") if address.count(":") == 2 else ("0000", "", address)
    return root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}"


def _placed(cards: Sequence[Nic], root: Path) -> list[tuple[Nic, list[str]]]:
    folders = {card: root / "sys/class" / _kind(card) / card.name / "device" for card in cards}
    return [(card, ancestors) for card, folder in folders.items() if (ancestors := _ancestors(folder))]


def _kind(card: Nic) -> str:
    return "infiniband" if card.kind == "infiniband" else "net"


def _ancestors(folder: Path | None) -> list[str]:
    """Host bridge, bridges and the device itself; empty when it is on no PCI bus."""
    if folder is None or not folder.exists():
        return []
    parts = folder.resolve().parts
    starts = [at for at, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    if not starts:
        return []
    return [parts[starts[-1]], *(part for part in parts[starts[-1] + 1 :] if _ADDRESS.fullmatch(part))]
