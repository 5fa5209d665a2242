"""Custom pipeline orders: the actions of each rank, one letter each, checked and simulated on a clock.

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
# With three letters each they fill the 4,096 characters that a text in a job may have.
MOST_MICRO_BATCHES = 1365
Orders = tuple[str, ...]


def named_orders(schedule: str, ranks: int, micro_batches: int) -> Orders:
    """Return the orders of a schedule that the trainer knows by name, with one chunk per rank.

    >>> named_orders("1f1b", 2, 3)
    ('FFBFBB', 'FBFBFB')
    """
    return tuple(
        "".join(kind for kind, _, _ in rank_order(schedule, rank, ranks, 1, micro_batches)) for rank in range(ranks)
    )


def numbered_actions(order: str) -> list[tuple[str, int]]:
    """Return every action with its micro-batch.

    >>> numbered_actions("FFIBW")
    [('F', 0), ('F', 1), ('I', 0), ('B', 1), ('W', 0)]
    """
    actions: list[tuple[str, int]] = []
    forward = backward = 0
    halved: deque[int] = deque()
    for kind in order:
        if kind == "F":
            actions.append((kind, forward))
            forward += 1
        elif kind in "BI":
            actions.append((kind, backward))
            if kind == "I":
                halved.append(backward)
            backward += 1
        else:
            actions.append((kind, halved.popleft()))
    return actions


def order_mistake(orders: Sequence[str]) -> str:
    """Describe what is wrong with the orders of all ranks; empty if a pipeline can run them.

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
    waiting = _waiting_ranks(orders)
    if waiting:
        where = (
            f"rank {rank} at action {place + 1} ({kind} of micro-batch {number})"
            for rank, place, kind, number in waiting[:3]
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
    """Return (rank, place, kind, micro-batch) of the ranks that wait for ever; empty if all of them finish."""
    played = play_orders(orders, unit_times(len(orders)))
    return played if isinstance(played, list) else []


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds (or any unit) of each action on each rank, and of one message between neighbours."""

    forward: tuple[float, ...]
    first_half: tuple[float, ...]  # I; a whole backward takes both halves
    second_half: tuple[float, ...]  # W
    send: float = 0.0


def unit_times(ranks: int) -> StageTimes:
    """Return one unit for each of F, I and W."""
    return StageTimes(forward=(1.0,) * ranks, first_half=(1.0,) * ranks, second_half=(1.0,) * ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedOrders:
    """The simulated step of some orders."""

    makespan: float  # from the start of the first action to the end of the last
    busiest: float  # seconds that the busiest rank computes
    # by rank: the most micro-batches whose activations it holds at once; pending ones weigh more
    held: tuple[float, ...]
    burst: int  # the most messages that one rank sends to one neighbour while the busiest computes one micro-batch

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest rank waits."""
        return 1.0 - self.busiest / self.makespan


def play_orders(orders: Sequence[str], times: StageTimes) -> PlayedOrders | list[tuple[int, int, str, int]]:
    """Simulate orders, every action as early as possible; return the stuck actions instead if ranks wait for ever."""
    ranks = len(orders)
    actions = [numbered_actions(order) for order in orders]
    cost = [
        {"F": f, "B": i + w, "I": i, "W": w}
        for f, i, w in zip(times.forward, times.first_half, times.second_half, strict=True)
    ]
    done_forward: list[dict[int, float]] = [{} for _ in orders]
    done_backward: list[dict[int, float]] = [{} for _ in orders]
    place, clock = [0] * ranks, [0.0] * ranks
    send_times: dict[tuple[int, int], list[float]] = {}
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
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
                send_times.setdefault((rank, target), []).append(clock[rank])
                runnable.append(target)
    waiting = [
        (rank, place[rank], *actions[rank][place[rank]]) for rank in range(ranks) if place[rank] < len(actions[rank])
    ]
    if waiting:
        return waiting
    count = orders[0].count("F")
    busiest = max(count * (action_cost["F"] + action_cost["B"]) for action_cost in cost)
    return PlayedOrders(
        makespan=max(clock),
        busiest=busiest,
        held=tuple(_most_held(order) for order in orders),
        burst=max((_most_within(moments, busiest / count) for moments in send_times.values()), default=0),
    )


def _most_held(order: str) -> float:
    held = pending = max_held = 0.0
    for kind in order:
        held += (kind == "F") - (kind in "BI")
        pending += (kind == "I") - (kind == "W")
        max_held = max(max_held, held + PENDING_WEIGHT * pending)
    return max_held


def _most_within(moments: Sequence[float], window: float) -> int:
    """Return the most messages in any period of length `window`; `moments` are in ascending order."""
    first = max_messages = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - window + 1e-9:
            first += 1
        max_messages = max(max_messages, last - first + 1)
    return max_messages
