"""Would these ranks meet? Their logs are played against each other; where they do not meet, a job would hang.

Messages leave at once and are waited for where they are posted; a collective waits for every member. A rank that was
not traced is taken to do what its traced twin (the same pipeline stage) does; `compare_twins` says whether twins agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.train.tracing.log import RankTrace, TracedOperation
from phalanx.units import format_bytes, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHang:
    """A rank that waits for ever: for whom, at which operation, and what the other does instead."""

    rank: int
    index: int  # of the operation in the rank's log
    operation: TracedOperation
    waits_for: int
    instead: str
    others: int = 0  # further ranks that wait behind it

    def render(self) -> str:
        """Two lines, the first failing rank first."""
        what = f"{describe_operation(self.operation)}, operation {self.index:,}"
        first = f"rank {self.rank} waits for rank {self.waits_for} in {what}"
        more = f"; behind them {plural(self.others, 'other rank')}" if self.others else ""
        return f"{first}\n  rank {self.waits_for} {self.instead}{more}"


def find_hang(traces: Sequence[RankTrace]) -> TraceHang | None:
    """The first operation that would never finish, or None when every rank comes through the step."""
    return _LogReplay({trace.rank: trace.operations for trace in traces}).run() or compare_twins(traces)


def compare_twins(traces: Sequence[RankTrace]) -> TraceHang | None:
    """Ranks of one pipeline stage run one program: the first place where two of them do not."""
    first: dict[tuple[int, ...], RankTrace] = {}
    for trace in traces:
        other = first.setdefault(trace.stages, trace)
        length = max(len(trace.operations), len(other.operations))
        for index in range(length):
            mine, theirs = _operation_at(trace.operations, index), _operation_at(other.operations, index)
            if mine is None or theirs is None or mine.signature != theirs.signature:
                return _difference_hang(other, trace, index)
    return None


def _difference_hang(one: RankTrace, other: RankTrace, index: int) -> TraceHang:
    waiting, missing = (one, other) if _operation_at(one.operations, index) is not None else (other, one)
    operation = waiting.operations[index]
    does = _operation_at(missing.operations, index)
    return TraceHang(
        rank=waiting.rank,
        index=index,
        operation=operation,
        waits_for=missing.rank,
        instead=f"(of the same stage) calls {describe_operation(does)} there"
        if does
        else "(of the same stage) is done by then",
    )


def _operation_at(operations: Sequence[TracedOperation], index: int) -> TracedOperation | None:
    return operations[index] if index < len(operations) else None


def describe_operation(operation: TracedOperation) -> str:
    """An operation in words."""
    size = format_bytes(operation.nbytes)
    if operation.is_message:
        way = "to" if operation.kind == "send" else "from"
        return (
            f"{operation.kind} of {size} {way} rank {operation.peer} on axis {operation.group.axis} ({operation.phase})"
        )
    return (
        f"{operation.kind} of {size} {operation.dtype} on axis {operation.group.axis} "
        f"({len(operation.group.ranks)} ranks from {operation.group.ranks[0]}, {operation.phase})"
    )


class _LogReplay:
    """The ranks' logs, each with a finger on the next operation."""

    def __init__(self, logs: Mapping[int, Sequence[TracedOperation]]) -> None:
        self._logs = logs
        self._at = dict.fromkeys(logs, 0)
        self._posted: set[tuple[int, int]] = set()  # (rank, index) of messages under way or waited for
        self._mail: dict[tuple[int, int, str], deque[tuple[int, TracedOperation]]] = defaultdict(deque)

    def run(self) -> TraceHang | None:
        """Move every finger as far as it goes."""
        ready = deque(self._logs)
        while ready:
            rank = ready.popleft()
            moved = self._move_rank(rank)
            if isinstance(moved, TraceHang):
                return moved
            ready.extend(other for other in moved if other not in ready)
        return self._stuck_cycle() or self._unread_message()

    def _move_rank(self, rank: int) -> set[int] | TraceHang:
        """Advance one rank until it waits; gives the ranks that may go on now."""
        freed: set[int] = set()
        while (operation := self._next_operation(rank)) is not None:
            if operation.is_message:
                self._post_sends(rank, freed)
                done = self._receive_message(rank, operation)
                if isinstance(done, TraceHang):
                    return done
                if not done:
                    return freed
            else:
                met = self._meet_group(rank, operation)
                if isinstance(met, TraceHang):
                    return met
                if not met:
                    return freed
                freed |= met - {rank}
        return freed

    def _next_operation(self, rank: int) -> TracedOperation | None:
        return _operation_at(self._logs[rank], self._at[rank])

    def _post_sends(self, rank: int, freed: set[int]) -> None:
        """All sends of the batch leave before the first receive of it is waited for."""
        log, index = self._logs[rank], self._at[rank]
        batch = log[index].batch
        while index < len(log) and log[index].batch == batch:
            one = log[index]
            if one.kind == "send" and (rank, index) not in self._posted and one.peer in self._logs:
                self._posted.add((rank, index))
                self._mail[rank, one.peer, one.group.axis].append((index, one))
                freed.add(one.peer)
            index += 1

    def _receive_message(self, rank: int, operation: TracedOperation) -> bool | TraceHang:
        if operation.kind == "receive" and operation.peer in self._logs:
            mail = self._mail[operation.peer, rank, operation.group.axis]
            if not mail:
                return False
            _, sent = mail.popleft()
            if (sent.nbytes, sent.dtype) != (operation.nbytes, operation.dtype):
                return self._make_hang(rank, operation, operation.peer, f"sends {describe_operation(sent)}")
        self._at[rank] += 1
        return True

    def _meet_group(self, rank: int, operation: TracedOperation) -> set[int] | TraceHang:
        """The members that went on, when all of them have come; empty while some are missing."""
        members = [other for other in operation.group.ranks if other in self._logs]
        for other in members:
            does = self._next_operation(other)
            here = does is not None and not does.is_message and does.group == operation.group
            if here and does is not None and does.signature != operation.signature:
                return self._make_hang(rank, operation, other, f"calls {describe_operation(does)} there")
            if not here:
                return set()
        for other in members:
            self._at[other] += 1
        return set(members)

    def _make_hang(self, rank: int, operation: TracedOperation, other: int, instead: str) -> TraceHang:
        waiting = sum(self._next_operation(one) is not None for one in self._logs) - 1
        return TraceHang(
            rank=rank,
            index=self._at[rank],
            operation=operation,
            waits_for=other,
            instead=instead,
            others=max(waiting - 1, 0),
        )

    def _stuck_cycle(self) -> TraceHang | None:
        """Follow who waits for whom to one that does not wait, or round a circle."""
        waiting = [rank for rank in self._logs if self._next_operation(rank) is not None]
        if not waiting:
            return None
        rank, path = waiting[0], list[int]()
        while rank not in path:
            path.append(rank)
            operation = self._next_operation(rank)
            assert operation is not None
            other = self._missing_member(rank, operation)
            if self._next_operation(other) is None:
                return self._make_hang(rank, operation, other, "has finished its step without it")
            rank = other
        # A circle: the one that came least far is where to look, and a message says more than a meeting of many.
        rank = min(path[path.index(rank) :], key=lambda one: (self._at[one], not self._awaits_message(one)))
        operation = self._next_operation(rank)
        assert operation is not None
        other = self._missing_member(rank, operation)
        does = self._next_operation(other)
        assert does is not None
        return self._make_hang(
            rank, operation, other, f"waits in {describe_operation(does)}, operation {self._at[other]:,}"
        )

    def _awaits_message(self, rank: int) -> bool:
        operation = self._next_operation(rank)
        return operation is not None and operation.is_message

    def _missing_member(self, rank: int, operation: TracedOperation) -> int:
        if operation.is_message:
            return operation.peer
        members = [other for other in operation.group.ranks if other in self._logs and other != rank]
        return next(other for other in members if not self._is_at(other, operation))

    def _is_at(self, rank: int, operation: TracedOperation) -> bool:
        does = self._next_operation(rank)
        return does is not None and not does.is_message and does.group == operation.group

    def _unread_message(self) -> TraceHang | None:
        for (sender, receiver, _), mail in self._mail.items():
            if mail:
                index, sent = mail[0]
                instead = "has finished its step and never receives it"
                return TraceHang(rank=sender, index=index, operation=sent, waits_for=receiver, instead=instead)
        return None
