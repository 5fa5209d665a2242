"""Which edits cure a job: those of its findings, tried together, without two rules that pull at the same key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import UserError
from phalanx.rules.formats.plain import as_toml, setting
from phalanx.rules.judge import CheckReport, Finding
from phalanx.rules.outcome import Edit

MOST_ROUNDS = 5  # a cure may uncover the next finding; no chain of more than two is known

Judge = Callable[[tuple[str, ...]], CheckReport]  # `--set` texts -> what the rules say of the job with them


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The edits that one finding asks for: taken whole or not at all."""

    rule: str
    edits: tuple[Edit, ...]

    @property
    def told(self) -> str:
        """For a person."""
        return f"{self.rule} asks for {', '.join(setting(edit) for edit in self.edits)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """What is to be edited, and what was left alone and why."""

    remedies: tuple[Remedy, ...]
    cured: int  # findings that are gone with them; a remedy of one rule may help another
    left: tuple[str, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits; no key has two."""
        return tuple(edit for remedy in self.remedies for edit in remedy.edits)


def find_cure(judge: Judge, *, unsafe: bool) -> Cure:
    """The edits after which no finding asks for one that is allowed; a fixed point, so that a second call finds none.

    A key that two rules want to have different values is left alone: whoever mends it decides which rule to waive.
    """
    chosen: list[Remedy] = []
    refused: dict[str, str] = {}  # key -> why it is left alone
    first = report = judge(())
    for number in range(MOST_ROUNDS):
        report = judge(_sets(chosen)) if number else first
        wanted = _wanted(report, unsafe=unsafe, refused=refused)
        if _tear(chosen, wanted, refused):
            chosen = []
            continue
        new = _that_hold(_Trial(judge=judge, first=first, unsafe=unsafe), _without(chosen, wanted), wanted, refused)
        if not new:
            break
        chosen = [*_without(chosen, new), *new]
    else:  # they chase each other: better no edit than another one at every call
        chosen, report = [], first
        refused["*"] = f"the edits do not settle in {MOST_ROUNDS} rounds"
    cured = max(0, _broken(first) - _broken(report))
    return Cure(remedies=tuple(chosen), cured=cured, left=tuple(dict.fromkeys(refused.values())))


def _without(chosen: Sequence[Remedy], newer: Sequence[Remedy]) -> list[Remedy]:
    """What was chosen, less what its own rule wants otherwise now, as an interval whose optimum another edit moved."""
    again = {edit.key for remedy in newer for edit in remedy.edits}
    return [remedy for remedy in chosen if not any(edit.key in again for edit in remedy.edits)]


def _broken(report: CheckReport) -> int:
    return sum(one.verdict == "fail" for one in report.findings)


def _wanted(report: CheckReport, *, unsafe: bool, refused: Mapping[str, str]) -> list[Remedy]:
    """What the findings ask for, the worst first; of two that want the same key, the first."""
    wanted: list[Remedy] = []
    taken = set(refused)
    for one in report.problems:
        edits = one.outcome.edits
        if one.verdict == "fail" and edits and all(_allowed(edit, unsafe, taken) for edit in edits):
            wanted.append(Remedy(rule=one.rule.id, edits=edits))
            taken |= {edit.key for edit in edits}
    return wanted


def _allowed(edit: Edit, unsafe: bool, taken: set[str]) -> bool:
    return (edit.safe or unsafe) and edit.key not in taken


def _tear(chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]) -> bool:
    """Whether a key that one rule had set is wanted otherwise by another; it is refused from here on."""
    owner = {edit.key: remedy.rule for remedy in chosen for edit in remedy.edits}
    asked = {edit.key: remedy.rule for remedy in wanted for edit in remedy.edits if edit.key in owner}
    torn = {key: rule for key, rule in asked.items() if rule != owner[key]}
    for key, rule in torn.items():
        refused[key] = f"{owner[key]} and {rule} want different values of {key}"
    return bool(torn)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """How remedies are tried, and what the job was like before all of them."""

    judge: Judge
    first: CheckReport
    unsafe: bool

    def harm(self, report: CheckReport) -> str:
        """What an edited job lacks that the job had; empty when it is no worse.

        An error that a further edit cures is none: the next round takes it.
        """
        if "P" in self.first.evidence and "P" not in report.evidence:
            return "with which the job can no longer be planned"
        before = {one.rule.id for one in self.first.findings if _is_error(one)}
        new = [one for one in report.findings if _is_error(one) and one.rule.id not in before]
        hopeless = [one.rule.id for one in new if not _curable(one, unsafe=self.unsafe)]
        return f"which breaks {', '.join(dict.fromkeys(hopeless))}" if hopeless else ""


def _is_error(finding: Finding) -> bool:
    return finding.verdict == "fail" and finding.severity == "error"


def _curable(finding: Finding, *, unsafe: bool) -> bool:
    edits = finding.outcome.edits
    return bool(edits) and all(edit.safe or unsafe for edit in edits)


def _that_hold(
    trial: _Trial, chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]
) -> list[Remedy]:
    """Remedies with which the job can be read and no longer asks for them; the others are refused from here on."""
    if not wanted or not _complaints(trial, [*chosen, *wanted], wanted):
        return list(wanted)
    held: list[Remedy] = []
    for remedy in wanted:
        if complaint := _complaints(trial, [*chosen, *held, remedy], [remedy]):
            refused |= {edit.key: complaint for edit in remedy.edits}
        else:
            held.append(remedy)
    return held


def _complaints(trial: _Trial, remedies: Sequence[Remedy], new: Sequence[Remedy]) -> str:
    """Why the new remedies do not help; empty when they do."""
    try:
        report = trial.judge(_sets(remedies))
    except UserError:
        return f"{new[0].told}, with which the job cannot be read"
    if harm := trial.harm(report):
        return f"{new[0].told}, {harm}"
    again = [
        remedy
        for remedy in new
        for one in report.findings
        if one.verdict == "fail" and one.rule.id == remedy.rule and set(remedy.edits) & set(one.outcome.edits)
    ]
    return f"{again[0].told}, which does not cure it" if again else ""


def _sets(remedies: Sequence[Remedy]) -> tuple[str, ...]:
    return tuple(f"{edit.key}={as_toml(edit.value)}" for remedy in remedies for edit in remedy.edits)
