"""The JSON Schema of the job file: printed, or written to a file for editors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.results import PublicResult
from phalanx.io.files import write_text
from phalanx.io.visible import one_line
from phalanx.job.json_schema import job_json_schema, schema_text
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobSchema(PublicResult):
    """The schema; `path` is the file it was written to."""

    path: str = ""

    def __str__(self) -> str:
        return f"wrote {self.path}" if self.path else schema_text().removesuffix("\n")

    def __repr__(self) -> str:
        sections = plural(len(job_json_schema()["properties"]), "key")
        return f"<JobSchema: {sections}{f', in {one_line(self.path)}' if self.path else ''}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the schema."""
        return job_json_schema()


def job_schema(out: str | Path | None = None) -> JobSchema:
    """Return the JSON Schema of job files, for editors that complete TOML; with `out`, write it to that file.

    A job file names it in its first line: `#:schema ./job.schema.json`.

    >>> sorted(job_schema().to_dict()["properties"]["checkpoint"]["properties"])
    ['async', 'interval_s', 'keep', 'memory_every', 'path']
    """
    if out is not None:
        write_text(Path(out), schema_text(), fix="name another --out")
    return JobSchema(path=str(out) if out is not None else "")
