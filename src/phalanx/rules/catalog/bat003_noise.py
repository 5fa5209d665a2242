"""BAT003: the batch is not far larger than the gradient noise scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import steps_of
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import NoiseFacts


def check(evidence: Evidence, limits: Limits) -> Outcome | tuple[Outcome, ...]:
    """Compare the batch with the last noise scale of the log, and check how the noise scale grew."""
    if evidence.plan is not None and evidence.plan.layout.data * evidence.plan.layout.accumulation < 2:
        return exempt("one micro-batch a step: the noise scale needs two batch sizes to compare")
    noise = evidence.the_log.noise
    if noise is None or noise.last is None or not math.isfinite(noise.last):
        return unknown(
            "the log has no gradient noise scale", fix="train with two data ranks or two micro-batches a step"
        )
    steps, least_steps = steps_of(evidence.the_log), limits.number("least_steps")
    if steps < least_steps:
        message = (
            f"the batch is {evidence.the_job.batch.global_sequences:,} and the noise scale {noise.last:,.3g} sequences"
        )
        return exempt(f"{message} after {plural(steps, 'step')}: reported, not judged before {least_steps:,.0f}")
    if noise.count < limits.number("least_count") or noise.last <= 0:
        return unknown(
            f"{plural(noise.count, 'estimate')} of the noise scale, last {noise.last:.3g}: too few, or no signal yet",
            fix="let the run go on; early in training the estimate is near zero",
        )
    return (_judge_size(evidence, noise, limits), *_judge_ramp(evidence, noise, limits))


def _judge_size(evidence: Evidence, noise: NoiseFacts, limits: Limits) -> Outcome:
    assert noise.last is not None
    batch, max_ratio = evidence.the_job.batch.global_sequences, limits.number("most_ratio")
    ratio = batch / noise.last
    efficiency = 1 / (1 + ratio)
    formula = (
        f"B / B_simple = {batch:,} / {noise.last:,.3g} sequences = {ratio:.2f}, at most {max_ratio:g};  "
        f"token efficiency 1 / (1 + {ratio:.2f}) = {efficiency:.0%}",
    )
    message = f"the batch is {ratio:.2f}x the noise scale"
    if ratio <= max_ratio:
        return passed(message, formula=formula, value=ratio, threshold=max_ratio, unit="x")
    # The largest power of two within the limit.
    smaller = max(1, 2 ** int(math.log2(max(1.0, noise.last * max_ratio))))
    return failed(
        f"{message}: a token teaches {efficiency:.0%} of what it would in a small batch",
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        unit="x",
        at="batch.global_sequences",
        impact=evidence.loses(
            1 - efficiency * (1 + max_ratio), "tokens that a batch at the limit would not have needed"
        ),
        fix="a smaller batch, or smaller ones early in training ([[batch.ramp]])",
        edits=(Edit(key="batch.global_sequences", value=smaller, safe=False, note="at most the noise scale"),),
    )


def _judge_ramp(evidence: Evidence, noise: NoiseFacts, limits: Limits) -> tuple[Outcome, ...]:
    growth, max_growth = noise.growth, limits.number("most_growth")
    if growth is None or not math.isfinite(growth) or growth <= max_growth or evidence.the_job.batch.ramp:
        return ()
    return (
        failed(
            f"the noise scale grew {growth:.1f}x and the batch stayed as it was",
            value=growth,
            threshold=max_growth,
            unit="x",
            at="batch.ramp",
            severity="info",
            impact=Impact(note="not known: smaller batches early would have needed fewer tokens"),
            fix="give smaller batches for the first tokens: [[batch.ramp]]",
        ),
    )


RULE = Rule(
    id="BAT003",
    slug="batch-vs-noise",
    severity="warning",
    requires="JL",
    uses="P",
    requirement="The batch is not larger than the gradient noise scale.",
    why="""
Past the noise scale B_simple a larger batch averages out noise that is no longer there: at B = B_simple a token teaches
half of what it teaches in a small batch, at 4 times that a fifth (McCandlish et al., arXiv:1812.06162). It is advice
and not a law: batches found by direct measurement differ from it (Merrill et al., arXiv:2505.23971), and early in
training the estimate is near zero.
""",
    how="""
`B / B_simple ≤ 1`, so that token efficiency `1 / (1 + B/B_simple)` is at least one half; B_simple is the last smoothed
estimate of the log, of at least ten, in a run of 200 steps or more: before, it is reported and not judged, since it
starts near zero and grows. Where it grew more than twofold since a tenth of the run and the job has no batch
ramp, an information says so.
""",
    limits={
        "most_ratio": Limit(value=1.0, unit="x", note="half of the token efficiency of a small batch: computed"),
        "most_growth": Limit(value=2.0, unit="x", note="growth of the noise scale without a ramp: our choice"),
        "least_steps": Limit(value=200, unit="steps", note="before which the noise scale grows fast: our choice"),
        "least_count": Limit(value=10, unit="estimates", note="before the last one is believed: our choice"),
    },
    bad="""
[batch]
global_sequences = 4096   # with a noise scale of 600 sequences at the end of the run
""",
    good="""
[batch]
global_sequences = 512
""",
    fix="A smaller batch with its learning rate, or `[[batch.ramp]]`.",
    waive="Wall-clock time matters more than tokens: a large batch on many devices, on purpose.",
    references=(
        Reference(text="McCandlish et al., arXiv:1812.06162", mark="recalled"),
        Reference(text="critical batch size revisited, arXiv:2505.23971", mark="read"),
    ),
    check=check,
)
