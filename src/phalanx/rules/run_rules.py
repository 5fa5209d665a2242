"""Judging the rules on the evidence: verdicts, waivers, severities, and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any

from phalanx.errors import nearest
from phalanx.io.user_code import last_line
from phalanx.io.visible import one_line
from phalanx.job.schema import Waiver
from phalanx.plan.request import trains_with_phalanx
from phalanx.plan.trainable import attention_remarks, trainer_problems
from phalanx.rules.catalog import spc001_waivers, spc003_own_rules
from phalanx.rules.evidence import Evidence, Unmapped
from phalanx.rules.facts.drill_facts import counted_records
from phalanx.rules.outcome import Impact, Outcome, Severity, Verdict, exempt, failed, passed, unknown
from phalanx.rules.own_rules import OwnRules
from phalanx.rules.profiles import at_least
from phalanx.rules.rule import LETTERS, Limits, Rule
from phalanx.rules.worth_telling import is_habit, is_small
from phalanx.units import plural

HOW_TO_GET = {
    "J": "name a job file, or a run that has one",
    "P": "name a cluster the planner knows (--cluster 8xH100:16), or a plan",
    "L": "check the run's folder: phalanx check runs/NAME",
    "H": "check on the machine itself; phalanx probe measures it",
    "D": "phalanx drill JOB --suite proves it; --drills DIR names records kept elsewhere",
}


NO_OWN_RULES = OwnRules()
MOST_WHAT = 120  # characters of an outcome's text in `repr`


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Finding:
    """One answer of one rule with its file, line and severity; `str()` is its first line in a report.

    >>> import phalanx
    >>> finding = phalanx.check("examples/drill.toml", select="TOP002").findings[0]
    >>> finding
    <Finding TOP002 pass: no tensor parallelism>
    >>> finding.verdict
    'pass'
    """

    rule: Rule
    outcome: Outcome
    verdict: Verdict
    severity: Severity
    file: str
    line: int  # 0: the whole file
    reason: str = ""  # the reason of the waiver

    def __str__(self) -> str:
        from phalanx.rules.formats.text import finding_head

        return finding_head(self)

    def __repr__(self) -> str:
        message = one_line(self.outcome.what)
        return f"<Finding {self.rule.id} {self.verdict}: {message[:MOST_WHAT]}{'…' * (len(message) > MOST_WHAT)}>"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckReport:
    """The findings of the specification on one target.

    `str()` is the output of `phalanx check`; a notebook shows HTML. Iterating yields the problems, the worst first;
    `findings` holds every answer, passes too.

    >>> import phalanx
    >>> report = phalanx.check("examples/drill.toml", select="TOP")
    >>> report.is_clean, report.verdicts["TOP002"]
    (True, 'pass')
    """

    edition: str
    target: str
    profile: str
    scaling: str
    devices: int  # 0: not known
    evidence: str  # letters of the evidence that existed, such as "JPL"
    usd: float | None
    findings: tuple[Finding, ...]  # every answer, passes too, in the order of the rules
    require_evidence: bool = False
    unmapped: tuple[Unmapped, ...] = ()
    # Remarks on the target: damaged files of it, and settings that `phalanx train` would refuse.
    notes: tuple[str, ...] = ()
    trainer: str = ""  # the trainer of a foreign configuration
    foreign: bool = False  # another trainer's file, which Phalanx does not edit

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each rule: the worst of its answers. Findings of severity info do not fail a rule."""
        # From the worst verdict to the best.
        order: dict[str, int] = {"fail": 0, "unknown": 1, "waived": 2, "habit": 3, "pass": 4}
        worst: dict[str, Verdict] = {}
        for finding in self.findings:
            worst_so_far = worst.get(finding.rule.id, "pass")
            verdict_: Verdict = "pass" if is_remark(finding) else finding.verdict
            worst[finding.rule.id] = min(worst_so_far, verdict_, key=lambda verdict: order[verdict])
        return worst

    @property
    def counts(self) -> Counter[str]:
        """The number of rules by verdict."""
        return Counter(self.verdicts.values())

    @property
    def exempt(self) -> frozenset[str]:
        """Ids of rules that do not apply to this target."""
        applicable = {finding.rule.id for finding in self.findings if finding.outcome.applies}
        return frozenset(finding.rule.id for finding in self.findings) - applicable

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The failing findings, by severity and then by cost; with `require_evidence` also those without evidence."""
        rank = {"error": 0, "warning": 1, "info": 2}
        problems = [
            finding
            for finding in self.findings
            if finding.verdict == "fail" or (self.require_evidence and is_open(finding))
        ]
        return tuple(sorted(problems, key=lambda one: (rank[one.severity], -(one.outcome.impact.points or 0.0))))

    @property
    def habits(self) -> tuple[Finding, ...]:
        """Default behaviour of another trainer, the same for each of its files; not findings on this file."""
        return tuple(finding for finding in self.findings if finding.verdict == "habit")

    @property
    def errors(self) -> int:
        """The number of findings of severity error, on which `phalanx train` refuses to start."""
        return sum(finding.severity == "error" for finding in self.problems)

    @property
    def exit_code(self) -> int:
        """0 when clean, 1 with findings; findings of severity info do not count."""
        return int(any(finding.severity != "info" for finding in self.problems))

    @property
    def is_clean(self) -> bool:
        """True if the report has no errors and no warnings."""
        return self.exit_code == 0

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __bool__(self) -> bool:
        """Always true: a clean report is not an absent one; use `is_clean`."""
        return True

    def __str__(self) -> str:
        from phalanx.rules.formats.text import render_text

        return render_text([self]).removesuffix("\n")

    def __repr__(self) -> str:
        from phalanx.rules.formats.text import summary_of

        return f"<CheckReport: {self.target}: {summary_of(self)}>"

    def _repr_html_(self) -> str:
        from phalanx.rules.formats.html import render_fragment

        return render_fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `phalanx check --json` prints them for each target."""
        from phalanx.rules.formats.text import report_dict

        return report_dict(self)

    def filter(
        self, severity: Severity | None = None, *, verdict: Verdict | None = None, rule: str = ""
    ) -> CheckReport:
        """Return the report with only the findings of a severity, a verdict, or rules whose id begins with `rule`.

        A severity alone selects failing findings: `report.filter("error")`.
        """
        wanted_verdict = verdict or ("fail" if severity is not None else None)
        findings = (
            finding
            for finding in self.findings
            if (severity is None or finding.severity == severity)
            and (wanted_verdict is None or finding.verdict == wanted_verdict)
            and finding.rule.id.startswith(rule.upper())
        )
        return replace(self, findings=tuple(findings))

    def frame(self) -> Any:
        """Return every finding as a row: a pandas DataFrame where pandas is installed, else numpy arrays by column."""
        from phalanx.io.notebook import as_frame
        from phalanx.rules.formats.text import findings_columns

        return as_frame(findings_columns(self.findings))


