"""How long a rank may keep silent while nothing is wrong: no timeout of a collective may be shorter than that.

A rank that saves, evaluates or restores takes part in no collective, and the others wait for it in theirs. Our own
trainer knows these pauses: across them it waits `comm.init_timeout_s` (train/collective_timeouts.py), in a steady step
`train.timeout_s`. Of other trainers the steady timeout holds for all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.rules.evidence import Evidence

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import CheckpointFacts

# A timeout that is proposed is twice the longest silence: a save that is predicted from the disk's bandwidth, or seen a
# few times, may well take longer once. Our choice.
ROOM = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """A pause of a rank that is no failure."""

    seconds: float
    what: str  # "a synchronous save"
    measured: bool = False

    @property
    def statement(self) -> str:
        """For a finding."""
        return f"{self.what} takes {self.seconds:.3g} s{'' if self.measured else ' (predicted)'}"


def longest_silence(evidence: Evidence) -> Silence | None:
    """The longest pause outside of steps; None where nothing says how long any takes."""
    seen = evidence.log.checkpoints if evidence.log is not None else None
    found = [_save_silence(evidence, seen), _evaluation_silence(evidence), _restore_silence(evidence)]
    known = [one for one in found if one is not None and math.isfinite(one.seconds) and one.seconds > 0]
    longest = max(known, key=lambda one: one.seconds, default=None)
    save, evaluation = found[0], found[1]
    own = evidence.practice.trainer == "phalanx"
    if own or save not in known or evaluation not in known or save is None or evaluation is None or longest is None:
        return longest
    # Our trainer waits for each on its own. Of others both may fall between two collectives: a save and an evaluation
    # are due on the same step wherever one interval divides the other.
    both = Silence(
        seconds=save.seconds + evaluation.seconds,
        what=f"{save.what} and {evaluation.what} after it",
        measured=save.measured and evaluation.measured,
    )
    return max(longest, both, key=lambda one: one.seconds)


def is_save_known(evidence: Evidence) -> bool:
    """Whether anything says how long this job stands still to save; without it no timeout can be called long enough."""
    return evidence.practice.saves is False or evidence.plan is not None or evidence.log is not None


def _save_silence(evidence: Evidence, seen: CheckpointFacts | None) -> Silence | None:
    """Until a save lets the training go on: until it is written, where it is not known to go on beside that."""
    job, plan = evidence.the_job, evidence.plan
    if evidence.practice.saves is False:
        return None
    aside = job.checkpoint.asynchronous and evidence.stated("checkpoint.async")
    what = "the copy that a save begins with" if aside else "a synchronous save"
    if seen is not None:
        kinds = (seen.blocked_s, seen.final_blocked_s) if aside else (seen.persist_s, seen.final_persist_s)
        if (most_s := max((one.most for one in kinds if one is not None and one.count), default=None)) is not None:
            return Silence(seconds=most_s, what=what, measured=True)
    if plan is None:
        return None
    return Silence(seconds=plan.reliability.blocking_s if aside else plan.reliability.persist_s, what=what)


def _evaluation_silence(evidence: Evidence) -> Silence | None:
    """A forward pass is a third of a step's arithmetic (forward 1, backward 2)."""
    job, plan = evidence.the_job, evidence.plan
    sequences: float = job.train.evaluate_sequences
    if plan is None:
        return None
    if passes := evidence.setting_number("eval_iters", "validation.steps", "train.eval_iters"):
        sequences = max(0.0, passes) * plan.job.batch.global_sequences  # Megatron: so many global batches
    elif not sequences or not evidence.stated("train.evaluate_sequences"):
        return None
    return Silence(
        seconds=plan.prediction.step_s_high / 3 * sequences / max(1, plan.job.batch.global_sequences),
        what="an evaluation",
    )


def _restore_silence(evidence: Evidence) -> Silence | None:
    """Reading what was written takes about as long; at a start, where `comm.init_timeout_s` holds."""
    plan = evidence.plan
    if plan is None or evidence.practice.saves is False:
        return None
    return Silence(seconds=plan.reliability.persist_s, what="restoring a checkpoint")
