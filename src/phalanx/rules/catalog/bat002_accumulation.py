"""BAT002: an accumulated loss is divided by all valid tokens, not averaged over means."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check how the trainer normalises the loss where a step has more than one micro-batch or data rank."""
    plan = evidence.plan
    parts = plan.layout.accumulation * plan.layout.data if plan is not None else None
    if parts is not None and parts <= limits.number("parts"):
        return exempt("one micro-batch on one data rank: there is nothing to average over")
    practice = evidence.practice
    parts_text = "several micro-batches or data ranks" if parts is None else f"{plural(parts, 'micro-batch')} a step"
    if practice.token_weighted_loss is None:
        return unknown(
            f"how {practice.trainer} normalises a loss over {parts_text} is not known",
            fix="compare the loss of one step with and without accumulation on sequences of unequal length",
        )
    where = (practice.sources or {}).get("token_weighted_loss", "")
    source = (where,) if where else ()
    if practice.token_weighted_loss:
        return passed(f"{practice.trainer} divides the loss of {parts_text} by all valid tokens", formula=source)
    unequal = _uneven_sequences(evidence)
    return failed(
        f"{practice.trainer} averages the means of {parts_text}, so tokens of padded or masked sequences count more",
        formula=source,
        value="mean of means",
        threshold="sum over valid tokens",
        at="" if evidence.is_foreign else "batch.micro",  # default behaviour of that trainer, whatever its batch
        severity="error" if unequal else "warning",
        impact=Impact(note="no time lost, but the model learns from other weights than those of one large batch"),
        fix="set --calculate-per-token-loss (calculate_per_token_loss: true)"
        if practice.trainer in ("megatron", "nemo")
        else "divide the summed loss by the valid tokens of the whole batch, or pack sequences so that all are full",
    )


def _uneven_sequences(evidence: Evidence) -> bool:
    """Return whether the log has steps of incomplete sequences: then the mean of means differs from the true mean."""
    steps = evidence.log.steps if evidence.log is not None else None
    if steps is None or not steps.tokens or evidence.job is None:
        return False
    return any(size % max(1, evidence.job.data.sequence) for size in steps.tokens)


RULE = Rule(
    id="BAT002",
    slug="accumulation-exact",
    severity="error",
    requires="J",
    uses="PL",
    requirement="The loss of a step is the sum over its valid tokens divided by their number, however it is cut up.",
    why="""
A mean of micro-batch means weighs a token by how short its neighbours are. Trainers did so for years, until the losses
of accumulated and plain batches were compared (Hugging Face, "Fixing gradient accumulation", October 2024). With
sequences all of one length both are the same; with padding or masks they are not.
""",
    how="""
The trainer's documented habit: the accumulated loss is divided by the valid tokens of all micro-batches and ranks. A
mean of means is a warning while nothing shows that sequences differ, and an error where the log has steps that are no
whole number of sequences. A self-test that proves it: on unequal lengths, `|L(a=k) − L(a=1)| / L ≤ 1e-5` in fp32, 1e-3
in bf16. One micro-batch on one data rank has nothing to get wrong.
""",
    limits={
        "parts": Limit(value=1, unit="micro-batches", note="parts of a step up to which there is no mean of means"),
    },
    bad="""
loss = sum(mean_loss(micro) for micro in batch) / len(batch)
""",
    good="""
loss = sum(summed_loss(micro) for micro in batch) / sum(valid_tokens(micro) for micro in batch)
""",
    fix="Sum first, divide once. Megatron: `--calculate-per-token-loss`.",
    waive="All sequences packed to one length and no token masked: then both are equal.",
    references=(
        Reference(text="huggingface.co/blog/gradient_accumulation", mark="recalled"),
        Reference(text="tolerances by number format", mark="our choice"),
    ),
    check=check,
)
