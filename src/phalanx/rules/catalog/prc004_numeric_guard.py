"""PRC004: steps that are not finite or explode are skipped by all ranks, and not for long."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.rules.catalog.shared import MARGIN, beyond_count
from phalanx.rules.catalog.tel_measured import file_of
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import StepFacts


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that skipping is bounded and done by all ranks, that gradients are guarded, and the steps of a run."""
    steps = evidence.log.steps if evidence.log is not None else None
    from_job = (_judge_clipping(evidence, limits), _judge_skips(evidence, steps), _judge_guard(evidence, limits))
    return (*from_job, *_judge_log(evidence, limits, steps)) if steps is not None else from_job


def _judge_clipping(evidence: Evidence, limits: Limits) -> Outcome:
    key, max_in_a_row = "train.skipped_steps", limits.number("most_in_a_row")
    if not evidence.stated(key):
        return unknown(
            f"it is not known after how many skipped steps {evidence.practice.trainer} stops",
            fix=f"set {key} to the number, or waive the rule",
            at=key,
        )
    count = evidence.the_job.train.skipped_steps
    statement = f"the run stops after {plural(count, 'skipped step')} in a row"
    if count <= max_in_a_row:
        return passed(statement, value=count, threshold=max_in_a_row, unit="steps", at=key)
    step_s = evidence.plan.prediction.step_s if evidence.plan is not None else 0.0
    return failed(
        f"{statement}, more than {max_in_a_row:.0f}",
        formula=(f"{plural(count, 'step')} × {step_s:.3g} s = {count * step_s:,.0f} s of steps that learn nothing",),
        value=count,
        threshold=max_in_a_row,
        unit="steps",
        at=key,
        severity=beyond_count(count, max_in_a_row, limits),
        impact=Impact(note=f"{format_seconds(count * step_s)} of steps that learn nothing, at every divergence"),
        edits=(
            Edit(key=key, value=int(max_in_a_row), safe=False, note="then the run goes back to its last intact state"),
        ),
    )


def _judge_skips(evidence: Evidence, steps: StepFacts | None) -> Outcome:
    if steps is not None and steps.skips_differ is not None:
        return failed(
            "a step was skipped by one rank and taken by another",
            at=steps.skips_differ,
            impact=Impact(note="the replicas differ from that step on: all that follows is to be done again"),
            fix="decide on the global gradient norm, which every rank has; go back to a checkpoint before that step",
        )
    together = evidence.practice.skips_together
    if together or (together is None and steps is not None and steps.skipped):
        return passed("a step that is not finite is skipped by all ranks or by none")
    if together is None:
        return unknown(
            f"it is not known whether the ranks of {evidence.practice.trainer} skip a step together",
            fix="a run with a skipped step shows it (phalanx drill JOB --fault nan:rank=0,step=5)",
        )
    return failed(
        f"{evidence.practice.trainer} lets each rank decide by itself whether to skip a step",
        impact=Impact(note="the replicas differ after the first such step, and all that follows is to be done again"),
        fix="decide on the global gradient norm, which every rank has",
    )


def _judge_guard(evidence: Evidence, limits: Limits) -> Outcome:
    clip, factor = evidence.the_job.optim.clip, evidence.the_job.train.spike_factor
    if not evidence.stated("optim.clip") and not evidence.written("train.spike_factor"):
        statement = f"it is not known whether {evidence.practice.trainer} clips gradients here"
        return unknown(statement, fix="set optim.clip to the norm it clips to, 0 for none", at="optim.clip")
    formula = (f"optim.clip = {clip:g}; train.spike_factor = {factor:g}",)
    if 0 < factor < limits.number("least_factor"):
        return _factor_too_small(factor, limits)
    if 0 < clip <= limits.number("most_clip") or factor > 0:
        guard = f"clipped to a norm of {clip:g}" if clip > 0 else f"skipped from {factor:g} times the running median"
        return passed(f"a gradient that explodes is {guard}", formula=formula, value=clip or factor, at="optim.clip")
    statement = "neither clipped" if clip <= 0 else f"clipped only to a norm of {clip:,.0f}, which is no bound, and not"
    # The search for a loss scale skips overflows; a gradient that grows but stays finite is applied.
    scaled = evidence.the_job.precision.compute == "fp16" and evidence.the_job.precision.loss_scale == "auto"
    unless = " unless it overflows fp16" if scaled else ""
    filled = _is_filled_in(evidence)
    return failed(
        f"a gradient that explodes is {statement}{' nor' * (clip <= 0)} skipped{unless}",
        severity="warning" if scaled else None,
        formula=formula,
        value=clip,
        threshold=limits.number("most_clip"),
        at="optim.clip",
        impact=Impact(note="one such step can undo the run; how often they come cannot be told beforehand"),
        edits=() if filled else (Edit(key="optim.clip", value=1.0, safe=False, note="as most published recipes"),),
        fix='gradient_clipping = "auto": the Trainer then fills in its max_grad_norm' if filled else "",
    )


