"""EFF005: the layout is predicted to use the hardware about as well as the best layout found."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.errors import UserError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rules.catalog.shared import without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt, failed, passed
from phalanx.rules.profiles import PROFILES
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_money

NOT_JUDGED = 0.0


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the predicted step with the best one found, and its MFU with what published jobs reach."""
    plan = evidence.the_plan
    if (missing := without_measurement(evidence, "how well a layout uses the hardware")) is not None:
        return missing
    step_s, mfu = plan.prediction.step_s, plan.prediction.mfu
    if not (math.isfinite(step_s) and step_s > 0 and math.isfinite(mfu)):
        return exempt("the plan predicts no step")
    if plan.duration.training_s < limits.number("least_s"):
        return exempt("a job of minutes: no layout is worth a change")
    best, best_s = fastest_layout(evidence)
    ratio, max_ratio = step_s / best_s, limits.number("most_ratio")
    floor, share = limits.number("floor"), limits.number("least_share")
    at = "plan:layout" if evidence.is_foreign else "parallel.mode"
    formula = (f"step {step_s:.3g} s, best found {best_s:.3g} s ({best.short}): {ratio:.2f}x; MFU {mfu:.1%}",)
    if ratio > max_ratio:
        lost_share = 1 - best_s / step_s
        usd = evidence.usd
        price = f": {format_money(lost_share * usd)}" if usd else ""
        return failed(
            f"your layout costs {ratio:.1f}x the best one found{price} (MFU {mfu:.1%} instead of {mfu * ratio:.1%})",
            formula=formula,
            value=ratio,
            threshold=max_ratio,
            unit="x",
            at=at,
            impact=evidence.loses(lost_share, "beside the best layout found for the same job and cluster"),
            fix=f"{best.name}; phalanx plan shows it beside its rivals. The threshold of {max_ratio:g}x is ours",
        )
    large = plan.prediction.parameters >= limits.number("least_parameters")
    if large and floor > NOT_JUDGED and mfu < share * floor:
        name, seconds = max(plan.prediction.breakdown_s.items(), key=lambda item: item[1], default=("", 0.0))
        largest = f"the largest part of a step is {name.removesuffix('_s').replace('_', ' ')}, {seconds:.3g} s"
        return failed(
            f"MFU {mfu:.1%} is predicted, and published jobs on {evidence.profile.name} reach {floor:.0%} and more",
            formula=(*formula, f"{mfu:.3f} < {share:g} × {floor:g}; {largest}"),
            value=mfu,
            threshold=share * floor,
            at=at,
            impact=evidence.loses(1 - mfu / (share * floor), "beside the least that is judged well enough"),
            fix=f"no layout found is much better: faster links between hosts, fewer devices, a larger batch or model; "
            f"the threshold, {share:g} of the floor of EFF002, is ours",
        )
    message = f"MFU {mfu:.1%} predicted, {ratio:.2f}x the step of the best layout found"
    return passed(message, formula=formula, value=ratio, threshold=max_ratio, unit="x")


def fastest_layout(evidence: Evidence) -> tuple[Layout, float]:
    """Return the fastest known layout that fits and that the trainer can run, and its seconds per step."""
    plan = evidence.the_plan
    candidates = [(plan.layout, plan.prediction.step_s)]
    if plan.search.fastest_memory_bytes <= plan.memory.usable_bytes:
        candidates.append((plan.search.fastest, plan.search.fastest_step_s))
    candidates += [(alternative.layout, alternative.step_s) for alternative in plan.alternatives if alternative.fits]
    if _shards_states_alone(evidence):
        runnable = [candidate for candidate in candidates if candidate[0].zero <= max(1, plan.layout.zero)]
        candidates = runnable if len(runnable) == len(candidates) else [*runnable, *_with_states_shared(plan)]
    return min(
        (candidate for candidate in candidates if math.isfinite(candidate[1]) and candidate[1] > 0),
        key=lambda candidate: candidate[1],
    )


SHARDS_MORE = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "deepspeed", "deepspeed_config", "zero_stage")


def _shards_states_alone(evidence: Evidence) -> bool:
    """Return whether the trainer shards only optimizer states, as Megatron's distributed optimizer does (ZeRO-1).

    Sharding weights needs one of Megatron's FSDPs, or DeepSpeed.
    """
    return evidence.practice.trainer in ("megatron", "nemo") and evidence.find_setting(*SHARDS_MORE) is None


def _with_states_shared(plan: Plan) -> list[tuple[Layout, float]]:
    """Repeat the planner's free search without the ZeRO stages that this trainer lacks."""
    from phalanx.plan.request import (
        request_from_job,
    )  # deferred: imports numpy, needed only where the search found another stage
    from phalanx.plan.search import search_layouts

    try:
        request, _ = request_from_job(plan.job, plan.cluster)
        fixed = {name: value for name, value in request.fixed.items() if name == "compression"}
        limits = replace(request.limits, zero=tuple(stage for stage in request.limits.zero if stage <= 1))
        best = search_layouts(replace(request, fixed=fixed, limits=limits)).best
    except UserError:  # no layout fits that shards only optimizer states
        return []
    return [(best.layout, best.step_s)]


RULE = Rule(
    id="EFF005",
    slug="predicted-efficiency",
    severity="warning",
    requires="JP",
    requirement="The layout is predicted to cost at most half as much again as the best one found, at a reasonable "
    "MFU.",
    why="""
A layout is chosen once and paid for in every step. Between the best and a common choice lie factors of two: a tensor
group across hosts, a pipeline with too few micro-batches, full recomputation that memory does not ask for. ZeRO-3 over
a 1 Gb/s network trains at 2 % MFU, and every other rule is content with it.
""",
    how="""
`step / best step <= 1.5`, the best of all layouts that the planner's free search finds to fit the same job on the same
cluster (of Megatron without its FSDP, those that share out no more than ZeRO-1); and `MFU >= 0.4 × the floor of EFF002`
for the hardware, of models of 1B parameters or more (the published jobs are); both in jobs that train for an hour or
more. All thresholds are our choice: the planner misses published steps by 4.8 % (`phalanx backtest`), so a factor of
1.5 is no error of prediction.
""",
    limits={
        "most_ratio": Limit(value=1.5, unit="x", note="predicted step over that of the best layout found: our choice"),
        "least_s": Limit(value=3600.0, unit="s", note="of training, below which no layout is judged: our choice"),
        "least_share": Limit(value=0.4, note="of the MFU floor of the hardware, EFF002: our choice"),
        "least_parameters": Limit(
            value=1e9, note="of the model, below which no MFU is judged: published jobs are larger"
        ),
        "floor": Limit(
            value=NOT_JUDGED,
            profiles={name: profile.mfu_floor or NOT_JUDGED for name, profile in PROFILES.items()},
            note="MFU that published jobs reach on the hardware, as in EFF002; 0 is not judged",
        ),
    },
    bad="""
[parallel]
tensor = 1
pipeline = 16
recompute = "full"
""",
    good="""
[parallel]
mode = "auto"
""",
    fix='The layout that the finding names, or `phalanx plan` with `mode = "auto"`.',
    waive="A layout that another part of the job dictates (weights to reshard, a kernel that needs the tensor size).",
    history="2026.1: added in 0.7.",
    references=(
        Reference(text="phalanx backtest: predicted against published steps, docs/validation.md", mark="computed"),
        Reference(text="1.5x and 0.4 of the floor", mark="our choice"),
    ),
    check=check,
)
