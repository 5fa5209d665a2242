"""The settings of a run (job, plan, id and launch) and their digests, which prove that they were not changed since.

Runs of 0.6 have no digests: their settings are accepted unchecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.checksums import (
    CHECKSUMS,
    add_checksums,
    compare_digest,
    file_sha256,
    read_checksums,
    text_digest,
    write_checksums,
)
from phalanx.io.files import MOST_JSON_BYTES, FileTooLargeError, read_bounded
from phalanx.record.run_files import cannot_write, read_json, write_json, write_run_file

SETTINGS = ("job.toml", "job.json", "plan.json")
RUN_ID = "run_id"
DIGEST = "sha256"  # in launch.json, of everything else in it
ID = re.compile(r"[0-9a-f]{32}")
WHY_CHANGED = "the run would go on with settings that nobody asked for"


def write_settings(folder: Path, *, job_toml: str, job: Mapping[str, Any], plan_json: str) -> None:
    """Write the settings. The digests come first: a process that dies in between leaves nothing that looks damaged."""
    job_json = json.dumps(job, indent=1, ensure_ascii=False) + "\n"
    texts = dict(zip(SETTINGS, (job_toml, job_json, plan_json), strict=True))
    if run_id := read_run_id(folder):
        texts[RUN_ID] = f"{run_id}\n"
    digests = {name: text_digest(text) for name, text in texts.items()}
    try:
        add_checksums(folder, digests)
        for name, text in texts.items():
            write_run_file(folder / name, text)
        write_checksums(folder, digests)
    except OSError as error:
        raise cannot_write(folder / CHECKSUMS, error) from error


def check_settings(folder: Path) -> None:
    """Raise UserError with the names of job and plan files that have changed since they were written."""
    digests = {}
    for name in (*SETTINGS, *([RUN_ID] if (folder / RUN_ID).exists() else [])):
        try:
            digests[name] = file_sha256(folder / name)
        except OSError:
            digests[name] = "a file that cannot be read"
    _refuse_changed(folder, digests)


def read_plan_text(path: Path) -> str:
    """Return plan.json; raise UserError if its digest is wrong."""
    try:
        text = read_bounded(path, MOST_JSON_BYTES).decode("utf-8")
    except (OSError, FileTooLargeError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise mistake(str(path), message, why="the run is damaged") from error
    _refuse_changed(path.parent, {path.name: text_digest(text)})
    return text


def _refuse_changed(folder: Path, digests: Mapping[str, str]) -> None:
    try:
        checksums = read_checksums(folder)
    except FileNotFoundError:  # a run of 0.6
        return
    fix = (
        "put it back from a copy; to change a setting: phalanx train --resume "
        f"{folder} --set KEY=VALUE; to keep the file as it is: delete {folder / CHECKSUMS}"
    )
    results = [compare_digest(folder, name, digest, checksums, fix=fix) for name, digest in digests.items()]
    if problems := [replace(problem, why=problem.why or WHY_CHANGED) for problem in results if problem is not None]:
        raise UserError(problems)


def read_run_id(folder: Path) -> str:
    """Return the run's random id; empty in a run of 0.6."""
    try:
        run_id = read_bounded(folder / RUN_ID, 64).decode("ascii", "replace").strip()
    except (OSError, FileTooLargeError):
        return ""
    return run_id if ID.fullmatch(run_id) else ""


def read_launch(path: Path) -> dict[str, Any]:
    """Return launch.json; raise UserError if its digest is wrong.

    A file that a person wrote has no digest and is accepted.
    """
    values = read_json(path)
    digest = values.pop(DIGEST, None)
    if digest is not None and digest != _values_digest(values):
        message = f"has changed since it was written: {DIGEST} in it is of other values"
        fix = f"put it back from a copy; to keep it as it is, delete {DIGEST} from it"
        raise mistake(str(path), message, why=WHY_CHANGED, fix=fix)
    return values


def write_launch(path: Path, values: Mapping[str, Any]) -> None:
    """Replace launch.json with these values and their digest.

    It is not in SHA256SUMS, because every launch rewrites it.
    """
    write_json(path, {**values, DIGEST: _values_digest(values)})


def _values_digest(values: Mapping[str, Any]) -> str:
    """Return a digest of JSON values that does not depend on their formatting or on the order of keys."""
    return text_digest(json.dumps(json.loads(json.dumps(values)), sort_keys=True))
