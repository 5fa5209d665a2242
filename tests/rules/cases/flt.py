"""FLT001 to FLT007: the good job, its log, and drills that went well or badly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rules.kit import Case, Flip, evidence
from rules.logs import good_cpu_log, good_log, incident, spread
from rules.swap import swapped

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import DrillFacts
from phalanx.rules.facts.host import HostFacts
from phalanx.rules.facts.log_facts import DigestFacts
from phalanx.rules.facts.trainers import PHALANX, Practice
from phalanx.rules.outcome import Spot
from phalanx.rules.profiles import scaling_of

PLANNED = ("fault.spares", "fault.failures_per_host_day", "batch.global_sequences")  # keys that change the plan
SPOT = Spot(file="runs/x/events-00001.jsonl", line=7)


def job(*sets: str, **changes: Any) -> Evidence:
    """The good job, as Phalanx would train it."""
    planned = [one for one in sets if one.partition("=")[0] in PLANNED]
    return swapped(evidence(*planned, **{"practice": PHALANX, **changes}), *(set(sets) - set(planned)))


def run(*sets: str, **facts: Any) -> Evidence:
    """A run of it."""
    return job(*sets, log=good_log(**facts))


def quiet(*sets: str, **changes: Any) -> Evidence:
    """A run in which nothing fell."""
    return job(*sets, log=good_log(incidents=(), detect_s=None, recovery_s=None, most_in_a_row=0), **changes)


def drill(**changes: Any) -> DrillFacts:
    """A drill on the good job's profile that went well."""
    made = DrillFacts(
        path="drills/x.json",
        signed=True,
        version="0.0",
        profile="nvidia-h100",
        faults=("kill", "crash-loop"),
        fired=("kill", "crash-loop"),
        clean=True,
        bitwise=True,
        detect_s=(0.1, 5.0),
        recovery_s=(20.0, 40.0),
    )
    return replace(made, **changes)


def other(**habits: Any) -> Practice:
    return Practice(trainer="megatron", **habits)


def large(devices: int, found: Evidence) -> Evidence:
    """The same evidence for another size: the rules look at the plan's layout alone."""
    layout = replace(found.the_plan.layout, data=devices)
    return replace(found, plan=replace(found.the_plan, layout=layout), scaling=scaling_of(devices))


def lasting(device_hours: float, found: Evidence) -> Evidence:
    """The same job, for so long."""
    plan = found.the_plan
    wall_s = device_hours * 3600 / plan.layout.devices
    return replace(found, plan=replace(plan, duration=replace(plan.duration, wall_s=wall_s)))


def elastic(*sets: str) -> Evidence:
    """Without spares, on many hosts: `need` of them are down in 1 % of the time."""
    return job("fault.spares=0", *sets)