def _is_filled_in(evidence: Evidence) -> bool:
    """Return whether Hugging Face's Trainer fills in values of a DeepSpeed JSON: it contains "auto"."""
    return evidence.practice.trainer == "deepspeed" and any(
        setting.value == "auto" for setting in evidence.settings.values()
    )


def _factor_too_small(factor: float, limits: Limits) -> Outcome:
    """Return the failure for a spike factor near 1, with which usual steps count as spikes and the run ends."""
    min_factor = limits.number("least_factor")
    return failed(
        f"steps are skipped from {factor:g} times the running median, less than {min_factor:g}: most are no spikes",
        formula=(
            f"train.spike_factor = {factor:g}, at least {min_factor:g}; at 1 half of all steps are above their median",
        ),
        value=factor,
        threshold=min_factor,
        unit="x",
        at="train.spike_factor",
        impact=Impact(note="steps that learn nothing, and a stop after train.skipped_steps of them: the run ends"),
        edits=(Edit(key="train.spike_factor", value=10.0, safe=False, note="ten times the median; 0 never skips"),),
    )


def _in_a_row(evidence: Evidence, limits: Limits, steps: StepFacts) -> tuple[Outcome, ...]:
    """Judge the steps skipped in a row: a few deserve a look; as many as the run may skip are an error."""
    searching = (
        evidence.the_job.precision.compute == "fp16"
    )  # fp16 searches for its loss scale, which skips steps by design
    max_in_a_row = limits.number("most_in_a_row")
    min_in_a_row = max_in_a_row if searching else limits.number("look_in_a_row")
    if steps.skipped_in_a_row < min_in_a_row or (searching and steps.skipped_in_a_row <= max_in_a_row):
        return ()
    count, bound = steps.skipped_in_a_row, min(max_in_a_row, evidence.the_job.train.skipped_steps)
    ending = ", as many as end a run" if count >= bound else ""
    return (
        failed(
            f"skipped {plural(count, 'step')} in a row{ending}",
            formula=(f"{steps.skipped:,} of {steps.count:,} steps were skipped; in a row fewer than {min_in_a_row:g}",),
            value=count,
            threshold=min_in_a_row,
            unit="steps",
            at=file_of(evidence.the_log),
            severity="error" if count >= bound else "warning",
            impact=evidence.loses(steps.skipped / max(1, steps.count), "steps that learnt nothing"),
            fix="go back to a state before them; look at the data, the learning rate and train.spike_factor",
        ),
    )


def _judge_log(evidence: Evidence, limits: Limits, steps: StepFacts) -> tuple[Outcome, ...]:
    failures = []
    if steps.not_finite:
        failures.append(
            failed(
                f"did not skip {plural(steps.not_finite, 'step')} with a loss or norm that is not finite",
                value=steps.not_finite,
                threshold=0,
                unit="steps",
                at=steps.not_finite_spot or "",
                impact=Impact(note="the weights are not finite from then on: all that follows is to be done again"),
                fix="go back to a checkpoint before the first of them",
            )
        )
    if steps.zero_norm:
        failures.append(
            failed(
                f"took {plural(steps.zero_norm, 'step')} with a gradient norm of exactly 0",
                value=steps.zero_norm,
                threshold=0,
                unit="steps",
                at=steps.zero_norm_spot or "",
                severity="warning",
                impact=evidence.loses(steps.zero_norm / max(1, steps.count), "steps that learnt nothing"),
                fix="the state may be damaged: compare the loss with that before the first of them, go back to a "
                "checkpoint of then, and look at the data of that step",
            )
        )
    return (*failures, *_in_a_row(evidence, limits, steps), _judge_jump(evidence, limits, steps))


