"""Run the rules over the evidence: verdicts, waivers, severities, and the exit code."""

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
MOST_WHAT = 120  # characters of what was found, in a line


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Finding:
    """One answer of one rule, placed and weighed; `str()` is its first line in a report.

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
    line: int  # 0: the file as a whole
    reason: str = ""  # of the waiver

    def __str__(self) -> str:
        from phalanx.rules.formats.text import finding_head

        return finding_head(self)

    def __repr__(self) -> str:
        what = one_line(self.outcome.what)
        return f"<Finding {self.rule.id} {self.verdict}: {what[:MOST_WHAT]}{'…' * (len(what) > MOST_WHAT)}>"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckReport:
    """What the specification says of one target. `str()` is what `phalanx check` prints; a notebook shows HTML.

    Iterating gives what speaks against the target, the worst first; `findings` has every answer, passes too.

    >>> import phalanx
    >>> report = phalanx.check("examples/drill.toml", select="TOP")
    >>> report.is_clean, report.verdicts["TOP002"]
    (True, 'pass')
    """

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
    trainer: str = ""  # of another one's file
    foreign: bool = False  # another trainer's file, which is not ours to edit

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each rule: the worst of its answers; remarks break no rule."""
        order: dict[str, int] = {"fail": 0, "unknown": 1, "waived": 2, "habit": 3, "pass": 4}
        worst: dict[str, Verdict] = {}
        for one in self.findings:
            known = worst.get(one.rule.id, "pass")
            statement: Verdict = "pass" if is_remark(one) else one.verdict
            worst[one.rule.id] = min(known, statement, key=lambda verdict: order[verdict])
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
    def habits(self) -> tuple[Finding, ...]:
        """What the trainer of another one's file does or lacks, the same for each of its files: no finding of this."""
        return tuple(one for one in self.findings if one.verdict == "habit")

    @property
    def errors(self) -> int:
        """Findings of the severity that `phalanx train` refuses on."""
        return sum(one.severity == "error" for one in self.problems)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings; information alone is no finding."""
        return int(any(one.severity != "info" for one in self.problems))

    @property
    def is_clean(self) -> bool:
        """Whether nothing speaks against the target; remarks do not count."""
        return self.exit_code == 0

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __bool__(self) -> bool:
        """A report is there even when it is clean: ask `is_clean`."""
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
        """Plain values, as `phalanx check --json` prints them for each target."""
        from phalanx.rules.formats.text import report_dict

        return report_dict(self)

    def filter(
        self, severity: Severity | None = None, *, verdict: Verdict | None = None, rule: str = ""
    ) -> CheckReport:
        """The report with only the findings of a severity, a verdict, or rules whose id begins with `rule`.

        A severity alone means what fails with it: `report.filter("error")`.
        """
        wanted = verdict or ("fail" if severity is not None else None)
        kept = (
            one
            for one in self.findings
            if (severity is None or one.severity == severity)
            and (wanted is None or one.verdict == wanted)
            and one.rule.id.startswith(rule.upper())
        )
        return replace(self, findings=tuple(kept))

    def frame(self) -> Any:
        """Every finding as a row: a pandas DataFrame where pandas is installed, else numpy arrays by column."""
        from phalanx.io.notebook import as_frame
        from phalanx.rules.formats.text import findings_columns

        return as_frame(findings_columns(self.findings))


def is_remark(finding: Finding) -> bool:
    """Whether a finding only informs: its rule is met all the same, and the exit code does not ask for it."""
    return finding.verdict == "fail" and finding.severity == "info"


def is_open(finding: Finding) -> bool:
    """Whether the evidence was missing."""
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
    """Every rule over the evidence; `own` says which of them are the user's, and what of theirs is not among them.

    SPC001 looks at the waivers of the rules that are asked; `whole` says that nobody chose among them, so that a
    waiver of a rule that does not exist can be told too.
    """
    about_rules = (spc001_waivers.RULE.id, spc003_own_rules.RULE.id)
    asked = [rule for rule in rules if rule.id not in about_rules]
    ids = {rule.id for rule in rules}
    found = [_placed_finding(rule, evidence, outcome) for rule in asked for outcome in _rule_outcomes(rule, evidence)]
    if spc003_own_rules.RULE.id in ids:
        found += [_placed_finding(spc003_own_rules.RULE, evidence, outcome) for outcome in _own_outcomes(own)]
    if evidence.job is not None or evidence.waivers:
        statement = spc001_waivers.RULE.id in ids
        found = _apply_waivers(found, evidence, asked, statement=statement, whole=whole and not own.left_out)
    counts = bool(counted_records(evidence.drills, profile=evidence.profile.name))  # other records are no evidence
    return CheckReport(
        edition=edition,
        target=evidence.target,
        profile=evidence.profile.name,
        scaling=evidence.scaling.name,
        devices=evidence.known_devices,
        evidence="".join(letter for letter in LETTERS if evidence.has(letter) and (letter != "D" or counts)),
        usd=evidence.usd,
        findings=tuple(found),
        require_evidence=require_evidence,
        unmapped=evidence.unmapped,
        notes=(
            *(f"{evidence.target}/{one.where} {one.what}" for one in evidence.damaged.values()),
            *evidence.file_notes,
            *_trainer_notes(evidence),
        ),
        trainer=evidence.practice.trainer if evidence.is_foreign else "",
        foreign=evidence.is_foreign,
    )


def _trainer_notes(evidence: Evidence) -> list[str]:
    """What our trainer would refuse or compute otherwise, where the plan is for it and nothing ran yet."""
    plan = evidence.plan
    if plan is None or evidence.has("L") or not trains_with_phalanx(plan.job):
        return []
    found = trainer_problems(plan.job, plan.layout, plan.cluster)
    return [
        *(f"phalanx train cannot run this: {one.where}: {one.what}" for one in found),
        *(one.what for one in attention_remarks(plan.job.model, plan.job.data.sequence, ours=True)),
    ]


def limits_of(rule: Rule, evidence: Evidence) -> Limits:
    """The limits of a rule for this profile and size."""
    return Limits(
        values={name: one.resolve(evidence.profile.name, evidence.scaling) for name, one in rule.limits.items()}
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
    except Exception as error:  # a fault of ours in one rule must not hide what the others say, nor count as a pass
        what = f"the rule itself failed on this evidence: {type(error).__name__}: {str(error)[:200]}"
        return (unknown(what, fix="this is a fault of Phalanx: report it with the file that was checked"),)
    return result if isinstance(result, tuple) else (result,)


def _own_answer(rule: Rule, evidence: Evidence) -> tuple[Outcome, ...]:
    """Of a user's rule. One that raises fails: who wrote it expects a clean report to mean that it was asked."""
    no_time = Impact(note="not known: the rule did not answer")
    try:
        result = rule.check(evidence, limits_of(rule, evidence))
    except (Exception, SystemExit) as error:
        what = f"the rule raised {type(error).__name__}: {str(error)[:200]}"
        return (failed(what, fix=f"correct the rule, at {last_line(error)}", impact=no_time),)
    several = result if isinstance(result, tuple | list) else (result,)
    if all(isinstance(one, Outcome) for one in several):
        return tuple(several)
    what = f"the rule returned {type(result).__name__}, not an outcome"
    return (failed(what, fix="return passed(...), failed(...), unknown(...) or exempt(...)", impact=no_time),)


