"""The outcome of one rule: verdict, values, the formula with the numbers filled in, impact and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.io.files import Spot as Spot

# "habit": a default behaviour of another trainer, the same for all files of that trainer
Verdict = Literal["pass", "fail", "unknown", "waived", "habit"]
Severity = Literal["error", "warning", "info"]
Scalar = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Impact:
    """The cost of a finding: points (hundredths) of effective training time, and dollars for this job.

    None means that the cost is not known; `note` then gives the reason, or else how the number was derived.
    """

    points: float | None = None
    usd: float | None = None
    note: str = ""


NO_IMPACT = Impact()


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A change of one key of the job file.

    A safe edit cannot change what the model learns, only how the run is operated.
    """

    key: str  # dotted, such as "checkpoint.interval_s"
    value: float | int | str | bool
    safe: bool
    note: str = ""  # why this value


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One answer of a rule.

    `at` is a dotted job key, an entry of the plan such as "plan:memory", or a `Spot` in the log.
    """

    verdict: Literal["pass", "fail", "unknown"]
    what: str  # one line with the values, such as "interval 21600 s is 15.2x the optimum 1418 s"
    formula: tuple[str, ...] = ()  # the arithmetic with this job's numbers in it
    value: Scalar = None
    threshold: Scalar = None
    unit: str = ""
    at: str | Spot = ""
    severity: Severity | None = None  # of this answer, where a rule has two levels; None means the rule's severity
    impact: Impact = NO_IMPACT
    fix: str = ""  # the manual remedy where no Edit can do it
    edits: tuple[Edit, ...] = ()
    applies: bool = True  # False on a pass: the rule does not apply to this job


def passed(
    what: str,
    *,
    formula: tuple[str, ...] = (),
    value: Scalar = None,
    threshold: Scalar = None,
    unit: str = "",
    at: str | Spot = "",
) -> Outcome:
    """Return an outcome for a requirement that is met."""
    return Outcome(verdict="pass", what=what, formula=formula, value=value, threshold=threshold, unit=unit, at=at)


def exempt(why: str) -> Outcome:
    """Return an outcome for a rule that does not apply; a pipeline of one stage, for example, has no bubble."""
    return Outcome(verdict="pass", what=why, applies=False)


def unknown(what: str, *, fix: str = "", at: str | Spot = "") -> Outcome:
    """Return an outcome for missing evidence; `fix` states how to get it."""
    return Outcome(verdict="unknown", what=what, fix=fix, at=at)


def failed(
    what: str,
    *,
    impact: Impact = NO_IMPACT,
    fix: str = "",
    edits: tuple[Edit, ...] = (),
    formula: tuple[str, ...] = (),
    value: Scalar = None,
    threshold: Scalar = None,
    unit: str = "",
    at: str | Spot = "",
    severity: Severity | None = None,
) -> Outcome:
    """Return an outcome for a requirement that is not met; a fix or an edit must be given."""
    assert fix or edits, "a finding without a cure"
    return Outcome(
        verdict="fail",
        what=what,
        impact=impact,
        fix=fix,
        edits=edits,
        formula=formula,
        value=value,
        threshold=threshold,
        unit=unit,
        at=at,
        severity=severity,
    )
