"""COM001: the algorithm of every collective is near the best one for its group and message size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.network.nccl_choice import ExpectedTime, expect_collective, rival_doubt
from phalanx.network.nccl_cluster import two_levels_s
from phalanx.network.nccl_tables import ALGORITHMS
from phalanx.plan.plan import Plan
from phalanx.rules.catalog.com_messages import Message, damaged_traffic, message_system, message_time, plan_messages
from phalanx.rules.catalog.shared import without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

AUTO = "auto"
# The values of comm.algorithm, as NCCL names them.
FORCED = {"ring": "Ring", "tree": "Tree", "nvls": "NVLS"}
TO_AUTO = Edit(key="comm.algorithm", value=AUTO, safe=True, note="NCCL picks by message and group")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Race:
    """The seconds of every available algorithm for one message, and the algorithm that the job uses."""

    message: Message
    seconds: dict[str, float]
    # Algorithms that the used one is compared with.
    rivals: tuple[str, ...]
    taken: str
    forced: bool  # by the job, so that changing the setting fixes it
    picked: ExpectedTime  # NCCL's own choice
    doubt: float  # factor by which the model may exaggerate

    @property
    def best(self) -> str:
        return min(self.rivals, key=lambda name: self.seconds[name])

    @property
    def slower(self) -> float:
        """The modelled time over that of the best algorithm."""
        taken_s, best_s = self.seconds.get(self.taken, math.inf), self.seconds[self.best]
        return taken_s / best_s if best_s > 0 else 1.0

    @property
    def ratio(self) -> float:
        """`slower` after division by the model's uncertainty; at least 1."""
        return max(1.0, self.slower / self.doubt) if self.taken != self.best else 1.0

    @property
    def line(self) -> str:
        message = self.message
        times = ", ".join(f"{name} {1e6 * value:,.0f} µs" for name, value in self.seconds.items())
        low, high = (1e6 * self.picked.low_s, 1e6 * self.picked.high_s)
        return (
            f"{message.axis} {message.operation} of {message.size} between {message.ranks:,} ranks {message.where}: "
            f"{times}; NCCL picks {self.picked.algorithm} {self.picked.protocol} "
            f"(80 % of systems: {low:,.0f} to {high:,.0f} µs)"
        )


def check(evidence: Evidence, limits: Limits) -> Outcome | tuple[Outcome, ...]:
    """Compare the time of the used algorithm with the shortest time, for the message with the largest ratio."""
    name, algorithm = evidence.profile.name, evidence.the_job.comm.algorithm
    if name == "tpu":
        return unknown(
            "the compiler (XLA) owns the algorithms of TPU collectives and does not say",
            fix="nothing can be set; waive the rule, or compare a profile of the step with phalanx plan",
        )
    if name == "cpu-gloo":
        return _judge_gloo(evidence, algorithm)
    if (damaged := damaged_traffic(evidence.the_plan)) is not None:
        return damaged
    sent = plan_messages(evidence)
    if not sent:
        return exempt("no group of this plan sums or gathers anything")
    if (missing := without_measurement(evidence, "the time of a collective")) is not None:
        return missing
    outcome = _judge_messages(evidence, limits, sent, algorithm)
    from_environment = _judge_environment(evidence, algorithm)
    return (outcome, from_environment) if from_environment is not None else outcome


def _judge_gloo(evidence: Evidence, wanted: str) -> Outcome:
    if wanted == AUTO or wanted == "ring":
        return passed("gloo has one all-reduce, a ring: there is nothing to choose")
    return failed(
        f'comm.algorithm = "{wanted}" has no effect: gloo has one all-reduce, a ring',
        value=wanted,
        threshold=AUTO,
        at="comm.algorithm",
        impact=Impact(note="no time: the setting is ignored"),
        edits=(TO_AUTO,),
    )


