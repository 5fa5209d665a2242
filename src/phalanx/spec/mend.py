"""Which edits cure a job: those of its findings, tried together, without two rules that pull at the same key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import UserError
from phalanx.spec.formats.plain import as_toml, setting
from phalanx.spec.judge import Finding, Report
from phalanx.spec.outcome import Edit

MOST_ROUNDS = 5  # a cure may uncover the next finding; no chain of more than two is known

Judge = Callable[[tuple[str, ...]], Report]  # `--set` texts -> what the rules say of the job with them


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """Edits by the rule that asked for each, and what was left alone and why."""

    edits: Mapping[str, tuple[Edit, str]]  # key -> edit, rule id
    left: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[Edit, ...]:
        """The edits alone."""
        return tuple(edit for edit, _ in self.edits.values())


def find_cure(judge: Judge, *, unsafe: bool) -> Cure:
    """The edits after which no finding asks for one that is allowed; a fixed point, so that a second call finds none.

    A key that two rules want to have different values is left alone: whoever mends it decides which rule to waive.
    """
    chosen: dict[str, tuple[Edit, str]] = {}
    refused: dict[str, str] = {}  # key -> why
    for _ in range(MOST_ROUNDS):
        report = _judged(judge, chosen)
        wanted = _wanted(report, unsafe=unsafe, refused=refused) if report is not None else {}
        torn = [key for key in wanted if key in chosen]
        for key in torn:
            refused[key] = f"{chosen[key][1]} and {wanted[key][1]} want different values of {key}"
        if torn:
            chosen = {}
            continue
        new = {key: one for key, one in wanted.items() if _holds(judge, chosen, key, one, refused)}
        if not new:
            break
        chosen |= new
    return Cure(edits=chosen, left=tuple(refused.values()))


def _wanted(report: Report, *, unsafe: bool, refused: Mapping[str, str]) -> dict[str, tuple[Edit, str]]:
    """What the findings ask for, the worst first; a cure of several edits is taken whole or not at all."""
    wanted: dict[str, tuple[Edit, str]] = {}
    for one in report.problems:
        edits = one.outcome.edits
        free = all((edit.safe or unsafe) and edit.key not in refused and edit.key not in wanted for edit in edits)
        if one.verdict == "fail" and free:
            wanted |= {edit.key: (edit, one.rule.id) for edit in edits}
    return wanted


def _holds(
    judge: Judge,
    chosen: Mapping[str, tuple[Edit, str]],
    key: str,
    one: tuple[Edit, str],
    refused: dict[str, str],
) -> bool:
    """Whether a job with this edit can be read and no longer asks for it; else it is noted as refused."""
    report = _judged(judge, {**chosen, key: one})
    edit, rule = one
    if report is None:
        refused[key] = f"{rule} asks for {setting(edit)}, with which the job cannot be read"
    elif any(asked.rule.id == rule and _asks(asked, edit) for asked in report.findings):
        refused[key] = f"{rule} asks for {setting(edit)}, which does not cure it"
    return key not in refused


def _asks(finding: Finding, edit: Edit) -> bool:
    return finding.verdict == "fail" and edit in finding.outcome.edits


def _judged(judge: Judge, chosen: Mapping[str, tuple[Edit, str]]) -> Report | None:
    try:
        return judge(tuple(f"{key}={as_toml(edit.value)}" for key, (edit, _) in chosen.items()))
    except UserError:
        if not chosen:
            raise
        return None
