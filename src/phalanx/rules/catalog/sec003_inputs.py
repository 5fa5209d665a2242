"""SEC003: names and paths of a job are plain data, and written paths stay inside the run."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from phalanx.job.plugin_reference import list_references, runs_named_code
from phalanx.job.schema import NAME_PATTERN
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

NO_TIME = Impact(note="no time by itself: a job file from elsewhere could write over files of yours")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the job's name, the checkpoint path, the other paths, and code that the job names."""
    return (
        _judge_name(evidence, limits),
        _judge_outputs(evidence, limits),
        _judge_paths(evidence),
        *_judge_code(evidence),
    )


def _judge_name(evidence: Evidence, limits: Limits) -> Outcome:
    name, max_length = evidence.the_job.name, int(limits.number("name_most"))
    if re.fullmatch(NAME_PATTERN, name) and len(name) <= max_length:
        return passed(
            f"the name {name} is {len(name)} plain characters", value=len(name), threshold=max_length, at="name"
        )
    return failed(
        f"the name {_shown_text(name)} is not plain, or longer than {max_length} characters",
        value=len(name),
        threshold=max_length,
        at="name",
        impact=NO_TIME,
        fix="lower-case letters, digits, '.', '_' and '-', not starting with a sign: it names a folder",
    )


def _judge_outputs(evidence: Evidence, limits: Limits) -> Outcome:
    """Judge checkpoint.path: an absolute path is the user's choice, one that climbs out of the run folder fails."""
    path, max_climbs = evidence.the_job.checkpoint.path, limits.number("climbs")
    if evidence.is_foreign:
        return exempt(f"a run of {evidence.practice.trainer} has no folder of its own that a path could lead out of")
    climbs = 0 if "://" in path else _levels_above(path)
    if climbs <= max_climbs and not path.startswith("~"):
        where = "a store" if "://" in path else "absolute" if path.startswith("/") else "inside the run"
        return passed(
            f"checkpoint.path = {_shown_text(path)} is {where}",
            value=climbs,
            threshold=max_climbs,
            at="checkpoint.path",
        )
    return failed(
        f"checkpoint.path = {_shown_text(path)} leads out of the run",
        formula=(f"{plural(climbs, 'level')} up, more than {max_climbs:g}; '~' is not expanded",),
        value=climbs,
        threshold=max_climbs,
        unit="levels",
        at="checkpoint.path",
        impact=NO_TIME,
        fix="write the absolute path if you mean another disk, or a folder inside the run",
    )


def _levels_above(path: str) -> int:
    """Return how many levels a path leads above its start; in an absolute path every `..` counts.

    >>> _levels_above("checkpoints"), _levels_above("a/../../b"), _levels_above("/data/../etc")
    (0, 1, 1)
    """
    depth = lowest = 0
    for part in PurePosixPath(path).parts:
        if part == "..":
            depth -= 1
        elif part != "/":
            depth += 1
        lowest = min(lowest, depth)
    ups = path.split("/").count("..") if path.startswith("/") else -lowest
    return ups


def _judge_paths(evidence: Evidence) -> Outcome:
    job = evidence.the_job
    texts = {
        "checkpoint.path": (job.checkpoint.path,),
        "data.path": job.data.paths,
        "train.weights": (job.train.weights,),
        "cluster.file": (job.cluster.file,),
    }
    for key, values in texts.items():
        for value in values:
            if not value.isprintable():
                return failed(
                    f"{key} = {_shown_text(value)} holds characters that do not print",
                    value=len(value),
                    at=key,
                    impact=NO_TIME,
                    fix="write the path again: line breaks and escapes have no place in one",
                )
    return passed("all paths are plain text")


def _judge_code(evidence: Evidence) -> tuple[Outcome, ...]:
    job = evidence.the_job
    model = [("model.module", job.model.module)] if runs_named_code(job.model.module) else []
    plugins = ((f"plugins.{key}", text) for key, text in list_references(job.plugins) if runs_named_code(text))
    code_settings = [*model, *(("rules", name) for name in job.rules), *plugins]
    return tuple(
        failed(
            f"{key} = {_shown_text(name)} runs code of its own",
            value=name[:60],
            at=key,
            severity="info",
            impact=NO_TIME,
            fix="read it first; nothing runs it without --allow-code",
        )
        for key, name in code_settings
        if name
    )


def _shown_text(text: str) -> str:
    return repr(text[:80])


RULE = Rule(
    id="SEC003",
    slug="inputs-are-data",
    severity="error",
    requires="J",
    requirement="Job files, names and paths cannot execute anything, and write nowhere but where a person said.",
    why="""
People pass job files around. One that a validator or a trainer evaluates is a program (MLPerf's and SuperBench's rule
files are strings of Python); one whose paths climb out of their folder writes over somebody's files (CWE-22). Both are
found before anything runs.
""",
    how="""
TOML and JSON are read by parsers that run nothing, with limits on size and depth; there is no expression in a job
file. Here: the name matches `[a-z0-9][a-z0-9._-]{0,62}`; `checkpoint.path` is inside the run, absolute, or the URL of
a store, and contains no `..` that leads out; no path holds control characters. Paths that are only read (`data.path`,
`train.weights`) may lie anywhere. An absolute `checkpoint.path` is allowed: whoever starts the job chooses the disk,
and sees what it is. `model.module`, `rules` and `plugins` are told of, and run with `--allow-code` only.
""",
    limits={
        "name_most": Limit(value=63, unit="characters", note="a DNS label: names become those of folders and pods"),
        "climbs": Limit(value=0, unit="levels", note="a written path may lead so far above the run: none"),
    },
    bad="""
[checkpoint]
path = "../../other-run/checkpoints"
""",
    good="""
[checkpoint]
path = "checkpoints"
""",
    fix="Name places absolutely when they are outside the run, so that a reader sees it.",
    waive="A layout of folders in which the run's parent is meant, known to everybody who runs the job.",
    references=(
        Reference(text="CWE-22 path traversal, CWE-502 deserialization of untrusted data", mark="recalled"),
        Reference(text="mlcommons/logging compliance_checker: exec and eval of rule strings", mark="read"),
    ),
    check=check,
)
