"""Choose the faults of a drill: two standard drills, random faults at a rate (chaos), the smallest set that fails.

In the first standard drill ranks are killed in a collective and at every point of a save, one hangs, a gradient is
poisoned, a bit flips, both hosts fail and the newest checkpoint is damaged before they are back; then SIGTERM. It is
replayed without faults, bit by bit. In the second a rank is slow, and another fails at each of its starts, until the
run gives up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from phalanx.errors import PhalanxError, mistake
from phalanx.record.account.stragglers import straggler_scores
from phalanx.record.archive.history import RunHistory
from phalanx.record.drill_record import MET, REFUSED
from phalanx.record.run import Run
from phalanx.train.drill.faults import SAVE_POINTS, Fault, parse_fault, parse_faults
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.perform import DrillResult
from phalanx.units import MINUTE_S

MOST_FAULTS = 100_000
# Losses of one host in a run: a launcher restarts a host so often (elastic.client), and no more.
LOSSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillTarget:
    """The size of the run that is drilled."""

    world: int
    hosts: int = 1
    spares: int = 0


DAMAGES = ("flip", "truncate", "swap", "missing")
# (weight, fewest hosts, fault to inject). Bit flips are not drawn: each takes a slot out of service for good, and a
# long run on one machine would run out of slots, rightly.
Draw = Callable[[random.Random, DrillTarget], str]
MIX: tuple[tuple[float, int, Draw], ...] = (
    (3, 1, lambda source, target: f"kill:rank={_pick_rank(source, target)}"),
    (4, 1, lambda source, target: f"kill:rank={_pick_rank(source, target)},point=collective"),
    (1, 1, lambda source, target: f"kill:rank={_pick_ranks(source, target)}"),
    (1, 1, lambda source, target: f"kill:rank={_pick_rank(source, target)},point=init"),
    (1, 1, lambda source, target: f"kill:rank={_pick_rank(source, target)},point=restore"),
    # Rank 0 passes all points of a save, the other ranks only the first four.
    (2, 1, lambda source, target: f"kill:rank=0,point=save-{source.choice(SAVE_POINTS)}"),
    (1, 1, lambda source, target: f"hang:rank={_pick_rank(source, target)}"),
    (1, 1, lambda source, target: f"raise:rank={_pick_rank(source, target)}"),
    (1, 1, lambda source, target: f"memory:rank={_pick_rank(source, target)},how={source.choice(('raise', 'limit'))}"),
    (2, 1, lambda source, target: f"nan:rank={_pick_rank(source, target)}"),
    (1, 1, lambda source, target: f"slow:rank={_pick_rank(source, target)},sleep_s=0.05,for_s=2"),
    (1, 1, lambda source, target: f"disk-full:rank={_pick_rank(source, target)},for_s=3"),
    (1, 1, lambda source, target: f"damage:how={source.choice(DAMAGES)},seed={source.randrange(10**6)}"),
    (1, 1, lambda source, target: "coordinator"),
    (1, 2, lambda source, target: f"host:host={source.randrange(target.hosts)}"),
)


def draw_faults(*, rate_per_min: float, minutes: float, seed: int, target: DrillTarget) -> tuple[Fault, ...]:
    """Draw the faults of a chaos run; the same for the same seed, with exponential gaps between them."""
    if rate_per_min * minutes > MOST_FAULTS:
        raise mistake("--chaos", f"{rate_per_min:g} per minute for {minutes:g} minutes is too much", fix="ask for less")
    source = random.Random(seed)
    faults: list[Fault] = []
    for number, at_s in enumerate(poisson_times(source, rate_per_min=rate_per_min, until_s=minutes * MINUTE_S)):
        fault = _pick_fault(source, target)
        while (
            fault.kind == "host"
            and sum(drawn.kind == "host" and drawn.host == fault.host for drawn in faults) >= LOSSES
        ):
            fault = _pick_fault(source, target)
        faults.append(replace(fault, id=number, at_s=round(at_s, 3)))
    return tuple(faults)


def poisson_times(source: random.Random, *, rate_per_min: float, until_s: float) -> list[float]:
    """Draw the times of a Poisson process in seconds, up to `until_s`."""
    times: list[float] = []
    at_s = 0.0
    while rate_per_min > 0:
        at_s += -math.log1p(-source.random()) * MINUTE_S / rate_per_min
        if at_s >= until_s:
            break
        times.append(at_s)
    return times


def _pick_fault(source: random.Random, target: DrillTarget) -> Fault:
    possible = [(weight, make) for weight, hosts, make in MIX if target.hosts >= hosts]
    [(_, make)] = source.choices(possible, weights=[weight for weight, _ in possible])
    return parse_fault(make(source, target))


def _pick_rank(source: random.Random, target: DrillTarget) -> int:
    return source.randrange(target.world)


def _pick_ranks(source: random.Random, target: DrillTarget) -> str:
    count = min(2, target.world)
    return "+".join(map(str, sorted(source.sample(range(target.world), count))))


# The standard drills.

LEAST_WORLD = 2
# Sleep of the slow rank in every step: several times the differences between ranks of one machine.
LEAST_SLEEP_S = 0.2
NAMED = "the slow rank was named"


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteProof:
    """A claim that a drill shows, the faults that show it, and the rules that ask for it."""

    claim: str
    kinds: tuple[str, ...]
    rules: tuple[str, ...]
    point: str = ""  # only faults at points with this prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class SuitePart:
    """One run of the suite."""

    name: str
    faults: tuple[str, ...]
    steps: int
    agents: int
    spares: int
    replay: bool
    proofs: tuple[SuiteProof, ...]
    overrides: tuple[str, ...] = ()
    slow_rank: int | None = None


def suite_parts(step_s: float) -> tuple[SuitePart, ...]:
    """Return the runs of the suite, for a job whose steps take about `step_s` seconds."""
    return (_recovery_part(), _limits_part(step_s))


def _recovery_part() -> SuitePart:
    # One kill per save, in consecutive saves.
    saves = tuple(f"kill:rank=0,point=save-{point},step=10" for point in SAVE_POINTS)
    return SuitePart(
        name="recovery",
        faults=(
            "kill:rank=2,step=5,point=collective",
            "nan:rank=0,step=7",
            *saves,
            "flip:rank=1,step=36",
            "hang:rank=3,step=40",
            # All in-memory checkpoints are lost, and no rank is left to save again when the newest checkpoint is
            # damaged: so a restore reads the damaged one.
            "host:host=0,step=48",
            "host:host=1,step=48",
            "damage:step=48",
            "sigterm:step=54",
        ),
        steps=100,
        agents=2,
        spares=1,
        replay=True,
        overrides=("checkpoint.interval_s=0.05", "checkpoint.keep=3"),
        proofs=(
            SuiteProof(claim="a lost rank is noticed and replaced", kinds=("kill",), rules=("FLT001", "FLT002")),
            SuiteProof(
                claim="a rank that hangs is noticed by its heartbeat", kinds=("hang",), rules=("FLT001", "FLT002")
            ),
            SuiteProof(
                claim="a save that is cut short leaves no half checkpoint",
                kinds=("kill",),
                rules=("CKP002",),
                point="save-",
            ),
            SuiteProof(claim="a damaged checkpoint is refused", kinds=("damage",), rules=("CKP003",)),
            SuiteProof(
                claim="steps go on with the same bits", kinds=("kill", "hang", "host"), rules=("CKP006", "FLT006")
            ),
            SuiteProof(claim="a step that is not finite is skipped by all", kinds=("nan",), rules=("PRC004",)),
            SuiteProof(claim="a flipped bit is found and its rank named", kinds=("flip",), rules=("FLT007",)),
            SuiteProof(claim="SIGTERM saves within the grace", kinds=("sigterm",), rules=("CKP001",)),
        ),
    )


def _limits_part(step_s: float) -> SuitePart:
    sleep_s = max(LEAST_SLEEP_S, 2 * step_s)
    return SuitePart(
        name="limits",
        faults=(
            f"slow:rank=2,step=3,sleep_s={sleep_s:.3g},for_s=3600",
            "kill:rank=1,step=20",
            "crash-loop:rank=1,point=restore",  # from the second generation on
        ),
        steps=60,
        agents=1,
        spares=0,
        replay=False,
        overrides=("fault.restarts=3",),
        slow_rank=2,
        proofs=(
            SuiteProof(claim="a crash loop ends, with a reason", kinds=("crash-loop",), rules=("FLT004",)),
            SuiteProof(claim="a slow rank is named, and nobody else", kinds=("slow",), rules=("TEL004",)),
        ),
    )


def suite_faults(part: SuitePart) -> tuple[Fault, ...]:
    """Return the part's faults, numbered."""
    return parse_faults(part.faults)


