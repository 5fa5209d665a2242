"""Results of a traced step: values without tensors, the same for a real run and for a dry one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceGroup:
    """The ranks of a communicator and the mesh axis they form."""

    axis: str
    ranks: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Rank distance of neighbours."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedOperation:
    """One call into the communication library."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send, receive, barrier
    nbytes: int  # of the full tensor: gathered, reduced, exchanged or sent
    dtype: str
    group: TraceGroup
    phase: str
    peer: int = -1  # of a send or receive, as rank of the job
    batch: int = -1  # sends and receives that were posted together share a number

    @property
    def is_message(self) -> bool:
        """True for an operation between two ranks instead of the whole group."""
        return self.kind in ("send", "receive")

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends if the library uses rings, as NCCL does for large calls."""
        ranks = len(self.group.ranks)
        share = (ranks - 1) / ranks
        factor = {"all-reduce": 2 * share, "send": 1.0, "receive": 0.0, "barrier": 0.0}
        return self.nbytes * factor.get(self.kind, share)

    @property
    def signature(self) -> tuple[str, int, str, str]:
        """The properties on which all members of the group must agree."""
        return self.kind, self.nbytes, self.dtype, self.group.axis


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """The moment of highest memory in a step; `parts_bytes` add up to `nbytes`."""

    nbytes: int
    phase: str
    parts_bytes: Mapping[str, int]
    rest_bytes: int  # memory between steps
    host_bytes: int  # offloaded, not part of the sum


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """The trace of one step of one rank."""

    rank: int
    place: Mapping[str, tuple[int, int]]  # axis -> (index, size)
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    operations: tuple[TracedOperation, ...]
    flops: Mapping[str, Mapping[str, int]]  # phase -> linear or attention -> FLOPs
    peak: MemoryPeak
    seconds: float = 0.0
    rss_bytes: int = 0

    @property
    def total_flops(self) -> int:
        """FLOPs of the step in matrix products and attention."""
        return sum(sum(kinds.values()) for kinds in self.flops.values())

    def sent_bytes(self, axis: str) -> float:
        """Return the bytes that the rank sends per step on an axis."""
        return sum(operation.sent_bytes for operation in self.operations if operation.group.axis == axis)

    @property
    def axes(self) -> list[str]:
        """Axes in use, in the order of their first call."""
        return list(dict.fromkeys(operation.group.axis for operation in self.operations))


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRow:
    """Sum of the operations of one kind on one axis in one phase."""

    axis: str
    ranks: int
    stride: int
    kind: str
    phase: str
    calls: int
    nbytes: int
    sent_bytes: float


def message_rows(trace: RankTrace) -> list[MessageRow]:
    """Return the operations as a table, by axis and kind in the order of their first call."""
    calls: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    sent_bytes: dict[tuple[str, str, str], float] = {}
    groups: dict[str, TraceGroup] = {}
    for operation in trace.operations:
        key = (operation.group.axis, operation.kind, operation.phase)
        groups.setdefault(operation.group.axis, operation.group)
        calls[key] += 1
        nbytes[key] += operation.nbytes
        sent_bytes[key] = sent_bytes.get(key, 0.0) + operation.sent_bytes
    order = {axis: place for place, axis in enumerate(trace.axes)}
    return [
        MessageRow(
            axis=axis,
            ranks=len(groups[axis].ranks),
            stride=groups[axis].stride,
            kind=kind,
            phase=phase,
            calls=calls[axis, kind, phase],
            nbytes=nbytes[axis, kind, phase],
            sent_bytes=sent_bytes[axis, kind, phase],
        )
        for axis, kind, phase in sorted(calls, key=lambda key: (order[key[0]], key[1], PHASES.index(key[2])))
    ]
