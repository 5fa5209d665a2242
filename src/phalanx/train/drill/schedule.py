"""Chaos: faults drawn at a rate, with exponential gaps between them, from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.errors import mistake
from phalanx.train.drill.fault import SAVE_POINTS, Fault, parse
from phalanx.units import MINUTE_S

MOST_FAULTS = 100_000
LOSSES = 3  # of one host in a run: a launcher brings a host back so often (supervise.client), and no more


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What there is to break."""

    world: int
    hosts: int = 1
    spares: int = 0


# (weight, least hosts, what to inject). Bit flips are not drawn: each takes a place out of service for good, and a
# long run on one machine would end for want of places, rightly.
Draw = Callable[[random.Random, Stage], str]
MIX: tuple[tuple[float, int, Draw], ...] = (
    (3, 1, lambda draw, stage: f"kill:rank={_rank(draw, stage)}"),
    (4, 1, lambda draw, stage: f"kill:rank={_rank(draw, stage)},point=collective"),
    (1, 1, lambda draw, stage: f"kill:rank={_several(draw, stage)}"),
    (1, 1, lambda draw, stage: f"kill:rank={_rank(draw, stage)},point=init"),
    (1, 1, lambda draw, stage: f"kill:rank={_rank(draw, stage)},point=restore"),
    (2, 1, lambda draw, stage: f"kill:rank={_saver(draw)}"),
    (1, 1, lambda draw, stage: f"hang:rank={_rank(draw, stage)}"),
    (1, 1, lambda draw, stage: f"raise:rank={_rank(draw, stage)}"),
    (1, 1, lambda draw, stage: f"memory:rank={_rank(draw, stage)},how={draw.choice(('raise', 'limit'))}"),
    (2, 1, lambda draw, stage: f"nan:rank={_rank(draw, stage)}"),
    (1, 1, lambda draw, stage: f"slow:rank={_rank(draw, stage)},sleep_s=0.05,for_s=2"),
    (1, 1, lambda draw, stage: f"disk-full:rank={_rank(draw, stage)},for_s=3"),
    (1, 1, lambda draw, stage: f"damage:how={draw.choice(('flip', 'truncate', 'swap', 'missing'))},seed={_seed(draw)}"),
    (1, 1, lambda draw, stage: "coordinator"),
    (1, 2, lambda draw, stage: f"host:host={draw.randrange(stage.hosts)}"),
)


def draw(*, rate_per_min: float, minutes: float, seed: int, stage: Stage) -> tuple[Fault, ...]:
    """The faults of a chaos run: the same for the same seed, the gaps between them exponential."""
    if rate_per_min * minutes > MOST_FAULTS:
        raise mistake("--chaos", f"{rate_per_min:g} per minute for {minutes:g} minutes is too much", fix="ask for less")
    source = random.Random(seed)
    found: list[Fault] = []
    for number, at_s in enumerate(times(source, rate_per_min=rate_per_min, until_s=minutes * MINUTE_S)):
        fault = _pick(source, stage)
        while fault.kind == "host" and sum(one.kind == "host" and one.host == fault.host for one in found) >= LOSSES:
            fault = _pick(source, stage)
        found.append(replace(fault, id=number, at_s=round(at_s, 3)))
    return tuple(found)


def times(source: random.Random, *, rate_per_min: float, until_s: float) -> list[float]:
    """Moments of a Poisson process, in seconds: every gap is drawn, none is the mean."""
    found: list[float] = []
    at_s = 0.0
    while rate_per_min > 0:
        at_s += -math.log1p(-source.random()) * MINUTE_S / rate_per_min
        if at_s >= until_s:
            break
        found.append(at_s)
    return found


def _pick(source: random.Random, stage: Stage) -> Fault:
    possible = [(weight, make) for weight, hosts, make in MIX if stage.hosts >= hosts]
    [(_, make)] = source.choices(possible, weights=[weight for weight, _ in possible])
    return parse(make(source, stage))


def _rank(source: random.Random, stage: Stage) -> int:
    return source.randrange(stage.world)


def _several(source: random.Random, stage: Stage) -> str:
    count = min(2, stage.world)
    return "+".join(map(str, sorted(source.sample(range(stage.world), count))))


def _saver(source: random.Random) -> str:
    """Rank 0 passes all points of a save, the others the first four."""
    return f"0,point=save-{source.choice(SAVE_POINTS)}"


def _seed(source: random.Random) -> int:
    return source.randrange(10**6)