def is_remark(finding: Finding) -> bool:
    """Return whether a finding only informs: its rule counts as met, and the exit code ignores it."""
    return finding.verdict == "fail" and finding.severity == "info"


def is_open(finding: Finding) -> bool:
    """Return whether the evidence for a finding was missing."""
    return finding.verdict == "unknown"


def judge(
    rules: Sequence[Rule],
    evidence: Evidence,
    *,
    edition: str,
    require_evidence: bool = False,
    whole: bool = True,
    own: OwnRules = NO_OWN_RULES,
) -> CheckReport:
    """Judge every rule on the evidence; `own` holds the user's rules, with those that could not be run.

    SPC001 checks the waivers of the rules in `rules`. `whole` states that `rules` holds all rules, so that a waiver
    of a rule that does not exist is reported too.
    """
    about_rules = (spc001_waivers.RULE.id, spc003_own_rules.RULE.id)
    judged_rules = [rule for rule in rules if rule.id not in about_rules]
    ids = {rule.id for rule in rules}
    findings = [
        _placed_finding(rule, evidence, outcome) for rule in judged_rules for outcome in _rule_outcomes(rule, evidence)
    ]
    if spc003_own_rules.RULE.id in ids:
        findings += [_placed_finding(spc003_own_rules.RULE, evidence, outcome) for outcome in _own_outcomes(own)]
    if evidence.job is not None or evidence.waivers:
        checks_waivers = spc001_waivers.RULE.id in ids
        findings = _apply_waivers(
            findings, evidence, judged_rules, statement=checks_waivers, whole=whole and not own.left_out
        )
    # Records of another hardware profile are not evidence.
    counts = bool(counted_records(evidence.drills, profile=evidence.profile.name))
    return CheckReport(
        edition=edition,
        target=evidence.target,
        profile=evidence.profile.name,
        scaling=evidence.scaling.name,
        devices=evidence.known_devices,
        evidence="".join(letter for letter in LETTERS if evidence.has(letter) and (letter != "D" or counts)),
        usd=evidence.usd,
        findings=tuple(findings),
        require_evidence=require_evidence,
        unmapped=evidence.unmapped,
        notes=(
            *(f"{evidence.target}/{problem.where} {problem.what}" for problem in evidence.damaged.values()),
            *evidence.file_notes,
            *_trainer_notes(evidence),
        ),
        trainer=evidence.practice.trainer if evidence.is_foreign else "",
        foreign=evidence.is_foreign,
    )