def hosts_idle(share: float) -> Evidence:
    """A job whose shrinking leaves this share idle: replicas are made as large as that takes."""
    found = elastic()
    plan = found.the_plan
    need = job().the_plan.reliability.spares
    replica = round(share * plan.layout.devices / need)
    layout = replace(plan.layout, pipeline=replica, data=max(2, plan.layout.devices // replica))
    return replace(found, plan=replace(plan, layout=layout))


FLT001 = [
    Case(rule="FLT001", name="as it is", verdict="pass", evidence=job),
    Case(rule="FLT001", name="a run with a failure", verdict="pass", evidence=run, says="in 1 failure of this run"),
    Case(rule="FLT001", name="nothing fell", verdict="pass", evidence=quiet),
    Case(rule="FLT001", name="30 s", verdict="pass", evidence=lambda: job("fault.dead_after_s=30"), boundary=True),
    Case(
        rule="FLT001",
        name="31 s",
        verdict="fail",
        evidence=lambda: job("fault.dead_after_s=31"),
        boundary=True,
        at="fault.dead_after_s",
        says="dead after 31 s",
        severity="warning",
    ),
    Case(
        rule="FLT001",
        name="a small job is warned",
        verdict="fail",
        evidence=lambda: job("fault.dead_after_s=600", cluster="8xH100:8"),
        severity="warning",
    ),
    Case(
        rule="FLT001",
        name="noticed late",
        verdict="fail",
        evidence=lambda: run(detect_s=spread(40.0, count=3)),
        says="p95 of detection in 3 failures of this run is 40.0 s",
    ),
    Case(
        rule="FLT001",
        name="noticed late in drills",
        verdict="fail",
        evidence=lambda: job(drills=(drill(detect_s=(0.1, 31.0)),)),
    ),
    Case(
        rule="FLT001",
        name="drills of another profile say nothing",
        verdict="pass",
        evidence=lambda: job(drills=(drill(detect_s=(31.0,), profile="cpu-gloo"),)),
    ),
    Case(
        rule="FLT001",
        name="a CPU has 10 s",
        verdict="fail",
        evidence=lambda: job(profile="cpu-gloo", drills=(drill(profile="cpu-gloo", detect_s=(10.1,)),)),
        boundary=True,
    ),
    Case(
        rule="FLT001",
        name="no heartbeat",
        verdict="fail",
        evidence=lambda: job(practice=other(heartbeat_s=0.0)),
        says="no heartbeat",
        severity="error",
    ),
    Case(rule="FLT001", name="nobody knows", verdict="unknown", evidence=lambda: job(practice=other())),
]

FLT002 = [
    Case(rule="FLT002", name="a run with a failure", verdict="pass", evidence=run),
    Case(rule="FLT002", name="never seen", verdict="unknown", evidence=job, says="no evidence from the run log"),
    Case(rule="FLT002", name="nothing fell", verdict="unknown", evidence=quiet, says="no failure in this run"),
    Case(rule="FLT002", name="a drill answers", verdict="pass", evidence=lambda: quiet(drills=(drill(),))),
    Case(
        rule="FLT002",
        name="not by one that is not signed",
        verdict="unknown",
        evidence=lambda: quiet(drills=(drill(signed=False, wrong=("it was changed",)),)),
        says="it was changed",
    ),
    Case(
        rule="FLT002",
        name="nor by an old one",
        verdict="unknown",
        evidence=lambda: quiet(drills=(drill(current=False, version="0.1"),)),
        says="of other code than this Phalanx (it was 0.1)",
    ),
    Case(
        rule="FLT002",
        name="by a drill of few ranks, which the answer says",
        verdict="pass",
        evidence=lambda: quiet(drills=(drill(world=8),)),
        says="in 1 drill with 8 ranks (this job has 128)",
    ),
    Case(
        rule="FLT002",
        name="by a drill as large as the job",
        verdict="pass",
        evidence=lambda: quiet(drills=(drill(world=128), drill(world=8))),
        says="in 2 drills with 128 ranks is",
    ),
    Case(
        rule="FLT002",
        name="nor of another trainer",
        verdict="unknown",
        evidence=lambda: quiet(practice=other(), drills=(drill(),)),
        says="no drill is on record",
    ),
    Case(
        rule="FLT002",
        name="90 s",
        verdict="pass",
        evidence=lambda: run(recovery_s=spread(90.0, count=1)),
        boundary=True,
    ),
    Case(
        rule="FLT002",
        name="91 s",
        verdict="fail",
        evidence=lambda: run(recovery_s=spread(91.0, count=1)),
        boundary=True,
        says="recovery in 1 failure is 91.0 s",
    ),
    Case(
        rule="FLT002",
        name="100 s beyond 16,384 devices",
        verdict="pass",
        evidence=lambda: large(16_385, run(recovery_s=spread(100.0, count=1))),
        boundary=True,
    ),
    Case(
        rule="FLT002",
        name="100 s on 16,384 devices",
        verdict="fail",
        evidence=lambda: large(16_384, run(recovery_s=spread(100.0, count=1))),
        boundary=True,
    ),
    Case(
        rule="FLT002",
        name="31 s on CPUs",
        verdict="fail",
        evidence=lambda: job(profile="cpu-gloo", log=good_cpu_log(recovery_s=spread(31.0, count=1))),
        boundary=True,
    ),
    Case(
        rule="FLT002",
        name="somebody else starts it again",
        verdict="pass",
        evidence=lambda: run('fault.recovery="stop"', recovery_s=spread(500.0, count=1)),
    ),
    Case(
        rule="FLT002",
        name="it never went on",
        verdict="fail",
        evidence=lambda: run(state="failed", incidents=(incident(), incident(recovery_s=None, what="Astray"))),
        says="the last of 2 failures ended the run: Astray",
        severity="error",
    ),
]

FLT003 = [
    Case(rule="FLT003", name="auto", verdict="pass", evidence=job),
    Case(rule="FLT003", name="going on smaller", verdict="pass", evidence=lambda: hosts_idle(0.0625), boundary=True),
    Case(
        rule="FLT003",
        name="neither",
        verdict="fail",
        evidence=lambda: elastic('fault.recovery="replace"'),
        at="fault.spares",
        severity="warning",
    ),
    Case(
        rule="FLT003",
        name="an error on 2,048",
        verdict="fail",
        evidence=lambda: job(
            "fault.spares=0", 'fault.recovery="replace"', "batch.global_sequences=2048", cluster="8xH100:256"
        ),
        severity="error",
    ),
    Case(rule="FLT003", name="one too few", verdict="fail", evidence=lambda: spared(-1), boundary=True),
    Case(rule="FLT003", name="as many as needed", verdict="pass", evidence=lambda: spared(0), boundary=True),
    Case(rule="FLT003", name="an eighth idle", verdict="fail", evidence=lambda: hosts_idle(0.125), boundary=True),
    Case(
        rule="FLT003",
        name="half of the job idle",
        verdict="fail",
        evidence=lambda: hosts_idle(0.5),
        says="50% of the job idle",
    ),
    Case(
        rule="FLT003",
        name="another trainer",
        verdict="unknown",
        evidence=lambda: evidence(practice=other()),
        says="no setting for spare hosts",
    ),
    Case(
        rule="FLT003",
        name="one host",
        verdict="pass",
        evidence=lambda: job("fault.spares=0", 'fault.recovery="stop"', "fault.failures_per_host_day=1e-6"),
    ),
]


def spared(more: int) -> Evidence:
    need = job().the_plan.reliability.spares
    return job(f"fault.spares={need + more}", 'fault.recovery="replace"')


FLT004 = [
    Case(rule="FLT004", name="three allowed", verdict="pass", evidence=job, boundary=True),
    Case(
        rule="FLT004",
        name="four",
        verdict="fail",
        evidence=lambda: job("fault.restarts=4"),
        boundary=True,
        at="fault.restarts",
    ),
    Case(rule="FLT004", name="a run with a failure", verdict="pass", evidence=run),
    Case(
        rule="FLT004",
        name="four that came to nothing",
        verdict="fail",
        evidence=lambda: run(most_in_a_row=5),
        says="4 restarts in a row brought no step",
        boundary=True,
    ),
    Case(rule="FLT004", name="three", verdict="pass", evidence=lambda: run(most_in_a_row=4), boundary=True),
    Case(
        rule="FLT004",
        name="no cause",
        verdict="fail",
        evidence=lambda: run(incidents=(incident(what=""),)),
        says="have no cause on record",
    ),
    Case(
        rule="FLT004",
        name="a drill that did not end",
        verdict="fail",
        evidence=lambda: job(drills=(drill(clean=False, wrong=("the run ended well",)),)),
    ),
    Case(rule="FLT004", name="a drill that did", verdict="pass", evidence=lambda: job(drills=(drill(),))),
    Case(rule="FLT004", name="nobody knows", verdict="unknown", evidence=lambda: job(practice=other())),
    Case(
        rule="FLT004",
        name="another trainer has its own",
        verdict="fail",
        evidence=lambda: job(practice=other(bounded_restarts=100)),
    ),
]


def here(**packages: str) -> Evidence:
    return job(host=HostFacts(name="box", source="this machine", packages=packages))


FLT005 = [
    Case(rule="FLT005", name="a habit", verdict="pass", evidence=job),
    Case(rule="FLT005", name="all memberships", verdict="pass", evidence=run, boundary=True),
    Case(
        rule="FLT005",
        name="one without",
        verdict="fail",
        evidence=lambda: run(preflights=1),
        boundary=True,
        says="1 of 2 memberships",
    ),
    Case(rule="FLT005", name="the log does not say", verdict="unknown", evidence=lambda: run(preflights=None)),
    Case(
        rule="FLT005",
        name="not a habit",
        verdict="fail",
        evidence=lambda: job(practice=other(preflight=False)),
        severity="warning",
    ),
    Case(rule="FLT005", name="nobody knows", verdict="unknown", evidence=lambda: job(practice=other())),
    Case(rule="FLT005", name="torch is there", verdict="pass", evidence=lambda: here(torch="2.13.0")),
    Case(
        rule="FLT005",
        name="torch is not",
        verdict="fail",
        evidence=lambda: here(numpy="2.0"),
        severity="warning",
        says="box has no torch",
    ),
]

FLT006 = [
    Case(rule="FLT006", name="a promise", verdict="pass", evidence=job),
    Case(rule="FLT006", name="a run", verdict="pass", evidence=run, boundary=True),
    Case(
        rule="FLT006",
        name="two digests of a step",
        verdict="fail",
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, differing=1, differing_spot=SPOT)),
        boundary=True,
        at=SPOT.file,
    ),
    Case(
        rule="FLT006",
        name="a word from the past",
        verdict="fail",
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, stale=1, stale_spot=SPOT)),
        boundary=True,
        at=SPOT.file,
    ),
    Case(
        rule="FLT006",
        name="members changed and nothing was compared",
        verdict="unknown",
        evidence=lambda: run(digests=None, memberships=2),
    ),
    Case(
        rule="FLT006",
        name="members changed and no rank holds a copy",
        verdict="pass",
        evidence=lambda: run(digests=DigestFacts(compared=0, every_steps=1, alone=40), memberships=2),
        says="nobody holds a copy of these weights: 40 digests",
    ),
    Case(
        rule="FLT006",
        name="no copy, and a word from the past",
        verdict="fail",
        evidence=lambda: run(digests=DigestFacts(compared=0, every_steps=1, alone=40, stale=1, stale_spot=SPOT)),
        at=SPOT.file,
    ),
    Case(
        rule="FLT006",
        name="members changed and nobody knows who holds a copy",
        verdict="unknown",
        evidence=lambda: run(digests=DigestFacts(compared=0, every_steps=1), memberships=2),
    ),
    Case(
        rule="FLT006",
        name="members never changed",
        verdict="pass",
        evidence=lambda: run(digests=None, memberships=1),
    ),
    Case(
        rule="FLT006",
        name="a drill found something",
        verdict="fail",
        evidence=lambda: job(drills=(drill(clean=False, wrong=("old generations are fenced",)),)),
        says="old generations are fenced",
    ),
    Case(
        rule="FLT006",
        name="a newer drill did not",
        verdict="pass",
        evidence=lambda: job(drills=(drill(), drill(clean=False))),
    ),
    Case(
        rule="FLT006",
        name="the largest jobs need a drill",
        verdict="unknown",
        evidence=lambda: large(40_000, job()),
    ),
    Case(rule="FLT006", name="one rank", verdict="pass", evidence=lambda: large(1, job()), says="commits alone"),
    Case(rule="FLT006", name="no epochs", verdict="fail", evidence=lambda: job(practice=other(step_transaction=False))),
    Case(rule="FLT006", name="nobody knows", verdict="unknown", evidence=lambda: job(practice=other())),
]


