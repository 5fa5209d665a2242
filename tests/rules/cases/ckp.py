"""CKP001 in a run, CKP002 to CKP006: habits, logs and drills, each broken by itself."""

from __future__ import annotations

from dataclasses import replace

from rules.kit import Case, Flip, evidence
from rules.logs import good_checkpoints, good_log, incident, spread

from phalanx.rules.facts.drill_facts import DrillFacts
from phalanx.rules.facts.host import HostFacts
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Spot

STATE = ("weights", "moments", "scheduler", "rng", "sampler", "tokens", "layout", "scaler")
OURS = Practice(
    trainer="phalanx", atomic_commit=True, verifies_digests=True, memory_copies="other host", resumes_exactly=STATE
)
OTHER = Practice(trainer="torchtitan")
BEST_S = 1235  # about Daly's optimum of the good job
SPOT = Spot(file="events-00000.jsonl", line=7)
POINTS = ("begin", "data", "index", "done", "all", "manifest", "set-aside", "commit", "prune")
DRILL = DrillFacts(
    path="runs/drill/drill-record.json",
    signed=True,
    version="0.5.0",
    profile="nvidia-h100",
    faults=("kill", "save-kill", "corrupt"),
    fired=("kill", "save-kill", "corrupt"),
    clean=True,
    bitwise=True,
    save_points=POINTS,
)


def job(*sets: str, practice: Practice = OURS, drill: DrillFacts | None = DRILL, **changes):
    """The good job under a trainer whose habits are known and drilled."""
    drills = () if drill is None else (drill,)
    return lambda: evidence(*sets, practice=practice, drills=drills, **changes)


def habit(**changes):
    return job(practice=replace(OURS, **changes))


def drilled(**changes):
    return job(drill=replace(DRILL, **changes))


def saved(*sets: str, log=None, **checkpoints):
    """A run of it, with other checkpoints."""
    return job(*sets, log=replace(log or good_log(), checkpoints=good_checkpoints(**checkpoints)))


def reliability(**changes):
    """The good job with another reliability in its plan."""

    def made():
        found = job()()
        plan = found.the_plan
        return replace(found, plan=replace(plan, reliability=replace(plan.reliability, **changes)))

    return made


def interval(ratio: float, **log):
    """A run that saved at a multiple of the optimum which its own δ and the plan's M give."""

    def made():
        found = job()()
        r = found.the_plan.reliability
        best_s = max((2 * 1.6 * r.mtbf_s) ** 0.5, 9.5)
        seen = good_checkpoints(interval_s=spread(best_s * ratio, count=20))
        return replace(found, log=good_log(checkpoints=seen, **log))

    return made


def many_failures(count: int, source: str = "disk", **log):
    """Failures every 1,000 s: the optimum of the run is that of its own rate, far below the plan's."""
    return interval(1.0, incidents=(incident(source=source),) * count, wall_s=1_000.0 * count, **log)


def few_due_saves(**changes):
    """A run that a person stopped again and again: three saves, one of them due, far closer than the optimum."""
    seen = {"interval_saves": 1, "blocked_s": spread(1.6, count=8), "interval_s": spread(20.0, count=1)}
    return job(log=good_log(checkpoints=good_checkpoints(**seen, **changes)))


def grace(seconds: float):
    def made():
        plan = evidence().the_plan
        r = plan.reliability
        needed = plan.prediction.step_s + r.blocking_s + r.persist_s
        return job(f"fault.grace_s={needed * seconds!r}")()

    return made


def free(share: float):
    """A disk with this share of the room that three checkpoints and a draft take."""

    def made():
        found = job()()
        size = found.the_plan.reliability.checkpoint_bytes
        return replace(found, host=HostFacts(name="here", source="this machine", disk_free_bytes=4 * size * share))

    return made


def racks(place: str):
    return job("batch.global_sequences=576", practice=replace(OURS, memory_copies=place), cluster="72xGB200:2")


