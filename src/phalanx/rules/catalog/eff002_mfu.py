"""EFF002: model FLOPs utilization is above the floor of the hardware."""

from __future__ import annotations

from phalanx.rules.catalog.tel_measured import file_of, finite_value, steps_of, still_reading
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt, failed, passed, unknown
from phalanx.rules.profiles import PROFILES
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

NOT_JUDGED = 0.0
LOW_BITS = ("fp8", "fp4")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the measured MFU with the floor of the hardware profile."""
    log, value = evidence.the_log, finite_value(evidence.the_log.mfu)
    floor = _mfu_floor(evidence, limits)
    if value is None:
        if steps_of(log) < limits.number("least_steps"):
            return exempt(f"{plural(steps_of(log), 'step')}: too few to judge a rate")
        return still_reading(log, "the steps") or unknown(
            "MFU is not known", fix="it needs a plan.json with the FLOPs per token and the peak, and timed steps"
        )
    if floor <= NOT_JUDGED:
        return exempt(f"MFU {value:.1%}: reported, not judged: no published floor for {evidence.profile.name}")
    if steps_of(log) < limits.number("least_steps"):
        return exempt(f"MFU {value:.1%} over {plural(steps_of(log), 'step')}: too few to judge")
    message = f"MFU {value:.1%}, the floor of {evidence.profile.name} is {floor:.0%}"
    formula = _mfu_formula(evidence, value, floor)
    if value >= floor:
        return passed(message, formula=formula, value=value, threshold=floor)
    return failed(
        message,
        formula=formula,
        value=value,
        threshold=floor,
        at=file_of(log),
        impact=evidence.loses(1 - value / floor, "a step at the floor would be this much shorter"),
        fix="phalanx report RUN puts the step beside its prediction; phalanx trace shows where it waits",
    )


def _mfu_floor(evidence: Evidence, limits: Limits) -> float:
    """Return the MFU floor.

    MFU is always relative to the 16-bit peak, and the floor of 8-bit formats is lower: part of their gain is lost
    to scaling and casts.
    """
    floor, job, plan = limits.number("floor"), evidence.job, evidence.plan
    if plan is not None and plan.cluster.accelerator.family == "tpu-v5" and evidence.profile.name == "tpu":
        floor = limits.number("floor_tpu_v5")
    low_bits = job is not None and job.precision.compute in LOW_BITS
    return min(floor, limits.number("floor_low_bits")) if low_bits else floor


def _mfu_formula(evidence: Evidence, value: float, floor: float) -> tuple[str, ...]:
    plan, steps = evidence.plan, evidence.the_log.steps
    rate = finite_value(steps.tokens_per_s) if steps is not None else None
    if plan is None or rate is None:
        return (f"MFU = {value:.3f}; at least {floor:g}",)
    flops, devices = plan.prediction.model_flops_per_token, plan.layout.devices
    return (f"{flops:.3g} FLOPs/token x {rate:,.0f} tokens/s / ({devices:,} x peak) = {value:.3f}; at least {floor:g}",)


RULE = Rule(
    id="EFF002",
    slug="mfu-floor",
    severity="warning",
    requires="L",
    uses="JP",
    requirement="Model FLOPs utilization is above the floor of the hardware profile.",
    why="""
MegaScale reached 55.2 % on 12,288 A100, Llama 3 38 to 43 % on 16,384 H100, MaxText 39 to 65 % on TPUs. A job well below
what others publish on the same hardware has a fault in its layout, links or data, and pays for it in every step.
""",
    how="""
`MFU = FLOPs per token x tokens/s / (devices x dense 16-bit peak)`, FLOPs as in the plan: 6 per active parameter without
the input embedding, plus causal attention, no recompute. At least 0.40 on A100, 0.35 on H100, H200 and TPU, 0.30 on
B200 and for 8-bit formats, from 20 steps on. No floor is published for CPUs, MI300X and other hardware: there it is
reported, not judged.
""",
    limits={
        "floor": Limit(
            value=NOT_JUDGED,
            profiles={name: profile.mfu_floor or NOT_JUDGED for name, profile in PROFILES.items()},
            note="least MFU: a step below what is published for the hardware, our choice; 0 is not judged",
        ),
        "floor_tpu_v5": Limit(value=0.45, note="TPU v5p and v5e: MaxText's published 39 to 65 %"),
        "floor_low_bits": Limit(value=0.30, note="the same for 8- and 4-bit formats over the 16-bit peak: our choice"),
        "least_steps": Limit(value=20, unit="steps", note="before which a rate says little: our choice"),
    },
    bad='{"event": "step", "step": 500, "tokens": 4194304, "duration_s": 30.0}  # llama-3-8b on 128 H100: MFU 6 %',
    good='{"event": "step", "step": 500, "tokens": 4194304, "duration_s": 4.3}  # the same: MFU 40 %',
    fix="`phalanx plan` shows the fastest layout it knows; a large gap to the prediction is a fault, not a layout.",
    waive="Models too small for the hardware, or sequences so short that kernels cannot fill it.",
    references=(
        Reference(text="MegaScale, arXiv:2402.15627: 55.2 %", mark="read"),
        Reference(text="Llama 3, arXiv:2407.21783: 38 to 43 %; MaxText: 39 to 65 %", mark="secondary"),
    ),
    check=check,
)
