"""MEM002: the run was not short of memory, and its peak was as predicted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_bytes, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts, MonitorFacts

OUT_OF_MEMORY = ("outofmemory", "out of memory", "memoryerror")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check for ranks that ran out of memory, then the memory samples of the run."""
    ends, monitor = _judge_ends(evidence, evidence.the_log), evidence.the_log.monitor
    if monitor is None:
        missing = unknown(
            "no rank reported its memory", fix="a run longer than telemetry.interval_s, in which ranks report"
        )
        return (ends, missing)
    if not evidence.profile.is_gpu:
        return (ends, _judge_stalls(evidence, monitor, limits), _judge_prediction(evidence, monitor, limits))
    return (
        ends,
        _judge_retries(monitor, limits),
        _judge_fragments(monitor, limits),
        _judge_prediction(evidence, monitor, limits),
    )


def _judge_ends(evidence: Evidence, log: LogFacts) -> Outcome:
    oom_incidents = [
        incident for incident in log.incidents if any(word in incident.what.lower() for word in OUT_OF_MEMORY)
    ]
    if not oom_incidents and log.memberships is None:
        return unknown(
            "no supervisor recorded why ranks ended",
            fix="start it with phalanx train, whose agents record it; under another launcher see its own log",
        )
    if not oom_incidents:
        return passed("no rank ran out of memory", value=0, threshold=0)
    lost_s = sum(incident.recovery_s or 0.0 for incident in oom_incidents)
    return failed(
        f"{plural(len(oom_incidents), 'time')} a rank ran out of memory, "
        f"first rank {oom_incidents[0].rank} at step {oom_incidents[0].step:,}",
        value=len(oom_incidents),
        threshold=0,
        impact=evidence.loses(lost_s / log.wall_s if log.wall_s else 0.0, "recoveries after running out of memory"),
        fix="a smaller batch.micro, more recompute or sharding: it will come again",
    )


def _judge_retries(monitor: MonitorFacts, limits: Limits) -> Outcome:
    count, max_retries = monitor.allocation_retries, limits.number("most_retries")
    if count is None:
        return unknown("nobody counted the allocator's retries", fix="telemetry of a trainer that reports them")
    if count <= max_retries:
        return passed(f"the allocator retried {plural(count, 'time')}", value=count, threshold=max_retries)
    return failed(
        f"the allocator freed its cache and retried {plural(count, 'time')}",
        value=count,
        threshold=max_retries,
        impact=Impact(note="each stops the device while its cache is freed; the steps it hit are in EFF003"),
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller batch.micro",
    )


def _judge_fragments(monitor: MonitorFacts, limits: Limits) -> Outcome:
    """Judge fragmentation: memory that the allocator holds beyond the peak filled by tensors."""
    held_bytes, peak, max_ratio = monitor.held_bytes, monitor.memory_peak_bytes, limits.number("most_held")
    if not held_bytes or not peak or not math.isfinite(held_bytes / peak):
        return unknown(
            "how much memory the allocator holds is not known",
            fix="a run longer than telemetry.interval_s, in which ranks report their peak and what they hold",
        )
    ratio = held_bytes / peak
    formula = (f"{format_bytes(held_bytes)} held / {format_bytes(peak)} filled = {ratio:.2f}, at most {max_ratio:g}",)
    statement = f"the allocator holds {ratio:.2f}x what tensors filled at most"
    if ratio <= max_ratio:
        return passed(statement, formula=formula, value=ratio, threshold=max_ratio, unit="x")
    return failed(
        statement,
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        unit="x",
        impact=Impact(
            note=f"no time lost, but {format_bytes(held_bytes - peak)} of device memory are too fragmented to use"
        ),
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or fewer sizes of tensors",
    )


def _judge_stalls(evidence: Evidence, monitor: MonitorFacts, limits: Limits) -> Outcome:
    share, max_share = monitor.pressure_mean, limits.number("most_stalled")
    if not monitor.pressure_source.startswith("psi") or share is None or not math.isfinite(share):
        return exempt("the kernel keeps no pressure stall information, and these are not GPUs")
    if share <= max_share:
        return passed(f"ranks stalled for lack of memory {share:.2%} of the time", value=share, threshold=max_share)
    return failed(
        f"ranks stalled for lack of memory {share:.2%} of the time, more than {max_share:.0%}",
        formula=(f"mean of {monitor.pressure_source}, some, over all samples = {share:.4f}",),
        value=share,
        threshold=max_share,
        impact=evidence.loses(share, "time in which a task waited for memory"),
        fix="fewer ranks on the host, a smaller batch.micro, or what else runs there",
    )


