"""The training specification: check a job, a plan or a run, fix a job file, and read the rules."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from phalanx.api.jobs import look_at_files, override_texts
from phalanx.api.results import Overrides, PublicResult, Tell, teller, warn
from phalanx.errors import Problem, mistake
from phalanx.hardware.types import Cluster
from phalanx.io.path_probes import is_file, is_folder, resolve_path
from phalanx.io.write_errors import write_failure
from phalanx.job.load import ResolvedJob, load
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.rules.gather import Request, given_plan, is_plan, of_job, refuse_extras
from phalanx.rules.specification import check as check_path
from phalanx.rules.specification import check_evidence, this_day
from phalanx.units import MB, plural

if TYPE_CHECKING:
    from phalanx.rules.explain import Explanation
    from phalanx.rules.fixes import JobFix
    from phalanx.rules.own_rules import RuleSource
    from phalanx.rules.profiles import HardwareProfile
    from phalanx.rules.rule import Rule
    from phalanx.rules.run_rules import CheckReport

# Seconds between progress lines; a log that is read faster needs none.
PROGRESS_S = 2.0


def check(
    target: str | Path | Plan | Run | ResolvedJob | Job,
    *,
    overrides: Overrides = (),
    cluster: str | Cluster | None = None,
    profile: str | None = None,
    plan: str | Path | Plan | None = None,
    drills: Sequence[str | Path] = (),
    parity: tuple[str | Path, str | Path] | None = None,
    source: str = "",
    waivers: str | Path | None = None,
    select: str = "",
    ignore: str = "",
    rules: Iterable[RuleSource] = (),
    allow_code: bool = False,
    require_evidence: bool = False,
    progress: bool | Tell = False,
) -> CheckReport:
    """Check a job, a plan, a run, or another trainer's configuration against the training specification.

    `target` is a path, or the result of `load`, `plan`, `train` or `run`. `select` and `ignore` are rule ids or their
    beginnings, as "CKP,FLT001". `rules` are additional rules, as objects or "file.py:name"; `allow_code` also runs
    those that the job names. The result lists findings, prints as text, shows as HTML in a notebook, and `frame()`
    gives a table. Raises UserError if the target cannot be checked.

    >>> report = check("examples/llama-3-8b-64xH100.toml", select="BAT")
    >>> {finding.rule.group for finding in report.findings if finding.rule.id != "SPC001"}
    {'BAT'}
    """
    from phalanx.rules.foreign.detect import trainer_of_file

    tell = teller(progress)
    request = _check_request(
        overrides=overrides,
        cluster=cluster,
        profile=profile,
        plan=plan,
        drills=drills,
        parity=parity,
        source=source,
        waivers=waivers,
    )
    applied: dict[str, Any] = {
        "select": select,
        "ignore": ignore,
        "require_evidence": require_evidence,
        "rules": rules,
        "allow_code": allow_code,
    }
    if isinstance(target, Run):
        target = target.path
    if not isinstance(target, str | Path):
        return _check_value(target, request, **applied)
    path = Path(target)
    if is_file(path) and not is_plan(path) and not (request.source or trainer_of_file(path)):
        # Check that the files of a job match it; no rule reads files of that size.
        warn(look_at_files(load(path, overrides=request.overrides), tell).warnings, tell)
    reading = ReadProgress(str(target), tell)
    try:
        return check_path(str(target), request=request, progress=reading, **applied)
    except KeyboardInterrupt:
        if reading.read:
            tell(reading.read)
        raise


def _check_value(target: Plan | ResolvedJob | Job, request: Request, **options: Any) -> CheckReport:
    """Check a job or a plan in memory; a plan without its file has no lines that a finding could refer to."""
    job_plan = target if isinstance(target, Plan) else None
    job = target.job if isinstance(target, Plan) else target
    if isinstance(target, Plan):
        refuse_extras(target.job.name, request, "a plan")
    elif request.overrides:
        raise mistake("phalanx.check", "overrides need a job file", fix="give them to phalanx.load")
    if not isinstance(job, Job | ResolvedJob):
        raise mistake(
            "phalanx.check",
            f"target = {str(target)[:60]!r} is of type {type(target).__name__}",
            fix="give a path, or what phalanx.load, plan, train or run returned",
        )
    resolved = job if isinstance(job, ResolvedJob) else ResolvedJob(job=job, path=Path(job.name), origins={})
    if request.plan is not None:
        job_plan = given_plan(request.plan, resolved)
    evidence = of_job(resolved, request, today=this_day(), environ=dict(os.environ), made=job_plan)
    return check_evidence(evidence, **options)


class EvidenceOptions(TypedDict, total=False):
    """The options of `check`, `explain` and `fix` that name the evidence about a target."""

    overrides: Overrides
    cluster: str | Cluster | None
    profile: str | None
    plan: str | Path | Plan | None
    drills: Sequence[str | Path]
    parity: tuple[str | Path, str | Path] | None
    source: str
    waivers: str | Path | None


def _check_request(**given: Unpack[EvidenceOptions]) -> Request:
    plan, cluster, parity = given.get("plan"), given.get("cluster"), given.get("parity")
    waivers = given.get("waivers")
    if plan and cluster:
        message = "--plan and --cluster exclude each other"
        raise mistake("phalanx check", message, fix="a plan has its cluster: give one")
    folders = tuple(Path(name) for name in given.get("drills", ()))
    for folder in folders:
        if not is_folder(folder):
            fix = "name the folder that phalanx drill wrote into"
            raise mistake(f"--drills {str(folder)[:200]}", "is not a folder", fix=fix)
    return Request(
        overrides=tuple(override_texts(given.get("overrides", ()))),
        cluster=cluster,
        profile=given.get("profile"),
        plan=plan if isinstance(plan, Plan) else Path(plan) if plan else None,
        drills=folders,
        parity=(Path(parity[0]), Path(parity[1])) if parity else None,
        source=given.get("source", ""),
        waivers=Path(waivers) if waivers else None,
    )


class ReadProgress:
    """Reports how far a log is read: a line every two seconds, for logs that take longer."""

    def __init__(self, target: str, tell: Tell) -> None:
        self.read = ""
        self._target, self._tell = target, tell
        self._last_tell_s = time.monotonic()

    def __call__(self, done_bytes: int, whole_bytes: int) -> None:
        """Report the progress; called while the log is read."""
        self.read = f"{self._target}: read {done_bytes / MB:,.0f} of {whole_bytes / MB:,.0f} MB"
        if time.monotonic() - self._last_tell_s >= PROGRESS_S:
            self._last_tell_s = time.monotonic()
            self._tell(self.read)


def check_before_training(
    resolved: ResolvedJob, plan: Plan, *, refuse: bool, tell: Tell, allow_code: bool = False
) -> None:
    """Check a plan before `train` starts it.

    Errors are printed in full, warnings in a line each. With `refuse`, errors raise RuleError.
    """
    from phalanx.errors import RuleError
    from phalanx.io.values import printable
    from phalanx.rules.formats.text import MOST_TEXT, finding_lines, shown_place, summary_of
    from phalanx.rules.specification import check_plan

    report = check_plan(resolved, plan, allow_code=allow_code)
    for finding in report.problems:
        if finding.severity == "error":
            for _, text in finding_lines(finding, report):
                tell(printable(text, most=MOST_TEXT))
        elif finding.severity == "warning":
            text = f"{shown_place(finding)}: W {finding.rule.id} {finding.rule.slug}  {finding.outcome.what}"
            tell(f"check: {printable(text, most=MOST_TEXT)}")
    tell(f"check: {summary_of(report)}")
    if report.errors and refuse:
        raise RuleError(
            Problem(
                where=report.target,
                what=f"{plural(report.errors, 'error')} against the training specification {report.edition}: "
                "nothing was started",
                fix=f"fix them (phalanx check {report.target} --fix writes the safe edits), waive them with a "
                "[[waiver]] in the job file, or start anyway with --no-check",
            )
        )


# ---- edits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FixedJob(PublicResult):
    """The edits that fix findings of a job file, whether they are written, and the remaining findings."""

    target: str
    cure: JobFix
    diff: str  # unified; empty if nothing changes
    written: bool
    report: CheckReport  # after the edits; of the unchanged file if nothing was written

    def __str__(self) -> str:
        return self.diff.removesuffix("\n")

    @property
    def exit_code(self) -> int:
        """The exit code of the report."""
        return self.report.exit_code

    @property
    def notes(self) -> list[str]:
        """The edits made, the edits left out, and the number of findings fixed."""
        from phalanx.rules.formats.text import shown_setting

        lines = [f"{self.target}: left alone: {line}" for line in self.cure.left]
        if self.written:
            for remedy in self.cure.remedies:
                lines.append(f"{self.target}: {remedy.rule}: {', '.join(shown_setting(edit) for edit in remedy.edits)}")
        word = "fixed" if self.written else "would be fixed"
        return [*lines, f"{self.target}: {plural(self.cure.cured, 'finding')} {word}"]


def fix(
    target: str | Path, *, unsafe: bool = False, write: bool = True, progress: bool | Tell = False, **options: Any
) -> FixedJob:
    """Edit a job file so that findings of `check` are fixed; `unsafe` also makes edits that change the training.

    With `write=False` nothing is written and the result prints as a diff. Further options are those of `check`.

    >>> fix("examples/drill.toml", write=False).diff
    ''
    """
    from phalanx.rules.fixes import edited_text, find_fix, read_exactly, unified_difference, write_exactly

    tell = teller(progress)
    if not isinstance(target, str | Path):
        raise mistake(
            "phalanx.fix",
            f"target = {repr(target)[:60]} is of type {type(target).__name__}, and only job files are edited",
            fix="give the path of the job file",
        )
    path = Path(target)
    _refuse_unmendable(path, options.get("source", ""))

    # Every round of the search would repeat the same messages.
    printed: list[str] = []

    def tell_once(text: str) -> None:
        if text not in printed:
            printed.append(text)
            tell(text)

    def checked(sets: Sequence[str] = ()) -> CheckReport:
        return check(target, overrides=tuple(sets), progress=tell_once, **options)

    before = read_exactly(path)
    cure = find_fix(checked, unsafe=unsafe)
    after = edited_text(before, cure.edits, where=str(target))
    if write and after != before:
        write_exactly(path, before, after)
    return FixedJob(
        target=str(target),
        cure=cure,
        diff=unified_difference(before, after, name=str(target)),
        written=write,
        report=checked(),
    )


def _refuse_unmendable(path: Path, source: str) -> None:
    from phalanx.record.run_files import has_events
    from phalanx.rules.foreign.detect import trainer_of_file

    def refuse(what: str, fix: str) -> None:
        raise mistake(str(path), f"{what}, and only job files are edited", fix=fix)

    if is_folder(path):
        refuse("is a run", "edit the job file that it was started from, and start it again")
    if is_plan(path):
        refuse("is a plan", "edit its job file, and plan again")
    if is_file(path) and (source or trainer_of_file(path)):
        refuse("is a configuration of another trainer", "phalanx import writes it as a job file")
    folder = resolve_path(path).parent
    if is_folder(folder) and has_events(os.listdir(folder)):
        refuse("belongs to a run and says how it was started", "edit the job file that it was started from")


# ---- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RuleList(PublicResult):
    """Rules of the training specification; with a hardware profile, those that apply to it, with its limits."""

    rules: tuple[Rule, ...]
    profile: HardwareProfile | None

    def __str__(self) -> str:
        from phalanx.rules.edition import EDITION
        from phalanx.rules.rule_page import TITLES, shown_limit

        lines = [f"{plural(len(self.rules), 'rule')}, edition {EDITION}; phalanx explain ID prints one", ""]
        group = ""
        for rule in self.rules:
            if rule.group != group:
                group = rule.group
                lines.append(f"{group}  {TITLES[group]}")
            lines.append(
                f"  {rule.id} {rule.severity[0].upper()} {rule.requires:<3} {rule.slug:<24} {rule.requirement}"
            )
            if self.profile is not None:
                values = (
                    f"{name} {shown_limit(limit.profiles.get(self.profile.name, limit.value), limit.unit)}"
                    for name, limit in rule.limits.items()
                )
                lines.append(f"           {'; '.join(values)}")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Return the index page of docs/rules."""
        from phalanx.rules.rule_page import rule_index

        return rule_index(self.rules)

    def to_dict(self) -> dict[str, Any]:
        """Return every rule with its limits, sources and text."""
        from phalanx.rules.edition import EDITION
        from phalanx.rules.rule_page import rule_sections

        return {
            "edition": EDITION,
            "profile": self.profile.name if self.profile is not None else None,
            "rules": [
                {
                    "id": rule.id,
                    "slug": rule.slug,
                    "group": rule.group,
                    "severity": rule.severity,
                    "requires": rule.requires,
                    "uses": rule.uses,
                    "limits": {name: self._limit(limit) for name, limit in rule.limits.items()},
                    "profiles": rule.profiles,
                    "softer_in": rule.softer_in,
                    "harder_from": rule.harder_from,
                    "sources": [{"text": reference.text, "mark": reference.mark} for reference in rule.references],
                    "sections": rule_sections(rule),
                }
                for rule in self.rules
            ],
        }

    def _limit(self, limit: Any) -> dict[str, Any]:
        profile = self.profile
        return {
            "value": limit.profiles.get(profile.name, limit.value) if profile is not None else limit.value,
            "unit": limit.unit,
            "profiles": {} if profile is not None else dict(limit.profiles),
            "classes": dict(limit.classes),
            "note": limit.note,
        }

    def write(self, folder: str | Path) -> int:
        """Write an index and a page per rule, and remove pages of former rules; return the number of pages."""
        from phalanx.io.files import write_text
        from phalanx.rules.rule_page import WROTE, rule_pages

        root, pages = Path(folder), rule_pages(self.rules)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for old in root.glob("*.md"):
                if old.name not in pages and WROTE in old.read_text(encoding="utf-8", errors="replace"):
                    old.unlink()
        except OSError as error:
            raise write_failure(root, error, fix="name another --write") from error
        for name, text in pages.items():
            write_text(root / name, text, fix="name another --write")
        return len(pages)


