"""OPT002: peers that take many steps alone first train synchronously, and exchange often enough."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule

LEARNS = Impact(note="no time lost, but the loss ended 2.6 to 4.7 % higher in our runs without a warm-up")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...] | Outcome:
    """Check the synchronous steps at the start of a short run, and the number of exchanges after them."""
    job, sync = evidence.the_job, evidence.the_job.sync
    if sync.mode not in ("diloco", "quorum"):
        return exempt("no peer takes steps alone")
    steps = _run_steps(evidence)
    if steps is None:
        return exempt("the length of the run is not known")
    warm = sync.warm_up_steps(steps)
    return (
        _judge_warm_up(job.train.weights, steps, warm, limits),
        _judge_rounds(steps, warm, sync.inner_steps, limits),
    )


def _run_steps(evidence: Evidence) -> int | None:
    """Return the number of optimizer steps of the run, or None."""
    if evidence.plan is not None:
        return evidence.plan.duration.steps
    tokens, batch = evidence.the_job.data.tokens, evidence.the_job.batch.global_tokens
    return -(-tokens // batch) if isinstance(tokens, int) and batch else None


def _judge_warm_up(weights: str, steps: int, warm: int, limits: Limits) -> Outcome:
    share, min_share = warm / max(1, steps), limits.number("least_share")
    if weights:
        return passed("the run starts from trained weights: peers do not start apart", value=share)
    if steps > limits.number("short_steps"):
        return passed(f"{warm:,} synchronous steps, in a long run of {steps:,}", value=share)
    statement = f"{warm:,} of {steps:,} steps at the start are synchronous ({share:.1%})"
    if share >= min_share:
        return passed(statement, value=share, threshold=min_share, at="sync.synchronous_steps")
    return failed(
        f"{statement}, less than {min_share:.0%} of a short run",
        formula=(f"{warm:,} / {steps:,} = {share:.3g} < {min_share:g}",),
        value=share,
        threshold=min_share,
        at="sync.synchronous_steps",
        impact=LEARNS,
        edits=(Edit(key="sync.synchronous_steps", value="auto", safe=False, note="20 % of the steps"),),
    )


def _judge_rounds(steps: int, warm: int, inner_steps: int, limits: Limits) -> Outcome:
    rounds, min_rounds = (steps - warm) / inner_steps, limits.number("least_rounds")
    statement = f"peers exchange {rounds:,.1f} times after the warm-up"
    if rounds >= min_rounds:
        return passed(statement, value=rounds, threshold=min_rounds, at="sync.inner_steps")
    return failed(
        f"{statement}, fewer than {min_rounds:g}",
        formula=(f"({steps:,} - {warm:,}) / {inner_steps:,} = {rounds:.3g}",),
        value=rounds,
        threshold=min_rounds,
        at="sync.inner_steps",
        impact=Impact(note="no time lost, but the outer optimizer hardly takes a step: peers train apart"),
        edits=(
            Edit(
                key="sync.inner_steps",
                value=max(1, int((steps - warm) / min_rounds)),
                safe=False,
                note=f"{min_rounds:g} exchanges in the run",
            ),
        ),
    )


RULE = Rule(
    id="OPT002",
    slug="outer-warm-up",
    severity="warning",
    requires="J",
    uses="P",
    requirement="Peers that take many steps alone train synchronously first in a short run, and exchange often enough.",
    why="""
Peers that start apart from random weights move to different places, and the mean of them is worse than each. In runs of
400 steps DiLoCo without a warm-up was no better than one worker on a quarter of the tokens (2.55 instead of 2.48 nats
per byte); with 80 synchronous steps it came within 0.2 % of synchronous training. DiLoCo itself starts from 24,000
steps of ordinary training (arXiv:2311.08105).
""",
    how="""
Of `diloco` and `quorum`: in runs of at most 20,000 steps that do not start from trained weights, at least 5 % of the
steps are synchronous; and `(steps − synchronous_steps) / inner_steps >= 4`.
""",
    limits={
        "least_share": Limit(value=0.05, note="of the steps; our runs had 20 %: our choice"),
        "short_steps": Limit(value=20_000, unit="steps", note="up to which a run is short: our choice"),
        "least_rounds": Limit(value=4, note="exchanges after the warm-up: our choice"),
    },
    bad="""
[data]
tokens = "1.6B"         # about 400 steps
[sync]
mode = "diloco"
inner_steps = 500
synchronous_steps = 0
""",
    good="""
[data]
tokens = "1.6B"
[sync]
mode = "diloco"
inner_steps = 20
synchronous_steps = "auto"
""",
    fix='`synchronous_steps = "auto"`, and a smaller `inner_steps`.',
    waive="Weights that were trained elsewhere and are loaded by a plugin.",
    history="2026.1: added with training over slow links.",
    references=(
        Reference(text="DiLoCo, arXiv:2311.08105", mark="recalled"),
        Reference(text="our runs: docs/slow-links.md", mark="computed"),
        Reference(text="all thresholds", mark="our choice"),
    ),
    check=check,
)