def _judge_messages(evidence: Evidence, limits: Limits, sent: tuple[Message, ...], wanted: str) -> Outcome:
    two_levels = limits.flag("two_levels")
    races = [
        _compare_algorithms(evidence.the_plan, message, _forced_algorithm(evidence, message), two_levels=two_levels)
        for message in sent
    ]
    worst = max(races, key=lambda race: race.ratio)
    max_ratio = limits.number("most_ratio")
    if worst.ratio <= max_ratio:
        is_forced = any(race.forced for race in races)
        return passed(
            f"{wanted + ' is' if is_forced else 'NCCL picks'} within {max_ratio:.2f}x of the best for every message: "
            f"{worst.ratio:.2f}x at worst",
            formula=tuple(race.line for race in races),
            value=worst.ratio,
            threshold=max_ratio,
            unit="x",
        )
    return _slow_algorithm(evidence, worst, max_ratio)


def _forced_algorithm(evidence: Evidence, message: Message) -> str:
    """Return the algorithm that the job forces on a message.

    Phalanx sets NCCL_ALGO for all-reduces only (train/worker.py).
    """
    is_exempt = evidence.practice.trainer == "phalanx" and message.operation != "all-reduce"
    return AUTO if is_exempt else evidence.the_job.comm.algorithm


def _compare_algorithms(plan: Plan, message: Message, wanted: str, *, two_levels: bool) -> _Race:
    group, cluster = message_system(message, plan.cluster), plan.cluster
    expected = {
        name: expect_collective(group, message.nbytes, operation=message.operation, algorithm=name)
        for name in ALGORITHMS
    }
    seconds: dict[str, float] = {name: time.seconds for name, time in expected.items() if time is not None}
    picked = message_time(message, cluster)
    used_algorithm = picked.algorithm if wanted == AUTO else FORCED.get(wanted, wanted)
    # NCCL's own choice is compared only with two levels: the model agrees with every choice that was logged, and
    # times of two algorithms are not known well enough to overrule it.
    rivals: list[str] = [picked.algorithm] if wanted == AUTO else list(seconds)
    if two_levels and wanted == AUTO:
        two_level_s = two_levels_s(
            cluster,
            domains=message.domains,
            per_domain=message.per_domain,
            nbytes=message.nbytes,
            operation=message.operation,
        )
        if math.isfinite(two_level_s):
            seconds["two levels"] = two_level_s
            rivals.append("two levels")
    return _Race(
        message=message,
        seconds=seconds,
        rivals=tuple(rivals),
        taken=used_algorithm,
        forced=wanted != AUTO,
        picked=picked,
        doubt=rival_doubt(group, message.nbytes),
    )


def _slow_algorithm(evidence: Evidence, race: _Race, most: float) -> Outcome:
    message, step_s = race.message, evidence.the_plan.prediction.step_s
    slowdown = (
        f"{race.taken} takes {race.slower:.1f}x the time of {race.best} for {message.operation} of {message.size}"
    )
    impact = evidence.loses(
        (1 - 1 / race.ratio) * message.wire_s / max(step_s, 1e-30),
        "at most: the difference, as far as nothing hides it",
    )
    severity: Severity | None = None
    if race.taken not in race.seconds:
        severity = "error"
        slowdown = f"there is no {race.taken} for {message.operation} between {message.ranks:,} ranks {message.where}"
        impact = Impact(note="the job does not start: NCCL ends with an error, or (older releases) ignores the setting")
    return failed(
        f"{slowdown} ({message.axis} axis)",
        formula=(
            race.line,
            f"T({race.taken}) / T({race.best}) = {race.slower:.2f}, of which the model may exaggerate {race.doubt:g}x: "
            f"{race.ratio:.2f}, at most {most:.2f}",
        ),
        value=race.ratio if math.isfinite(race.ratio) else None,
        threshold=most,
        unit="x",
        at="comm.algorithm" if race.forced else "parallel.shard",
        severity=severity,
        impact=impact,
        fix="" if race.forced else _two_levels(message),
        edits=(TO_AUTO,) if race.forced else (),
    )