LARGE = "8xH100:256"  # 2,048 devices: class S3
CASES = [
    Case(rule="CKP001", name="a run at its own optimum", verdict="pass", evidence=interval(1.0)),
    Case(rule="CKP001", name="a run at 1.9 of it", verdict="pass", evidence=interval(1.9), boundary=True),
    Case(
        rule="CKP001",
        name="a run at 2.1 of it",
        verdict="fail",
        evidence=interval(2.1),
        boundary=True,
        severity="warning",
        at="checkpoint.interval_s",
    ),
    Case(rule="CKP001", name="four failures are no rate", verdict="pass", evidence=many_failures(4), boundary=True),
    Case(
        rule="CKP001",
        name="five failures are",
        verdict="fail",
        evidence=many_failures(5),
        boundary=True,
        severity="error",
    ),
    Case(rule="CKP001", name="saves that a Ctrl-C made", verdict="pass", evidence=few_due_saves()),
    Case(
        rule="CKP001",
        name="a save at a SIGTERM that outlasts the grace",
        verdict="fail",
        evidence=few_due_saves(final_persist_s=spread(40.0, count=8), final_blocked_s=spread(1.0, count=8)),
        says="the last checkpoint is cut off",
    ),
    Case(rule="CKP001", name="failures of a drill", verdict="pass", evidence=many_failures(5, is_drill=True)),
    Case(rule="CKP001", name="five that memory mended are not", verdict="pass", evidence=many_failures(5, "memory")),
    Case(rule="CKP001", name="a grace that is enough", verdict="pass", evidence=grace(1.01), boundary=True),
    Case(
        rule="CKP001",
        name="a grace that is not",
        verdict="fail",
        evidence=grace(0.99),
        boundary=True,
        severity="warning",
        says="of the",
        at="fault.grace_s",
    ),
    Case(
        rule="CKP001",
        name="a run whose save outlasts the grace",
        verdict="fail",
        evidence=saved(persist_s=spread(25.0, count=55), interval_s=None),
        says="the last checkpoint is cut off",
    ),
    Case(
        rule="CKP001",
        name="another trainer's grace",
        verdict="pass",
        evidence=job(f"checkpoint.interval_s={BEST_S}", practice=OTHER),
    ),
    Case(rule="CKP001", name="another trainer's interval", verdict="unknown", evidence=job(practice=OTHER)),
    Case(
        rule="CKP001",
        name="checkpoints are off",
        verdict="fail",
        evidence=job(f"checkpoint.interval_s={BEST_S}", practice=replace(OTHER, saves=False)),
        severity="error",
        says="checkpoints are off",
        at="checkpoint.interval_s",
    ),
    Case(
        rule="CKP004",
        name="another trainer's interval",
        verdict="unknown",
        evidence=job(practice=OTHER),
        says="it is not known how often torchtitan saves",
    ),
    Case(rule="CKP002", name="known and drilled", verdict="pass", evidence=job()),
    Case(rule="CKP002", name="in place", verdict="fail", evidence=habit(atomic_commit=False), severity="error"),
    Case(rule="CKP002", name="nobody says", verdict="unknown", evidence=habit(atomic_commit=None)),
    Case(rule="CKP002", name="not drilled", verdict="unknown", evidence=job(drill=None), says="dies while it saves"),
    Case(rule="CKP002", name="drilled elsewhere", verdict="unknown", evidence=drilled(profile="cpu-gloo")),
    Case(rule="CKP002", name="drilled without a save", verdict="unknown", evidence=drilled(fired=("kill",))),
    Case(
        rule="CKP002",
        name="drilled at eight points",
        verdict="unknown",
        evidence=drilled(save_points=POINTS[1:]),
        says="8 of its 9 points",
        boundary=True,
    ),
    Case(rule="CKP002", name="a forged record", verdict="unknown", evidence=drilled(signed=False)),
    Case(
        rule="CKP002",
        name="a drill that went wrong",
        verdict="fail",
        evidence=drilled(clean=False, wrong=("a restore took half a checkpoint",)),
        says="half a checkpoint",
    ),
    Case(
        rule="CKP002",
        name="our drills say nothing of others",
        verdict="unknown",
        evidence=job(practice=replace(OURS, trainer="torchtitan")),
        says="under torchtitan",
    ),
    Case(rule="CKP002", name="a run in order", verdict="pass", evidence=saved(restored_uncommitted=0), boundary=True),
    Case(
        rule="CKP002",
        name="one restore of what was not there",
        verdict="fail",
        evidence=saved(restored_uncommitted=1, restored_spot=SPOT),
        boundary=True,
        at="events-00000.jsonl",
    ),
    Case(rule="CKP002", name="a commit from nowhere", verdict="fail", evidence=saved(commits_without_stage=1)),
    Case(rule="CKP002", name="a folder without its manifest", verdict="fail", evidence=saved(incomplete=1)),
    Case(rule="CKP003", name="known and drilled", verdict="pass", evidence=job()),
    Case(rule="CKP003", name="two kept", verdict="pass", evidence=job("checkpoint.keep=2"), boundary=True),
    Case(
        rule="CKP003",
        name="one kept",
        verdict="fail",
        evidence=job("checkpoint.keep=1"),
        boundary=True,
        severity="error",
        at="checkpoint.keep",
    ),
    Case(rule="CKP003", name="unverified", verdict="fail", evidence=habit(verifies_digests=False)),
    Case(rule="CKP003", name="nobody says", verdict="unknown", evidence=job(practice=OTHER)),
    Case(rule="CKP003", name="no damage was drilled", verdict="unknown", evidence=drilled(fired=("save-kill",))),
    Case(rule="CKP003", name="damage was loaded", verdict="fail", evidence=drilled(clean=False)),
    Case(rule="CKP003", name="two are there", verdict="pass", evidence=saved(kept=2), boundary=True),
    Case(rule="CKP003", name="one of 55 is there", verdict="fail", evidence=saved(kept=1), boundary=True),
    Case(rule="CKP003", name="one of one is there", verdict="pass", evidence=saved(kept=1, commits=1, stages=1)),
    Case(
        rule="CKP003",
        name="one is there after a roll-back",
        verdict="pass",
        evidence=saved(kept=1, given_up=(28,), rolled_back_to=20),
    ),
    Case(
        rule="CKP003",
        name="none is there after a roll-back",
        verdict="fail",
        evidence=saved(kept=0, given_up=(28, 29), rolled_back_to=20),
        says="none can be restored: the roll-back to step 20 set step 28, 29 aside",
    ),
    Case(
        rule="CKP003",
        name="more is missing than a roll-back explains",
        verdict="fail",
        evidence=saved(kept=0, given_up=(28,), rolled_back_to=20),
        says="55 checkpoints were committed and 0 are there",
        boundary=True,
    ),
    Case(rule="CKP004", name="the good job", verdict="pass", evidence=job()),
    Case(
        rule="CKP004",
        name="stalls 0.99 %",
        verdict="pass",
        evidence=reliability(blocking_s=9.9, interval_s=1_000.0),
        boundary=True,
    ),
    Case(
        rule="CKP004",
        name="stalls 1.01 %",
        verdict="fail",
        evidence=reliability(blocking_s=10.1, interval_s=1_000.0),
        boundary=True,
        severity="warning",
        says="1.01% of the time",
    ),
    Case(
        rule="CKP004",
        name="written just in time",
        verdict="pass",
        evidence=reliability(persist_s=1_000.0, interval_s=1_000.0),
        boundary=True,
    ),
    Case(
        rule="CKP004",
        name="written too late",
        verdict="fail",
        evidence=reliability(persist_s=1_001.0, interval_s=1_000.0),
        boundary=True,
        severity="error",
        at="checkpoint.interval_s",
    ),
    Case(
        rule="CKP004",
        name="synchronous",
        verdict="fail",
        evidence=job("checkpoint.async=false", "checkpoint.interval_s=100"),
        at="checkpoint.async",
    ),
    Case(rule="CKP004", name="a job of minutes", verdict="pass", evidence=job("data.tokens=1B"), says=""),
    Case(rule="CKP004", name="just enough disk", verdict="pass", evidence=free(1.0), boundary=True),
    Case(rule="CKP004", name="too little disk", verdict="fail", evidence=free(0.99), boundary=True, says="are free"),
    Case(
        rule="CKP004",
        name="too little memory",
        verdict="fail",
        evidence=reliability(checkpoint_bytes=1e15),
        severity="warning",
        says="staging takes",
    ),
    Case(rule="CKP004", name="a good run", verdict="pass", evidence=saved()),
    Case(rule="CKP004", name="a run that stalls", verdict="fail", evidence=saved(blocked_s=spread(20.0, count=55))),
    Case(
        rule="CKP004", name="a run that piles up", verdict="fail", evidence=saved(persist_s=spread(1_801.0, count=55))
    ),
    Case(rule="CKP004", name="failed saves", verdict="fail", evidence=saved(errors=2, error_spot=SPOT), says="2 saves"),
    Case(rule="CKP004", name="overlapping saves", verdict="fail", evidence=saved(overlapping=1), severity="warning"),
    Case(rule="CKP004", name="a full disk", verdict="fail", evidence=saved(free_bytes=1e9)),
    Case(rule="CKP005", name="on another host", verdict="pass", evidence=job()),
    Case(rule="CKP005", name="on the same host", verdict="fail", evidence=habit(memory_copies="other process")),
    Case(
        rule="CKP005",
        name="the only host",
        verdict="pass",
        evidence=job(practice=replace(OURS, memory_copies="other process"), cluster="8xH100:1"),
        boundary=True,
    ),
    Case(rule="CKP005", name="nobody says", verdict="unknown", evidence=habit(memory_copies=None)),
    Case(rule="CKP005", name="none, and not required", verdict="pass", evidence=job("checkpoint.memory_every=0")),
    Case(
        rule="CKP005",
        name="none on 1,024 devices",
        verdict="pass",
        evidence=job("checkpoint.memory_every=0", "batch.global_sequences=2048", cluster="8xH100:128"),
        boundary=True,
    ),
    Case(
        rule="CKP005",
        name="none on 2,048 devices",
        verdict="fail",
        evidence=job("checkpoint.memory_every=0", "batch.global_sequences=2048", cluster=LARGE),
        boundary=True,
        severity="error",
        at="checkpoint.memory_every",
    ),
    Case(rule="CKP005", name="mostly the same rack", verdict="fail", evidence=racks("other host"), severity="warning"),
    Case(rule="CKP005", name="another rack", verdict="pass", evidence=racks("other rack")),
    Case(
        rule="CKP005",
        name="the disk at 10x",
        verdict="pass",
        evidence=reliability(optimal_interval_s=1_000.0, interval_s=10_000.0),
        boundary=True,
    ),
    Case(
        rule="CKP005",
        name="the disk at more",
        verdict="fail",
        evidence=reliability(optimal_interval_s=1_000.0, interval_s=10_001.0),
        boundary=True,
        at="checkpoint.interval_s",
    ),
    Case(rule="CKP006", name="known and drilled", verdict="pass", evidence=job()),
    Case(
        rule="CKP006",
        name="one part is missing",
        verdict="fail",
        evidence=habit(resumes_exactly=STATE[1:]),
        severity="error",
        says="does not restore: weights",
        boundary=True,
    ),
    Case(rule="CKP006", name="no loss scale in bf16", verdict="pass", evidence=habit(resumes_exactly=STATE[:-1])),
    Case(
        rule="CKP006",
        name="no loss scale in fp16",
        verdict="fail",
        evidence=job("precision.compute=fp16", practice=replace(OURS, resumes_exactly=STATE[:-1])),
        says="does not restore: scaler",
    ),
    Case(rule="CKP006", name="nobody says", verdict="unknown", evidence=habit(resumes_exactly=None)),
    Case(rule="CKP006", name="not drilled", verdict="unknown", evidence=job(drill=None)),
    Case(rule="CKP006", name="near enough on a GPU", verdict="pass", evidence=drilled(bitwise=False), boundary=True),
    Case(
        rule="CKP006",
        name="not the same bits on a CPU",
        verdict="fail",
        evidence=job(drill=replace(DRILL, profile="cpu-gloo", bitwise=False), profile="cpu-gloo"),
        boundary=True,
        says="did not end like one without",
    ),
    Case(rule="CKP006", name="a drill that went wrong", verdict="fail", evidence=drilled(clean=False, bitwise=False)),
]
FLIPS = [
    Flip(rule="CKP005", limit="rack_devices", value=73, evidence=racks("other host"), before="fail", after="pass"),
    Flip(rule="CKP001", limit="least_failures", value=6, evidence=many_failures(5), before="fail", after="pass"),
    Flip(rule="CKP001", limit="least_saves", value=100, evidence=interval(2.1), before="fail", after="pass"),
    Flip(rule="CKP001", limit="grace_room", value=2.0, evidence=grace(1.5), before="pass", after="fail"),
    Flip(rule="CKP002", limit="save_faults", value=("disk-full",), evidence=job(), before="pass", after="unknown"),
    Flip(
        rule="CKP002",
        limit="least_points",
        value=1,
        evidence=drilled(save_points=("manifest",)),
        before="unknown",
        after="pass",
    ),
    Flip(rule="CKP003", limit="least_kept", value=4, evidence=job(), before="pass", after="fail"),
    Flip(rule="CKP003", limit="damage_faults", value=("flip",), evidence=job(), before="pass", after="unknown"),
    Flip(
        rule="CKP004",
        limit="most_stall",
        value=0.05,
        evidence=reliability(blocking_s=20.0, interval_s=1_000.0),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="CKP004",
        limit="most_persist",
        value=0.5,
        evidence=reliability(persist_s=600.0, interval_s=1_000.0),
        before="pass",
        after="fail",
    ),
    Flip(rule="CKP004", limit="drafts", value=2, evidence=free(1.0), before="pass", after="fail"),
    Flip(rule="CKP004", limit="copies", value=10_000, evidence=job(), before="pass", after="fail"),
    Flip(
        rule="CKP004",
        limit="least_saves",
        value=100,
        evidence=saved(blocked_s=spread(20.0, count=55)),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="CKP005",
        limit="required",
        value=True,
        evidence=job("checkpoint.memory_every=0"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="CKP005",
        limit="persistent_ratio",
        value=5.0,
        evidence=reliability(optimal_interval_s=1_000.0, interval_s=6_000.0),
        before="pass",
        after="fail",
    ),
    Flip(rule="CKP006", limit="parts", value=("weights", "soul"), evidence=job(), before="pass", after="fail"),
    Flip(
        rule="CKP006",
        limit="fp16_parts",
        value=(),
        evidence=job("precision.compute=fp16", practice=replace(OURS, resumes_exactly=STATE[:-1])),
        before="fail",
        after="pass",
    ),
    Flip(rule="CKP006", limit="restoring_faults", value=("nan",), evidence=job(), before="pass", after="unknown"),
    Flip(rule="CKP006", limit="bitwise", value=True, evidence=drilled(bitwise=False), before="pass", after="fail"),
]
