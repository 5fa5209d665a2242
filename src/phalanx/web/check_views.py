"""What the training specification says of a run, while it grows and afterwards, and what its rules say."""

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
    """The newest verdicts on a run; raises NotYetError when they take longer than `wait_s`."""
    turns, over = store.checks.turns(run), not state_of(run)[1]
    asked = (run_stamp(run), turns.number)
    found: Verdicts = store.memo.get(("check", run.name), asked, turns.take, wait_s=wait_s, now=over)
    return found


def verdicts_if_known(store: RunStore, run: Run) -> Verdicts | None:
    """`verdicts`, or None while they are worked out."""
    try:
        return read_verdicts(store, run, wait_s=PATIENCE_S)
    except NotYetError:
        return None


def findings_view(store: RunStore, name: str) -> Json:
    """Every verdict, by group; beside them the plan's warnings and who was shut out."""
    parts, run = AnswerParts(), store.run(name)
    found = parts.read("check", lambda: verdicts_if_known(store, run))
    report = report_dict(found.report) if found is not None else {}
    listed = report.pop("findings", [])
    said = run_remarks(store, name, parts)
    return {
        **_check_standing(found, parts),
        "report": {key: value for key, value in report.items() if key not in ("target", "unmapped", "notes")},
        "groups": _finding_groups(listed, run.path),
        "remarks": said,
        "damage": parts.damage,
    }


def counts_view(store: RunStore, name: str) -> Json:
    """The counts alone, for the head of every page of a run."""
    parts, run = AnswerParts(), store.run(name)
    found = parts.read("check", lambda: verdicts_if_known(store, run))
    report = report_dict(found.report) if found is not None else {"counts": {}, "errors": 0}
    return {
        **_check_standing(found, parts),
        "counts": report["counts"],
        "errors": report["errors"],
        "damage": parts.damage,
    }


def _check_standing(found: Verdicts | None, parts: AnswerParts) -> Json:
    """Whether there is an answer; `settled` is false while a better one is worked out."""
    broken = any(one["where"] == "check" for one in parts.damage)
    return {
        "available": found is not None,
        "settled": broken or (found is not None and found.is_settled),
        "so_far": found is None or not found.is_last,
    }


def _finding_groups(listed: Sequence[Json], folder: Path) -> list[Json]:
    """Findings under the names of their groups, in the order of the specification."""
    own = {one["group"]: "your own rules" for one in listed if one.get("origin")}
    titles = {**GROUPS, "SPC": OTHER, **own}
    kept = [_finding_view(one, folder) for one in listed[:MOST_FINDINGS]]
    by_group = {group: [one for one in kept if one["group"] == group] for group in titles}
    return [{"group": key, "title": titles[key], "findings": found} for key, found in by_group.items() if found]


def _finding_view(one: Json, folder: Path) -> Json:
    """A finding as the page shows it: no control characters, and no path but those inside the run."""
    cleaned = {key: printable(value) if isinstance(value, str) else value for key, value in one.items()}
    path = Path(one["file"]) if one["file"] else None
    inside = path is not None and path.is_relative_to(folder)
    file = "" if path is None or path == folder else str(path.relative_to(folder)) if inside else path.name
    cleaned["origin"] = printable(Path(one["origin"]).name)
    return {**cleaned, "file": printable(file), "formula": [printable(line) for line in one["formula"]]}


# ---- rules -----------------------------------------------------------------------------------------------------------


def rule_view(name: str) -> Json:
    """A rule's own words; raises UserError for a name that is none."""
    found = find_rule(name)
    return {
        "edition": EDITION,
        "id": found.id,
        "slug": found.slug,
        "group": GROUPS.get(found.group, OTHER),
        "severity": found.severity,
        **{key: getattr(found, key).strip() for key in TEXTS},
        "limits": [_limit_view(key, one) for key, one in found.limits.items()],
        "references": [{"text": one.text, "mark": one.mark} for one in found.references],
        "evidence": {"requires": found.requires, "uses": found.uses},
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
