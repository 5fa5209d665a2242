"""Passive signals of one node, from its kernel, GPUs, disks and network, without putting load on any of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.io.visible import one_line
from phalanx.units import plural

# XID numbers of NVIDIA's list that blame the GPU or its links. Others (13, 31, 43, 45, 68, …) are a program's
# mistakes.
BAD_XIDS = {
    48: "uncorrectable memory error",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit memory errors",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP timeout",
    120: "GSP error",
    140: "unrecovered memory error",
}
_XID = re.compile(r"NVRM: Xid \(([^)]{1,40})\): (\d{1,4})")
# Part of a line of the kernel's log -> the fault. Each is a fault of the node, independent of its user.
LOG_PARTS = {
    "Remounting filesystem read-only": "disk: a file system became read-only",
    "EXT4-fs error": "disk: file system errors",
    "Buffer I/O error on dev": "disk: I/O errors",
    "blk_update_request: critical medium error": "disk: medium errors",
    "controller is down; will reset": "disk: an NVMe controller is down",
    "[Hardware Error]: Uncorrected": "memory or CPU: uncorrected hardware error",
    "EDAC MC0: UE": "memory: uncorrectable error",
    "Machine check events logged": "memory or CPU: machine check",
    "health compromised": "network: an RDMA card reports bad health",
    "device's health compromised": "network: an RDMA card reports bad health",
    "NETDEV WATCHDOG": "network: an interface stopped sending",
}
# Counter of an interface -> increase per hour above which it is blamed. The names are the kernel's.
NIC_LIMITS = {
    "rx_crc_errors": 1000.0,
    "rx_errors": 10_000.0,
    "tx_errors": 10_000.0,
    "symbol_error": 1000.0,
    "link_downed": 3.0,
    "port_rcv_errors": 1000.0,
    "local_link_integrity_errors": 100.0,
}
GPU_FIELDS = (
    *("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.failure", "remapped_rows.pending"),
    "retired_pages.pending",
)
SMI_S = 30.0
# a line of text: a site's or cloud's notice that the node will be removed
MAINTENANCE = Path("/run/phalanx/maintenance")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSignal:
    """A sign that a node is faulty."""

    kind: str  # xid, ecc, gpus, disk, memory, network, maintenance
    said: str


def log_signals(lines: Iterable[str]) -> list[NodeSignal]:
    """Return the faults in lines of the kernel's log, each only once."""
    signals: dict[str, NodeSignal] = {}
    for line in lines:
        if (match := _XID.search(line)) is not None:
            number = int(match[2])
            if number in BAD_XIDS:
                message = f"XID {number} ({BAD_XIDS[number]}) of {match[1]}"
                signals.setdefault(message, NodeSignal(kind="xid", said=message))
            continue
        for pattern, message in LOG_PARTS.items():
            if pattern in line:
                signals.setdefault(message, NodeSignal(kind=message.partition(":")[0].split()[0], said=message))
                break
    return list(signals.values())


def gpu_signals(table: str, *, expected: int) -> list[NodeSignal]:
    """Return faults in the table of `nvidia-smi --query-gpu`: memory that cannot be repaired, and missing GPUs."""
    signals, num_gpus = [], 0
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS) or not cells[0].isdecimal():
            continue
        num_gpus += 1
        values = dict(zip(GPU_FIELDS, cells, strict=True))
        count = values["ecc.errors.uncorrected.volatile.total"]
        if count.isdecimal() and int(count):
            message = f"GPU {cells[0]}: {plural(int(count), 'uncorrectable memory error')}"
            signals.append(NodeSignal(kind="ecc", said=message))
        if values["remapped_rows.failure"].lower() in ("yes", "1"):
            signals.append(NodeSignal(kind="ecc", said=f"GPU {cells[0]}: a memory row could not be remapped"))
        if "yes" in (values["remapped_rows.pending"].lower(), values["retired_pages.pending"].lower()):
            signals.append(NodeSignal(kind="ecc", said=f"GPU {cells[0]}: needs a reset to retire bad memory"))
    if num_gpus < expected:
        signals.append(NodeSignal(kind="gpus", said=f"{num_gpus} of {plural(expected, 'GPU')} answer"))
    return signals


def ask_gpus() -> str:
    """Return the table of nvidia-smi; empty without it, or if the driver hangs, so that its GPUs count as missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


def read_counters(sys_folder: Path) -> dict[str, int]:
    """Return the error counters of all network and RDMA interfaces, by path below `sys_folder`."""
    counters = {}
    patterns = ("class/net/*/statistics/*", "class/infiniband/*/ports/*/counters/*")
    for path in (path_found for pattern in patterns for path_found in sorted(sys_folder.glob(pattern))):
        if path.name in NIC_LIMITS:
            try:
                counters[str(path.relative_to(sys_folder))] = int(path.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
    return counters


def counter_signals(before: Mapping[str, int], now: Mapping[str, int], seconds: float) -> list[NodeSignal]:
    """Return interfaces whose errors grew too fast between two readings; a counter that was reset is ignored."""
    signals = []
    for path, value in now.items():
        increase = value - before.get(path, value)
        words = path.split("/")
        limit = NIC_LIMITS[words[-1]]
        # A single event in a short time is not a rate: at least a tenth of the hourly limit must have happened.
        if increase > max(1.0, limit / 10.0) and increase * 3600.0 / max(seconds, 1.0) > limit:
            signals.append(
                NodeSignal(kind="network", said=f"{words[2]}: {words[-1]} grew by {increase} in {seconds:.0f} s")
            )
    return signals


def maintenance_signals(path: Path = MAINTENANCE) -> list[NodeSignal]:
    """Return a notice of the site, which an operator's or cloud's script writes."""
    try:
        message = one_line(path.read_text(encoding="utf-8", errors="replace").strip())[:120]
    except OSError:
        return []
    return [NodeSignal(kind="maintenance", said=f"maintenance: {message or 'announced'}")]
