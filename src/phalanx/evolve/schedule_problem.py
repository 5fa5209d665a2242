"""The pipeline schedule search problem: each rank's order of actions, simulated on a clock.

The axes of the grid are the most activations that a rank holds and the most messages in a burst. The fitness is the
share of a step in which the busiest rank computes, 1 - bubble. The trainer runs an order that is set as
parallel.order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.evolve.problem import Floats, Genome, SearchAxis, SearchOutcome
from phalanx.plan.pipeline_order import (
    Orders,
    PlayedOrders,
    StageTimes,
    named_orders,
    order_mistake,
    play_orders,
)

BATCH = 25
MOST_BURST = 7
CELLS = 16


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """The orders of one pipeline, given its stage times and the number of micro-batches."""

    times: StageTimes
    micro_batches: int
    # Backward may be split into I (gradient of the input) and W (gradient of the weights).
    split: bool = True
    name: str = "schedules"
    batch: int = BATCH

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.times.forward)

    @cached_property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        # Above micro_batches: `peak` weighs a stage by its forward time, so heavier stages exceed it.
        upper = 1.6 * self.micro_batches
        step = max(1.0, upper / CELLS)
        edges = tuple(round(step * (cell + 1) + 0.05, 6) for cell in range(min(CELLS, int(upper / step)) - 1))
        activations = SearchAxis(
            name="most activations held",
            edges=edges,
            labels=(*(f"to {edge:.1f} micro-batches" for edge in edges), "more"),
        )
        bursts = tuple(number + 0.5 for number in range(1, MOST_BURST + 1))
        burst = SearchAxis(
            name="messages in a burst",
            edges=bursts,
            labels=(*(f"{number}" for number in range(1, MOST_BURST + 1)), "more"),
        )
        return activations, burst

    def describe(self) -> Mapping[str, Any]:
        """Return the stage times, the number of micro-batches, and whether backward may be split."""
        return {
            "forward": list(self.times.forward),
            "first_half": list(self.times.first_half),
            "second_half": list(self.times.second_half),
            "send": self.times.send,
            "micro_batches": self.micro_batches,
            "split": self.split,
        }

    def play(self, orders: Sequence[str]) -> PlayedOrders:
        """Simulate a valid order on this problem's clock."""
        played = play_orders(orders, self.times)
        assert isinstance(played, PlayedOrders)
        return played

    def peak(self, played: PlayedOrders) -> float:
        """Return the most activations of a rank, in micro-batches of an average stage.

        A stage with a longer forward stores more per micro-batch.
        """
        mean = sum(self.times.forward) / self.ranks
        return max(num_held * forward / mean for num_held, forward in zip(played.held, self.times.forward, strict=True))

    # ---- candidates ----------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Genome]:
        """Return GPipe, all forward and then all backward: the simplest order."""
        return ({"orders": list(named_orders("gpipe", self.ranks, self.micro_batches))},)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Return a greedy order under random limits."""
        limits = rng.integers(1, self.micro_batches + 1, size=self.ranks)
        # Limits that fall along the pipeline let every rank reach its own limit.
        if rng.random() < 0.7:
            limits = np.sort(limits)[::-1]
        return {"orders": list(self._greedy([int(limit) for limit in limits], rng))}

    def _greedy(self, limits: Sequence[int], rng: np.random.Generator) -> Orders:
        """Return a greedy order with at most `limits[rank]` micro-batches in flight; other choices are random."""
        split = [
            bool(self.split and is_split) for is_split in rng.random(self.ranks) < rng.choice((0.0, 0.5, 1.0, 1.0))
        ]
        backward_first = rng.random() < 0.8
        pending_most = [int(rng.integers(1, self.micro_batches + 1)) for _ in range(self.ranks)]
        return greedy_orders(
            self.times,
            self.micro_batches,
            limits=limits,
            split=split,
            backward_first=backward_first,
            pending_most=pending_most,
        )

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change an order in one of four ways.

        Build a greedy order with nearby limits, move actions of one rank, shift its W, or split or join its
        backwards.
        """
        orders, chance = [str(order) for order in genome["orders"]], rng.random()
        rank = int(rng.integers(self.ranks))
        if chance < 0.35:
            limits = [max(1, _in_flight(order) + int(rng.integers(-1, 2))) for order in orders]
            return {"orders": list(self._greedy(limits, rng))}
        if chance < 0.75:
            for _ in range(int(rng.geometric(0.5))):
                orders[rank] = _moved(orders[rank], rng)
        elif chance < 0.9 and "W" in orders[rank]:
            orders[rank] = _shifted_weights(orders[rank], rng)
        elif self.split and "B" in orders[rank]:
            orders[rank] = orders[rank].replace("B", "IW")
        else:
            orders[rank] = orders[rank].replace("W", "").replace("I", "B")
        return {"orders": list(repair_orders(orders, self.micro_batches, split=self.split))}

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Take the first ranks' orders from one candidate and the remaining ranks' from the other."""
        cut = int(rng.integers(1, self.ranks)) if self.ranks > 1 else 0
        orders = [*first["orders"][:cut], *second["orders"][cut:]]
        return {"orders": list(repair_orders(orders, self.micro_batches, split=self.split))}

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Simulate each candidate: utilisation of the busiest rank, activations and bursts."""
        outcomes = []
        for genome in genomes:
            played = self.play(genome["orders"])
            outcomes.append(
                SearchOutcome(
                    fitness=played.busiest / played.makespan,
                    place=(self.peak(played), float(played.burst)),
                    details={"makespan": played.makespan, "held": list(played.held)},
                )
            )
        return outcomes

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """Return None: a linear model cannot predict the outcome of an order."""
        return None

    def read_genome(self, data: object) -> Genome:
        """Read orders from untrusted JSON and repair those that would deadlock.

        Raises ValueError for a wrong number of ranks, a text that is too long, or other letters than F, B, I and W.
        """
        orders = data.get("orders") if isinstance(data, Mapping) else None
        if not isinstance(orders, list) or len(orders) != self.ranks:
            raise ValueError(f"orders is not a list of {self.ranks} texts")
        if not all(isinstance(order, str) and len(order) <= 4 * self.micro_batches for order in orders):
            raise ValueError("an order is not a text of the letters F, B, I and W, one per action")
        if any(set(order) - set("FBIW") for order in orders):
            raise ValueError("an order has other letters than F, B, I and W")
        return {"orders": list(repair_orders(orders, self.micro_batches, split=self.split))}

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """Return the prompt: the pipeline, this order, and the share of the step that its busiest rank waits."""
        assert outcome.fitness is not None
        letters = "F forward, B backward" + (", or I and W, its halves" if self.split else "")
        return (
            f"Improve a pipeline schedule: one text per rank, one letter per action ({letters}), the n-th F is of "
            f"micro-batch n and so is the n-th B or I. Forward runs from rank 0 to the last, backward returns.\n"
            f"Times: {dict(self.describe())}\n"
            f"Orders: {list(genome['orders'])}\n"
            f"The busiest rank waits {1 - outcome.fitness:.2%} of the step.\n"
            'Answer with one JSON object: {"orders": [one text per rank]}.'
        )


