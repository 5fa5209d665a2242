"""Hang check: replays the ranks' traces against each other; where operations do not match, the job would hang.

Messages are sent at once and awaited where they are posted; a collective waits for every member. A rank that was not
traced is assumed to do what its traced twin (a rank of the same pipeline stage) does; `compare_twins` checks that
twins agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.train.tracing.log import RankTrace, TracedOperation
from phalanx.units import format_bytes, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHang:
    """A rank that waits for ever: the rank it waits for, the operation, and what that rank does instead."""

    rank: int
    index: int  # of the operation in the rank's trace
    operation: TracedOperation
    waits_for: int
    instead: str
    others: int = 0  # further ranks that wait as a consequence

    def render(self) -> str:
        """Return two lines that name the first waiting rank first."""
        operation = f"{describe_operation(self.operation)}, operation {self.index:,}"
        first = f"rank {self.rank} waits for rank {self.waits_for} in {operation}"
        further_ranks = f"; behind them {plural(self.others, 'other rank')}" if self.others else ""
        return f"{first}\n  rank {self.waits_for} {self.instead}{further_ranks}"


def find_hang(traces: Sequence[RankTrace]) -> TraceHang | None:
    """Return the first operation that would never finish, or None if every rank completes the step."""
    return _LogReplay({trace.rank: trace.operations for trace in traces}).run() or compare_twins(traces)


def compare_twins(traces: Sequence[RankTrace]) -> TraceHang | None:
    """Return the first operation in which two ranks of one pipeline stage, which run one program, differ."""
    first: dict[tuple[int, ...], RankTrace] = {}
    for trace in traces:
        first_trace = first.setdefault(trace.stages, trace)
        length = max(len(trace.operations), len(first_trace.operations))
        for index in range(length):
            operation, first_operation = (
                _operation_at(trace.operations, index),
                _operation_at(first_trace.operations, index),
            )
            if operation is None or first_operation is None or operation.signature != first_operation.signature:
                return _difference_hang(first_trace, trace, index)
    return None


def _difference_hang(one: RankTrace, other: RankTrace, index: int) -> TraceHang:
    waiting, missing = (one, other) if _operation_at(one.operations, index) is not None else (other, one)
    operation = waiting.operations[index]
    actual = _operation_at(missing.operations, index)
    return TraceHang(
        rank=waiting.rank,
        index=index,
        operation=operation,
        waits_for=missing.rank,
        instead=f"(of the same stage) calls {describe_operation(actual)} there"
        if actual
        else "(of the same stage) is done by then",
    )


def _operation_at(operations: Sequence[TracedOperation], index: int) -> TracedOperation | None:
    return operations[index] if index < len(operations) else None


def describe_operation(operation: TracedOperation) -> str:
    """Describe an operation in words."""
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
    """A replay of the ranks' traces, with the index of each rank's next operation."""

    def __init__(self, logs: Mapping[int, Sequence[TracedOperation]]) -> None:
        self._logs = logs
        self._at = dict.fromkeys(logs, 0)
        # (rank, index) of posted messages
        self._posted: set[tuple[int, int]] = set()
        self._mail: dict[tuple[int, int, str], deque[tuple[int, TracedOperation]]] = defaultdict(deque)

    def run(self) -> TraceHang | None:
        """Advance every rank as far as possible; return a hang if one cannot finish."""
        runnable = deque(self._logs)
        while runnable:
            rank = runnable.popleft()
            progress = self._move_rank(rank)
            if isinstance(progress, TraceHang):
                return progress
            runnable.extend(waiting_rank for waiting_rank in progress if waiting_rank not in runnable)
        return self._stuck_cycle() or self._unread_message()

    def _move_rank(self, rank: int) -> set[int] | TraceHang:
        """Advance one rank until it waits; return the ranks that may be able to continue."""
        unblocked: set[int] = set()
        while (operation := self._next_operation(rank)) is not None:
            if operation.is_message:
                self._post_sends(rank, unblocked)
                is_received = self._receive_message(rank, operation)
                if isinstance(is_received, TraceHang):
                    return is_received
                if not is_received:
                    return unblocked
            else:
                advanced = self._meet_group(rank, operation)
                if isinstance(advanced, TraceHang):
                    return advanced
                if not advanced:
                    return unblocked
                unblocked |= advanced - {rank}
        return unblocked

    def _next_operation(self, rank: int) -> TracedOperation | None:
        return _operation_at(self._logs[rank], self._at[rank])

    def _post_sends(self, rank: int, freed: set[int]) -> None:
        """Post all sends of a batch before the first of its receives is awaited."""
        log, index = self._logs[rank], self._at[rank]
        batch = log[index].batch
        while index < len(log) and log[index].batch == batch:
            posted = log[index]
            if posted.kind == "send" and (rank, index) not in self._posted and posted.peer in self._logs:
                self._posted.add((rank, index))
                self._mail[rank, posted.peer, posted.group.axis].append((index, posted))
                freed.add(posted.peer)
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
        """Advance all members if each is at this collective, and return them; else return an empty set."""
        members = [member for member in operation.group.ranks if member in self._logs]
        for member in members:
            member_operation = self._next_operation(member)
            is_at_group = (
                member_operation is not None
                and not member_operation.is_message
                and member_operation.group == operation.group
            )
            if is_at_group and member_operation is not None and member_operation.signature != operation.signature:
                return self._make_hang(rank, operation, member, f"calls {describe_operation(member_operation)} there")
            if not is_at_group:
                return set()
        for member in members:
            self._at[member] += 1
        return set(members)

    def _make_hang(self, rank: int, operation: TracedOperation, other: int, instead: str) -> TraceHang:
        waiting = sum(self._next_operation(any_rank) is not None for any_rank in self._logs) - 1
        return TraceHang(
            rank=rank,
            index=self._at[rank],
            operation=operation,
            waits_for=other,
            instead=instead,
            others=max(waiting - 1, 0),
        )

    def _stuck_cycle(self) -> TraceHang | None:
        """Follow the chain of waiting ranks to one that does not wait, or round a cycle."""
        waiting = [rank for rank in self._logs if self._next_operation(rank) is not None]
        if not waiting:
            return None
        rank, path = waiting[0], list[int]()
        while rank not in path:
            path.append(rank)
            operation = self._next_operation(rank)
            assert operation is not None
            awaited = self._missing_member(rank, operation)
            if self._next_operation(awaited) is None:
                return self._make_hang(rank, operation, awaited, "has finished its step without it")
            rank = awaited
        # A cycle: report the rank with the fewest operations done, and a message rather than a collective, which is
        # vaguer.
        rank = min(
            path[path.index(rank) :],
            key=lambda cycle_rank: (self._at[cycle_rank], not self._awaits_message(cycle_rank)),
        )
        operation = self._next_operation(rank)
        assert operation is not None
        awaited = self._missing_member(rank, operation)
        awaited_operation = self._next_operation(awaited)
        assert awaited_operation is not None
        return self._make_hang(
            rank,
            operation,
            awaited,
            f"waits in {describe_operation(awaited_operation)}, operation {self._at[awaited]:,}",
        )

    def _awaits_message(self, rank: int) -> bool:
        operation = self._next_operation(rank)
        return operation is not None and operation.is_message

    def _missing_member(self, rank: int, operation: TracedOperation) -> int:
        if operation.is_message:
            return operation.peer
        members = [member for member in operation.group.ranks if member in self._logs and member != rank]
        return next(member for member in members if not self._is_at(member, operation))

    def _is_at(self, rank: int, operation: TracedOperation) -> bool:
        next_operation = self._next_operation(rank)
        return next_operation is not None and not next_operation.is_message and next_operation.group == operation.group

    def _unread_message(self) -> TraceHang | None:
        for (sender, receiver, _), mail in self._mail.items():
            if mail:
                index, sent = mail[0]
                instead = "has finished its step and never receives it"
                return TraceHang(rank=sender, index=index, operation=sent, waits_for=receiver, instead=instead)
        return None
