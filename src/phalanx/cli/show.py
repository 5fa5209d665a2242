"""`phalanx show`: every resolved value of a job and where it came from."""

from __future__ import annotations

import argparse

from phalanx.arch.counts import count_parameters
from phalanx.cli.options import add_job, add_json
from phalanx.cli.output import print_json, say, warn
from phalanx.job.dump import to_dict, to_rows
from phalanx.job.load import ResolvedJob, load
from phalanx.job.rules import shown
from phalanx.job.schema import TOKENS_PER_PARAMETER


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx show`."""
    add_job(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same as JSON."""
    resolved = load(args.job, overrides=args.overrides)
    warn(resolved.warnings)
    if args.json:
        origins = {key: origin for key, _, origin in to_rows(resolved)}
        derived = {"data.tokens": tokens} if (tokens := auto_tokens(resolved)) else {}
        print_json({"path": str(resolved.path), "job": to_dict(resolved.job), "origins": origins, "derived": derived})
    else:
        say(table(resolved))
    return 0


def table(resolved: ResolvedJob) -> str:
    """Three columns, a blank line between sections."""
    rows = [(key, _cell(value), origin) for key, value, origin in to_rows(resolved)]
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
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else shown(value, limit=48)
