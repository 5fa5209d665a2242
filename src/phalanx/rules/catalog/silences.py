"""Healthy pauses of a rank, the lower bound for the timeout of a collective.

A rank that saves, evaluates or restores takes part in no collective, while the others wait for it in theirs.
Phalanx knows these pauses: across them it waits `comm.init_timeout_s` (train/collective_timeouts.py), in a steady
step `train.timeout_s`. In other trainers the steady timeout applies to all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.rules.evidence import Evidence

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import CheckpointFacts

# Factor of a proposed timeout over the longest pause: a save predicted from the disk's bandwidth, or measured a few
# times, may take longer once. Our choice.
ROOM = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """A pause of a rank that is not a failure."""

    seconds: float
    what: str  # "a synchronous save"
    measured: bool = False

    @property
    def statement(self) -> str:
        """A clause with the duration, for a finding."""
        return f"{self.what} takes {self.seconds:.3g} s{'' if self.measured else ' (predicted)'}"


def longest_silence(evidence: Evidence) -> Silence | None:
    """Return the longest pause outside of steps; None where no duration is known."""
    checkpoints = evidence.log.checkpoints if evidence.log is not None else None
    pauses = [_save_silence(evidence, checkpoints), _evaluation_silence(evidence), _restore_silence(evidence)]
    known_pauses = [
        pause for pause in pauses if pause is not None and math.isfinite(pause.seconds) and pause.seconds > 0
    ]
    longest = max(known_pauses, key=lambda pause: pause.seconds, default=None)
    save, evaluation = pauses[0], pauses[1]
    is_phalanx = evidence.practice.trainer == "phalanx"
    if (
        is_phalanx
        or save not in known_pauses
        or evaluation not in known_pauses
        or save is None
        or evaluation is None
        or longest is None
    ):
        return longest
    # Phalanx waits for each separately. In other trainers both may fall between two collectives: a save and an
    # evaluation are due on the same step wherever one interval divides the other.
    combined = Silence(
        seconds=save.seconds + evaluation.seconds,
        what=f"{save.what} and {evaluation.what} after it",
        measured=save.measured and evaluation.measured,
    )
    return max(longest, combined, key=lambda pause: pause.seconds)


def is_save_known(evidence: Evidence) -> bool:
    """Return whether the duration of a save is known; otherwise no timeout can be called long enough."""
    return evidence.practice.saves is False or evidence.plan is not None or evidence.log is not None


def _save_silence(evidence: Evidence, seen: CheckpointFacts | None) -> Silence | None:
    """Return the pause of a save: the copy of an asynchronous save, else until the checkpoint is written."""
    job, plan = evidence.the_job, evidence.plan
    if evidence.practice.saves is False:
        return None
    is_async = job.checkpoint.asynchronous and evidence.stated("checkpoint.async")
    message = "the copy that a save begins with" if is_async else "a synchronous save"
    if seen is not None:
        kinds = (seen.blocked_s, seen.final_blocked_s) if is_async else (seen.persist_s, seen.final_persist_s)
        if (
            most_s := max((spread.most for spread in kinds if spread is not None and spread.count), default=None)
        ) is not None:
            return Silence(seconds=most_s, what=message, measured=True)
    if plan is None:
        return None
    return Silence(seconds=plan.reliability.blocking_s if is_async else plan.reliability.persist_s, what=message)


def _evaluation_silence(evidence: Evidence) -> Silence | None:
    """Return the pause of an evaluation: a forward pass is a third of a step's arithmetic (forward 1, backward 2)."""
    job, plan = evidence.the_job, evidence.plan
    sequences: float = job.train.evaluate_sequences
    if plan is None:
        return None
    if passes := evidence.setting_number("eval_iters", "validation.steps", "train.eval_iters"):
        # Megatron counts global batches.
        sequences = max(0.0, passes) * plan.job.batch.global_sequences
    elif not sequences or not evidence.stated("train.evaluate_sequences"):
        return None
    return Silence(
        seconds=plan.prediction.step_s_high / 3 * sequences / max(1, plan.job.batch.global_sequences),
        what="an evaluation",
    )


def _restore_silence(evidence: Evidence) -> Silence | None:
    """Return the pause of a restore: reading takes about as long as writing. It occurs at a start."""
    plan = evidence.plan
    if plan is None or evidence.practice.saves is False:
        return None
    return Silence(seconds=plan.reliability.persist_s, what="restoring a checkpoint")
