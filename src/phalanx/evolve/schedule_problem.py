"""Pipeline orders as candidates: what each rank does, played on a clock; the trainer runs them as parallel.order.

The grid: most activations that a rank holds × messages in a burst. Fitness is the share of a step in which the busiest
rank computes, 1 - bubble.
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
    """Orders of one pipeline: its ranks, micro-batches and times."""

    times: StageTimes
    micro_batches: int
    split: bool = True  # whether backward may be split into I and W
    name: str = "schedules"
    batch: int = BATCH

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return len(self.times.forward)

    @cached_property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        most = 1.6 * self.micro_batches
        step = max(1.0, most / CELLS)
        edges = tuple(round(step * (cell + 1) + 0.05, 6) for cell in range(min(CELLS, int(most / step)) - 1))
        held = SearchAxis(
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
        return held, burst

    def describe(self) -> Mapping[str, Any]:
        """Times, micro-batches, and what is allowed."""
        return {
            "forward": list(self.times.forward),
            "first_half": list(self.times.first_half),
            "second_half": list(self.times.second_half),
            "send": self.times.send,
            "micro_batches": self.micro_batches,
            "split": self.split,
        }

    def play(self, orders: Sequence[str]) -> PlayedOrders:
        """A valid order on this problem's clock."""
        played = play_orders(orders, self.times)
        assert isinstance(played, PlayedOrders)
        return played

    def peak(self, played: PlayedOrders) -> float:
        """Most activations of a rank, in micro-batches of an average stage: a heavier stage holds more of each."""
        mean = sum(self.times.forward) / self.ranks
        return max(held * forward / mean for held, forward in zip(played.held, self.times.forward, strict=True))

    # ---- candidates ----------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Genome]:
        """All forward, then all backward: the order that needs no thought."""
        return ({"orders": list(named_orders("gpipe", self.ranks, self.micro_batches))},)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """A greedy order under random limits."""
        limits = rng.integers(1, self.micro_batches + 1, size=self.ranks)
        if rng.random() < 0.7:  # limits that fall along the pipeline let every rank reach its own
            limits = np.sort(limits)[::-1]
        return {"orders": list(self._greedy([int(one) for one in limits], rng))}

    def _greedy(self, limits: Sequence[int], rng: np.random.Generator) -> Orders:
        """Every rank does what is ready: at most `limits` micro-batches in flight, W where it would wait."""
        split = [bool(self.split and one) for one in rng.random(self.ranks) < rng.choice((0.0, 0.5, 1.0, 1.0))]
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
        """Move an action, shift the W of a rank, split or join a rank's backwards, or begin anew from its limits."""
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
        """The first ranks of one, the last of the other."""
        cut = int(rng.integers(1, self.ranks)) if self.ranks > 1 else 0
        orders = [*first["orders"][:cut], *second["orders"][cut:]]
        return {"orders": list(repair_orders(orders, self.micro_batches, split=self.split))}

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Bubble, activations and bursts of each."""
        found = []
        for genome in genomes:
            played = self.play(genome["orders"])
            found.append(
                SearchOutcome(
                    fitness=played.busiest / played.makespan,
                    place=(self.peak(played), float(played.burst)),
                    details={"makespan": played.makespan, "held": list(played.held)},
                )
            )
        return found

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """None: an order is no point that a straight line goes through."""
        return None

    def read_genome(self, data: object) -> Genome:
        """Orders that somebody wrote: letters are checked, and what waits for ever is repaired."""
        orders = data.get("orders") if isinstance(data, Mapping) else None
        if not isinstance(orders, list) or len(orders) != self.ranks:
            raise ValueError(f"orders is not a list of {self.ranks} texts")
        if not all(isinstance(one, str) and len(one) <= 4 * self.micro_batches for one in orders):
            raise ValueError("an order is not a text of the letters F, B, I and W, one per action")
        if any(set(one) - set("FBIW") for one in orders):
            raise ValueError("an order has other letters than F, B, I and W")
        return {"orders": list(repair_orders(orders, self.micro_batches, split=self.split))}

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """The pipeline, this order, and how long its busiest rank waits."""
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
    held = most = 0
    for kind in order:
        held += (kind == "F") - (kind in "BI")
        most = max(most, held)
    return most


def _moved(order: str, rng: np.random.Generator) -> str:
    """One action elsewhere, most often near."""
    place = int(rng.integers(len(order)))
    target = place + int(rng.choice((-1, 1))) * int(rng.geometric(0.35))
    kind, rest = order[place], order[:place] + order[place + 1 :]
    target = min(max(target, 0), len(rest))
    return rest[:target] + kind + rest[target:]


def _shifted_weights(order: str, rng: np.random.Generator) -> str:
    """Every W so many actions later or earlier."""
    by = int(rng.choice((-3, -2, -1, 1, 2, 3)))
    places = [place + (by if kind == "W" else 0.0) + (0.5 if kind == "W" else 0.0) for place, kind in enumerate(order)]
    return "".join(order[one] for one in sorted(range(len(order)), key=places.__getitem__))


def greedy_orders(
    times: StageTimes,
    micro_batches: int,
    *,
    limits: Sequence[int],
    split: Sequence[bool],
    backward_first: bool,
    pending_most: Sequence[int],
) -> Orders:
    """The orders of ranks that never wait while they may do something; they cannot wait for each other."""
    ranks = len(times.forward)
    clock, made = [0.0] * ranks, [""] * ranks
    forward: list[list[float]] = [[] for _ in range(ranks)]  # when each micro-batch was done
    backward: list[list[float]] = [[] for _ in range(ranks)]
    pending = [0] * ranks
    while True:
        best: tuple[float, int, str] | None = None
        for rank in range(ranks):
            done_f, done_b, options = len(forward[rank]), len(backward[rank]), []
            if done_f < micro_batches and done_f - done_b < limits[rank]:
                before = forward[rank - 1][done_f : done_f + 1] if rank else [-times.send]
                options += [(max(clock[rank], one + times.send), backward_first, "F") for one in before]
            if done_b < done_f:
                after = backward[rank + 1][done_b : done_b + 1] if rank < ranks - 1 else [-times.send]
                kind = "I" if split[rank] else "B"
                options += [(max(clock[rank], one + times.send), not backward_first, kind) for one in after]
            if pending[rank] and (
                pending[rank] >= pending_most[rank] or not options or min(options)[0] > clock[rank] + 1e-9
            ):
                options = [(clock[rank], False, "W")]
            if options:
                start, _, kind = min(options)
                if best is None or (start, rank) < best[:2]:
                    best = (start, rank, kind)
        if best is None:
            return tuple(made)
        start, rank, kind = best
        whole = times.first_half[rank] + times.second_half[rank]
        cost = {"F": times.forward[rank], "I": times.first_half[rank], "W": times.second_half[rank], "B": whole}[kind]
        clock[rank] = start + cost
        made[rank] += kind
        pending[rank] += (kind == "I") - (kind == "W")
        if kind == "F":
            forward[rank].append(clock[rank])
        elif kind in "BI":
            backward[rank].append(clock[rank])


def repair_orders(orders: Sequence[str], micro_batches: int, *, split: bool) -> Orders:
    """The orders nearest to these that a pipeline can run: what is missing comes last, what comes too early waits."""
    lists = [_whole_order(order, micro_batches, split=split) for order in orders]
    ranks = len(lists)
    done = {"F": [0] * ranks, "B": [0] * ranks}
    place = [0] * ranks

    def enabled(rank: int, kind: str) -> bool:
        if kind == "F":
            return rank == 0 or done["F"][rank - 1] > done["F"][rank]
        if kind == "W":
            return lists[rank][: place[rank]].count("I") > lists[rank][: place[rank]].count("W")
        ready = rank == ranks - 1 or done["B"][rank + 1] > done["B"][rank]
        return ready and done["F"][rank] > done["B"][rank]

    while True:
        moved = False
        for rank in range(ranks):
            while place[rank] < len(lists[rank]) and enabled(rank, lists[rank][place[rank]]):
                kind = lists[rank][place[rank]]
                place[rank] += 1
                moved = True
                if kind != "W":
                    done["F" if kind == "F" else "B"][rank] += 1
        if moved:
            continue
        stuck = [rank for rank in range(ranks) if place[rank] < len(lists[rank])]
        if not stuck:
            repaired = tuple("".join(one) for one in lists)
            assert not order_mistake(repaired), repaired
            return repaired
        # Of the ranks that wait, one has an action that is ready: it comes first.
        for rank in reversed(stuck):
            later = [at for at in range(place[rank] + 1, len(lists[rank])) if enabled(rank, lists[rank][at])]
            if later:
                lists[rank].insert(place[rank], lists[rank].pop(later[0]))
                break


def _whole_order(order: str, count: int, *, split: bool) -> list[str]:
    """Exactly `count` forwards and backwards, every W after its I."""
    text = order if split else order.replace("W", "").replace("I", "B")
    found: list[str] = []
    forward = backward = halves = 0
    early: list[str] = []  # that wait for what they need
    for kind in [*text, *"F" * count, *("B" * count)]:
        early.append(kind)
        taken = True
        while taken:
            taken = False
            for at, one in enumerate(early):
                if (one == "F" and forward >= count) or (one in "BI" and backward >= count):
                    early.pop(at)
                    taken = True
                    break
                if one == "F" or (one in "BI" and forward > backward) or (one == "W" and halves > 0):
                    early.pop(at)
                    found.append(one)
                    forward += one == "F"
                    backward += one in "BI"
                    halves += (one == "I") - (one == "W")
                    taken = True
                    break
    return [*found, *"W" * halves]
