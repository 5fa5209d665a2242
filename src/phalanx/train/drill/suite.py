"""The standard drills: two runs of a job in which everything happens that the rules of the specification ask about.

In the first run ranks are killed in a collective and at every point of a save, one hangs, a gradient is poisoned, a bit
flips, both hosts fall and the newest checkpoint is damaged before they are back; then SIGTERM. It is replayed without
faults, bit by bit. In the second a rank is slow, and another falls again at each of its starts, until the run gives up.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.record.account.stragglers import scores
from phalanx.record.archive.history import RunHistory
from phalanx.record.drill import MET, REFUSED
from phalanx.record.run import Run
from phalanx.train.drill.fault import SAVE_POINTS, Fault, parse_all
from phalanx.train.drill.oracle import Verdict
from phalanx.train.drill.perform import Result

LEAST_WORLD = 2
LEAST_SLEEP_S = 0.2  # of the slow rank in every step: several times what ranks of one machine differ by
NAMED = "the slow rank was named"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What a drill shows, by which faults, and the rules that ask for it."""

    claim: str
    kinds: tuple[str, ...]
    rules: tuple[str, ...]
    point: str = ""  # only faults at points that begin so


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One run of the suite."""

    name: str
    faults: tuple[str, ...]
    steps: int
    agents: int
    spares: int
    replay: bool
    proofs: tuple[Proof, ...]
    overrides: tuple[str, ...] = ()
    slow_rank: int | None = None


def parts(step_s: float) -> tuple[Part, ...]:
    """The runs of the suite, for a job whose steps take about so long."""
    return (_recovery(), _limits(step_s))


def _recovery() -> Part:
    saves = tuple(f"kill:rank=0,point=save-{point},step=10" for point in SAVE_POINTS)  # a save each, one after another
    return Part(
        name="recovery",
        faults=(
            "kill:rank=2,step=5,point=collective",
            "nan:rank=0,step=7",
            *saves,
            "flip:rank=1,step=36",
            "hang:rank=3,step=40",
            # Every copy in memory goes, and nobody is left to save again when the newest checkpoint is damaged: so a
            # restore meets it.
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
            Proof(claim="a lost rank is noticed and made good", kinds=("kill",), rules=("FLT001", "FLT002")),
            Proof(claim="a rank that hangs is noticed by its heartbeat", kinds=("hang",), rules=("FLT001", "FLT002")),
            Proof(
                claim="a save that is cut short leaves no half checkpoint",
                kinds=("kill",),
                rules=("CKP002",),
                point="save-",
            ),
            Proof(claim="a damaged checkpoint is refused", kinds=("damage",), rules=("CKP003",)),
            Proof(claim="steps go on with the same bits", kinds=("kill", "hang", "host"), rules=("CKP006", "FLT006")),
            Proof(claim="a step that is not finite is skipped by all", kinds=("nan",), rules=("PRC004",)),
            Proof(claim="a flipped bit is found and its rank named", kinds=("flip",), rules=("FLT007",)),
            Proof(claim="SIGTERM saves within the grace", kinds=("sigterm",), rules=("CKP001",)),
        ),
    )


def _limits(step_s: float) -> Part:
    sleep_s = max(LEAST_SLEEP_S, 2 * step_s)
    return Part(
        name="limits",
        faults=(
            f"slow:rank=2,step=3,sleep_s={sleep_s:.3g},for_s=3600",
            "kill:rank=1,step=20",
            "crash-loop:rank=1,point=restore",  # from the second epoch on
        ),
        steps=60,
        agents=1,
        spares=0,
        replay=False,
        overrides=("fault.restarts=3",),
        slow_rank=2,
        proofs=(
            Proof(claim="a crash loop ends, with a reason", kinds=("crash-loop",), rules=("FLT004",)),
            Proof(claim="a slow rank is named, and nobody else", kinds=("slow",), rules=("TEL004",)),
        ),
    )


def faults_of(part: Part) -> tuple[Fault, ...]:
    """The faults, numbered."""
    return parse_all(part.faults)


def named(run: Run, *, slow_rank: int, world: int) -> Verdict:
    """Whether the record names the rank that was slow, and nobody else."""
    rank = slow_rank % world
    try:
        found = scores(RunHistory.open(run))
    except (PhalanxError, KeyError, ValueError) as error:
        return Verdict(name=NAMED, ok=False, evidence=f"{type(error).__name__}: {error}")
    who = [one.rank for one in found.named]
    shown = ", ".join(f"rank {one.rank} ({one.score:.1f} times its peers)" for one in found.named) or "nobody"
    return Verdict(name=NAMED, ok=who == [rank], evidence=f"rank {rank} was slow; named: {shown}")


def shown(part: Part, result: Result) -> list[tuple[str, tuple[str, ...], bool]]:
    """(claim, rules, whether it was put to the test) of each proof."""
    fired = [one.fault for one in result.outcomes if one.judged and (one.kind != "damage" or _met(result))]
    return [(one.claim, one.rules, any(_is_of(text, one) for text in fired)) for one in part.proofs]


def _met(result: Result) -> bool:
    """Whether a restore met a damaged checkpoint; one that nobody read proves nothing."""
    return any(one.name == REFUSED and MET in one.evidence for one in result.verdicts)


def _is_of(text: str, proof: Proof) -> bool:
    kind, _, keys = text.partition(":")
    return kind in proof.kinds and (not proof.point or f"point={proof.point}" in keys)
