"""TEL002: utilization is activity of the hardware, and there is enough of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, still_reading, too_young, wall_s
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import HOUR_S, format_seconds

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts, MonitorFacts

NOT_JUDGED = 0.0
DUE_S = 20.0  # until the first sample: twice TEL001's interval


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the source of the utilization, then its level, where a level is published for the source."""
    log = evidence.the_log
    monitor = log.monitor
    if monitor is None:
        return (_without_samples(log),)
    source = _judge_source(evidence, log, monitor)
    if source.verdict != "pass" or not monitor.utilization_sources:
        return (source,)
    return (source, *_judge_levels(evidence, log, monitor, limits))


def _judge_levels(evidence: Evidence, log: LogFacts, monitor: MonitorFacts, limits: Limits) -> tuple[Outcome, ...]:
    value = finite_value(monitor.utilization)
    if value is None:
        return (unknown("utilization has a source and no value", fix="look at `utilization` in the monitor events"),)
    statement = f"mean utilization {value:.0%}: reported, not judged"
    # NVIDIA's 0.8 and 0.5 refer to SM activity; tensor, gfx and CPU activity have no published level.
    if not all(source.endswith("-sm") for source in monitor.utilization_sources) or limits.number("mean") <= NOT_JUDGED:
        shared = "ranks that share cores cannot all be busy"
        no_level = f"no published level for {', '.join(monitor.utilization_sources)}"
        return (exempt(f"{statement} ({shared if evidence.profile.name == 'cpu-gloo' else no_level})"),)
    if wall_s(log) < limits.number("least_wall_s"):
        return (exempt(f"{statement} of a run of {format_seconds(wall_s(log))}: start and end weigh too much"),)
    return (_judge_mean(evidence, value, limits.number("mean")), _judge_hour(evidence, monitor, limits.number("hour")))


def _without_samples(log: LogFacts) -> Outcome:
    return (
        still_reading(log, "samples of the devices")
        or too_young(log, "the first sample of a device", DUE_S)
        or unknown("the log has no samples of the devices", fix="TEL001 says what should be there")
    )


def _judge_source(evidence: Evidence, log: LogFacts, monitor: MonitorFacts) -> Outcome:
    honest, profile = evidence.profile.utilization_sources, evidence.profile.name
    dishonest = [source for source in monitor.utilization_sources if source not in honest]
    if dishonest:
        return failed(
            f"utilization is measured by {', '.join(dishonest)}, not by the activity of the hardware",
            formula=(f"{', '.join(dishonest)} is not one of {', '.join(honest)} ({profile})",),
            value=", ".join(dishonest),
            threshold=", ".join(honest),
            at=file_of(log),
            impact=Impact(note="costs no time by itself: it hides idle devices behind a resident kernel"),
            fix=f"record {honest[0]} instead; NVML's utilization.gpu is the share of time with any kernel resident",
        )
    if monitor.utilization_sources:
        return passed(
            f"utilization is {', '.join(monitor.utilization_sources)}",
            value=", ".join(monitor.utilization_sources),
            threshold=", ".join(honest),
        )
    if finite_value(log.mfu) is not None:
        return passed(f"no counter of activity on these devices; MFU stands for it: {log.mfu:.1%}", value="mfu")
    return unknown(
        "no utilization, and no MFU either",
        fix="pip install nvidia-ml-py gives gpm-sm on Hopper and newer; MFU needs a plan and steps",
    )


def _judge_mean(evidence: Evidence, value: float, least: float) -> Outcome:
    statement = f"mean utilization {value:.0%}"
    if value >= least:
        return passed(statement, formula=(f"{value:.3f} >= {least:g}",), value=value, threshold=least)
    return failed(
        statement,
        formula=(f"mean over all ranks = {value:.3f} < {least:g}",),
        value=value,
        threshold=least,
        severity="warning",
        at=file_of(evidence.the_log),
        impact=evidence.loses(1 - value / least, "the same work at the level that is called necessary"),
        fix="phalanx trace shows where a step waits; EFF003 and COM001 to COM003 name the usual causes",
    )


def _judge_hour(evidence: Evidence, monitor: MonitorFacts, least: float) -> Outcome:
    value = finite_value(monitor.lowest_hour)
    if value is None:
        return exempt("no hour to judge by itself")
    statement = f"lowest hour {value:.0%}"
    if value >= least:
        return passed(statement, formula=(f"{value:.3f} >= {least:g}",), value=value, threshold=least)
    return failed(
        statement,
        formula=(f"lowest mean of an hour = {value:.3f} < {least:g}",),
        value=value,
        threshold=least,
        at=file_of(evidence.the_log),
        impact=evidence.loses_once(HOUR_S * (1 - value), "devices without work in that hour"),
        fix="look at that hour in phalanx web: data, checkpoints, or a recovery that did not end",
    )


RULE = Rule(
    id="TEL002",
    slug="utilization-honest",
    severity="error",
    requires="L",
    uses="JP",
    requirement="Utilization is activity of the hardware or MFU, never the time in which some kernel was resident.",
    why="""
NVML's `utilization.gpu` is the share of time with any kernel: on one H200 a single spinning thread block of 132 showed
100 % there and 0.75 % of SM activity (docs/telemetry.md). NVIDIA's guide to DCGM says of SM activity that 0.8 or more
is necessary but not sufficient, and that below 0.5 the use is likely ineffective.
""",
    how="""
Sources of the run's `monitor` events are those of the profile: `gpm-sm`, `gpm-tensor`, `dcgm-sm`, `dcgm-tensor` on
NVIDIA, `amdsmi-gfx` beside MFU, `libtpu-tensorcore`, `cpu-time` or `gemm` on CPUs; a device without a counter may stand
by its MFU. Of SM activity, in runs of an hour or more: a warning where the mean is below 0.8, an error where the lowest
hour is below 0.5. Tensor, gfx, TPU and CPU activity have no published level, and ranks that share cores cannot all be
busy: reported, not judged.
""",
    limits={
        "mean": Limit(
            value=0.8,
            profiles={"cpu-gloo": 0.0, "amd-mi300x": 0.0, "tpu": 0.0},
            note="least mean SM activity: NVIDIA's DCGM guide, read; 0 is not judged",
        ),
        "hour": Limit(
            value=0.5,
            profiles={"cpu-gloo": 0.0, "amd-mi300x": 0.0, "tpu": 0.0},
            note="least SM activity of an hour: NVIDIA's DCGM guide, read; 0 is not judged",
        ),
        "least_wall_s": Limit(value=3600.0, unit="s", note="before which start and end weigh too much: our choice"),
    },
    bad='{"event": "monitor", "utilization": 0.99, "utilization_source": "nvml-utilization"}',
    good='{"event": "monitor", "utilization": 0.86, "utilization_source": "gpm-sm"}',
    fix="`pip install nvidia-ml-py` on Hopper and newer; DCGM's fields 1002 and 1004 (SM, tensor) elsewhere.",
    waive="A cluster whose operator forbids profiling counters: say who, and keep MFU.",
    references=(
        Reference(text="DCGM feature overview: profiling metrics 1001 to 1005", mark="read"),
        Reference(text="docs/telemetry.md: five loads on one H200, 15 November 2026", mark="computed"),
    ),
    check=check,
)
