"""Run the rules over the evidence: verdicts, waivers, severities, and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.plan.request import trains_with_phalanx
from phalanx.plan.trainable import trainer_problems
from phalanx.rules.catalog import spc001_waivers
from phalanx.rules.evidence import Evidence, Unmapped
from phalanx.rules.judge import settle_waivers
from phalanx.rules.outcome import Outcome, Severity, Verdict, exempt, unknown
from phalanx.rules.profiles import at_least
from phalanx.rules.rule import LETTERS, Limits, Rule

HOW_TO_GET = {
    "J": "name a job file, or a run that has one",
    "P": "name a cluster the planner knows (--cluster 8xH100:16), or a plan",
    "L": "check the run's folder: phalanx check runs/NAME",
    "H": "check on the machine itself; phalanx probe measures it",
    "D": "phalanx drill JOB --suite proves it; --drills DIR names records kept elsewhere",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One answer of one rule, placed and weighed."""

    rule: Rule
    outcome: Outcome
    verdict: Verdict
    severity: Severity
    file: str
    line: int  # 0: the file as a whole
    reason: str = ""  # of the waiver


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What the specification says of one target."""

    edition: str
    target: str
    profile: str
    scaling: str
    devices: int  # 0 is not known
    evidence: str  # letters there was something of, as "JPL"
    usd: float | None
    findings: tuple[Finding, ...]  # every answer, passes too, in the order of the rules
    require_evidence: bool = False
    unmapped: tuple[Unmapped, ...] = ()
    notes: tuple[str, ...] = ()  # about the target: files of it that could not be used, what our trainer would refuse
    foreign: bool = False  # another trainer's file, which is not ours to edit

    def __str__(self) -> str:
        """The page that `phalanx check` prints."""
        from phalanx.rules.formats.text import render_text

        return render_text([self]).removesuffix("\n")

    def __repr__(self) -> str:
        from phalanx.rules.formats.text import summary_of

        return f"<Report: {self.target}: {summary_of(self)}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html
        from phalanx.rules.formats.html import render_html

        return document_as_html(render_html([self]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `phalanx check --json` prints them for each target."""
        from phalanx.rules.formats.text import report_dict

        return report_dict(self)

    def frame(self) -> Any:
        """One row per finding: a pandas DataFrame, or a dict of numpy columns where pandas is not installed."""
        from phalanx.io.notebook import as_frame
        from phalanx.rules.formats.text import finding_dict

        rows = [finding_dict(one) for one in self.findings]
        names = ("rule", "slug", "verdict", "severity", "what", "fix", "file", "line")
        return as_frame({name: [row[name] for row in rows] for name in names})

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each rule: the worst of its answers; remarks break no rule."""
        order: dict[str, int] = {"fail": 0, "unknown": 1, "waived": 2, "pass": 3}
        worst: dict[str, Verdict] = {}
        for one in self.findings:
            known = worst.get(one.rule.id, "pass")
            told: Verdict = "pass" if is_remark(one) else one.verdict
            worst[one.rule.id] = min(known, told, key=lambda verdict: order[verdict])
        return worst

    @property
    def counts(self) -> Counter[str]:
        """Rules by verdict."""
        return Counter(self.verdicts.values())

    @property
    def exempt(self) -> frozenset[str]:
        """Rules that have nothing to say about this target."""
        speaking = {one.rule.id for one in self.findings if one.outcome.applies}
        return frozenset(one.rule.id for one in self.findings) - speaking

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What speaks against it, the worst and dearest first."""
        rank = {"error": 0, "warning": 1, "info": 2}
        bad = [one for one in self.findings if one.verdict == "fail" or (self.require_evidence and is_open(one))]
        return tuple(sorted(bad, key=lambda one: (rank[one.severity], -(one.outcome.impact.points or 0.0))))

    @property
    def errors(self) -> int:
        """Findings of the severity that `phalanx train` refuses on."""
        return sum(one.severity == "error" for one in self.problems)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings; information alone is no finding."""
        return int(any(one.severity != "info" for one in self.problems))


def is_remark(finding: Finding) -> bool:
    """Whether a finding only informs: its rule is met all the same, and the exit code does not ask for it."""
    return finding.verdict == "fail" and finding.severity == "info"


def is_open(finding: Finding) -> bool:
    """Whether the evidence was missing."""
    return finding.verdict == "unknown"


def judge(
    rules: Sequence[Rule], evidence: Evidence, *, edition: str, require_evidence: bool = False, whole: bool = True
) -> CheckReport:
    """Every rule over the evidence.

    SPC001 looks at the waivers of the rules that are asked; `whole` says that nobody chose among them, so that a
    waiver of a rule that does not exist can be told too.
    """
    asked = [rule for rule in rules if rule.id != spc001_waivers.RULE.id]
    found = [finding for rule in asked for finding in _answers(rule, evidence)]
    if evidence.job is not None or evidence.waivers:
        found = _waive(found, evidence, asked, told=len(asked) < len(rules), whole=whole)
    return CheckReport(
        edition=edition,
        target=evidence.target,
        profile=evidence.profile.name,
        scaling=evidence.scaling.name,
        devices=evidence.known_devices,
        evidence="".join(letter for letter in LETTERS if evidence.has(letter)),
        usd=evidence.usd,
        findings=tuple(found),
        require_evidence=require_evidence,
        unmapped=evidence.unmapped,
        notes=(
            *(f"{evidence.target}/{one.where} {one.what}" for one in evidence.damaged.values()),
            *_untrainable(evidence),
        ),
        foreign=bool(evidence.their_keys),
    )


def _untrainable(evidence: Evidence) -> list[str]:
    """What our trainer would refuse of the plan before its first step, where the plan is for it and nothing ran yet."""
    plan = evidence.plan
    if plan is None or evidence.has("L") or not trains_with_phalanx(plan.job):
        return []
    found = trainer_problems(plan.job, plan.layout, plan.cluster)
    return [f"phalanx train cannot run this: {one.where}: {one.what}" for one in found]


def limits_of(rule: Rule, evidence: Evidence) -> Limits:
    """The limits of a rule for this profile and size."""
    return Limits(
        values={name: one.resolve(evidence.profile.name, evidence.scaling) for name, one in rule.limits.items()}
    )


def _answers(rule: Rule, evidence: Evidence) -> list[Finding]:
    return [_placed(rule, evidence, outcome) for outcome in _outcomes(rule, evidence)]


def _outcomes(rule: Rule, evidence: Evidence) -> tuple[Outcome, ...]:
    if rule.profiles and evidence.profile.name not in rule.profiles:
        return (exempt(f"does not apply to {evidence.profile.name}"),)
    missing = [letter for letter in rule.requires if not evidence.has(letter)]
    if missing:
        return (_missing(missing, evidence),)
    try:
        result = rule.check(evidence, limits_of(rule, evidence))
    except Exception as error:  # a fault of ours in one rule must not hide what the others say, nor count as a pass
        what = f"the rule itself failed on this evidence: {type(error).__name__}: {str(error)[:200]}"
        return (unknown(what, fix="this is a fault of Phalanx: report it with the file that was checked"),)
    return result if isinstance(result, tuple) else (result,)


def _missing(letters: Sequence[str], evidence: Evidence) -> Outcome:
    """Evidence that is not there, and how to get it; a file that is there and damaged is named."""
    what = f"no evidence from the {' or the '.join(LETTERS[letter] for letter in letters)}"
    damage = evidence.damaged.get(letters[0])
    if damage is None:
        return unknown(what, fix=HOW_TO_GET[letters[0]])
    return unknown(f"{what}: {damage.where} {damage.what}", fix=damage.fix)


def _placed(rule: Rule, evidence: Evidence, outcome: Outcome) -> Finding:
    outcome = _in_their_words(evidence, outcome)
    file, line = evidence.place(outcome.at)
    return Finding(
        rule=rule,
        outcome=outcome,
        verdict=outcome.verdict,
        severity=severity_of(rule, outcome, evidence),
        file=file,
        line=line,
    )


def _in_their_words(evidence: Evidence, outcome: Outcome) -> Outcome:
    """An edit names a key of the job; of another trainer's file it also says what the key is called there."""
    if not evidence.their_keys or not outcome.edits:
        return outcome
    edits = []
    for edit in outcome.edits:
        notes = [edit.note, evidence.their_keys.get(edit.key, "")]
        edits.append(replace(edit, note="; ".join(one for one in notes if one)))
    return replace(outcome, edits=tuple(edits))


def severity_of(rule: Rule, outcome: Outcome, evidence: Evidence) -> Severity:
    """Of an answer: its own or its rule's, softer in small classes and harder in large ones."""
    severity = outcome.severity or rule.severity
    if severity == "error" and evidence.scaling.name in rule.softer_in:
        return "warning"
    if severity == "warning" and rule.harder_from and at_least(evidence.scaling, rule.harder_from):
        return "error"
    return severity


def _waive(
    found: list[Finding], evidence: Evidence, asked: Sequence[Rule], *, told: bool, whole: bool
) -> list[Finding]:
    """Open findings that a waiver covers; and, where it is `told`, what is wrong with the waivers."""
    broken = {one.rule.id for one in found if one.verdict in ("fail", "unknown")}
    settled = settle_waivers(evidence, broken, asked=asked, whole=whole)
    result = []
    for one in found:
        reason = settled.reasons.get(one.rule.id, "")
        waived = bool(reason) and one.verdict in ("fail", "unknown")
        result.append(replace(one, verdict="waived", reason=reason) if waived else one)
    extra = [_placed(spc001_waivers.RULE, evidence, outcome) for outcome in settled.outcomes] if told else []
    return [*result, *extra]