def _trainer_notes(evidence: Evidence) -> list[str]:
    """Return what `phalanx train` would refuse or compute otherwise; empty for other trainers and for runs."""
    plan = evidence.plan
    if plan is None or evidence.has("L") or not trains_with_phalanx(plan.job):
        return []
    problems = trainer_problems(plan.job, plan.layout, plan.cluster)
    return [
        *(f"phalanx train cannot run this: {problem.where}: {problem.what}" for problem in problems),
        *(remark.what for remark in attention_remarks(plan.job.model, plan.job.data.sequence, ours=True)),
    ]


def limits_of(rule: Rule, evidence: Evidence) -> Limits:
    """Return the limits of a rule for this hardware profile and scaling class."""
    return Limits(
        values={name: limit.resolve(evidence.profile.name, evidence.scaling) for name, limit in rule.limits.items()}
    )


def _rule_outcomes(rule: Rule, evidence: Evidence) -> tuple[Outcome, ...]:
    if rule.profiles and evidence.profile.name not in rule.profiles:
        return (exempt(f"does not apply to {evidence.profile.name}"),)
    missing = [letter for letter in rule.requires if not evidence.has(letter)]
    if missing:
        return (_missing_evidence(missing, evidence),)
    if rule.origin:
        return _own_answer(rule, evidence)
    try:
        result = rule.check(evidence, limits_of(rule, evidence))
    except Exception as error:
        # A bug in one rule must neither hide the verdicts of the others nor count as a pass.
        message = f"the rule itself failed on this evidence: {type(error).__name__}: {str(error)[:200]}"
        return (unknown(message, fix="this is a fault of Phalanx: report it with the file that was checked"),)
    return result if isinstance(result, tuple) else (result,)


def _own_answer(rule: Rule, evidence: Evidence) -> tuple[Outcome, ...]:
    """Run a user's rule. An exception is a failure, so that a clean report means that the rule really ran."""
    no_time = Impact(note="not known: the rule did not answer")
    try:
        result = rule.check(evidence, limits_of(rule, evidence))
    except (Exception, SystemExit) as error:
        message = f"the rule raised {type(error).__name__}: {str(error)[:200]}"
        return (failed(message, fix=f"correct the rule, at {last_line(error)}", impact=no_time),)
    outcomes = result if isinstance(result, tuple | list) else (result,)
    if all(isinstance(outcome, Outcome) for outcome in outcomes):
        return tuple(outcomes)
    message = f"the rule returned {type(result).__name__}, not an outcome"
    return (failed(message, fix="return passed(...), failed(...), unknown(...) or exempt(...)", impact=no_time),)