def _own_outcomes(own: OwnRules) -> list[Outcome]:
    """SPC003: what of the user's rules could not be asked. Nothing is said where there are none."""
    if not own.named:
        return []
    limit = spc003_own_rules.RULE.limits["left_out"].value
    assert isinstance(limit, int)
    faults = [one for one in own.left_out if one.is_fault]
    found = [unknown(one.what, fix=one.fix, at="rules") for one in own.left_out if not one.is_fault]
    note = Impact(note="costs no time by itself: nobody knows what the rule would have said")
    if len(faults) > limit:
        found += [failed(one.what, fix=one.fix, at="rules", impact=note) for one in faults]
    return found or [passed(f"{plural(own.named, 'rule')} of your own: all asked", value=0, threshold=limit)]


def _missing_evidence(letters: Sequence[str], evidence: Evidence) -> Outcome:
    """Evidence that is not there, and how to get it; a file that is there and damaged is named."""
    what = f"no evidence from the {' or the '.join(LETTERS[letter] for letter in letters)}"
    damage = evidence.damaged.get(letters[0])
    if damage is None:
        return unknown(what, fix=HOW_TO_GET[letters[0]])
    return unknown(f"{what}: {damage.where} {damage.what}", fix=damage.fix)


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
    """Open findings that a waiver covers; and, where it is `statement`, what is wrong with the waivers."""
    broken = {one.rule.id for one in found if one.verdict in ("fail", "unknown", "habit")}
    settled = settle_waivers(evidence, broken, asked=asked, whole=whole)
    result = []
    for one in found:
        reason = settled.reasons.get(one.rule.id, "")
        waived = bool(reason) and one.verdict in ("fail", "unknown", "habit")
        result.append(replace(one, verdict="waived", reason=reason) if waived else one)
    extra = (
        [_placed_finding(spc001_waivers.RULE, evidence, outcome) for outcome in settled.outcomes] if statement else []
    )
    return [*result, *extra]


# Waivers: rules a job breaks on purpose, with a reason and a last day. Old and idle ones are findings themselves.


COSTS_NO_TIME = Impact(note="costs no time by itself: it hides what does")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waived:
    """Reasons by rule id, and what is wrong with the waivers themselves."""

    reasons: Mapping[str, str]
    outcomes: tuple[Outcome, ...]


def settle_waivers(evidence: Evidence, broken: set[str], *, asked: Sequence[Rule], whole: bool) -> Waived:
    """Which rules are waived. `broken` ones of those `asked` failed or lack evidence; `whole`: all rules were asked."""
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
    from phalanx.rules.edition import EDITION, all_rules  # at the top it would be a circle: an edition imports rules

    titles = {rule.id: rule.slug for rule in all_rules()}
    if waiver.rule == spc001_waivers.RULE.id:
        what, fix = f"{waiver.rule} cannot be waived: it is about waivers", "take the waiver out"
    else:
        close = nearest(waiver.rule, titles)
        what = f"{waiver.rule} is no rule of edition {EDITION}"
        fix = f"did you mean {close} ({titles[close]})?" if close else "phalanx rules lists them"
    return failed(
        f"the waiver of {waiver.rule} waives nothing: {what}",
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
    """Before the run a rule that also looks at the log may still need its waiver: said, and not held against it."""
    later = "L" in rule.uses and not evidence.has("L")
    severity: Severity = "info" if later else "warning"
    statement = "waives nothing so far: the rule is met before the run" if later else "waives nothing: the rule is met"
    fix = "take it out, unless the run is known to need it" if later else "take it out"
    return failed(
        f"the waiver of {waiver.rule} {statement}",
        value=waiver.rule,
        severity=severity,
        impact=COSTS_NO_TIME,
        fix=fix,
        at=f"waiver.{index}.rule",
    )
