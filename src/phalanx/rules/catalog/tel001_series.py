"""TEL001: every rank reports the required series often enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.shared import MARGIN, severity_above
from phalanx.rules.catalog.tel_measured import file_of, finite_value, steps_of, still_reading, too_young, why_no_noise
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

BLIND = Impact(note="costs no time by itself; what goes wrong unseen is found by whoever pays for it")
SERIES = ("utilization", "memory", "peers", "noise", "steps")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the job's telemetry keys before a run, and the intervals in the log of a run."""
    log = evidence.log
    if log is None:
        return _judge_job(evidence, limits)
    return (
        _judge_steps(log),
        _judge_devices(evidence, log, limits),
        _judge_peers(evidence, log, limits),
        _judge_noise(evidence, log, limits),
        _judge_schema(log),
    )


# ---- before a run ----------------------------------------------------------------------------------------------------


def _judge_job(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    practice = evidence.practice
    if practice.trainer != "phalanx":
        return (_judge_trainer(evidence),)
    if evidence.job is None:
        return (unknown("neither a job nor a run log says what will be measured", fix="name a job file or a run"),)
    return (_judge_interval(evidence, limits), _judge_pings(evidence, limits))


def _judge_trainer(evidence: Evidence) -> Outcome:
    trainer, written = evidence.practice.trainer, evidence.practice.telemetry
    if written is None:
        return unknown(f"which series {trainer} writes is not known", fix="check the log of a run")
    missing = [series for series in SERIES if series not in written]
    if not missing:
        return passed(f"{trainer} writes {', '.join(SERIES)}")
    return failed(
        f"{trainer} does not record {', '.join(missing)}",
        value=len(SERIES) - len(missing),
        threshold=len(SERIES),
        unit="series",
        impact=BLIND,
        severity="warning",
        fix=f"export {', '.join(missing)} beside {trainer}'s own log, or train with phalanx train",
    )


def _judge_interval(evidence: Evidence, limits: Limits) -> Outcome:
    interval_s, max_interval_s = evidence.the_job.telemetry.interval_s, limits.number("device_s")
    statement = f"devices are sampled every {interval_s:g} s"
    formula = (f"telemetry.interval_s = {interval_s:g} s <= {max_interval_s:g} s",)
    if interval_s < limits.number("least_s"):
        return _too_often("telemetry.interval_s", interval_s, max_interval_s, statement, limits)
    if interval_s <= max_interval_s:
        return passed(statement, formula=formula, value=interval_s, threshold=max_interval_s, unit="s")
    return failed(
        statement,
        formula=(f"telemetry.interval_s = {interval_s:g} s > {max_interval_s:g} s",),
        value=interval_s,
        threshold=max_interval_s,
        unit="s",
        at="telemetry.interval_s",
        severity=severity_above(interval_s, max_interval_s, limits),
        impact=BLIND,
        edits=(Edit(key="telemetry.interval_s", value=round(max_interval_s), safe=True, note="the slowest allowed"),),
    )


def _too_often(key: str, value_s: float, most: float, statement: str, limits: Limits) -> Outcome:
    """Return the failure for an interval so short that the sampling thread takes a core from the training."""
    min_interval_s = limits.number("least_s")
    return failed(
        f"{statement}, more often than every {min_interval_s:g} s",
        formula=(f"{key} = {value_s:g} s < {min_interval_s:g} s",),
        value=value_s,
        threshold=min_interval_s,
        unit="s",
        at=key,
        severity="warning",
        impact=Impact(note="a core of every rank, and a log that grows by as much: TEL006 measures the cost in a run"),
        edits=(Edit(key=key, value=min(10, round(most)), safe=True, note="often enough"),),
    )


def _judge_pings(evidence: Evidence, limits: Limits) -> Outcome:
    every_s, max_interval_s = evidence.the_job.telemetry.peers_every_s, limits.number("peers_s")
    if evidence.plan is not None and evidence.devices < 2:
        return exempt("one rank has no peers")
    statement = f"peer latency is reported every {every_s:g} s" if every_s else "peer latency is never measured"
    if 0 < every_s < limits.number("least_s"):
        return _too_often("telemetry.peers_every_s", every_s, max_interval_s, statement, limits)
    if 0 < every_s <= max_interval_s:
        formula = (f"0 < telemetry.peers_every_s = {every_s:g} s <= {max_interval_s:g} s",)
        return passed(statement, formula=formula, value=every_s, threshold=max_interval_s, unit="s")
    return failed(
        statement,
        formula=(f"telemetry.peers_every_s = {every_s:g} s is not within (0, {max_interval_s:g}] s",),
        value=every_s,
        threshold=max_interval_s,
        unit="s",
        at="telemetry.peers_every_s",
        severity=severity_above(every_s, max_interval_s, limits) if every_s > 0 else None,
        impact=BLIND,
        edits=(
            Edit(key="telemetry.peers_every_s", value=min(30, round(max_interval_s)), safe=True, note="the default"),
        ),
    )


# ---- of a run --------------------------------------------------------------------------------------------------------


def _judge_steps(log: LogFacts) -> Outcome:
    steps = log.steps
    if steps is None or steps.count <= 0:
        return still_reading(log, "steps") or exempt("the run has no step yet")
    span = steps.last - steps.first + 1
    statement = f"{steps.count:,} of {span:,} steps are on record"
    if steps.count >= span:
        return passed(statement, value=steps.count, threshold=span, unit="steps")
    return failed(
        statement,
        formula=(f"{span:,} - {steps.count:,} = {plural(span - steps.count, 'step')} without a `step` event",),
        value=steps.count,
        threshold=span,
        unit="steps",
        at=file_of(log),
        impact=BLIND,
        fix="look for a disk that was full, or files that were cut: every rank writes every step",
    )


def _judge_devices(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    max_gap_s = limits.number("device_s") * limits.number("gap_ratio")
    if log.monitor is None:
        return _absent_series(log, "samples of the devices", "`monitor`", max_gap_s)
    too_few_ranks = _too_few(evidence, log, log.monitor.ranks, "samples of the devices", limits)
    return too_few_ranks or _judge_gaps(log, "devices are sampled", log.monitor.gap_s, max_gap_s, limits)


def _judge_peers(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    max_gap_s = limits.number("peers_s") * limits.number("gap_ratio")
    if max(log.world, len(log.ranks)) < 2:
        return exempt("one rank has no peers")
    if log.peers is None:
        return _absent_series(log, "reports of peer latency", "`peers`", max_gap_s)
    if log.peers.p99_s is None and (finite_value(log.peers.lost_share) or 0.0) > 0:
        return failed(
            "every ping between peers was lost",
            value=log.peers.lost_share,
            at=file_of(log),
            impact=BLIND,
            fix="let UDP between the hosts pass (docs/telemetry.md, peer latency)",
        )
    too_few_ranks = _too_few(evidence, log, log.peers.ranks, "reports of peer latency", limits)
    return too_few_ranks or _judge_gaps(log, "peer latency is reported", log.peers.gap_s, max_gap_s, limits)


def _judge_noise(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    max_steps, steps = limits.number("noise_steps"), steps_of(log)
    if why := why_no_noise(evidence):
        return exempt(why)
    noise = log.noise
    if noise is None or not noise.count:
        if steps <= max_steps:
            return exempt(f"the gradient noise is due within {max_steps:g} steps; the run has {steps:,}")
        return still_reading(log, "the gradient noise") or failed(
            f"{plural(steps, 'step')} and no gradient noise",
            value=0,
            threshold=max_steps,
            unit="steps",
            at=file_of(log),
            impact=BLIND,
            fix="phalanx train writes `noise_scale` with every step: look for a `remark` in the rank's events",
        )
    gap = finite_value(noise.gap_steps)
    statement = f"{plural(noise.count, 'value')} of the gradient noise" + (
        f", p99 {gap:.0f} steps apart" if gap is not None else ""
    )
    if gap is None or gap <= max_steps:
        return passed(statement, value=gap, threshold=max_steps, unit="steps")
    return failed(
        statement,
        formula=(f"p99 of the distance = {gap:.0f} steps > {max_steps:g}",),
        value=gap,
        threshold=max_steps,
        unit="steps",
        at=file_of(log),
        impact=BLIND,
        fix="look for steps with `noise_scale` null: gradients that are not finite, or a mean below zero",
    )


def _judge_schema(log: LogFacts) -> Outcome:
    invalid = log.grammar.invalid
    if invalid <= 0:
        return passed("every event read keeps the schema", value=0, threshold=0, unit="events")
    return failed(
        f"{invalid:,} events break the schema: {log.grammar.invalid_text or 'see the line'}",
        value=invalid,
        threshold=0,
        unit="events",
        at=log.grammar.invalid_spot or file_of(log),
        impact=BLIND,
        fix="write events as docs/events.md says: names, types and units",
    )


def _absent_series(log: LogFacts, what: str, kind: str, due_s: float) -> Outcome:
    return (
        still_reading(log, what)
        or too_young(log, f"the first of the {what}", due_s)
        or failed(
            f"the log has no {what}",
            value=0,
            at=file_of(log),
            impact=BLIND,
            fix=f"every rank writes {kind} events: [telemetry] of the job, and the remarks of the ranks, say why not",
        )
    )


def _too_few(evidence: Evidence, log: LogFacts, found: int, what: str, limits: Limits) -> Outcome | None:
    """Return the outcome if too few ranks report a series, else None.

    From class S4 on a host may report for its ranks.
    """
    expected, sources = log.world or len(log.ranks), "ranks"
    if limits.flag("aggregated") and evidence.plan is not None:
        expected, sources = min(expected, evidence.plan.reliability.hosts), "hosts"
    if log.ranks_read is not None and log.ranks_read < len(log.ranks):
        expected, sources = min(expected, log.ranks_read), "ranks that were read"
    share = found / expected if expected else 1.0
    min_ranks_share = limits.number("ranks_share")
    if share >= min_ranks_share:
        return None
    return still_reading(log, what) or failed(
        f"{found:,} of {expected:,} {sources} have {what}",
        formula=(f"{found:,} / {expected:,} = {share:.1%} < {min_ranks_share:.0%}",),
        value=share,
        threshold=min_ranks_share,
        at=file_of(log),
        impact=BLIND,
        fix="look at the rank's log: a driver that fails is told there once",
    )


def _judge_gaps(log: LogFacts, statement: str, gap_s: float | None, most: float, limits: Limits) -> Outcome:
    gap = finite_value(gap_s)
    if gap is None:
        return passed(f"{statement}, once in each membership", threshold=most, unit="s")
    statement = f"{statement} {gap:.1f} s apart or less, for 99 % of the time on 99 % of the ranks"
    if gap <= most:
        return passed(statement, formula=(f"{gap:.1f} s <= {most:g} s",), value=gap, threshold=most, unit="s")
    return failed(
        statement,
        formula=(f"not exceeded for 99 % of the time on 99 % of the ranks: {gap:.1f} s > {most:g} s",),
        value=gap,
        threshold=most,
        unit="s",
        at=file_of(log),
        severity=severity_above(gap, most, limits),
        impact=BLIND,
        fix="shorten [telemetry] interval_s or peers_every_s; where they are short, the host was too busy to look",
    )


RULE = Rule(
    id="TEL001",
    slug="mandated-series",
    severity="error",
    requires="",
    uses="JPL",
    requirement="Every rank reports steps, utilization, memory, peer latency and gradient noise on schedule.",
    why="""
A failure that nobody measures is found by its bill: of 3,079 jobs at ByteDance 42.5 % straggled, and 10.4 % of the
device hours were lost to it (arXiv:2505.05713). Ten seconds is what MLflow samples at by default and ten times what
DCGM does (1 s); a minute between pings is enough to see a link that flaps for longer than a step.
""",
    how="""
Before a run: `0.1 <= telemetry.interval_s <= 10`, `0.1 <= telemetry.peers_every_s <= 60` (with two ranks or more), a
warning up to a tenth beyond and below 0.1 s; for another trainer, the series it is documented to write. Of a run: a
`step` event for every step; for 99 % of the time of a rank, its silence before the first and after the last sample
counted, samples `<= 2 x 10 s` apart and reports of peer latency `<= 2 x 60 s`, on 99 % of the ranks (from class S4 on,
of the hosts: they may sum up); p99 of the distance between values of the noise `<= 100 steps`; no event breaks the
schema. Gradient noise is not asked of layouts that cannot have it: context
ranks, or one micro-batch on one data rank.
""",
    limits={
        "device_s": Limit(value=10.0, unit="s", note="between samples of a device: MLflow's default, read"),
        "least_s": Limit(
            value=0.1, unit="s", note="between samples or reports; more often costs what it measures: our choice"
        ),
        "margin": MARGIN,
        "peers_s": Limit(value=60.0, unit="s", note="between reports of peer latency: the source document of the spec"),
        "noise_steps": Limit(value=100, unit="steps", note="between values of the gradient noise: our choice"),
        "gap_ratio": Limit(value=2.0, unit="x", note="of the distance over the interval: one sample may be missed"),
        "ranks_share": Limit(value=0.99, note="of ranks that report: our choice"),
        "aggregated": Limit(
            value=False, classes={"S4": True}, note="a host may report for its ranks: spec 6.3, 32,768 streams are many"
        ),
    },
    bad="""
[telemetry]
interval_s = 60
peers_every_s = 0
""",
    good="""
[telemetry]
interval_s = 10
peers_every_s = 30
""",
    fix="`--fix` writes the two keys of `[telemetry]`; a rank that is silent says why in its own log.",
    waive="A profiler run of minutes, in which the monitor's thread must not disturb what is measured.",
    references=(
        Reference(text="MLflow system metrics: every 10 s by default", mark="read"),
        Reference(text="DCGM samples every second by default", mark="secondary"),
        Reference(text="stragglers at ByteDance, arXiv:2505.05713", mark="secondary"),
        Reference(text="OpenTelemetry: units in UCUM, seconds and bytes", mark="read"),
    ),
    check=check,
)
