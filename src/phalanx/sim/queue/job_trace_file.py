"""Traces of jobs: Phalanx's CSV, and the Standard Workload Format of the Parallel Workloads Archive.

https://www.cs.huji.ac.il/labs/parallel/workload/swf.html: 18 numbers a line, `;` begins a comment, -1 means
"unknown".
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from phalanx.errors import MOST_SHOWN, Problem, UserError, mistake, nearest
from phalanx.io.files import csv_columns, read_text
from phalanx.io.values import printable
from phalanx.sim.queue.queue_job import MOST_JOBS, QueueJob, in_order_of_submission, job_faults
from phalanx.units import MIB

MOST_BYTES = 256 * MIB  # a million lines of SWF are about 80 MB
NEEDED = ("submit_s", "nodes", "duration_s")
COLUMNS = (*NEEDED, "limit_s", "team", "priority", "domain", "name")
MOST_NAME = 80
SWF_FIELDS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTrace:
    """Jobs in order of submission, and the number of lines left out because the jobs never ran."""

    source: str
    jobs: tuple[QueueJob, ...]
    left_out: int = 0


def read_trace(path: Path, *, devices_per_node: int) -> JobTrace:
    """Read the jobs of a .csv or .swf file; raises UserError with the wrong lines.

    Processors of SWF become whole nodes of `devices_per_node`. Its times are shifted so that the first job is
    submitted at 0.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".swf"):
        problem = "is neither a .csv nor a .swf file"
        raise mistake(
            str(path), problem, fix="name a trace such as jobs.csv (docs/queue-simulation.md), or `synthetic`"
        )
    text = read_text(path, noun="trace", most_bytes=MOST_BYTES)
    return _read_csv(text, str(path)) if ending == ".csv" else _read_swf(text, str(path), devices_per_node)


def _read_csv(text: str, where: str) -> JobTrace:
    """Read a trace in Phalanx's CSV format; raises UserError with all wrong lines."""
    try:
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
        names = csv_columns(reader, where)
        problems = [
            Problem(where=f"{where}:1", what=f"there is no column {printable(name, most=40)!r}", fix=_column_fix(name))
            for name in names
            if name not in COLUMNS
        ]
        if missing := [name for name in NEEDED if name not in names]:
            problems.append(
                Problem(
                    where=f"{where}:1",
                    what=f"lacks the column {', '.join(missing)}",
                    fix=f"the first line names the columns: {', '.join(COLUMNS)}; the last five may be left out",
                )
            )
        if problems:
            raise UserError(problems)
        jobs: list[QueueJob] = []
        for row in reader:
            _check_count(len(jobs), where)
            jobs += _job_or_problem(partial(_csv_job, row, len(jobs)), f"{where}:{reader.line_num}", problems)
    except csv.Error as error:
        raise mistake(f"{where}:{reader.line_num}", f"is not CSV: {error}") from error
    if problems:
        raise UserError(problems)
    return JobTrace(source=where, jobs=in_order_of_submission(jobs, where))


def _column_fix(name: str) -> str:
    close = nearest(name, COLUMNS)
    return f"did you mean {close}?" if close else f"the columns are {', '.join(COLUMNS)}"


def _csv_job(row: dict[str | None, str | list[str] | None], number: int) -> QueueJob:
    if None in row or None in row.values():
        raise ValueError("does not have as many values as the first line has columns")
    cells = {str(name): str(value).strip() for name, value in row.items()}
    duration = _parse_number(cells["duration_s"], "duration_s")
    limit = cells.get("limit_s", "")
    return QueueJob(
        name=printable(cells.get("name") or f"job {number + 1}", most=MOST_NAME),
        submit_s=_parse_number(cells["submit_s"], "submit_s"),
        nodes=_parse_whole(cells["nodes"], "nodes"),
        duration_s=duration,
        limit_s=_parse_number(limit, "limit_s") if limit else duration,
        team=printable(cells.get("team", ""), most=MOST_NAME),
        priority=_parse_whole(cells.get("priority") or "0", "priority"),
        domain=cells.get("domain", ""),  # type: ignore[arg-type]  # job_faults refuses others
    )


def _read_swf(text: str, where: str, devices_per_node: int) -> JobTrace:
    """Read a trace in the Standard Workload Format; jobs that never ran are left out and counted."""
    jobs: list[QueueJob] = []
    problems: list[Problem] = []
    left_out = 0
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith(";"):
            continue
        _check_count(len(jobs), where)
        fields = line.split()
        if len(fields) != SWF_FIELDS:
            problem = f"has {len(fields)} fields; a job of the Standard Workload Format has {SWF_FIELDS}"
            problems.append(Problem(where=f"{where}:{number}", what=problem))
        elif fields[3] in ("-1", "0") or (fields[4] in ("-1", "0") and fields[7] in ("-1", "0")):
            left_out += 1  # cancelled before it started, or without any record of its size
        else:
            jobs += _job_or_problem(partial(_swf_job, fields, devices_per_node), f"{where}:{number}", problems)
        if len(problems) > MOST_SHOWN:
            break
    if problems:
        raise UserError(problems)
    first = min((job.submit_s for job in jobs), default=0.0)
    moved = [replace(job, submit_s=job.submit_s - first) for job in jobs]
    return JobTrace(source=where, jobs=in_order_of_submission(moved, where), left_out=left_out)


def _swf_job(fields: list[str], devices_per_node: int) -> QueueJob:
    processors = _parse_whole(fields[4] if fields[4] not in ("-1", "0") else fields[7], "processors (field 5)")
    duration = _parse_number(fields[3], "run time (field 4)")
    requested = _parse_number(fields[8], "requested time (field 9)")
    group = _parse_whole(fields[12], "group (field 13)")
    if processors < 1:
        raise ValueError(f"{processors} processors (field 5)")
    return QueueJob(
        name=f"job {_parse_whole(fields[0], 'job number (field 1)')}",
        submit_s=_parse_number(fields[1], "submit time (field 2)"),
        nodes=math.ceil(processors / devices_per_node),
        duration_s=duration,
        # Sites let jobs run slightly over their requested time, and the trace shows when they did.
        limit_s=max(requested, duration),
        team=f"group {group}" if group >= 0 else "",
    )


def _job_or_problem(make: Callable[[], QueueJob], where: str, problems: list[Problem]) -> list[QueueJob]:
    """Return the job of one line in a list, or an empty list with its problems added to `problems`."""
    try:
        job = make()
    except ValueError as error:
        problems.append(Problem(where=where, what=str(error)))
        return []
    faults = job_faults(job)
    problems += [Problem(where=where, what=fault) for fault in faults]
    if len(problems) > MOST_SHOWN:
        raise UserError(problems)
    return [] if faults else [job]


def _check_count(count: int, where: str) -> None:
    if count >= MOST_JOBS:
        raise mistake(where, f"holds more than {MOST_JOBS:,} jobs", fix="cut it into parts")


def _parse_number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:
        raise ValueError(f"{name} {printable(text, most=40)!r} is not a number")
    return value


def _parse_whole(text: str, name: str) -> int:
    value = _parse_number(text, name)
    if value != int(value):
        raise ValueError(f"{name} {printable(text, most=40)!r} is not a whole number")
    return int(value)