def _in_flight(order: str) -> int:
    """Return the most micro-batches that are in flight at once: forward done, backward not."""
    num_in_flight = most = 0
    for kind in order:
        num_in_flight += (kind == "F") - (kind in "BI")
        most = max(most, num_in_flight)
    return most


def _moved(order: str, rng: np.random.Generator) -> str:
    """Move one action of an order to another place, most often a near one."""
    place = int(rng.integers(len(order)))
    target = place + int(rng.choice((-1, 1))) * int(rng.geometric(0.35))
    kind, shortened = order[place], order[:place] + order[place + 1 :]
    target = min(max(target, 0), len(shortened))
    return shortened[:target] + kind + shortened[target:]


def _shifted_weights(order: str, rng: np.random.Generator) -> str:
    """Move every W of an order up to three actions earlier or later, by the same distance."""
    distance = int(rng.choice((-3, -2, -1, 1, 2, 3)))
    sort_keys = [
        place + (distance if kind == "W" else 0.0) + (0.5 if kind == "W" else 0.0) for place, kind in enumerate(order)
    ]
    return "".join(order[place] for place in sorted(range(len(order)), key=sort_keys.__getitem__))


def greedy_orders(
    times: StageTimes,
    micro_batches: int,
    *,
    limits: Sequence[int],
    split: Sequence[bool],
    backward_first: bool,
    pending_most: Sequence[int],
) -> Orders:
    """Simulate ranks that never wait while an action is ready, and return their orders; these cannot deadlock.

    A rank has at most `limits[rank]` micro-batches in flight, and runs a W while it would wait or once
    `pending_most[rank]` of them are pending.
    """
    ranks = len(times.forward)
    clock, orders = [0.0] * ranks, [""] * ranks
    # [rank][micro-batch], the time when it was done.
    forward: list[list[float]] = [[] for _ in range(ranks)]
    backward: list[list[float]] = [[] for _ in range(ranks)]
    pending = [0] * ranks
    while True:
        next_action: tuple[float, int, str] | None = None
        for rank in range(ranks):
            done_f, done_b, options = len(forward[rank]), len(backward[rank]), []
            if done_f < micro_batches and done_f - done_b < limits[rank]:
                arrivals = forward[rank - 1][done_f : done_f + 1] if rank else [-times.send]
                options += [(max(clock[rank], done_at + times.send), backward_first, "F") for done_at in arrivals]
            if done_b < done_f:
                returns = backward[rank + 1][done_b : done_b + 1] if rank < ranks - 1 else [-times.send]
                kind = "I" if split[rank] else "B"
                options += [(max(clock[rank], done_at + times.send), not backward_first, kind) for done_at in returns]
            # A W fills time in which the rank would wait, or runs once too many of them are pending.
            if pending[rank] and (
                pending[rank] >= pending_most[rank] or not options or min(options)[0] > clock[rank] + 1e-9
            ):
                options = [(clock[rank], False, "W")]
            if options:
                start, _, kind = min(options)
                if next_action is None or (start, rank) < next_action[:2]:
                    next_action = (start, rank, kind)
        if next_action is None:
            return tuple(orders)
        start, rank, kind = next_action
        backward_time = times.first_half[rank] + times.second_half[rank]
        cost = {
            "F": times.forward[rank],
            "I": times.first_half[rank],
            "W": times.second_half[rank],
            "B": backward_time,
        }[kind]
        clock[rank] = start + cost
        orders[rank] += kind
        pending[rank] += (kind == "I") - (kind == "W")
        if kind == "F":
            forward[rank].append(clock[rank])
        elif kind in "BI":
            backward[rank].append(clock[rank])


