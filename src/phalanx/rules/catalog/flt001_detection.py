"""FLT001: failures are detected soon, by heartbeat."""

from __future__ import annotations

import math

from phalanx.rules.catalog.flt_shared import counted_drills, high_percentile, per_failure, which_drills, with_ranks
from phalanx.rules.catalog.shared import MARGIN, severity_above
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the trainer's heartbeat, the job's limit of silence, and the measured detection times."""
    beat_s = evidence.practice.heartbeat_s
    # Without heartbeats there is no silence to judge.
    silent = beat_s is not None and beat_s <= 0
    patience = () if silent else (_judge_patience(evidence, limits),)
    return (_judge_heartbeat(evidence, limits), *patience, *_judge_measured(evidence, limits))


def _judge_heartbeat(evidence: Evidence, limits: Limits) -> Outcome:
    practice, max_heartbeat_s = evidence.practice, limits.number("heartbeat_s")
    beat_s = practice.heartbeat_s
    if beat_s is None:
        return unknown(
            f"whether ranks of {practice.trainer} send heartbeats is not known", fix="name a run log with a failure"
        )
    message = f"ranks of {practice.trainer} say every {beat_s:g} s that they live"
    if 0 < beat_s <= max_heartbeat_s:
        return passed(message, value=beat_s, threshold=max_heartbeat_s, unit="s")
    if beat_s <= 0:
        message = f"ranks of {practice.trainer} send no heartbeat: a failure shows when a collective times out"
    waits_s = _timeout_s(evidence)
    return failed(
        message,
        formula=(f"heartbeat {beat_s:g} s is not within (0, {max_heartbeat_s:g}] s; a collective waits {waits_s:g} s",),
        value=beat_s,
        threshold=max_heartbeat_s,
        unit="s",
        severity=_late_severity(beat_s, max_heartbeat_s, limits)
        if beat_s > 0
        else _late_severity(math.inf, max_heartbeat_s, limits),
        impact=per_failure(evidence, max(0.0, waits_s - limits.number("dead_after_s")), "waiting for a timeout"),
        fix="train with phalanx train, or put a heartbeat beside the ranks (NVIDIA's nvidia-resiliency-ext has one)",
    )


def _timeout_s(evidence: Evidence) -> float:
    """Return the seconds that a collective waits: the job's, else PyTorch's 600 s for NCCL and 1800 s for gloo."""
    job = evidence.the_job
    if evidence.stated("train.timeout_s") and not isinstance(job.train.timeout_s, str):
        return job.train.timeout_s
    if evidence.stated("fault.dead_after_s"):
        return job.fault.dead_after_s
    return 1800.0 if evidence.profile.name == "cpu-gloo" else 600.0


def _judge_patience(evidence: Evidence, limits: Limits) -> Outcome:
    dead_s, max_dead_after_s = evidence.the_job.fault.dead_after_s, limits.number("dead_after_s")
    if not evidence.stated("fault.dead_after_s"):
        return exempt(f"{evidence.practice.trainer} has no setting for the silence after which a rank is dead")
    message = f"a rank is dead after {dead_s:g} s of silence"
    min_beats = limits.number("least_beats") * (evidence.practice.heartbeat_s or 0.0)
    if dead_s < min_beats:
        return _too_short(evidence, message, min_beats, limits)
    if dead_s <= max_dead_after_s:
        return passed(message, value=dead_s, threshold=max_dead_after_s, unit="s", at="fault.dead_after_s")
    return failed(
        message,
        formula=(f"fault.dead_after_s = {dead_s:g} s > {max_dead_after_s:g} s",),
        value=dead_s,
        threshold=max_dead_after_s,
        unit="s",
        at="fault.dead_after_s",
        severity=_late_severity(dead_s, max_dead_after_s, limits),
        impact=per_failure(evidence, dead_s - max_dead_after_s, "silence that nobody acts on"),
        edits=(Edit(key="fault.dead_after_s", value=int(max_dead_after_s), safe=True, note="the longest allowed"),),
    )


def _late_severity(value_s: float, most: float, limits: Limits) -> Severity | None:
    """Return the severity of late detection: a warning in small jobs and slightly beyond the bound."""
    return severity_above(value_s, most, limits) if limits.flag("late_is_error") else "warning"


def _too_short(evidence: Evidence, statement: str, least: float, limits: Limits) -> Outcome:
    """Return the failure for a limit shorter than a few heartbeats: every rank would count as dead between two."""
    beats, beat_s = limits.number("least_beats"), evidence.practice.heartbeat_s or 0.0
    return failed(
        f"{statement}, and sends a heartbeat only every {beat_s:g} s",
        formula=(f"fault.dead_after_s < {beats:g} heartbeats × {beat_s:g} s = {least:g} s",),
        value=evidence.the_job.fault.dead_after_s,
        threshold=least,
        unit="s",
        at="fault.dead_after_s",
        impact=Impact(note="healthy ranks are ended; below one heartbeat the run takes no step at all"),
        edits=(
            Edit(key="fault.dead_after_s", value=int(limits.number("dead_after_s")), safe=True, note="the default"),
        ),
    )


def _judge_measured(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Judge the detection times of the log if there was a failure, else those of drills; empty without either."""
    log = evidence.log
    if log is not None and log.detect_s is not None and log.detect_s.count:
        count = log.detect_s.count
        return (_judge_detection(evidence, log.detect_s.p95, f"in {plural(count, 'failure')} of this run", limits),)
    drills = counted_drills(evidence)
    slow_s = high_percentile([value for drill in drills for value in drill.detect_s])
    where = f"in {plural(len(drills), 'drill')}{with_ranks(evidence, drills)}"
    if slow_s is None:
        return ()
    return (
        _judge_detection(evidence, slow_s, where, limits, which_drills([drill for drill in drills if drill.detect_s])),
    )


