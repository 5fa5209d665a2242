"""What this user has launched: a file per job, so that an id leads to its run when the system has forgotten it."""

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
    digest: str = ""  # of the job and its cluster: the same job is not launched twice at once
    submitted_s: float = 0.0  # Unix time


def book_folder(environ: Mapping[str, str]) -> Path:
    """Where the records are kept."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    return Path(home) / "phalanx" / "launches"


def job_digest(values: Mapping[str, Any]) -> str:
    """What tells a job from another: all its values but where it is launched."""
    kept = {key: value for key, value in values.items() if key != "launch"}
    return hashlib.sha256(json_text(kept).encode()).hexdigest()


def record_launch(record: LaunchRecord, environ: Mapping[str, str]) -> None:
    """Keep a record; raises SystemFailure where it cannot be written."""
    folder = book_folder(environ)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = record if record.submitted_s else LaunchRecord(**{**asdict(record), "submitted_s": time.time()})
    replace_text(folder / f"{record.system}-{record.id}.json", json_text(kept, indent=1) + "\n")


def read_records(environ: Mapping[str, str], *, system: str = "", group: str = "") -> list[LaunchRecord]:
    """All records, oldest first; files that are none are left out."""
    found = []
    folder = book_folder(environ)
    for path in folder.glob(f"{system or '*'}-*.json") if folder.is_dir() else ():
        try:
            values = read_json(path)
        except PhalanxError:
            continue
        names = ("id", "system", "name", "run", "group", "queue", "digest")
        made = LaunchRecord(
            **{name: text(values, name) for name in names}, submitted_s=number(values, "submitted_s") or 0.0
        )
        if ID.fullmatch(made.id) and (not group or made.group == group):
            found.append(made)
    return sorted(found, key=lambda one: (one.submitted_s, one.id))


def find_record(job: str, environ: Mapping[str, str], *, system: str = "") -> LaunchRecord:
    """The record of an id, or of a run folder; raises UserError when nobody launched it from here."""
    records = read_records(environ, system=system)
    same = [one for one in records if job == one.id or _is_run(job, one.run)]
    if not same:
        known = ", ".join(one.id for one in records[-5:])
        fix = f"phalanx queue lists them; the newest are {known}" if known else "phalanx launch JOB launches one"
        raise mistake("phalanx", f"no launched job has the id {job[:80]!r}", fix=fix)
    return same[-1]


def _is_run(job: str, run: str) -> bool:
    return bool(run) and (job == Path(run).name or ("/" in job and Path(job).resolve() == Path(run)))
