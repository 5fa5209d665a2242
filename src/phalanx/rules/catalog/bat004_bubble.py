"""BAT004: enough micro-batches fill the pipeline."""

from __future__ import annotations

import math

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the pipeline bubble with the time of the micro-batches."""
    layout = evidence.the_plan.layout
    if layout.pipeline <= 1:
        return exempt("one stage: a pipeline of one has no bubble")
    zero_bubble = layout.schedule == "zero-bubble"
    bubble_share = limits.number("zero_bubble_left") if zero_bubble else 1.0
    chunks, count = max(1, layout.virtual_pipeline), max(1, layout.accumulation)
    fill = max(1, evidence.practice.pipeline_fill or count)
    # Several times a step; the pipeline fills again each time.
    drained = fill < count
    count = min(count, fill)
    ratio = bubble_share * (layout.pipeline - 1) / (chunks * count)
    max_ratio = limits.number("most_ratio")
    shrunk = f"{bubble_share:.2f} × " if zero_bubble else ""
    formula = (
        f"{shrunk}(pp − 1) / (v · m) = {shrunk}({layout.pipeline} − 1) / ({chunks} × {count}) = {ratio:.3f}, "
        f"at most {max_ratio:g}",
        *(
            [f"drained after {count:,} of the {plural(layout.accumulation, 'micro-batch')} of a step"]
            if drained
            else []
        ),
    )
    message = f"the pipeline idles {ratio:.0%} of the time its micro-batches take"
    if ratio <= max_ratio:
        return passed(message, formula=formula, value=ratio, threshold=max_ratio)
    needed_count = math.ceil(bubble_share * (layout.pipeline - 1) / (chunks * max_ratio)) if max_ratio > 0 else count
    # The largest smaller micro-batch that gives enough micro-batches; 0 where there is none.
    rank_sequences = layout.micro_batch * count
    sizes = [
        size
        for size in range(1, layout.micro_batch)
        if rank_sequences % size == 0 and rank_sequences // size >= needed_count
    ]
    smaller = max(sizes, default=0)
    return failed(
        f"{message}, more than {max_ratio:.0%}",
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        at="batch.micro" if smaller else "parallel.pipeline",
        impact=evidence.loses(
            ratio / (1 + ratio) - max_ratio / (1 + max_ratio),
            "idle stages, beside a bubble at the limit; other parts unchanged",
        ),
        fix=_bubble_fix(evidence, needed_count, drained=drained),
        edits=(Edit(key="batch.micro", value=smaller, safe=False, note=f"{needed_count:,} micro-batches or more"),)
        if smaller
        else (),
    )


def _bubble_fix(evidence: Evidence, wanted: int, *, drained: bool) -> str:
    if not drained:
        return f"{wanted:,} micro-batches a step: a smaller batch.micro, a larger batch, or fewer stages"
    setting_name = evidence.their_keys.get("batch.fill", "")
    hint = f" ({setting_name})" if setting_name else ""
    return f"{wanted:,} micro-batches before it is drained{hint}, smaller ones, or fewer stages"


RULE = Rule(
    id="BAT004",
    slug="pipeline-bubble",
    severity="warning",
    requires="JP",
    requirement="Enough micro-batches fill the pipeline: it idles at most a quarter of the time they take.",
    why="""
A pipeline of pp stages fills and drains once a step: pp − 1 micro-batches long, divided by the v chunks of an
interleaved schedule. GPipe found the bubble negligible from m ≥ 4·pp micro-batches on (arXiv:1811.06965);
Megatron's analysis gives (pp − 1)/(v·m) (arXiv:2104.04473). With 8 stages and 8 micro-batches 47 % of the step is idle.
""",
    how="""
`(pp − 1) / (v · m) ≤ 0.25`, m the micro-batches of a step on a data rank, or those after which a trainer drains its
pipeline (torchtitan: of a local batch). A zero-bubble schedule leaves a third of it:
`(F + B − W)` of `(F + B + W)` with the three alike (arXiv:2401.10241). Of a run it is judged by the plan too: the log
tells how long a rank waited in a step, not whether for the pipeline or for a slow neighbour (TEL004, EFF003).
""",
    limits={
        "most_ratio": Limit(value=0.25, note="bubble over the time of the micro-batches: m ≥ 4·pp of GPipe"),
        "zero_bubble_left": Limit(value=1 / 3, note="of the bubble, with ZB-H1: arXiv:2401.10241, F = B = W"),
    },
    bad="""
[parallel]
pipeline = 8
schedule = "1f1b"

[batch]
global_sequences = 512
micro = 2           # on 128 devices: 16 micro-batches a step
""",
    good="""
[parallel]
pipeline = 8
schedule = "1f1b"

[batch]
global_sequences = 512
micro = 1           # 32 of them
""",
    fix="A smaller micro-batch, an interleaved or zero-bubble schedule, or fewer stages.",
    waive="A model that fits no other way, with a batch that must not grow.",
    references=(
        Reference(text="GPipe, arXiv:1811.06965; Megatron-LM, arXiv:2104.04473", mark="recalled"),
        Reference(text="zero bubble, arXiv:2401.10241", mark="recalled"),
    ),
    check=check,
)