def _judge_prediction(evidence: Evidence, monitor: MonitorFacts, limits: Limits) -> Outcome:
    if not limits.flag("judge_prediction"):
        return exempt(f"on {evidence.profile.name} the peak is measured for the process, not for an allocator")
    if evidence.plan is None:
        return exempt("there is no plan to compare the peak with")
    peak, planned = monitor.memory_peak_bytes, evidence.plan.memory.total_bytes
    if not peak or not math.isfinite(peak):
        return unknown(
            "no rank reported its peak memory", fix="a run longer than telemetry.interval_s, in which ranks report"
        )
    error, max_error = planned / peak - 1, limits.number("most_error")
    formula = (f"{format_bytes(planned)} / {format_bytes(peak)} − 1 = {error:+.1%}",)
    statement = f"predicted {format_bytes(planned)}, measured {format_bytes(peak)}: {error:+.1%}"
    if abs(error) <= max_error:
        return passed(statement, formula=formula, value=error, threshold=max_error, at="plan:memory")
    return failed(
        statement,
        formula=formula,
        value=error,
        threshold=max_error,
        at="plan:memory",
        impact=Impact(
            note="no time lost, but the next plan of such a job may choose what does not fit, or waste what does"
        ),
        fix="phalanx trace JOB measures every term on one machine: compare, and plan with the peak that was measured",
    )


RULE = Rule(
    id="MEM002",
    slug="pressure-observed",
    severity="warning",
    requires="L",
    uses="P",
    requirement="The run never ran out of memory nor thrashed for it, and its peak was what the plan said.",
    why="""
An allocator that is short frees its cache and asks the driver again; every such retry stops the device, and
torchtitan reports them beside its step times for that reason. On a CPU the kernel says the same by pressure stall
information: the share of time in which some task waited for memory. A prediction that was off by more than a tenth
will choose wrongly next time.
""",
    how="""
In the log: incidents that name memory = 0; on GPUs `allocation_retries` = 0, most held (of the monitor) over most
filled (of the steps) ≤ 1.15 and |predicted / peak − 1| ≤ 10 %; on a CPU the mean of the kernel's `some` memory pressure
is at most 1 %: `some` and not the lower `full`, since one rank that stalls holds up all. The time of major faults is in
it. The ratios are our choice.
""",
    limits={
        "most_retries": Limit(value=0, note="retries of the allocator: our choice; torchtitan reports the count"),
        "most_held": Limit(
            value=1.15, unit="x", note="memory the allocator holds over the most that tensors filled: our choice"
        ),
        "most_stalled": Limit(value=0.01, note="share of time stalled for memory on a CPU host: our choice"),
        "most_error": Limit(value=0.10, note="of the predicted peak: our choice, beside a median error of 5.7 %"),
        "judge_prediction": Limit(
            value=True,
            note="whether the peak is held against the plan; cpu: no, private memory of a process holds "
            "more than tensors",
            profiles={"cpu-gloo": False},
        ),
    },
    bad="""
{"event":"monitor","rank":3,"memory_bytes":84000000000,"memory_limit_bytes":85000000000,"allocation_retries":12}
""",
    good="""
{"event":"monitor","rank":3,"memory_bytes":66000000000,"memory_limit_bytes":85000000000,"allocation_retries":0}
""",
    fix="A smaller micro-batch, more recompute or sharding; where only the prediction was off, "
    "`phalanx trace JOB` tells which term.",
    waive="A drill that ran out of memory on purpose.",
    references=(
        Reference(text="torchtitan metrics: memory, alloc retries, OOMs", mark="read"),
        Reference(text="Linux pressure stall information, Documentation/accounting/psi.rst", mark="recalled"),
        Reference(text="the four ratios", mark="our choice"),
    ),
    check=check,
)