def compared(ratio: float) -> Evidence:
    """Compared every so many checkpoint intervals."""
    plan = job().the_plan
    steps = plan.reliability.interval_s / plan.prediction.step_s
    return job(f"fault.digest_every={max(2, int(steps * ratio))}")


FLT007 = [
    Case(rule="FLT007", name="auto", verdict="pass", evidence=job),
    Case(rule="FLT007", name="never", verdict="fail", evidence=lambda: job("fault.digest_every=0"), severity="warning"),
    Case(rule="FLT007", name="within an interval", verdict="pass", evidence=lambda: compared(0.99), boundary=True),
    Case(rule="FLT007", name="less often", verdict="fail", evidence=lambda: compared(1.1), boundary=True),
    Case(
        rule="FLT007",
        name="an error from 4,097 devices on",
        verdict="fail",
        evidence=lambda: large(4_097, job("fault.digest_every=0")),
        severity="error",
    ),
    Case(
        rule="FLT007",
        name="and for a million device-hours",
        verdict="fail",
        evidence=lambda: lasting(1.0e6, job("fault.digest_every=0")),
        severity="error",
        boundary=True,
    ),
    Case(
        rule="FLT007",
        name="not for less",
        verdict="fail",
        evidence=lambda: lasting(0.99e6, job("fault.digest_every=0")),
        severity="warning",
        boundary=True,
    ),
    Case(rule="FLT007", name="a run without a difference", verdict="pass", evidence=run),
    Case(
        rule="FLT007",
        name="a run with one",
        verdict="fail",
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, differing=1, differing_spot=SPOT)),
        severity="error",
        at=SPOT.file,
    ),
    Case(
        rule="FLT007",
        name="no rank holds a copy",
        verdict="pass",
        evidence=lambda: run(digests=DigestFacts(compared=0, every_steps=1, alone=40)),
        says="nobody holds a copy of these weights: 40 digests",
    ),
    Case(
        rule="FLT007",
        name="nobody knows who holds a copy",
        verdict="unknown",
        evidence=lambda: run(digests=DigestFacts(compared=0, every_steps=1)),
    ),
    Case(rule="FLT007", name="none on record", verdict="unknown", evidence=lambda: run(digests=None)),
    Case(rule="FLT007", name="another trainer", verdict="unknown", evidence=lambda: job(practice=other())),
    Case(rule="FLT007", name="one rank", verdict="pass", evidence=lambda: large(1, job())),
]

