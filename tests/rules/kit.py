"""A job in which every rule is met, and the tools to break one thing of it at a time."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan import search_or_shrink
from phalanx.plan.make import make_plan
from phalanx.plan.search import SearchResult, search_layouts
from phalanx.rules.edition import EDITION, find_rule
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Severity, Verdict
from phalanx.rules.profiles import PROFILES, find_profile, profile_of, scaling_of
from phalanx.rules.rule import Value
from phalanx.rules.run_rules import Finding, judge

TODAY = date(2026, 11, 15)
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
JOB = """\
# a good job
spec = "2026.1"
name = "good"

[model]
preset = "llama-3-8b"

[data]
tokens = "1T"
sequence = 8192

[batch]
global_sequences = 512  # 4M tokens
micro = 1

[parallel]
tensor = 1
context = 1
pipeline = 1
zero = 3
recompute = "selective"

[cluster]
spec = "8xH100:16"
"""


def evidence(
    *sets: str, text: str = JOB, cluster: str | None = None, profile: str | None = None, **changes: Any
) -> Evidence:
    """The good job with `--set` overrides; `changes` replace fields of Evidence, as log=…, drills=…, practice=…"""
    found = _planned(tuple(sets), text, cluster)
    if profile is not None:
        found = replace(found, profile=PROFILES[profile])
    return replace(found, **changes)


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="phalanx-rules-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _Noted(dict[str, str]):
    """Origins of keys that remember which of them were asked for."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        super().__init__(origins)
        self.asked: dict[str, str | None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = super().get(key)
        return super().get(key, default)


_FOUND: dict[str, list[tuple[dict[str, str | None], SearchResult]]] = {}


def _search_once(ask: Any) -> SearchResult:
    """`search`, half the time of a plan, once for all jobs that ask it the same.

    It is a function of its question alone, and of the lines of the keys that its warnings name.
    """
    known = _FOUND.setdefault(repr(replace(ask, origins={})), [])
    for asked, found in known:
        if all(ask.origins.get(key) == line for key, line in asked.items()):
            return found
    noted = _Noted(ask.origins)
    found = search_layouts(replace(ask, origins=noted))
    known.append((noted.asked, found))
    return found


@functools.lru_cache(maxsize=1024)
def _planned(sets: tuple[str, ...], text: str, cluster: str | None) -> Evidence:
    path = Path(_folder()) / "job.toml"  # one name for all jobs: lines of equal jobs are then equal
    path.write_text(text, encoding="utf-8")
    resolved = load(path, overrides=sets)
    where = resolve_cluster(cluster or resolved.job.cluster.target)
    refusals, plan = (), None
    try:
        with patch.object(search_or_shrink, search_layouts.__name__, _search_once):
            plan = make_plan(resolved, where)
    except UserError as error:
        refusals = error.problems
    named = resolved.job.profile
    return Evidence(
        target=str(path),
        job=resolved.job,
        practice=Practice(trainer="phalanx"),
        profile=profile_of(where) if named == "auto" else find_profile(named),
        scaling=scaling_of(plan.layout.devices if plan else where.devices),
        today=TODAY,
        origins=resolved.origins,
        job_file=str(path),
        plan=plan,
        refusals=refusals,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a rule must say of some evidence. A `boundary` case stands exactly on a limit, or one notch beside it."""

    rule: str
    name: str
    verdict: Verdict
    evidence: Callable[[], Evidence]
    boundary: bool = False
    severity: str = ""  # of the finding, where it matters
    says: str = ""  # part of its line
    at: str = ""  # the key it points at
    points: float | None = None  # what it is said to cost, within 1 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """A constant of a rule that, changed, turns the verdict on the same evidence, or the severity of a failure."""

    rule: str
    limit: str
    value: Value
    evidence: Callable[[], Evidence]
    before: Verdict | Severity
    after: Verdict | Severity


def answers(rule_id: str, found: Evidence, **limits: Value) -> list[Finding]:
    """What one rule says, with some of its limits changed."""
    rule = find_rule(rule_id)
    for name, value in limits.items():
        rule = rule.with_limit(name, value)
    return list(judge([rule], found, edition=EDITION, whole=False).findings)


def verdict(rule_id: str, found: Evidence, **limits: Value) -> Verdict:
    """The verdict of one rule."""
    return judge_one(answers(rule_id, found, **limits))


def severity(rule_id: str, found: Evidence, **limits: Value) -> Severity:
    """The worst severity of what one rule finds; a rule that finds nothing has none to compare."""
    failed = {one.severity for one in answers(rule_id, found, **limits) if one.verdict == "fail"}
    return next(one for one in SEVERITIES if one in failed)


def judge_one(findings: Sequence[Finding]) -> Verdict:
    """The worst of several answers."""
    order = {"fail": 0, "unknown": 1, "waived": 2, "habit": 3, "pass": 4}
    return min((one.verdict for one in findings), key=lambda one: order[one])
