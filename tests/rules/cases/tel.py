"""TEL001 to TEL006: a log that is content, with one thing of it broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rules.kit import Case, Flip, evidence
from rules.logs import good_cpu_log, good_log, good_monitor, good_steps, incident, ledger

from phalanx.record.account.ledger import Ledger
from phalanx.record.account.stragglers import Straggler
from phalanx.record.account.time_accounts import Accounts
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import DrillFacts
from phalanx.rules.facts.log_facts import GrammarFacts, NoiseFacts, PeerFacts
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Spot
from phalanx.rules.profiles import scaling_of

Found = Callable[[], Evidence]
SPOT = Spot(file="runs/good/events-00003.jsonl", line=812)


def with_log(**changes: Any) -> Found:
    """The good job with a log that differs in something."""
    return lambda: evidence(log=good_log(**changes))


def on_cpus(**changes: Any) -> Found:
    """Four ranks of cpu-gloo."""
    return lambda: evidence(profile="cpu-gloo", log=good_cpu_log(**changes))


def trainer(name: str, telemetry: tuple[str, ...] | None) -> Found:
    return lambda: evidence(practice=Practice(trainer=name, telemetry=telemetry))


def noise(**changes: Any) -> NoiseFacts:
    made = NoiseFacts(count=9_600, gap_steps=1.0, last=2_000.0, growth=1.5, has_parts=True, error=0.001)
    return replace(made, **changes)


def peers(**changes: Any) -> PeerFacts:
    return replace(PeerFacts(ranks=128, gap_s=31.0, lost_share=0.0, p99_s=40e-6), **changes)


def starting(init_s: float) -> Ledger:
    """A run of 50 s of which the launch took so many."""
    accounts = Accounts(init=init_s, productive=50.0 - init_s)
    return ledger(wall_s=50.0, accounts=accounts, steps=9, steps_lost=0)


def slow(score: float) -> tuple[Straggler, ...]:
    text = f"rank 5 (data 5, on host-0) is at work {score - 1:.0%} longer than its peers"
    return (Straggler(rank=5, place="data 5", host="host-0", score=score, text=text),)


def drill(*, named_right: bool | None) -> DrillFacts:
    return DrillFacts(
        path="drills/slow", signed=True, version="0.1", profile="nvidia-h100", faults=("slow",), fired=("slow",),
        clean=True, bitwise=True, named_right=named_right,
    )  # fmt: skip


def at_scale() -> Evidence:
    """16,384 devices that report by the host."""
    found = evidence(scaling=scaling_of(16_384), log=good_log(world=16_384, ranks=tuple(range(16_384))))
    plan = found.the_plan
    log = replace(found.the_log, monitor=good_monitor(ranks=2_048), peers=peers(ranks=2_048))
    return replace(found, plan=replace(plan, reliability=replace(plan.reliability, hosts=2_048)), log=log)


TEL001 = [
    Case(rule="TEL001", name="defaults", verdict="pass", evidence=evidence),
    Case(rule="TEL001", name="a run", verdict="pass", evidence=with_log()),
    Case(rule="TEL001", name="a small run", verdict="pass", evidence=on_cpus()),
    Case(
        rule="TEL001",
        name="every ten seconds",
        verdict="pass",
        evidence=lambda: evidence("telemetry.interval_s=10", "telemetry.peers_every_s=60"),
        boundary=True,
    ),
    Case(
        rule="TEL001",
        name="every eleven seconds",
        verdict="fail",
        evidence=lambda: evidence("telemetry.interval_s=10.5"),
        boundary=True,
        severity="warning",
        says="sampled every 10.5 s",
        at="telemetry.interval_s",
    ),
    Case(
        rule="TEL001",
        name="no pings",
        verdict="fail",
        evidence=lambda: evidence("telemetry.peers_every_s=0"),
        says="never measured",
        at="telemetry.peers_every_s",
    ),
    Case(
        rule="TEL001",
        name="no pings and no plan",
        verdict="fail",
        evidence=lambda: evidence("telemetry.peers_every_s=0", plan=None),
    ),
    Case(
        rule="TEL001",
        name="pings every two minutes",
        verdict="fail",
        evidence=lambda: evidence("telemetry.peers_every_s=61"),
        boundary=True,
    ),
    Case(rule="TEL001", name="a trainer nobody knows", verdict="unknown", evidence=trainer("megatron", None)),
    Case(
        rule="TEL001",
        name="a trainer without pings",
        verdict="fail",
        evidence=trainer("megatron", ("steps", "memory", "utilization", "noise")),
        severity="warning",
        says="does not record peers",
    ),
    Case(
        rule="TEL001",
        name="no samples",
        verdict="fail",
        evidence=with_log(monitor=None),
        says="no samples of the devices",
    ),
    Case(
        rule="TEL001",
        name="no samples in what was read",
        verdict="unknown",
        evidence=with_log(monitor=None, bytes_left=10_000),
    ),
    Case(
        rule="TEL001",
        name="no samples in the first seconds",
        verdict="pass",
        evidence=on_cpus(monitor=None, peers=None, wall_s=15.0),
    ),
    Case(
        rule="TEL001",
        name="no samples while the ranks start",
        verdict="pass",
        evidence=on_cpus(monitor=None, peers=None, wall_s=50.0, ledger=starting(35.0)),
    ),
    Case(
        rule="TEL001",
        name="no samples long after the start",
        verdict="fail",
        evidence=on_cpus(monitor=None, peers=None, wall_s=50.0, ledger=starting(5.0)),
        says="no samples of the devices",
    ),
    Case(
        rule="TEL001",
        name="samples 20 s apart",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(gap_s=20.0)),
        boundary=True,
    ),
    Case(
        rule="TEL001",
        name="samples 21 s apart",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(gap_s=20.5)),
        boundary=True,
        says="20.5 s apart",
    ),
    Case(rule="TEL001", name="two silent ranks", verdict="fail", evidence=with_log(monitor=good_monitor(ranks=126))),
    Case(rule="TEL001", name="one silent rank", verdict="pass", evidence=with_log(monitor=good_monitor(ranks=127))),
    Case(rule="TEL001", name="hosts speak for their ranks", verdict="pass", evidence=at_scale),
    Case(
        rule="TEL001",
        name="lost pings",
        verdict="fail",
        evidence=with_log(peers=peers(lost_share=1.0, p99_s=None)),
        says="every ping between peers was lost",
    ),
    Case(rule="TEL001", name="no noise", verdict="fail", evidence=with_log(noise=None), says="no gradient noise"),
    Case(rule="TEL001", name="rare noise", verdict="fail", evidence=with_log(noise=noise(gap_steps=101.0))),
    Case(rule="TEL001", name="noise with gaps", verdict="pass", evidence=with_log(noise=noise(gap_steps=100.0))),
    Case(
        rule="TEL001",
        name="missing steps",
        verdict="fail",
        evidence=with_log(steps=good_steps(count=9_699)),
        says="9,699 of 9,700 steps",
    ),
    Case(
        rule="TEL001",
        name="events of another schema",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(invalid=3, invalid_spot=SPOT, invalid_text="loss is no number")),
        at=SPOT.file,
        says="loss is no number",
    ),
    Case(
        rule="TEL001",
        name="nothing is finite",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(gap_s=math.nan), peers=peers(gap_s=math.inf)),
    ),
]
TEL002 = [
    Case(rule="TEL002", name="SM activity", verdict="pass", evidence=with_log()),
    Case(rule="TEL002", name="CPU time", verdict="pass", evidence=on_cpus()),
    Case(
        rule="TEL002",
        name="NVML",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(utilization_sources=("nvml-utilization",))),
        severity="error",
        says="nvml-utilization",
    ),
    Case(rule="TEL002", name="a CPU's on a GPU", verdict="fail", evidence=lambda: evidence(log=good_cpu_log())),
    Case(
        rule="TEL002",
        name="MFU instead",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(utilization=None, utilization_sources=())),
    ),
    Case(
        rule="TEL002",
        name="nothing",
        verdict="unknown",
        evidence=with_log(monitor=good_monitor(utilization=None, utilization_sources=()), mfu=None),
    ),
    Case(rule="TEL002", name="no samples", verdict="unknown", evidence=with_log(monitor=None)),
    Case(
        rule="TEL002",
        name="exactly enough",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(utilization=0.8, lowest_hour=0.5)),
        boundary=True,
    ),
    Case(
        rule="TEL002",
        name="not enough",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(utilization=0.79)),
        boundary=True,
        severity="warning",
    ),
    Case(
        rule="TEL002",
        name="an idle hour",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(lowest_hour=0.49)),
        boundary=True,
        severity="error",
        says="lowest hour 49%",
    ),
    Case(
        rule="TEL002",
        name="a short run has no hour",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(utilization=0.3, lowest_hour=0.2), wall_s=3_599.0),
    ),
    Case(
        rule="TEL002",
        name="tensor activity has no level",
        verdict="pass",
        evidence=with_log(monitor=good_monitor(utilization=0.4, lowest_hour=0.3, utilization_sources=("gpm-tensor",))),
    ),
]
TEL003 = [
    Case(rule="TEL003", name="parts agree", verdict="pass", evidence=with_log()),
    Case(rule="TEL003", name="one percent", verdict="pass", evidence=with_log(noise=noise(error=0.01)), boundary=True),
    Case(
        rule="TEL003",
        name="more than one percent",
        verdict="fail",
        evidence=with_log(noise=noise(error=0.0101)),
        boundary=True,
        severity="warning",
    ),
    Case(
        rule="TEL003",
        name="no parts",
        verdict="fail",
        evidence=with_log(noise=noise(has_parts=False, error=None)),
        says="stands alone",
    ),
    Case(rule="TEL003", name="no noise", verdict="unknown", evidence=with_log(noise=None)),
    Case(
        rule="TEL003",
        name="no noise yet",
        verdict="pass",
        evidence=with_log(noise=None, steps=good_steps(last=18, count=19)),
    ),
    Case(rule="TEL003", name="not a number", verdict="pass", evidence=with_log(noise=noise(error=math.nan))),
    Case(rule="TEL003", name="no log", verdict="unknown", evidence=evidence),
]
TEL004 = [
    Case(rule="TEL004", name="nobody", verdict="pass", evidence=with_log(), says="nobody stands out"),
    Case(
        rule="TEL004",
        name="a third longer",
        verdict="pass",
        evidence=with_log(stragglers=slow(1 / 0.75)),
        boundary=True,
    ),
    Case(
        rule="TEL004",
        name="far behind",
        verdict="fail",
        evidence=with_log(stragglers=slow(1.34)),
        boundary=True,
        severity="warning",
        says="rank 5 (data 5, on host-0) is at work 34% longer",
    ),
    Case(rule="TEL004", name="shared cores", verdict="pass", evidence=on_cpus(stragglers=slow(1.9))),
    Case(rule="TEL004", name="not even with shared cores", verdict="fail", evidence=on_cpus(stragglers=slow(2.1))),
    Case(rule="TEL004", name="no scores", verdict="unknown", evidence=with_log(straggler_scores=None)),
    Case(rule="TEL004", name="few scores", verdict="fail", evidence=with_log(straggler_scores=100)),
    Case(
        rule="TEL004",
        name="no scores yet",
        verdict="pass",
        evidence=with_log(straggler_scores=None, steps=good_steps(last=8, count=9)),
    ),
    Case(rule="TEL004", name="one rank", verdict="pass", evidence=with_log(world=1, ranks=(0,), straggler_scores=None)),
    Case(
        rule="TEL004",
        name="a drill named another",
        verdict="fail",
        evidence=lambda: evidence(log=good_log(), drills=(drill(named_right=False),)),
        says="another one was named",
    ),
    Case(
        rule="TEL004",
        name="a drill named it",
        verdict="pass",
        evidence=lambda: evidence(log=good_log(), drills=(drill(named_right=True), drill(named_right=None))),
        says="a drill named",
    ),
]
TEL005 = [
    Case(rule="TEL005", name="whole", verdict="pass", evidence=with_log()),
    Case(
        rule="TEL005",
        name="no end",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(missing=("run_end",))),
        severity="error",
        says="the log lacks run_end",
    ),
    Case(rule="TEL005", name="two plans", verdict="fail", evidence=with_log(grammar=GrammarFacts(repeated=("plan",)))),
    Case(
        rule="TEL005",
        name="silent ranks",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(ranks_missing=tuple(range(9)))),
        says="of 128 ranks, 9 left no event: 0, 1, 2, 3, 4, 5 and 3 more",
    ),
    Case(
        rule="TEL005",
        name="a silent rank",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(ranks_missing=(2,))),
        says="of 128 ranks, rank 2 left no event",
    ),
    Case(
        rule="TEL005",
        name="back in time",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(out_of_order=2, out_of_order_spot=SPOT)),
        at=SPOT.file,
    ),
    Case(
        rule="TEL005",
        name="a torn line for each rank of a lost host",
        verdict="pass",
        evidence=with_log(grammar=GrammarFacts(unreadable=8)),
        boundary=True,
    ),
    Case(
        rule="TEL005",
        name="more torn lines",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(unreadable=9, unreadable_spot=SPOT)),
        boundary=True,
        says="9 lines are no events",
        at=SPOT.file,
    ),
    Case(
        rule="TEL005",
        name="an open incident",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(unclosed=1)),
    ),
    Case(
        rule="TEL005",
        name="the newest incident of a run that goes on",
        verdict="pass",
        evidence=with_log(grammar=GrammarFacts(unclosed=1), is_over=False),
        says="so far",
    ),
    Case(
        rule="TEL005",
        name="clocks a second apart",
        verdict="pass",
        evidence=with_log(grammar=GrammarFacts(skew_s=1.0)),
        boundary=True,
    ),
    Case(
        rule="TEL005",
        name="clocks two seconds apart",
        verdict="fail",
        evidence=with_log(grammar=GrammarFacts(skew_s=2.0)),
        severity="warning",
    ),
    Case(
        rule="TEL005",
        name="nothing",
        verdict="fail",
        evidence=with_log(world=4, ranks=(), steps=None, incidents=(incident(),)),
        severity="error",
        says="no rank left any event",
    ),
    Case(
        rule="TEL005",
        name="nothing yet",
        verdict="pass",
        evidence=with_log(world=4, ranks=(), steps=None, is_over=False),
        says="no rank has written anything yet",
    ),
]
TEL006 = [
    Case(rule="TEL006", name="closes", verdict="pass", evidence=with_log()),
    Case(rule="TEL006", name="closes on CPUs", verdict="pass", evidence=on_cpus()),
    Case(rule="TEL006", name="no ledger", verdict="unknown", evidence=with_log(ledger=None)),
    Case(
        rule="TEL006",
        name="a percent is missing",
        verdict="pass",
        evidence=with_log(ledger=ledger(wall_s=101_000.0)),
        boundary=True,
    ),
    Case(
        rule="TEL006",
        name="more is missing",
        verdict="fail",
        evidence=with_log(ledger=ledger(wall_s=101_100.0)),
        boundary=True,
        severity="error",
        says="does not close",
    ),
    Case(
        rule="TEL006",
        name="claimed twice",
        verdict="fail",
        evidence=with_log(ledger=ledger(overlap_s=1_001.0)),
        says="two marks claim",
    ),
    Case(
        rule="TEL006",
        name="unexplained",
        verdict="fail",
        evidence=with_log(ledger=ledger(accounts=replace(ledger().accounts, other=5_100.0, productive=92_320.0))),
        says="no event explains",
    ),
    Case(
        rule="TEL006",
        name="dear telemetry",
        verdict="fail",
        evidence=with_log(telemetry_share=0.011),
        severity="warning",
        boundary=True,
    ),
    Case(rule="TEL006", name="cheap telemetry", verdict="pass", evidence=with_log(telemetry_share=0.01), boundary=True),
    Case(rule="TEL006", name="not told", verdict="pass", evidence=with_log(telemetry_share=None)),
    Case(
        rule="TEL006",
        name="not a number",
        verdict="fail",
        evidence=with_log(ledger=ledger(overlap_s=math.nan)),
    ),
]
CASES = [*TEL001, *TEL002, *TEL003, *TEL004, *TEL005, *TEL006]


def flip(rule: str, limit: str, value: Any, found: Found, *, breaks: bool = True) -> Flip:
    before, after = ("pass", "fail") if breaks else ("fail", "pass")
    return Flip(rule=rule, limit=limit, value=value, evidence=found, before=before, after=after)


FLIPS = [
    flip("TEL001", "device_s", 5.0, evidence),
    flip("TEL001", "peers_s", 20.0, evidence),
    flip("TEL001", "gap_ratio", 1.0, with_log()),
    flip("TEL001", "noise_steps", 0.5, with_log()),
    flip("TEL001", "ranks_share", 0.95, with_log(monitor=good_monitor(ranks=125)), breaks=False),
    flip("TEL001", "aggregated", False, at_scale),
    flip("TEL002", "mean", 0.9, with_log()),
    flip("TEL002", "hour", 0.86, with_log()),
    flip("TEL002", "least_wall_s", 60.0, with_log(monitor=good_monitor(utilization=0.3), wall_s=3_599.0)),
    flip("TEL003", "error", 0.0001, with_log()),
    Flip(
        rule="TEL003",
        limit="least_steps",
        value=5,
        evidence=with_log(noise=None, steps=good_steps(last=18, count=19)),
        before="pass",
        after="unknown",
    ),
    Flip(
        rule="TEL004",
        limit="within_steps",
        value=5,
        evidence=with_log(straggler_scores=None, steps=good_steps(last=8, count=9)),
        before="pass",
        after="unknown",
    ),
    flip("TEL004", "score", 0.9, with_log(stragglers=slow(1.2))),
    flip("TEL004", "ranks_share", 0.5, with_log(straggler_scores=100), breaks=False),
    flip("TEL005", "skew_s", 0.01, with_log()),
    flip("TEL005", "torn_per_incident", 0, with_log(grammar=GrammarFacts(unreadable=3))),
    flip("TEL005", "unclosed", 1, with_log(grammar=GrammarFacts(unclosed=1)), breaks=False),
    flip("TEL006", "gap", 0.02, with_log(ledger=ledger(overlap_s=1_500.0)), breaks=False),
    flip("TEL006", "unexplained", 0.001, with_log()),
    flip("TEL006", "unexplained_step_s", 0.0, on_cpus(ledger=ledger(
        wall_s=160.0, steps=400, steps_lost=0,
        accounts=Accounts(productive=150.0, other=10.0)))),
    flip("TEL006", "telemetry", 0.001, with_log()),
]  # fmt: skip
