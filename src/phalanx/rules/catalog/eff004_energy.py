"""EFF004: energy is counted by a counter, and reported per token and in dollars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, still_reading, too_young
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

NO_TIME = Impact(note="costs no time: energy that is not counted cannot be saved, or billed")
DUE_S = 20.0  # until the first sample: twice TEL001's interval


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check that the energy comes from a counter, and that the log has joules."""
    log = evidence.the_log
    if evidence.profile.name == "tpu" and not _energy_sources(log):
        return unknown("no energy counter of TPUs is published", fix="take the site's meter, and say so in a waiver")
    if log.monitor is None:
        return (
            still_reading(log, "samples of the devices")
            or too_young(log, "the first sample of a device", DUE_S)
            or unknown("the log has no samples of the devices", fix="TEL001 says what should be there")
        )
    counters = limits.words("counters")
    sources = _energy_sources(log)
    if not sources:
        return _without_counter(evidence, "no rank counts energy", "none", counters, limits)
    estimates = [source for source in sources if source not in counters]
    if estimates:
        message = f"energy is from {', '.join(estimates)}, not from a counter"
        return _without_counter(evidence, message, ", ".join(estimates), counters, limits)
    return _energy_reported(log, sources)


def _energy_sources(log: LogFacts) -> tuple[str, ...]:
    return log.monitor.energy_sources if log.monitor is not None else ()


def _without_counter(
    evidence: Evidence, statement: str, value: str, counters: tuple[str, ...], limits: Limits
) -> Outcome:
    """Return the failure for a run without a counter.

    On CPUs it is a remark: RAPL is readable only by root, and missing on most virtual machines.
    """
    cpu_fix = (
        "let the ranks read the powercap counters (root, or chmod of energy_uj)" if not evidence.profile.is_gpu else ""
    )
    return failed(
        statement,
        formula=(f"{value} is not one of {', '.join(counters)}",),
        value=value,
        threshold=", ".join(counters),
        severity="info" if limits.flag("remark_only") else None,
        at=file_of(evidence.the_log),
        impact=NO_TIME,
        fix=cpu_fix or "pip install nvidia-ml-py reads the board's energy counter (Volta and newer)",
    )


def _energy_reported(log: LogFacts, sources: tuple[str, ...]) -> Outcome:
    energy_j, steps = finite_value(log.energy_j), log.steps
    if energy_j is None and log.monitor is not None:
        energy_j = finite_value(log.monitor.energy_j)
    if energy_j is None:
        return still_reading(log, "energy") or unknown(
            "a counter is named, but no joules are recorded", fix="look at energy_j in the monitor events"
        )
    tokens = sum(size * count for size, count in (steps.tokens or {}).items()) if steps is not None else 0
    each = f", {energy_j / tokens:.3g} J per token" if tokens > 0 else ""
    usd = finite_value(log.usd)
    spent = f", ${usd:,.2f} so far" if usd is not None else ""
    if energy_j <= 0 and tokens:
        return exempt(f"the counter of {', '.join(sources)} has not moved yet")
    return passed(f"{energy_j:,.0f} J by {', '.join(sources)}{each}{spent}", value=energy_j, unit="J")


RULE = Rule(
    id="EFF004",
    slug="energy-counted",
    severity="warning",
    requires="L",
    requirement="Energy is read from counters, and stands per token and in dollars beside the run.",
    why="""
The power sensor behind nvidia-smi samples 25 % of the time on A100 and H100 (arXiv:2312.02741): integrating what was
polled misses the rest, a cumulative counter does not. Perseus saved up to 30 % of the energy without slowing training
(arXiv:2312.06902), and nobody can tell without J per token.
""",
    how="""
`energy_source` of the run's `monitor` events is a counter (`nvml`, `rapl`, `amdsmi`), not an estimate, and joules are
told. On cpu-gloo an estimate is a remark, not a warning: RAPL is readable by root alone, and missing on most virtual
machines. TPUs have no published counter: unknown. Whether a power cap pays (J per token at least 5 % less, steps at
most 3 % slower) is for `phalanx diff` of two runs: one log cannot say.
""",
    limits={
        "counters": Limit(
            value=("nvml", "rapl", "amdsmi", "dcgm"), note="sources that count joules: docs/telemetry.md"
        ),
        "remark_only": Limit(
            value=False, profiles={"cpu-gloo": True}, note="an estimate is a remark: our choice, RAPL needs root"
        ),
    },
    bad='{"event": "monitor", "energy_j": 51000.0, "energy_source": "estimate"}',
    good='{"event": "monitor", "energy_j": 48211.4, "energy_source": "nvml"}',
    fix="`pip install nvidia-ml-py` for NVIDIA; on CPUs let the ranks read /sys/class/powercap.",
    waive="A cloud that hides the counters: take the bill's kWh, and say where it is kept.",
    references=(
        Reference(text="nvidia-smi's power sensor, arXiv:2312.02741", mark="read"),
        Reference(text="Perseus, arXiv:2312.06902", mark="read"),
    ),
    check=check,
)