def _two_levels(one: Message) -> str:
    return (
        f"use two levels: parallel.shard = {one.per_domain} gathers inside domains and sums once between them (HSDP), "
        "where memory allows it; or let NCCL sum in the network (NCCL_COLLNET_ENABLE=1, with SHARP)"
    )


def _judge_environment(evidence: Evidence, wanted: str) -> Outcome | None:
    """Return a failure if NCCL_ALGO is set outside the job, else None.

    The variable applies to every group and size, and no record of the job shows it.
    """
    set_to = (evidence.host.environment or {}).get("NCCL_ALGO", "") if evidence.host is not None else ""
    if not set_to:
        return None
    return failed(
        f"NCCL_ALGO = {set_to[:40]!r} in the environment decides for every group and every size",
        value=set_to[:40],
        threshold="not set",
        at="comm.algorithm",
        impact=Impact(note="not known: it may be the best for one message and 4.6x slower for another"),
        fix="unset NCCL_ALGO"
        + ("" if wanted != AUTO else "; where one algorithm must be forced, say so in the job file"),
    )


RULE = Rule(
    id="COM001",
    slug="algorithm-near-optimal",
    severity="warning",
    requires="JP",
    uses="H",
    requirement="The algorithm of every collective is within 10 % of the best one for its group and its size.",
    why="""
Ring or tree is a question of nodes *and* bytes. In NCCL's own cost model an all-reduce of 64 MiB on nodes of 8 H100 is
faster as a ring on 2 nodes (434 against 499 µs), a tie on 4, and 4.6 times faster as a tree on 64 (584 against 2,689
µs); where the NVSwitches add (NVLSTree), they beat both. A ring over thousands of ranks pays thousands of latencies.
Reduce-scatter and all-gather, the traffic of ZeRO and FSDP, have no tree in NCCL at all: a plain `NCCL_ALGO=tree`,
which holds for every collective, ends in an error there (or in nothing, in older releases). Phalanx sets
`NCCL_ALGO=allreduce:tree`, which leaves them alone.
""",
    how="""
For every sum, gather and scatter of the plan, with its real group and message (gradient bucket, block of layers, or
activations): `T(algorithm) ≤ 1.10 · d · min T` over NCCL's algorithms, times of the model that `phalanx fabric
collective` prints (`network/nccl_choice.py`), d how far it may exaggerate one over the other (1.5 between nodes below
256 MiB, 1.15 above, 1.1 in a node). What NCCL picks by itself is taken for the best of its own; from 4,096 devices on
it is held against two levels, inside a domain and between domains. `NCCL_ALGO` in the environment is a finding by
itself. An algorithm that does not exist for a message, as tree for the scatters of another trainer or nvls between
nodes, is an error. gloo has a ring only; the algorithms of a TPU belong to its compiler, so there the verdict is
unknown.
""",
    limits={
        "most_ratio": Limit(value=1.10, unit="x", note="time over that of the best algorithm: our choice"),
        "two_levels": Limit(
            value=False, classes={"S4": True}, note="whether two levels are among the rivals: above 4,096 devices"
        ),
    },
    bad="""
[comm]
algorithm = "nvls"   # one NVSwitch cannot sum between nodes: NCCL ends with an error
""",
    good="""
[comm]
algorithm = "auto"
""",
    fix='`algorithm = "auto"`: NCCL decides per message. Unset `NCCL_ALGO`.',
    waive="A fabric on which nccl-tests showed the forced algorithm to be faster: put the numbers in the reason.",
    references=(
        Reference(text="NVIDIA/nccl src/graph/tuning.cc, 2.30.7", mark="read"),
        Reference(text="table of ring and tree over nodes: our arithmetic from that model", mark="computed"),
        Reference(text="times: benchmarks/2026-11-16-collective-interval.md", mark="computed"),
    ),
    check=check,
    harder_from="S4",
)
