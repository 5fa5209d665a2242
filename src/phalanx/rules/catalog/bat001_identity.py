"""BAT001: every step trains on the declared batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import Problem
from phalanx.job.schema import Batch
from phalanx.plan.peer_share import planned_share
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.rules.catalog.top001_degrees import OUR_LIMIT, is_batch
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import StepFacts

LEARNS = Impact(note="no time lost, but the learning rate was chosen for another batch")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the batch of the plan, and the tokens of the steps in the log."""
    planned = _judge_plan(evidence)
    steps = evidence.log.steps if evidence.log is not None else None
    if steps is None:
        return planned
    return (*planned, _judge_steps(evidence, steps, limits))


def _judge_plan(evidence: Evidence) -> tuple[Outcome, ...]:
    if evidence.plan is None:
        return _judge_refusal(evidence)
    layout, declared = evidence.plan.layout, evidence.the_job.batch.global_sequences
    if evidence.plan.sites is not None:
        peers = len(evidence.plan.sites.sites)
        return (passed(f"{peers} sites share {plural(declared, 'sequence')} a step, as declared", value=declared),)
    batch = layout.micro_batch * layout.accumulation * layout.data
    share = planned_share(evidence.the_job, evidence.plan.cluster).batch.global_sequences
    if share != declared and batch == share:
        message = f"each of {evidence.the_job.sync.peers} peers takes {batch:,} of the {declared:,} sequences of a step"
        return (passed(message, value=batch, threshold=share, unit="sequences"),)
    formula = (
        f"B = b · a · dp = {layout.micro_batch} × {layout.accumulation} × {layout.data} = {plural(batch, 'sequence')}, "
        f"declared {declared:,}",
    )
    if batch == declared:
        message = f"each step takes {plural(batch, 'sequence')}, as declared"
        return (passed(message, formula=formula, value=batch, threshold=declared, unit="sequences"),)
    deal = BatchDeal.of(layout, reproducible=evidence.the_job.numerics.reproducible)
    if batch > declared and layout.accumulation == deal.micro_batches(declared) and not evidence.is_foreign:
        message = f"each step takes {plural(declared, 'sequence')}, as declared"
        message += f", and {plural(batch - declared, 'row')} of padding that do not count"
        return (passed(message, formula=formula, value=declared, threshold=declared, unit="sequences"),)
    return (
        failed(
            f"each step takes {plural(batch, 'sequence')}, and {declared:,} are declared",
            formula=formula,
            value=batch,
            threshold=declared,
            unit="sequences",
            at="batch.global_sequences",
            impact=LEARNS,
            fix=f"declare {batch:,}, or choose micro-batch, accumulation and data ranks whose product is {declared:,}",
        ),
    )


def _judge_refusal(evidence: Evidence) -> tuple[Outcome, ...]:
    problems = tuple(problem for problem in evidence.refusals if is_batch(problem))
    if not problems:
        message = "there is no plan, so the number of data ranks is not known"
        return (unknown(message, fix="fix what TOP001 or MEM001 reports, or name a cluster"),)
    return tuple(
        # Another trainer may accept such a batch.
        unknown(f"{problem.what}; no plan is made", fix=problem.fix)
        if evidence.is_foreign and OUR_LIMIT.search(problem.what)
        else failed(
            problem.what,
            formula=_refusal_reason(evidence, problem),
            at="batch.micro" if "batch.micro" in problem.what else "batch.global_sequences",
            impact=Impact(points=100.0, note="the job does not start"),
            fix=problem.fix or "make the batch a multiple of the data ranks",
        )
        for problem in problems
    )


def _refusal_reason(evidence: Evidence, problem: Problem) -> tuple[str, ...]:
    """Return the planner's reason, and the setting that restricts the planner to data ranks."""
    restriction = "numerics.reproducible = true splits over data ranks alone: only their sums keep their order"
    return (*([problem.why] if problem.why else []), *([restriction] if evidence.the_job.numerics.reproducible else []))


def _judge_steps(evidence: Evidence, steps: StepFacts, limits: Limits) -> Outcome:
    sizes = declared_sizes(evidence.the_job.batch, evidence.the_job.data.sequence)
    if not steps.tokens:
        return unknown(
            "the log does not say how many tokens the steps had, or had too many sizes to count",
            fix="train with a Phalanx that writes `tokens` into its step events",
        )
    tolerance = limits.number("tolerance")
    odd_counts = {
        size: count
        for size, count in steps.tokens.items()
        if all(abs(size - declared) > tolerance * declared for declared in sizes)
    }
    # A step of one peer has its share of the batch, which changes as other peers come and go.
    if evidence.the_job.sync.has_peers:
        odd_counts = {size: count for size, count in odd_counts.items() if size > max(sizes)}
    total = sum(steps.tokens.values())
    words = " or ".join(f"{size:,}" for size in sizes)
    if not odd_counts:
        return passed(
            f"{plural(total, 'step')} had {words} tokens each, as declared",
            value=0,
            threshold=0,
            unit="steps",
        )
    size = min(odd_counts, key=lambda odd_size: (odd_counts[odd_size], odd_size))
    return failed(
        f"{sum(odd_counts.values()):,} of {total:,} steps had another batch than declared, "
        f"as {size:,} tokens for {words}",
        formula=tuple(
            f"{plural(count, 'step')} of {tokens:,} tokens" for tokens, count in sorted(odd_counts.items())[:4]
        ),
        value=size,
        threshold=sizes[-1],
        unit="tokens",
        at=steps.tokens_spot or "batch.global_tokens",
        impact=LEARNS,
        fix="keep the batch when ranks leave (Phalanx gives their sequences to the others), or declare the sizes under "
        "[[batch.ramp]]",
    )


def declared_sizes(batch: Batch, sequence: int) -> tuple[int, ...]:
    """Return all token counts that a step may have, in increasing order: whole sequences, at least one."""
    sequences = [batch.global_sequences, *(stage.global_tokens // max(1, sequence) for stage in batch.ramp)]
    return tuple(sorted({max(1, count) * sequence for count in sequences}))


RULE = Rule(
    id="BAT001",
    slug="batch-identity",
    severity="error",
    requires="J",
    uses="PL",
    requirement="The effective batch is what was declared, at every step, also when ranks come and go.",
    why="""
The learning rate belongs to the batch. A trainer that loses a data rank and goes on with the others learns from a
smaller batch unless it hands the lost share to the rest; torchft therefore reports the participants of every step and
divides by them. One data rank of 8 lost without notice is a batch 12.5 % smaller for the rest of the run.
""",
    how="""
`B = b · a · dp` in the plan, less the rows with which a run that is resumed on other ranks pads its batch. In the
log, the tokens of every step are `batch.global_tokens`, or those of a stage of `[[batch.ramp]]`; a size of neither
kind is a finding, with the line of the rarest. Where the planner finds that the batch cannot be shared out, its reason
is the finding.
""",
    limits={
        "tolerance": Limit(value=0.0, note="relative difference of a step's tokens: none, it is an identity"),
    },
    bad="""
[batch]
global_sequences = 500    # over 128 data ranks
""",
    good="""
[batch]
global_sequences = 512
""",
    fix="A batch that is a multiple of micro-batch times data ranks.",
    waive="Documents that are not packed, so that the valid tokens of a step differ by nature.",
    references=(Reference(text="pytorch/torchft: participants of a step, and division by them", mark="read"),),
    check=check,
)
