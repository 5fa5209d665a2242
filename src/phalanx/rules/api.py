"""The specification for programs: check a target, a plan before it starts, or a run while it grows."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, date, datetime

from phalanx.job.load import ResolvedJob
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.rules.catalog import spc001_waivers
from phalanx.rules.edition import EDITION, all_rules, select
from phalanx.rules.evidence import Evidence
from phalanx.rules.formats.plain import report_dict
from phalanx.rules.gather import Progress, Request, before_log, gather, of_job
from phalanx.rules.judge import Finding, Report, judge
from phalanx.rules.rule import Rule

__all__ = [
    "Finding",
    "Report",
    "Request",
    "base_of",
    "check",
    "check_evidence",
    "check_plan",
    "report_dict",
]

AS_IT_IS = Request()
BEFORE = frozenset("JP")  # what is there before a run starts


def check(
    target: str,
    *,
    request: Request = AS_IT_IS,
    select: str = "",
    ignore: str = "",
    require_evidence: bool = False,
    today: date | None = None,
    progress: Progress | None = None,
) -> Report:
    """What the specification says of a job file, a plan, a run folder, or another trainer's configuration.

    `select` and `ignore` are rule ids or their beginnings, as "CKP,FLT001". Raises UserError when the target is nothing
    that can be checked.
    """
    rules_of(select, ignore)  # first: a misspelt group should not cost the reading of a log
    evidence = gather(target, request, today=today or this_day(), progress=progress)
    return check_evidence(evidence, select=select, ignore=ignore, require_evidence=require_evidence)


def check_evidence(evidence: Evidence, *, select: str = "", ignore: str = "", require_evidence: bool = False) -> Report:
    """The same for evidence that is in hand."""
    chosen = rules_of(select, ignore)
    if select and _names_ours(select):  # whether a waiver is used is known when its rule was asked, chosen or not
        report = judge(all_rules(), evidence, edition=EDITION, require_evidence=require_evidence)
        ids = {rule.id for rule in chosen}
        return replace(report, findings=tuple(one for one in report.findings if one.rule.id in ids))
    whole = not select and not ignore
    return judge(chosen, evidence, edition=EDITION, require_evidence=require_evidence, whole=whole)


def check_plan(resolved: ResolvedJob, plan: Plan, *, today: date | None = None) -> Report:
    """The rules that a job and its plan settle: what `phalanx train` asks before it starts."""
    request = Request(look=False)
    evidence = of_job(resolved, request, today=today or this_day(), environ=dict(os.environ), made=plan)
    rules = [rule for rule in all_rules() if set(rule.requires) <= BEFORE]
    return judge(rules, evidence, edition=EDITION, whole=False)


def base_of(run: Run, *, request: Request = AS_IT_IS, today: date | None = None) -> Evidence:
    """What a run says without its events; `gather.with_log` adds them, as `live.LiveCheck` does while it grows."""
    return before_log(run, request, today=today or this_day(), environ=dict(os.environ))


def rules_of(chosen: str, ignored: str) -> tuple[Rule, ...]:
    """The rules that are selected. SPC001 comes along, for their waivers, unless it is ignored by name."""
    rules, ours = select(chosen, ignored), spc001_waivers.RULE
    return rules if ours in rules or _names_ours(ignored) else (*rules, ours)


def _names_ours(words: str) -> bool:
    """Whether SPC001 is among rule ids or their beginnings."""
    return any(word.strip() and spc001_waivers.RULE.id.startswith(word.strip().upper()) for word in words.split(","))


def this_day() -> date:
    """Today, in UTC: a waiver ends everywhere at once."""
    return datetime.now(UTC).date()