def _judge_detection(evidence: Evidence, value_s: float, where: str, limits: Limits, *more: str) -> Outcome:
    bound_s = limits.number("measured_s")
    message = f"p95 of detection {where} is {format_seconds(value_s)}"
    if value_s <= 0:  # the rank itself reported it
        message = f"detection {where} took no time"
    message = "; ".join([message, *more])
    if value_s <= bound_s:
        return passed(message, value=value_s, threshold=bound_s, unit="s")
    return failed(
        message,
        formula=(f"p95(detection) = {value_s:.3g} s > {bound_s:g} s",),
        value=value_s,
        threshold=bound_s,
        unit="s",
        at="fault.dead_after_s",
        severity=_late_severity(value_s, bound_s, limits),
        impact=per_failure(evidence, value_s - bound_s, "noticed late"),
        fix="lower fault.dead_after_s; where it is low, look in supervisor.jsonl at what was noticed late, and by whom",
    )


RULE = Rule(
    id="FLT001",
    slug="detection-latency",
    severity="error",
    requires="J",
    uses="PLD",
    requirement="Failures are detected by heartbeat within seconds, not by the timeout of a collective.",
    why="""
Until a failure is noticed every device waits. ByteRobust detects what the operating system sees in 2 s, a lost GPU in
10 s, a network card in 30 s, and about 600 s by timeout (arXiv:2509.16293 table 3); PyTorch's default timeout is 600 s
for NCCL and 1800 s for gloo. From 10 minutes to 90 s is worth 0.3 points of effective time on 1,024 GPUs and 4.5 on
16,384 (computed: 3.8e-3 failures per host and day, checkpoints of 10 s).
""",
    how="""
`heartbeat <= 5 s` (a habit of the trainer), `4 heartbeats <= fault.dead_after_s <= 30 s` (Phalanx beats every 0.25 s),
and `p95(detection) <= 30 s` over the failures of the run, or over drills of this code and profile where the run had
none. A fault of the network has no bound of its own: heartbeats go over it, and `dead_after_s` holds for all silence.
Before a run, and for a run without a failure, the first two settle it. On CPUs what was measured must be
within 10 s: nothing there takes longer. Up to a tenth beyond a bound is a warning, and so is all that is late in jobs
of up to 64 devices.
""",
    limits={
        "heartbeat_s": Limit(value=5.0, unit="s", note="NVIDIA resiliency extension's check interval"),
        "dead_after_s": Limit(value=30.0, unit="s", note="ByteRobust table 3: a network card is noticed in 30 s"),
        "least_beats": Limit(
            value=4,
            unit="heartbeats",
            note="silence shorter than so many may be a busy host: our choice",
        ),
        "late_is_error": Limit(
            value=False, classes={"S2": True}, note="timing rules warn in class S1, spec.md 6.3: our choice"
        ),
        "margin": MARGIN,
        "measured_s": Limit(
            value=30.0,
            unit="s",
            note="p95 of detection: as above; CPU ranks have no device to wait for, 10 s is our choice",
            profiles={"cpu-gloo": 10.0},
        ),
    },
    bad="""
[fault]
dead_after_s = 600
""",
    good="""
[fault]
dead_after_s = 30
""",
    fix="`fault.dead_after_s = 30` or less. A step longer than that is no reason: its agent sees that it runs.",
    waive="A machine that stops whole processes for longer on purpose (live migration, suspended virtual machines).",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 table 3", mark="read"),
        Reference(text="NVIDIA/nvidia-resiliency-ext: checks every 5 s", mark="read"),
        Reference(text="PyTorch pull request 110947: default timeouts", mark="read"),
        Reference(text="10 s on CPUs", mark="our choice"),
    ),
    check=check,
)
