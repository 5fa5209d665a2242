"""Every edit that is called safe holds when it is made: it cures its finding and breaks nothing of another rule.

Jobs are drawn at random over the keys that rules look at; each safe edit of each finding is made alone, as a person
would type it, and the whole specification is asked again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rules.kit import evidence
from rules.logs import good_checkpoints, good_log, good_steps, spread

from phalanx.errors import UserError
from phalanx.rules.edition import EDITION, all_rules, find_rule
from phalanx.rules.facts.trainers import PHALANX
from phalanx.rules.formats.text import as_toml
from phalanx.rules.run_rules import CheckReport, Finding, judge

SEVERITY = {"error": 0, "warning": 1, "info": 2}
JOB = """\
spec = "2026.1"
name = "drawn"
[model]
preset = "{preset}"
[data]
tokens = "{tokens}"
sequence = {sequence}
[batch]
global_sequences = {sequences}
micro = 1
[parallel]
tensor = {tensor}
context = 1
pipeline = {pipeline}
zero = {zero}
recompute = "selective"
[cluster]
spec = "{cluster}"
"""
CHOICES: dict[str, tuple[object, ...]] = {
    "comm.init_timeout_s": (3, 20, 60, 299, 300, 301, 320, 700, 3600),
    "train.timeout_s": ("auto", 1, 6, 20, 39, 60, 119, 121, 130, 600, 1800),
    "checkpoint.interval_s": ("auto", 1, 15, 60, 300, 900, 3600, 21_600, 10**6),
    "checkpoint.async": (True, False),
    "checkpoint.keep": (1, 2, 3, 100),
    "checkpoint.memory_every": ("auto", 0, 1, 1000),
    "fault.dead_after_s": (0.1, 0.5, 5, 30, 60, 90, 300, 2000),
    "fault.spares": ("auto", 0, 1, 40),
    "fault.recovery": ("auto", "replace", "shrink", "stop"),
    "fault.restarts": (1, 3, 4, 50),
    "fault.digest_every": ("auto", 0, 1, 50, 10**6),
    "fault.grace_s": (5, 30, 600),
    "fault.failures_per_host_day": (0, 0.001, 0.02, 0.5),
    "telemetry.interval_s": (1, 10, 61, 900),
    "telemetry.peers_every_s": (0, 10, 60, 3000),
    "telemetry.timeline_every": (0, 200),
    "telemetry.prometheus": (True, False),
    "telemetry.listen": ("127.0.0.1:0", "0.0.0.0:9400"),
    "train.evaluate_every": (0, 100),
    "train.evaluate_sequences": (0, 64, 100_000),
    "comm.bucket_mib": ("auto", 1, 25, 4000),
    "comm.algorithm": ("auto", "ring", "tree", "nvls"),
}
CLUSTERS = ("8xH100:1", "8xH100:8", "8xH100:128", "8xA100:4", "4xGB200:16", "8xMI300X:8", "local-cpu:4")


def drawn_jobs(count: int, seed: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Text of a job and what is set in it."""
    draw = random.Random(seed)
    for _ in range(count):
        cluster = draw.choice(CLUSTERS)
        is_cpu = cluster.startswith("local")
        text = JOB.format(
            preset="gpt2" if is_cpu else draw.choice(("llama-3-8b", "llama-2-13b")),
            sequence=1024 if is_cpu else 4096,
            tokens=draw.choice(("1B", "1T")),
            sequences=draw.choice((512, 1024)),
            tensor=draw.choice((1, 2)),
            pipeline=draw.choice((1, 2)),
            zero=draw.choice((1, 3)),
            cluster=cluster,
        )
        chosen = draw.sample(sorted(CHOICES), k=draw.randint(2, 9))
        yield text, tuple(f"{key}={as_toml(draw.choice(CHOICES[key]))}" for key in chosen)


@functools.lru_cache(maxsize=4096)
def report_of(text: str, sets: tuple[str, ...]) -> CheckReport:
    return judge(all_rules(), evidence(*sets, text=text, practice=PHALANX), edition=EDITION)


