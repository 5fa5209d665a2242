"""What a rank that leaves a membership can still say: whether a peer is to blame, and which collective was the last."""

from __future__ import annotations

from typing import Any

from phalanx.elastic.failure import failure_of
from phalanx.train.flight import recorded_entries


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank went away."""
    return isinstance(error, Exception) and failure_of(0, error, step=-1).is_consequence


def last_collective() -> str:
    """The last collective this rank began, as torch's flight recorder knows it; empty when it recorded none."""
    try:
        entries = recorded_entries()
    except (ImportError, AttributeError):
        return ""
    entries.sort(key=lambda entry: int(entry.get("time_created_ns") or 0))  # NCCL's and gloo's are recorded apart
    return _named(entries[-1]) if entries else ""


def _named(entry: dict[str, Any]) -> str:
    group, sizes = entry.get("process_group") or ["", ""], entry.get("input_sizes") or []
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    return f"{entry.get('profiling_name', '?')} number {number} of group {group[-1] or group[0]}, sizes {sizes}"