def repair_orders(orders: Sequence[str], micro_batches: int, *, split: bool) -> Orders:
    """Return orders that a pipeline can run, near to the given ones.

    Missing actions are appended, and a rank that waits in a deadlock runs its next ready action first.
    """
    lists = [_whole_order(order, micro_batches, split=split) for order in orders]
    ranks = len(lists)
    done = {"F": [0] * ranks, "B": [0] * ranks}
    position = [0] * ranks

    def enabled(rank: int, kind: str) -> bool:
        if kind == "F":
            return rank == 0 or done["F"][rank - 1] > done["F"][rank]
        if kind == "W":
            return lists[rank][: position[rank]].count("I") > lists[rank][: position[rank]].count("W")
        ready = rank == ranks - 1 or done["B"][rank + 1] > done["B"][rank]
        return ready and done["F"][rank] > done["B"][rank]

    while True:
        has_progress = False
        for rank in range(ranks):
            while position[rank] < len(lists[rank]) and enabled(rank, lists[rank][position[rank]]):
                kind = lists[rank][position[rank]]
                position[rank] += 1
                has_progress = True
                if kind != "W":
                    done["F" if kind == "F" else "B"][rank] += 1
        if has_progress:
            continue
        stuck = [rank for rank in range(ranks) if position[rank] < len(lists[rank])]
        if not stuck:
            repaired = tuple("".join(actions) for actions in lists)
            assert not order_mistake(repaired), repaired
            return repaired
        # A deadlock: the last waiting rank that has a ready action further down its list runs that one first.
        for rank in reversed(stuck):
            later_ready = [
                index for index in range(position[rank] + 1, len(lists[rank])) if enabled(rank, lists[rank][index])
            ]
            if later_ready:
                lists[rank].insert(position[rank], lists[rank].pop(later_ready[0]))
                break


def _whole_order(order: str, count: int, *, split: bool) -> list[str]:
    """Complete one rank's order to exactly `count` forwards and backwards, with every W after its I."""
    text = order if split else order.replace("W", "").replace("I", "B")
    actions: list[str] = []
    forward = backward = halves = 0
    waiting: list[str] = []  # actions whose precondition is not met yet
    for kind in [*text, *"F" * count, *("B" * count)]:
        waiting.append(kind)
        has_progress = True
        while has_progress:
            has_progress = False
            for at, action in enumerate(waiting):
                if (action == "F" and forward >= count) or (action in "BI" and backward >= count):
                    waiting.pop(at)
                    has_progress = True
                    break
                if action == "F" or (action in "BI" and forward > backward) or (action == "W" and halves > 0):
                    waiting.pop(at)
                    actions.append(action)
                    forward += action == "F"
                    backward += action in "BI"
                    halves += (action == "I") - (action == "W")
                    has_progress = True
                    break
    return [*actions, *"W" * halves]
