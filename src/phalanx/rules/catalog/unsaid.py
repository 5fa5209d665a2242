"""What another trainer's file does not say is not judged by a default of ours."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, unknown


def unsaid(evidence: Evidence, key: str, what: str) -> Outcome | None:
    """The answer of a rule where the job's value of a key is no more than our default; None where it counts."""
    if evidence.stated(key):
        return None
    return unknown(f"nothing says {what}", fix=how_to_say(evidence, key), at=key)


def how_to_say(evidence: Evidence, key: str) -> str:
    """Where a value is said: in the trainer's own words, or beside its file."""
    trainer = evidence.practice.trainer
    if theirs := evidence.their_keys.get(key):
        return f"say it in the file ({theirs}), or give --set {key}=…"
    if evidence.their_keys:
        return f"a file of {trainer} has no key for it: give --set {key}=…"
    return f"write {key} into the job, as {trainer} has it"