def judge_slow_rank(run: Run, *, slow_rank: int, world: int) -> Verdict:
    """Judge whether the record names the slow rank, and no other rank."""
    rank = slow_rank % world
    try:
        scores = straggler_scores(RunHistory.open(run))
    except (PhalanxError, KeyError, ValueError) as error:
        return Verdict(name=NAMED, ok=False, evidence=f"{type(error).__name__}: {error}")
    named_ranks = [straggler.rank for straggler in scores.named]
    shown = (
        ", ".join(f"rank {straggler.rank} ({straggler.score:.1f} times its peers)" for straggler in scores.named)
        or "nobody"
    )
    return Verdict(name=NAMED, ok=named_ranks == [rank], evidence=f"rank {rank} was slow; named: {shown}")


def claims_shown(part: SuitePart, result: DrillResult) -> list[tuple[str, tuple[str, ...], bool]]:
    """Return (claim, rules, whether a fault tested it) of each proof."""
    # A restore read the damaged file.
    was_read = any(verdict.name == REFUSED and MET in verdict.evidence for verdict in result.verdicts)
    fired = [
        outcome.fault.partition(":")
        for outcome in result.outcomes
        if outcome.judged and (outcome.kind != "damage" or was_read)
    ]
    claims = []
    for proof in part.proofs:
        point = f"point={proof.point}" if proof.point else ""
        tested = any(kind in proof.kinds and point in keys for kind, _, keys in fired)
        claims.append((proof.claim, proof.rules, tested))
    return claims


