"""What a rule says of one piece of evidence: verdict, values, formula with the numbers filled in, impact, and cure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.io.files import Spot as Spot

Verdict = Literal["pass", "fail", "unknown", "waived", "habit"]  # habit: of another trainer, the same for all its files
Severity = Literal["error", "warning", "info"]
Scalar = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Impact:
    """What a finding costs: points (hundredths) of effective training time, and dollars of this job.

    None is "cannot be told"; `note` then says why, or how the number came about.
    """

    points: float | None = None
    usd: float | None = None
    note: str = ""


NO_IMPACT = Impact()


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A change of one key of the job file. Safe: it cannot change what the model learns, only how the run is kept."""

    key: str  # dotted, as "checkpoint.interval_s"
    value: float | int | str | bool
    safe: bool
    note: str = ""  # why this value


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One answer of a rule. `at` is a dotted job key, an entry of the plan as "plan:memory", or a Spot of the log."""

    verdict: Literal["pass", "fail", "unknown"]
    what: str  # one line with the values, as "interval 21600 s is 15.2x the optimum 1418 s"
    formula: tuple[str, ...] = ()  # the arithmetic with this job's numbers in it
    value: Scalar = None
    threshold: Scalar = None
    unit: str = ""
    at: str | Spot = ""
    severity: Severity | None = None  # of this answer, where a rule has two levels; None is the rule's own
    impact: Impact = NO_IMPACT
    fix: str = ""  # what a person does where no Edit does it
    edits: tuple[Edit, ...] = ()
    applies: bool = True  # a pass with False: the rule has nothing to say about this job


def passed(
    what: str,
    *,
    formula: tuple[str, ...] = (),
    value: Scalar = None,
    threshold: Scalar = None,
    unit: str = "",
    at: str | Spot = "",
) -> Outcome:
    """The requirement is met."""
    return Outcome(verdict="pass", what=what, formula=formula, value=value, threshold=threshold, unit=unit, at=at)


def exempt(why: str) -> Outcome:
    """The rule has nothing to check here, as a pipeline of one stage has no bubble."""
    return Outcome(verdict="pass", what=why, applies=False)


def unknown(what: str, *, fix: str = "", at: str | Spot = "") -> Outcome:
    """The evidence is missing; `fix` says how to get it."""
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
    """The requirement is not met; a cure is always named."""
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