def failures(report: CheckReport) -> dict[tuple[str, object], int]:
    """Severity of each finding, by rule and place; remarks are none."""
    found: dict[tuple[str, object], int] = {}
    for one in report.problems:
        if one.severity != "info":
            name = (one.rule.id, one.outcome.at)
            found[name] = min(found.get(name, 2), SEVERITY[one.severity])
    return found


def with_edits(sets: tuple[str, ...], finding: Finding) -> tuple[str, ...]:
    new = {edit.key: f"{edit.key}={as_toml(edit.value)}" for edit in finding.outcome.edits}
    kept = [one for one in sets if one.partition("=")[0] not in new]
    return (*kept, *new.values())


def broken_by(text: str, sets: tuple[str, ...], finding: Finding, before: CheckReport) -> list[str]:
    """What is worse with the edits of a finding than without."""
    after_sets = with_edits(sets, finding)
    told = ", ".join(after_sets[-len(finding.outcome.edits) :])
    try:
        after = report_of(text, after_sets)
    except UserError as error:
        return [f"{finding.rule.id} proposes {told}, with which the job cannot be read: {error}"]
    if "P" in before.evidence and "P" not in after.evidence:
        return [f"{finding.rule.id} proposes {told}, with which the job cannot be planned"]
    old, new = failures(before), failures(after)
    own = (finding.rule.id, finding.outcome.at)
    worse = [] if new.get(own, 9) > SEVERITY[finding.severity] else [f"{own} is not cured"]
    limit = SEVERITY[finding.severity]
    worse += [f"{name} is new" for name, grade in new.items() if name not in old and grade <= limit]
    worse += [f"{name} is worse" for name, grade in new.items() if name in old and grade < old[name]]
    return [f"{finding.rule.id} proposes {told}: {one}" for one in worse]


def safe(report: CheckReport) -> list[Finding]:
    return [
        one
        for one in report.problems
        if one.verdict == "fail" and one.outcome.edits and all(edit.safe for edit in one.outcome.edits)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_every_safe_edit_cures_and_breaks_nothing(seed: int) -> None:
    wrong: list[str] = []
    tried = 0
    for text, sets in drawn_jobs(40, seed):
        before = report_of(text, sets)
        for finding in safe(before):
            tried += 1
            told = f"of {sets} on {text.splitlines()[-1]}"
            wrong += [f"{one}\n    {told}" for one in broken_by(text, sets, finding, before)]
    assert tried > 40
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("seed", range(2))
def test_no_timeout_is_proposed_that_a_silence_of_the_run_outlasts(seed: int) -> None:
    """Runs that were measured: saves, staging and steps of any length, synchronous or not, of any trainer."""
    draw = random.Random(seed)
    for _ in range(25):
        save_s, stage_s, step_s = (draw.choice((0.5, 20.0, 82.0, 400.0)) for _ in range(3))
        saves = good_checkpoints(
            persist_s=spread(save_s, count=20),
            blocked_s=spread(stage_s, count=20),
            final_persist_s=spread(save_s, count=4),
        )
        log = good_log(steps=good_steps(duration_s=spread(step_s)), checkpoints=saves)
        aside = draw.choice((True, False))
        waits = (f"train.timeout_s={draw.choice((1, 39, 3600))}", f"comm.init_timeout_s={draw.choice((3, 60, 9000))}")
        practice = draw.choice((PHALANX, replace(PHALANX, trainer="torchtitan")))
        found = evidence(f"checkpoint.async={str(aside).lower()}", *waits, practice=practice, log=log)
        least_s = max(stage_s if aside else save_s, step_s)
        for one in judge([find_rule("COM004")], found, edition=EDITION, whole=False).findings:
            for edit in one.outcome.edits if one.verdict == "fail" else ():
                if edit.key.endswith("timeout_s"):
                    assert edit.value >= least_s, (waits, aside, save_s, stage_s, step_s, edit)