# The smallest subset of a schedule that still fails.

T = TypeVar("T")


def shrink_schedule(
    items: Sequence[T],
    fails: Callable[[Sequence[T]], bool],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[T, ...]:
    """Return a subset of `items` that still fails, as small as the time allows; all of `items` is known to fail.

    Delta debugging (Zeller and Hildebrandt 2002).

    >>> shrink_schedule(range(100), lambda some: {7, 42} <= set(some), budget_s=10)
    (7, 42)
    """
    until_s = clock() + budget_s
    remaining, num_parts = tuple(items), 2
    while len(remaining) >= 2:
        for candidate in _smaller_candidates(remaining, num_parts):
            if clock() >= until_s:
                return remaining
            if fails(candidate):
                # A part that fails alone is halved again; after removing a part the parts keep their size.
                num_parts = 2 if len(candidate) <= len(remaining) // num_parts + 1 else max(num_parts - 1, 2)
                remaining = candidate
                break
        else:
            if num_parts >= len(remaining):
                break
            num_parts = min(2 * num_parts, len(remaining))
    return remaining


def _smaller_candidates(items: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """Return each part alone, then all items without each part."""
    size, more = divmod(len(items), parts)
    cuts = [0]
    for number in range(parts):
        cuts.append(cuts[-1] + size + (number < more))
    ranges = list(pairwise(cuts))
    alone = [items[low:high] for low, high in ranges]
    without = [items[:low] + items[high:] for low, high in ranges] if parts > 2 else []
    return [candidate for candidate in (*alone, *without) if candidate]