def _own_outcomes(own: OwnRules) -> list[Outcome]:
    """Return the outcomes of SPC003, about the user's rules that could not be run; empty when there are none."""
    if not own.named:
        return []
    limit = spc003_own_rules.RULE.limits["left_out"].value
    assert isinstance(limit, int)
    faults = [rule for rule in own.left_out if rule.is_fault]
    outcomes = [unknown(rule.what, fix=rule.fix, at="rules") for rule in own.left_out if not rule.is_fault]
    note = Impact(note="costs no time by itself: nobody knows what the rule would have said")
    if len(faults) > limit:
        outcomes += [failed(rule.what, fix=rule.fix, at="rules", impact=note) for rule in faults]
    return outcomes or [passed(f"{plural(own.named, 'rule')} of your own: all asked", value=0, threshold=limit)]


def _missing_evidence(letters: Sequence[str], evidence: Evidence) -> Outcome:
    """Return the outcome for missing evidence, with the way to get it; a damaged file is named."""
    message = f"no evidence from the {' or the '.join(LETTERS[letter] for letter in letters)}"
    damage = evidence.damaged.get(letters[0])
    if damage is None:
        return unknown(message, fix=HOW_TO_GET[letters[0]])
    return unknown(f"{message}: {damage.where} {damage.what}", fix=damage.fix)


def _placed_finding(rule: Rule, evidence: Evidence, outcome: Outcome) -> Finding:
    outcome = _in_their_words(evidence, outcome)
    file, line = evidence.place(outcome.at)
    return Finding(
        rule=rule,
        outcome=outcome,
        verdict="habit" if is_habit(rule, outcome, evidence, line) else outcome.verdict,
        severity=severity_of(rule, outcome, evidence),
        file=file,
        line=line,
    )


def _in_their_words(evidence: Evidence, outcome: Outcome) -> Outcome:
    """Add the name that another trainer's file has for each edited key to the notes of the edits."""
    if not evidence.their_keys or not outcome.edits:
        return outcome
    edits = []
    for edit in outcome.edits:
        notes = [edit.note, evidence.their_keys.get(edit.key, "")]
        edits.append(replace(edit, note="; ".join(note for note in notes if note)))
    return replace(outcome, edits=tuple(edits))


def severity_of(rule: Rule, outcome: Outcome, evidence: Evidence) -> Severity:
    """Return the severity of an answer: its own or its rule's, lowered in small classes and raised in large ones."""
    severity = outcome.severity or rule.severity
    if is_small(rule, outcome, evidence):
        return "info"
    if severity == "error" and evidence.scaling.name in rule.softer_in:
        return "warning"
    if severity == "warning" and rule.harder_from and at_least(evidence.scaling, rule.harder_from):
        return "error"
    return severity


def _apply_waivers(
    found: list[Finding], evidence: Evidence, asked: Sequence[Rule], *, statement: bool, whole: bool
) -> list[Finding]:
    """Mark the findings that a waiver covers as waived; with `statement`, add findings on the waivers themselves."""
    broken = {finding.rule.id for finding in found if finding.verdict in ("fail", "unknown", "habit")}
    waivers = settle_waivers(evidence, broken, asked=asked, whole=whole)
    result = []
    for finding in found:
        reason = waivers.reasons.get(finding.rule.id, "")
        waived = bool(reason) and finding.verdict in ("fail", "unknown", "habit")
        result.append(replace(finding, verdict="waived", reason=reason) if waived else finding)
    extra = (
        [_placed_finding(spc001_waivers.RULE, evidence, outcome) for outcome in waivers.outcomes] if statement else []
    )
    return [*result, *extra]