CASES = [*FLT001, *FLT002, *FLT003, *FLT004, *FLT005, *FLT006, *FLT007]
FLIPS = [
    Flip(rule="FLT001", limit="heartbeat_s", value=0.1, evidence=job, before="pass", after="fail"),
    Flip(rule="FLT001", limit="dead_after_s", value=29.0, evidence=job, before="pass", after="fail"),
    Flip(rule="FLT001", limit="measured_s", value=5.0, evidence=run, before="pass", after="fail"),
    Flip(rule="FLT002", limit="bound_s", value=40.0, evidence=run, before="pass", after="fail"),
    Flip(
        rule="FLT002",
        limit="large_devices",
        value=64,
        evidence=lambda: run(recovery_s=spread(100.0, count=1)),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="FLT002", limit="large_s", value=40.0, evidence=lambda: large(20_000, run()), before="pass", after="fail"
    ),
    Flip(
        rule="FLT002",
        limit="alone_s",
        value=30.0,
        evidence=lambda: run('fault.recovery="stop"'),
        before="pass",
        after="fail",
    ),
    Flip(rule="FLT003", limit="repair_h", value=1e4, evidence=lambda: spared(0), before="pass", after="fail"),
    Flip(
        rule="FLT003", limit="idle_share", value=0.01, evidence=lambda: hosts_idle(0.0625), before="pass", after="fail"
    ),
    Flip(rule="FLT004", limit="in_a_row", value=2, evidence=job, before="pass", after="fail"),
    Flip(rule="FLT005", limit="missed", value=1, evidence=lambda: run(preflights=1), before="fail", after="pass"),
    Flip(
        rule="FLT005",
        limit="packages",
        value=("torch", "apex"),
        evidence=lambda: here(torch="2"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="FLT006",
        limit="differing",
        value=1,
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, differing=1)),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="FLT006",
        limit="stale",
        value=1,
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, stale=1)),
        before="fail",
        after="pass",
    ),
    Flip(rule="FLT006", limit="must_drill", value=True, evidence=job, before="pass", after="unknown"),
    Flip(rule="FLT007", limit="intervals", value=0.5, evidence=lambda: compared(0.9), before="pass", after="fail"),
    Flip(
        rule="FLT007",
        limit="differing",
        value=1,
        evidence=lambda: run(digests=DigestFacts(compared=9, every_steps=1, differing=1)),
        before="fail",
        after="pass",
    ),
]
