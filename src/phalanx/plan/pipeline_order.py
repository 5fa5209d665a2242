"""Pipeline orders of one's own: what each rank does, one letter an action, checked and played on a clock.

A rank's order is a text such as "FFBFBB": F forward, B backward, or backward in two halves, I (gradients of the input)
and W (gradients of the weights). The n-th F is of micro-batch n, and so is the n-th B or I, and the W of the n-th I. An
order has one chunk of layers per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.schedules import PENDING_WEIGHT, rank_order

MOST_RANKS = 1024
MOST_MICRO_BATCHES = 1365  # three letters each are the 4,096 characters that a text of a job may have
Orders = tuple[str, ...]


def named_orders(schedule: str, ranks: int, micro_batches: int) -> Orders:
    """The orders of a schedule that the trainer knows by name, with one chunk per rank.

    >>> named_orders("1f1b", 2, 3)
    ('FFBFBB', 'FBFBFB')
    """
    return tuple(
        "".join(kind for kind, _, _ in rank_order(schedule, rank, ranks, 1, micro_batches)) for rank in range(ranks)
    )


def numbered_actions(order: str) -> list[tuple[str, int]]:
    """Every action with its micro-batch.

    >>> numbered_actions("FFIBW")
    [('F', 0), ('F', 1), ('I', 0), ('B', 1), ('W', 0)]
    """
    found: list[tuple[str, int]] = []
    forward = backward = 0
    halved: deque[int] = deque()
    for kind in order:
        if kind == "F":
            found.append((kind, forward))
            forward += 1
        elif kind in "BI":
            found.append((kind, backward))
            if kind == "I":
                halved.append(backward)
            backward += 1
        else:
            found.append((kind, halved.popleft()))
    return found


def order_mistake(orders: Sequence[str]) -> str:
    """What is wrong with orders of all ranks; empty where a pipeline can run them.

    >>> order_mistake(["FFBB", "FBFB"])
    ''
    >>> order_mistake(["FBFB", "FFBB"]).partition(":")[0]
    'the ranks wait for each other'
    """
    if not 1 <= len(orders) <= MOST_RANKS:
        return f"{len(orders)} ranks are not between 1 and {MOST_RANKS:,}"
    count = orders[0].count("F")
    for rank, order in enumerate(orders):
        if problem := _rank_mistake(order, count):
            return f"rank {rank}: {problem}"
    stuck = _waiting_ranks(orders)
    if stuck:
        where = (
            f"rank {rank} at action {place + 1} ({kind} of micro-batch {number})"
            for rank, place, kind, number in stuck[:3]
        )
        return f"the ranks wait for each other: {', '.join(where)}"
    return ""


def _rank_mistake(order: str, count: int) -> str:
    if not order or set(order) - set("FBIW"):
        return "an order is made of the letters F, B, I and W"
    if not 1 <= count <= MOST_MICRO_BATCHES:
        return f"{count} micro-batches are not between 1 and {MOST_MICRO_BATCHES:,}"
    forward = backward = first_half = second_half = 0
    for place, kind in enumerate(order, start=1):
        forward += kind == "F"
        backward += kind in "BI"
        first_half += kind == "I"
        second_half += kind == "W"
        if backward > forward:
            return f"action {place} goes backward through a micro-batch that has not gone forward"
        if second_half > first_half:
            return f"action {place} is a W without an I before it"
    if forward != count or backward != count:
        return f"{forward} forwards and {backward} backwards, where rank 0 has {count} micro-batches"
    if first_half != second_half:
        return f"{first_half} I and {second_half} W: every I needs its W"
    return ""


def _waiting_ranks(orders: Sequence[str]) -> list[tuple[int, int, str, int]]:
    """(rank, place, kind, micro-batch) of ranks that wait for ever; none where all of them reach their end."""
    played = play_orders(orders, unit_times(len(orders)))
    return played if isinstance(played, list) else []


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds (or any unit) of each action on each rank, and of one message between neighbours."""

    forward: tuple[float, ...]
    first_half: tuple[float, ...]  # I; a whole backward is both halves
    second_half: tuple[float, ...]  # W
    send: float = 0.0


def unit_times(ranks: int) -> StageTimes:
    """One unit for each of F, I and W."""
    return StageTimes(forward=(1.0,) * ranks, first_half=(1.0,) * ranks, second_half=(1.0,) * ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedOrders:
    """A step of some orders on a clock."""

    makespan: float  # from the first action to the end of the last
    busiest: float  # seconds that the busiest rank computes
    held: tuple[float, ...]  # by rank: most micro-batches whose activations it holds at once; pending ones weigh more
    burst: int  # most messages that one rank sends to one neighbour while the busiest does one micro-batch

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank waits."""
        return 1.0 - self.busiest / self.makespan


def play_orders(orders: Sequence[str], times: StageTimes) -> PlayedOrders | list[tuple[int, int, str, int]]:
    """Play orders, every action as early as it can; or the actions that wait for each other for ever."""
    ranks = len(orders)
    actions = [numbered_actions(order) for order in orders]
    cost = [
        {"F": f, "B": i + w, "I": i, "W": w}
        for f, i, w in zip(times.forward, times.first_half, times.second_half, strict=True)
    ]
    done_forward: list[dict[int, float]] = [{} for _ in orders]
    done_backward: list[dict[int, float]] = [{} for _ in orders]
    place, clock = [0] * ranks, [0.0] * ranks
    sent: dict[tuple[int, int], list[float]] = {}
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        while place[rank] < len(actions[rank]):
            kind, number = actions[rank][place[rank]]
            ready: float | None = 0.0
            if kind == "F" and rank:
                ready = done_forward[rank - 1].get(number)
            elif kind in "BI" and rank < ranks - 1:
                ready = done_backward[rank + 1].get(number)
            if ready is None:
                break
            crosses = (kind == "F" and rank > 0) or (kind in "BI" and rank < ranks - 1)
            clock[rank] = max(clock[rank], ready + (times.send if crosses else 0.0)) + cost[rank][kind]
            place[rank] += 1
            if kind == "F":
                done_forward[rank][number] = clock[rank]
            elif kind in "BI":
                done_backward[rank][number] = clock[rank]
            target = rank + 1 if kind == "F" else rank - 1
            if kind != "W" and 0 <= target < ranks:
                sent.setdefault((rank, target), []).append(clock[rank])
                todo.append(target)
    stuck = [
        (rank, place[rank], *actions[rank][place[rank]]) for rank in range(ranks) if place[rank] < len(actions[rank])
    ]
    if stuck:
        return stuck
    count = orders[0].count("F")
    busiest = max(count * (one["F"] + one["B"]) for one in cost)
    return PlayedOrders(
        makespan=max(clock),
        busiest=busiest,
        held=tuple(_most_held(order) for order in orders),
        burst=max((_most_within(moments, busiest / count) for moments in sent.values()), default=0),
    )


def _most_held(order: str) -> float:
    held = pending = most = 0.0
    for kind in order:
        held += (kind == "F") - (kind in "BI")
        pending += (kind == "I") - (kind == "W")
        most = max(most, held + PENDING_WEIGHT * pending)
    return most


def _most_within(moments: Sequence[float], window: float) -> int:
    """Most messages in any time of this length; `moments` rise."""
    first = most = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - window + 1e-9:
            first += 1
        most = max(most, last - first + 1)
    return most
