"""COM002: lossy gradient compression saves time, and its error is fed back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from phalanx.errors import UserError
from phalanx.plan.request import request_from_job
from phalanx.plan.score import price_layouts
from phalanx.rules.catalog.shared import without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds

PLAIN = Edit(key="parallel.compression", value="none", safe=False, note="gradients as they are")


def check(evidence: Evidence, limits: Limits) -> Outcome | tuple[Outcome, ...]:
    """Check whether the trainer corrects the error, and how much time the plan predicts to be saved."""
    layout = evidence.the_plan.layout
    if layout.compression == "none":
        return exempt("gradients travel as they are")
    if layout.data * layout.context <= 1:
        return exempt("one data rank: no gradients travel")
    return (_judge_correction(evidence, limits, layout.compression), _judge_saving(evidence, limits))


def _judge_correction(evidence: Evidence, limits: Limits, kind: str) -> Outcome:
    if kind not in limits.words("biased"):
        return passed(f"{kind} gradients are rounded to the nearest number, without a bias that adds up", value=kind)
    trainer, feedback = evidence.practice.trainer, evidence.practice.error_feedback
    if feedback is None:
        return unknown(
            f"whether {trainer} feeds the error of {kind} gradients back is not known",
            fix='look it up in its documentation, or use compression = "none"',
            at="parallel.compression",
        )
    if feedback:
        return passed(f"{trainer} adds what {kind} gradients lost to the next step's", value=kind)
    return failed(
        f"{kind} gradients are biased and {trainer} does not feed their error back",
        value=kind,
        threshold="error feedback",
        at="parallel.compression",
        severity="error",
        impact=Impact(note="no time lost, but the model learns from wrong gradients, and may not converge"),
        fix="turn error feedback on",
        edits=(PLAIN,),
    )


def _judge_saving(evidence: Evidence, limits: Limits) -> Outcome:
    plan = evidence.the_plan
    if (missing := without_measurement(evidence, "what compression saves")) is not None:
        return missing
    times = _step_seconds(evidence)
    if times is None:
        return unknown(
            "the plan cannot be priced again without compression", fix="plan the job again: phalanx plan JOB"
        )
    with_s, without_s = times
    saved = 1.0 - with_s / without_s
    spans = plan.layout.devices > plan.cluster.domain_devices
    rate_gbps = (plan.cluster.nic_bytes_per_s if spans else plan.cluster.link_bytes_per_s) * 8 / 1e9
    slow = rate_gbps <= limits.number("slow_gbps")
    min_saving = limits.number("slow_saving" if slow else "saving")
    message = f"{plan.layout.compression} gradients save {saved:.1%} of the predicted step"
    formula = (
        f"1 − {format_seconds(with_s)} / {format_seconds(without_s)} = {saved:.1%}, at least {min_saving:.0%} on "
        f"{rate_gbps:,.0f} Gb/s a device",
    )
    if saved >= min_saving:
        return passed(message, formula=formula, value=saved, threshold=min_saving, at="parallel.compression")
    return failed(
        f"{message}, less than {min_saving:.0%}",
        formula=formula,
        value=saved,
        threshold=min_saving,
        at="parallel.compression",
        impact=evidence.loses(max(0.0, -saved), "the step as predicted; packing and rounding are not free"),
        edits=(PLAIN,),
    )


def _step_seconds(evidence: Evidence) -> tuple[float, float] | None:
    """Return the predicted seconds of a step with the layout's compression and without, or None."""
    plan = evidence.the_plan
    rows = [plan.layout, replace(plan.layout, compression="none")]
    try:
        request, _ = request_from_job(evidence.the_job, plan.cluster)
        with np.errstate(all="ignore"):
            _, times, _ = price_layouts(request, rows)
    except (UserError, ValueError, ArithmeticError):  # a plan that no longer matches its job or cluster
        return None
    with_s, without_s = (float(step_s) for step_s in times.step_s)
    return (with_s, without_s) if math.isfinite(with_s) and without_s > 0 else None


RULE = Rule(
    id="COM002",
    slug="compression-justified",
    severity="warning",
    requires="JP",
    requirement="Lossy gradient compression saves a real part of the step, and a biased one feeds its error back.",
    why="""
Of more than 200 setups, compression made 6 faster: gradients travel behind the backward pass already, and packing
takes time of its own (Agarwal et al., arXiv:2103.00543). A compressor that always errs to the same side (top-k, low
rank, coarse rounding) moves the model somewhere else unless what was lost is added to the next step's gradient
(Karimireddy et al., arXiv:1901.09847; PowerSGD, arXiv:1905.13727).
""",
    how="""
`1 − step(compressed) / step(plain)`, both from the planner with everything that overlaps, is at least 5 %, or 2 % where
the slowest links of the job carry at most 10 Gb/s a device: a warning otherwise. Packing is priced for PowerSGD only,
so the 2 % are also the planner's error. A biased format without error feedback is an error.
""",
    limits={
        "saving": Limit(value=0.05, note="share of the step, as a measured gain would have to be: our choice"),
        "slow_saving": Limit(value=0.02, note="where links are slow; below it the plan cannot tell: our choice"),
        "slow_gbps": Limit(value=10.0, unit="Gb/s", note="where compression is a fair default: our choice"),
        "biased": Limit(value=("fp8", "int8", "powersgd", "topk"), note="formats whose error adds up without feedback"),
    },
    bad="""
[parallel]
compression = "int8"   # on 400 Gb/s a GPU: nothing is saved
""",
    good="""
[parallel]
compression = "none"
""",
    fix='`compression = "none"`, or `"auto"`; bf16 sums (`precision.grad_reduce`) are the first thing to try.',
    waive="A link slower than the cluster file says, with the step time measured both ways.",
    references=(
        Reference(text="Agarwal et al., arXiv:2103.00543", mark="read"),
        Reference(text="error feedback: arXiv:1901.09847; PowerSGD: arXiv:1905.13727", mark="recalled"),
    ),
    check=check,
)
