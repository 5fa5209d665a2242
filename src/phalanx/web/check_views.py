"""The views of rules: the verdicts of the training specification on a run, and the text of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.io.values import printable
from phalanx.record.run import Run
from phalanx.rules.edition import EDITION, find_rule
from phalanx.rules.formats.text import report_dict
from phalanx.rules.live_check import Verdicts
from phalanx.rules.rule import GROUPS, Limit
from phalanx.web.answer import AnswerParts, Json
from phalanx.web.detail_views import run_remarks
from phalanx.web.run_store import NotYetError, RunStore, run_stamp, state_of

PATIENCE_S = 5.0
MOST_FINDINGS = 500
OTHER = "waivers and the specification itself"


def read_verdicts(store: RunStore, run: Run, *, wait_s: float) -> Verdicts:
    """Return the newest verdicts on a run; raise NotYetError if they take longer than `wait_s`."""
    turns, over = store.checks.turns(run), not state_of(run)[1]
    mark = (run_stamp(run), turns.number)
    verdicts: Verdicts = store.memo.get(("check", run.name), mark, turns.take, wait_s=wait_s, now=over)
    return verdicts


def verdicts_if_known(store: RunStore, run: Run) -> Verdicts | None:
    """Return the verdicts, or None while they are being computed."""
    try:
        return read_verdicts(store, run, wait_s=PATIENCE_S)
    except NotYetError:
        return None


def findings_view(store: RunStore, name: str) -> Json:
    """Return every verdict by group, with the plan's warnings and the hosts that were quarantined."""
    parts, run = AnswerParts(), store.run(name)
    verdicts = parts.read("check", lambda: verdicts_if_known(store, run))
    report = report_dict(verdicts.report) if verdicts is not None else {}
    findings = report.pop("findings", [])
    remarks = run_remarks(store, name, parts)
    return {
        **_check_standing(verdicts, parts),
        "report": {key: value for key, value in report.items() if key not in ("target", "unmapped", "notes")},
        "groups": _finding_groups(findings, run.path),
        "remarks": remarks,
        "damage": parts.damage,
    }


def counts_view(store: RunStore, name: str) -> Json:
    """Return only the counts, for the header of every page of a run."""
    parts, run = AnswerParts(), store.run(name)
    verdicts = parts.read("check", lambda: verdicts_if_known(store, run))
    report = report_dict(verdicts.report) if verdicts is not None else {"counts": {}, "errors": 0}
    return {
        **_check_standing(verdicts, parts),
        "counts": report["counts"],
        "errors": report["errors"],
        "damage": parts.damage,
    }


def _check_standing(found: Verdicts | None, parts: AnswerParts) -> Json:
    """Return if verdicts are available and final; `settled` is false while newer ones are being computed."""
    broken = any(problem["where"] == "check" for problem in parts.damage)
    return {
        "available": found is not None,
        "settled": broken or (found is not None and found.is_settled),
        "so_far": found is None or not found.is_last,
    }


def _finding_groups(listed: Sequence[Json], folder: Path) -> list[Json]:
    """Group findings by their rule group, in the order of the specification."""
    own_groups = {finding["group"]: "your own rules" for finding in listed if finding.get("origin")}
    titles = {**GROUPS, "SPC": OTHER, **own_groups}
    finding_views = [_finding_view(finding, folder) for finding in listed[:MOST_FINDINGS]]
    by_group = {group: [finding for finding in finding_views if finding["group"] == group] for group in titles}
    return [
        {"group": key, "title": titles[key], "findings": findings} for key, findings in by_group.items() if findings
    ]


def _finding_view(one: Json, folder: Path) -> Json:
    """Return a finding as the page shows it: without control characters and without paths outside the run."""
    cleaned = {key: printable(value) if isinstance(value, str) else value for key, value in one.items()}
    path = Path(one["file"]) if one["file"] else None
    inside = path is not None and path.is_relative_to(folder)
    file = "" if path is None or path == folder else str(path.relative_to(folder)) if inside else path.name
    cleaned["origin"] = printable(Path(one["origin"]).name)
    return {**cleaned, "file": printable(file), "formula": [printable(line) for line in one["formula"]]}


# ---- rules -----------------------------------------------------------------------------------------------------------


def rule_view(name: str) -> Json:
    """Return a rule's texts and limits; raise UserError for an unknown name."""
    rule = find_rule(name)
    return {
        "edition": EDITION,
        "id": rule.id,
        "slug": rule.slug,
        "group": GROUPS.get(rule.group, OTHER),
        "severity": rule.severity,
        **{key: getattr(rule, key).strip() for key in TEXTS},
        "limits": [_limit_view(key, limit) for key, limit in rule.limits.items()],
        "references": [{"text": reference.text, "mark": reference.mark} for reference in rule.references],
        "evidence": {"requires": rule.requires, "uses": rule.uses},
    }


TEXTS = ("requirement", "why", "how", "bad", "good", "fix", "waive", "history")


def _limit_view(name: str, limit: Limit) -> Json:
    special = {**limit.classes, **limit.profiles}
    return {
        "name": name,
        "value": _limit_value(limit.value),
        "unit": limit.unit,
        "note": limit.note,
        "special": {key: _limit_value(value) for key, value in special.items()},
    }


def _limit_value(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
