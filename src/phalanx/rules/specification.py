"""The Python interface of the specification: check a job, plan or run, and list the rules.

>>> from phalanx.rules.specification import check
>>> report = check("examples/llama-3-8b-64xH100.toml")    # doctest: +SKIP
>>> print(report)                                         # doctest: +SKIP
>>> [finding.rule.id for finding in report.filter("error")]       # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

from phalanx.job.load import ResolvedJob
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.rules.catalog import spc001_waivers, spc003_own_rules
from phalanx.rules.edition import EDITION, all_rules, select_rules
from phalanx.rules.evidence import Evidence
from phalanx.rules.formats.text import report_dict
from phalanx.rules.gather import Progress, Request, before_log, gather_evidence, of_job, of_plan, of_run
from phalanx.rules.outcome import Edit, Impact, Outcome, Spot, exempt, failed, passed, unknown
from phalanx.rules.own_rules import OwnRules, RuleSource, collect_own_rules, own_rule
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.rules.run_rules import CheckReport, Finding, judge

__all__ = [
    "CheckReport",
    "Edit",
    "Evidence",
    "Finding",
    "Impact",
    "Limit",
    "Limits",
    "Outcome",
    "Reference",
    "Request",
    "Rule",
    "Spot",
    "base_of",
    "check",
    "check_evidence",
    "check_plan",
    "exempt",
    "failed",
    "list_rules",
    "own_rule",
    "passed",
    "report_dict",
    "unknown",
]

Target = str | os.PathLike[str] | Plan | ResolvedJob | Job | Run
BEFORE = frozenset("JP")  # evidence that exists before a run starts
# Judged whatever is selected, unless ignored by name.
ABOUT_RULES = (spc001_waivers.RULE, spc003_own_rules.RULE)


def check(
    what: Target,
    *,
    rules: Iterable[RuleSource] = (),
    profile: str | None = None,
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    cluster: str | None = None,
    overrides: Sequence[str] = (),
    drills: Sequence[str | os.PathLike[str]] = (),
    waivers: str | os.PathLike[str] | None = None,
    source: str = "",
    allow_code: bool = False,
    require_evidence: bool = False,
    request: Request | None = None,
    today: date | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check a job, a plan or a run, or a file or folder that holds one, against the rules of the specification.

    A path may be a job file, a plan, a run folder, or another trainer's configuration (`source` names the trainer).

    - `rules`: your own rules, as objects or as "file.py:name"; naming one here is the consent to run it.
    - `allow_code`: also run the rules that the job itself names.
    - `select`, `ignore`: ids of rules or id prefixes, such as "CKP,FLT001" or ["CKP", "FLT001"].
    - `profile`, `cluster`, `overrides`, `drills`, `waivers`: as the options of `phalanx check`; `request` holds all of
      them, and more, in one value.
    - `require_evidence`: count rules without evidence as problems.
    - `today`: the date that decides whether waivers have expired; the current date in UTC by default.
    - `progress`: called with the bytes read and the total bytes while a run log is read.

    Raises UserError when the target is nothing that can be checked.
    """
    selected_words, ignored_words = _word_list(select), _word_list(ignore)
    own_rules = collect_own_rules(rules)
    # With consent to run code, the job may define rules that match.
    if not allow_code:
        # Before the evidence is gathered: a misspelt group must not cost the reading of a log.
        select_rules(selected_words, ignored_words, own_rules.rules)
    if request is None:
        request = Request(
            overrides=tuple(overrides),
            cluster=cluster,
            profile=profile,
            drills=tuple(Path(drill) for drill in drills),
            source=source,
            waivers=Path(waivers) if waivers is not None else None,
        )
    evidence = evidence_of(what, request, today=today, progress=progress)
    return check_evidence(
        evidence,
        rules=own_rules.rules,
        select=selected_words,
        ignore=ignored_words,
        require_evidence=require_evidence,
        allow_code=allow_code,
    )


