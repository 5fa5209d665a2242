"""`phalanx show`: every resolved value of a job and where it came from; of a run, also what its ranks talk through."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.options import add_json, add_set
from phalanx.cli.output import print_json, say, warn
from phalanx.job.key_rules import shown_value
from phalanx.job.load import ResolvedJob, job_to_dict, job_to_rows, load
from phalanx.job.schema import TOKENS_PER_PARAMETER
from phalanx.plan.parameter_counts import count_parameters

if TYPE_CHECKING:
    from phalanx.record.account.communication import Communication
    from phalanx.record.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx show`."""
    parser.add_argument("job", metavar="JOB", help="the job file, such as job.toml, or the folder of a run")
    add_set(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same as JSON."""
    run = _run_of(args.job)
    resolved = load(run.job_toml if run is not None else args.job, overrides=args.overrides)
    warn(resolved.warnings)
    if args.json:
        origins = {key: origin for key, _, origin in job_to_rows(resolved)}
        derived = {"data.tokens": tokens} if (tokens := auto_tokens(resolved)) else {}
        shown_job = {
            "path": str(resolved.path),
            "job": job_to_dict(resolved.job),
            "origins": origins,
            "derived": derived,
        }
        print_json(shown_job if run is None else {**shown_job, "communication": _communication(run)})
        return 0
    say(table(resolved))
    if run is not None:
        from phalanx.record.account.communication import communication_lines

        found = _communication(run)
        say("\nCOMMUNICATION")
        for line in communication_lines(found) if found is not None else ["nothing is on record: no rank has begun"]:
            say(f"  {line}")
    return 0


def _run_of(path: str) -> Run | None:
    """The run, where a run folder was named instead of a job file."""
    if not Path(path).is_dir():
        return None
    from phalanx.record.run import open_run

    return open_run(path)


def _communication(run: Run) -> Communication | None:
    from phalanx.record.account.communication import communication
    from phalanx.record.archive.history import RunHistory

    return communication(RunHistory.open(run))


def table(resolved: ResolvedJob) -> str:
    """Three columns, a blank line between sections."""
    rows = [(key, _cell(value), origin) for key, value, origin in job_to_rows(resolved)]
    if tokens := auto_tokens(resolved):
        note = f"{TOKENS_PER_PARAMETER} per parameter: {tokens:_}"
        rows = [(key, value, f"{origin}; {note}" if key == "data.tokens" else origin) for key, value, origin in rows]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines: list[str] = []
    section = ""
    for key, value, origin in rows:
        if "." in key and key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines.append("")
        lines.append(f"{key:<{key_width}}  {value:<{value_width}}  {origin}".rstrip())
    return "\n".join(lines)


def auto_tokens(resolved: ResolvedJob) -> int:
    """What `data.tokens = "auto"` comes to for this model; 0 where the job names a number."""
    if resolved.job.data.tokens != "auto":
        return 0
    return TOKENS_PER_PARAMETER * count_parameters(resolved.job.model).total


def _cell(value: object) -> str:
    if value is None:
        return "not given"
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else shown_value(value, limit=48)