# Waivers: rules a job breaks on purpose, with a reason and a last day. Expired and unused waivers are findings.


COSTS_NO_TIME = Impact(note="costs no time by itself: it hides what does")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waived:
    """Reasons of the valid waivers by rule id, and the outcomes on the waivers themselves."""

    reasons: Mapping[str, str]
    outcomes: tuple[Outcome, ...]


def settle_waivers(evidence: Evidence, broken: set[str], *, asked: Sequence[Rule], whole: bool) -> Waived:
    """Match the waivers with the rules.

    `broken` are the ids of rules in `asked` that failed or lack evidence; `whole` states that all rules were
    judged.
    """
    rules = {rule.id: rule for rule in asked}
    reasons: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for index, waiver in enumerate(evidence.all_waivers):
        if waiver.rule not in rules:
            outcomes += [_empty_waiver(waiver, index)] if whole else []
        elif _is_over(waiver, evidence.today):
            outcomes.append(_expired_waiver(waiver, index, evidence.today))
        elif waiver.rule in broken:
            reasons[waiver.rule] = waiver.reason
        else:
            outcomes.append(_unused_waiver(waiver, index, rules[waiver.rule], evidence))
    if whole and not outcomes:
        count = len(evidence.all_waivers)
        outcomes.append(passed(f"{plural(count, 'waiver')}, each with a reason and valid"))
    return Waived(reasons=reasons, outcomes=tuple(outcomes))


def _is_over(waiver: Waiver, today: date) -> bool:
    days_over = spc001_waivers.RULE.limits["days_over"].value
    assert isinstance(days_over, int)
    return today - date.fromisoformat(waiver.expires) > timedelta(days=days_over)


def _empty_waiver(waiver: Waiver, index: int) -> Outcome:
    # At the top it would be a circular import: `edition` imports the rules.
    from phalanx.rules.edition import EDITION, all_rules

    titles = {rule.id: rule.slug for rule in all_rules()}
    if waiver.rule == spc001_waivers.RULE.id:
        problem, fix = f"{waiver.rule} cannot be waived: it is about waivers", "take the waiver out"
    else:
        close = nearest(waiver.rule, titles)
        problem = f"{waiver.rule} is no rule of edition {EDITION}"
        fix = f"did you mean {close} ({titles[close]})?" if close else "phalanx rules lists them"
    return failed(
        f"the waiver of {waiver.rule} waives nothing: {problem}",
        value=waiver.rule,
        impact=COSTS_NO_TIME,
        fix=fix,
        at=f"waiver.{index}.rule",
    )


def _expired_waiver(waiver: Waiver, index: int, today: date) -> Outcome:
    return failed(
        f"the waiver of {waiver.rule} expired on {waiver.expires}",
        value=waiver.expires,
        threshold=today.isoformat(),
        impact=COSTS_NO_TIME,
        fix=f"meet {waiver.rule}, or decide again and set a new date",
        at=f"waiver.{index}.expires",
    )


def _unused_waiver(waiver: Waiver, index: int, rule: Rule, evidence: Evidence) -> Outcome:
    """Return the outcome for a waiver of a rule that is met.

    Before the run, a rule that also reads the log may still need its waiver: this is only severity info.
    """
    later = "L" in rule.uses and not evidence.has("L")
    severity: Severity = "info" if later else "warning"
    remark = "waives nothing so far: the rule is met before the run" if later else "waives nothing: the rule is met"
    fix = "take it out, unless the run is known to need it" if later else "take it out"
    return failed(
        f"the waiver of {waiver.rule} {remark}",
        value=waiver.rule,
        severity=severity,
        impact=COSTS_NO_TIME,
        fix=fix,
        at=f"waiver.{index}.rule",
    )