def evidence_of(
    what: Target, request: Request, *, today: date | None = None, progress: Progress | None = None
) -> Evidence:
    """Gather all evidence about a target: a path, or a job, plan or run in memory."""
    day, environ = today or this_day(), dict(os.environ)
    if isinstance(what, Plan):
        return of_plan(what, request, today=day, environ=environ)
    if isinstance(what, Run):
        return of_run(what, request, today=day, environ=environ, progress=progress)
    if isinstance(what, Job):
        what = ResolvedJob(job=what, path=Path(what.name), origins={})
    if isinstance(what, ResolvedJob):
        return of_job(what, request, today=day, environ=environ)
    path = what if isinstance(what, str | os.PathLike) else getattr(what, "path", None)
    if path is None:
        raise TypeError(f"check() takes a path, a job, a plan or a run, not {type(what).__name__}")
    return gather_evidence(os.fspath(path), request, today=day, environ=environ, progress=progress)


def check_evidence(
    evidence: Evidence,
    *,
    rules: Iterable[RuleSource] = (),
    select: str = "",
    ignore: str = "",
    require_evidence: bool = False,
    allow_code: bool = False,
) -> CheckReport:
    """Check evidence that has already been gathered; the parameters are as for `check`."""
    own_rules = own_rules_of(evidence, rules, allow_code=allow_code)
    selected = rules_of(select, ignore, own_rules)
    if select and _names_rule(spc001_waivers.RULE, select):
        # A waiver is used or unused only once its rule was judged, so all rules run and the selected ones are kept.
        report = judge(
            (*all_rules(), *own_rules.rules),
            evidence,
            edition=EDITION,
            require_evidence=require_evidence,
            own=own_rules,
        )
        ids = {rule.id for rule in selected}
        return replace(report, findings=tuple(finding for finding in report.findings if finding.rule.id in ids))
    all_selected = not select and not ignore
    return judge(
        selected, evidence, edition=EDITION, require_evidence=require_evidence, whole=all_selected, own=own_rules
    )


def check_plan(
    resolved: ResolvedJob,
    plan: Plan,
    *,
    rules: Iterable[RuleSource] = (),
    allow_code: bool = False,
    today: date | None = None,
) -> CheckReport:
    """Check the rules that need only a job and its plan, as `phalanx train` does before it starts."""
    request = Request(look=False)
    evidence = of_job(resolved, request, today=today or this_day(), environ=dict(os.environ), made=plan)
    own_rules = own_rules_of(evidence, rules, allow_code=allow_code)
    settled_rules = [rule for rule in (*all_rules(), *own_rules.rules) if set(rule.requires) <= BEFORE]
    return judge(settled_rules, evidence, edition=EDITION, whole=False, own=own_rules)


def list_rules(
    select: str | Sequence[str] = (), *, profile: str | None = None, rules: Iterable[RuleSource] = ()
) -> tuple[Rule, ...]:
    """Return the rules of the edition and your own; with `profile`, those that apply to that kind of hardware."""
    from phalanx.rules.profiles import find_profile

    selected = select_rules(_word_list(select), own=collect_own_rules(rules).rules)
    name = find_profile(profile).name if profile is not None else ""
    return tuple(rule for rule in selected if not name or not rule.profiles or name in rule.profiles)


def own_rules_of(evidence: Evidence, given: Iterable[RuleSource], *, allow_code: bool) -> OwnRules:
    """Return the user's rules for some evidence: those passed in, named by its job, and installed."""
    names = evidence.job.rules if evidence.job is not None else ()
    folder = Path(evidence.job_file or evidence.plan_file).parent
    return collect_own_rules(given, job_names=names, folder=folder, allow_code=allow_code)


def base_of(run: Run, *, request: Request | None = None, today: date | None = None) -> Evidence:
    """Return the evidence of a run without its events; `gather.with_log` adds them, as `LiveCheck` does repeatedly."""
    return before_log(run, request or Request(), today=today or this_day(), environ=dict(os.environ))


def rules_of(chosen: str, ignored: str, own: OwnRules) -> tuple[Rule, ...]:
    """Return the selected rules, and SPC001 for waivers and SPC003 for the user's own rules unless ignored by name."""
    rules = select_rules(chosen, ignored, own.rules)
    extra_rules = [rule for rule in ABOUT_RULES if rule not in rules and not _names_rule(rule, ignored)]
    return (*rules, *extra_rules)


def _names_rule(rule: Rule, words: str) -> bool:
    """Return whether a rule's id begins with one of the comma-separated words."""
    return any(word.strip() and rule.id.startswith(word.strip().upper()) for word in words.split(","))


def _word_list(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else ",".join(words)


def this_day() -> date:
    """Return today's date in UTC, so that a waiver expires at the same moment everywhere."""
    return datetime.now(UTC).date()