def _judge_jump(evidence: Evidence, limits: Limits, steps: StepFacts) -> Outcome:
    """Judge the largest jump of a step that was taken.

    The loss is judged where it is logged by itself; otherwise the larger jump of loss and gradient norm, unless
    gradients are clipped.
    """
    max_jump = limits.number("jump")
    jump, spot = steps.worst_loss_jump, steps.worst_loss_jump_spot
    if jump is None and evidence.the_job.optim.clip <= 0:
        jump, spot = steps.worst_jump, steps.worst_jump_spot
    if jump is None or not math.isfinite(jump):
        return passed(f"{steps.skipped:,} of {steps.count:,} steps skipped, at most {steps.skipped_in_a_row} in a row")
    if jump <= max_jump:
        return passed(
            f"no step that was taken jumped by more than {jump:.1f}x", value=jump, threshold=max_jump, unit="x"
        )
    return failed(
        f"a step that was taken had {jump:.1f}x the running mean",
        value=jump,
        threshold=max_jump,
        unit="x",
        at=spot or "",
        severity="warning",
        impact=Impact(note="the run went on; only a run from before that step shows whether it learnt less"),
        fix="look at the data of that step; train.spike_factor skips such steps, a longer warm-up avoids them",
    )


RULE = Rule(
    id="PRC004",
    slug="numeric-guard",
    severity="error",
    requires="J",
    uses="PL",
    requirement="Steps that are not finite are skipped by all ranks together and not for long, and "
    "exploding gradients are bounded.",
    why="""
One NaN that one rank adds to its weights is in all of them a step later. ByteRobust stops a job for inspection when
loss or gradient norm are NaN or jump to 5 times; from then to the restart a NaN took it 4,289 s. PaLM's loss spiked
about 20 times although gradients were clipped, and going back and leaving out 200 to 500 batches helped.

How many in a row: a machine stops after 10, a person looks after 3. In fp16 the search for the loss scale skips steps
by design (from 2¹⁶ to 2⁶ are ten halvings), and a skipped step costs one step, while a stop costs a recovery; in the
other formats nothing is searched, and three in a row are no accident. A factor
on gradient norms is not demanded where they are clipped: in our own first-run.toml the norm of step 17 was 43 times
the median of the 16 before it, in the warm-up of a run that ended well (2026-11-15).
""",
    how="""
`train.skipped_steps ≤ 10` (11 is a warning); ranks decide on numbers that all of them have; `0 < optim.clip ≤ 100` or
`train.spike_factor > 0`, and that at least 2. In a run: no step with a loss or norm that is not finite was taken, no
step was skipped by some ranks only, none was taken with a gradient norm of exactly 0 (a warning: a flipped bit can
freeze a model that way), fewer than 3 in a row were skipped (a warning; an error from 10, or from
`train.skipped_steps`, on; in fp16 more than 10), and no step was taken whose loss (without clipping: or gradient norm)
was over 5 times its running mean (a warning).
""",
    limits={
        "most_in_a_row": Limit(
            value=10, unit="steps", note="skipped steps before the run stops or goes back: our choice"
        ),
        "look_in_a_row": Limit(
            value=3, unit="steps", note="skipped in a run without fp16, from which somebody must look: our choice"
        ),
        "least_factor": Limit(
            value=2.0,
            unit="x",
            note="of train.spike_factor, where there is one: our choice, norms differ by less all day",
        ),
        "most_clip": Limit(
            value=100.0, note="a larger norm to clip to bounds nothing: our choice; recipes have 0.1 to 10"
        ),
        "margin": MARGIN,
        "jump": Limit(value=5.0, unit="x", note="over the running mean: ByteRobust, arXiv:2509.16293"),
    },
    bad="""
[optim]
clip = 0.0

[train]
spike_factor = 0.0
""",
    good="""
[optim]
clip = 1.0
""",
    fix="`optim.clip = 1.0`, `train.skipped_steps = 10`; `train.spike_factor = 10.0` where batches "
    "are known to be uneven.",
    waive="An optimizer whose update has a bounded norm by itself, without clipping (Muon, sign "
    "descent), named in the reason.",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 (5x jump or NaN; table 6: NaN 4,289 s)", mark="read"),
        Reference(text="PaLM, arXiv:2204.02311 section 5.1", mark="recalled"),
        Reference(text="3 and 10 in a row, a factor of 2, a norm of 100", mark="our choice"),
        Reference(text="gradient norms of examples/first-run.toml, 400 steps on CPU, 2026-11-15", mark="computed"),
    ),
    check=check,
)
