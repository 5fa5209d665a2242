"""What `phalanx train` asks of the training specification before it starts, and what it says of it on stderr."""

from __future__ import annotations

from phalanx.cli.output import note
from phalanx.errors import Problem, RuleError
from phalanx.job.load import ResolvedJob
from phalanx.plan.plan import Plan
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.rules.judge import CheckReport


def check_before(resolved: ResolvedJob, plan: Plan, *, refuse: bool) -> None:
    """Judge a job and its plan: errors are told in full, warnings in a line each. With `refuse`, errors raise."""
    from phalanx.rules.api import check_plan

    report = check_plan(resolved, plan)
    _tell(report)
    if report.errors and refuse:
        raise RuleError(_refusal(report))


def _tell(report: CheckReport) -> None:
    from phalanx.io.values import printable
    from phalanx.rules.formats.text import MOST_TEXT, finding_lines, shown_place, summary_of

    for one in report.problems:
        if one.severity == "error":
            for _, text in finding_lines(one, report):
                note(printable(text, most=MOST_TEXT))
        elif one.severity == "warning":
            text = f"{shown_place(one)}: W {one.rule.id} {one.rule.slug}  {one.outcome.what}"
            note(f"check: {printable(text, most=MOST_TEXT)}")
    note(f"check: {summary_of(report)}")


def _refusal(report: CheckReport) -> Problem:
    return Problem(
        where=report.target,
        what=f"{plural(report.errors, 'error')} against the training specification {report.edition}: "
        "nothing was started",
        fix=f"mend them (phalanx check {report.target} --fix writes the safe ones), waive them with a [[waiver]] in "
        "the job file, or start anyway with --no-check",
    )
