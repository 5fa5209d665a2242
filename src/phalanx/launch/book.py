"""Launch records: one file per job launched by this user, so that an id leads to its run after the system forgot it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError, mistake
from phalanx.io.codec import json_text
from phalanx.io.files import replace_text
from phalanx.io.values import number, text
from phalanx.record.run_files import read_json

ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """One launched job."""

    id: str
    system: str
    name: str
    run: str
    group: str = ""
    queue: str = ""
    digest: str = ""  # of the job and its cluster, so that the same job is not launched twice at the same time
    submitted_s: float = 0.0  # Unix time


def book_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the records."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    return Path(home) / "phalanx" / "launches"


def job_digest(values: Mapping[str, Any]) -> str:
    """Return a digest of all values of a job except where it is launched."""
    job_values = {key: value for key, value in values.items() if key != "launch"}
    return hashlib.sha256(json_text(job_values).encode()).hexdigest()


def record_launch(record: LaunchRecord, environ: Mapping[str, str]) -> None:
    """Store a record; raises SystemFailure if it cannot be written."""
    folder = book_folder(environ)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    timed_record = record if record.submitted_s else LaunchRecord(**{**asdict(record), "submitted_s": time.time()})
    replace_text(folder / f"{record.system}-{record.id}.json", json_text(timed_record, indent=1) + "\n")


def read_records(environ: Mapping[str, str], *, system: str = "", group: str = "") -> list[LaunchRecord]:
    """Return all records, oldest first; invalid files are skipped."""
    records = []
    folder = book_folder(environ)
    for path in folder.glob(f"{system or '*'}-*.json") if folder.is_dir() else ():
        try:
            values = read_json(path)
        except PhalanxError:
            continue
        names = ("id", "system", "name", "run", "group", "queue", "digest")
        record = LaunchRecord(
            **{name: text(values, name) for name in names}, submitted_s=number(values, "submitted_s") or 0.0
        )
        if ID.fullmatch(record.id) and (not group or record.group == group):
            records.append(record)
    return sorted(records, key=lambda record_of: (record_of.submitted_s, record_of.id))


def find_record(job: str, environ: Mapping[str, str], *, system: str = "") -> LaunchRecord:
    """Return the record of an id or a run folder; raises UserError if it was not launched from here."""
    records = read_records(environ, system=system)
    matches = [record for record in records if job == record.id or _is_run(job, record.run)]
    if not matches:
        newest_ids = ", ".join(record.id for record in records[-5:])
        fix = (
            f"phalanx queue lists them; the newest are {newest_ids}"
            if newest_ids
            else "phalanx launch JOB launches one"
        )
        raise mistake("phalanx", f"no launched job has the id {job[:80]!r}", fix=fix)
    return matches[-1]


def _is_run(job: str, run: str) -> bool:
    return bool(run) and (job == Path(run).name or ("/" in job and Path(job).resolve() == Path(run)))