def rules(select: str = "", *, profile: str | None = None, own: Iterable[RuleSource] = ()) -> RuleList:
    """Return the rules of the training specification.

    `select` is as in `check`, `profile` limits them to a hardware profile, `own` adds other rules.

    >>> import phalanx
    >>> [rule.id for rule in phalanx.rules("CKP").rules][:3]
    ['CKP001', 'CKP002', 'CKP003']
    """
    from phalanx.rules.edition import select_rules as select_rules
    from phalanx.rules.own_rules import collect_own_rules
    from phalanx.rules.profiles import find_profile

    hardware_profile = find_profile(profile) if profile else None
    chosen = (
        rule
        for rule in select_rules(select, own=collect_own_rules(own).rules)
        if hardware_profile is None or not rule.profiles or hardware_profile.name in rule.profiles
    )
    return RuleList(rules=tuple(chosen), profile=hardware_profile)


def explain(
    rule: str,
    target: str | Path | Plan | Run | ResolvedJob | None = None,
    *,
    rules: Iterable[RuleSource] = (),
    allow_code: bool = False,
    progress: bool | Tell = False,
    **evidence: Unpack[EvidenceOptions],
) -> Explanation:
    """Explain a rule by id or name: its requirement, reason and sources; with a target, also its findings there.

    Further options are those with which `check` gathers evidence: overrides, cluster, plan, drills and so on.

    >>> explain("CKP001").rule.slug
    'interval-daly'
    """
    from phalanx.rules.explain import explain as explain_rule

    tell = teller(progress)
    if target is None:
        return explain_rule(rule, rules=rules)
    reading = ReadProgress(str(target), tell)
    request = _check_request(**evidence)
    return explain_rule(rule, target, rules=rules, allow_code=allow_code, request=request, progress=reading)
