"""A job as text: the table that `phalanx show` prints, and a one-line summary."""

from __future__ import annotations

from phalanx.io.tables import text_table
from phalanx.io.visible import one_line
from phalanx.job.key_rules import shown_value
from phalanx.job.load import ResolvedJob, job_to_rows
from phalanx.job.model import TOKENS_PER_PARAMETER
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.schema import Job
from phalanx.units import format_count

MOST_NAME = 40  # characters of a model's name in a line


def job_line(job: Job) -> str:
    """Return the name, model and tokens of a job in one line."""
    tokens = auto_tokens(job) or job.data.tokens
    count = tokens if isinstance(tokens, str) else format_count(tokens)
    model = one_line(job.model.name)
    return f"{one_line(job.name)}: {model[:MOST_NAME]}{'…' * (len(model) > MOST_NAME)}, {count} tokens"


def job_table(resolved: ResolvedJob) -> str:
    """Return key, value and origin in three columns, with a blank line between sections."""

    def cell(value: object) -> str:
        if value is None:
            return "not given"
        return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else shown_value(value, limit=48)

    rows = [(key, cell(value), origin) for key, value, origin in job_to_rows(resolved)]
    if tokens := auto_tokens(resolved.job):
        note = f"{TOKENS_PER_PARAMETER} per parameter: {tokens:_}"
        rows = [(key, value, f"{origin}; {note}" if key == "data.tokens" else origin) for key, value, origin in rows]
    lines: list[str] = []
    section = ""
    for (key, _, _), line in zip(rows, text_table(rows), strict=True):
        if "." in key and key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def auto_tokens(job: Job) -> int:
    """Return the number of tokens that `data.tokens = "auto"` means for this model; 0 if the job sets a number."""
    if job.data.tokens != "auto":
        return 0
    return TOKENS_PER_PARAMETER * count_parameters(job.model).total
