"""Read the record of a drill and check it: first its signature, then the SHA-256 digests of its evidence files.

The signature is an HMAC-SHA256 under a key in the user's configuration folder. It proves that this user's Phalanx
wrote the record and that the record was not changed afterwards. The owner of the key can sign anything, so it proves
nothing against that user. A copy in the user's store has no evidence files next to it: there only the signature is
checked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.checksums import file_sha256
from phalanx.io.files import open_regular
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.values import at, integer, printable, text
from phalanx.record.run_files import read_json
from phalanx.record.secret import read_secret

VERSION = 1
NAME = "drill-record.json"
EVIDENCE = ("events-*.jsonl", "supervisor.jsonl", "drill.json", "plan.json", "job.json", "drill/fired-*.json")
# About one second of hashing; the evidence of a drill is usually some hundred kilobytes.
MOST_EVIDENCE_BYTES = 2**28
MOST_MODULE_BYTES = 2**24  # of a model's own Python file
# A verdict of the drill oracle. MET is the text of its evidence when a restore refused a damaged checkpoint.
REFUSED = "damaged files were refused"
MET = " refused step-"
FOREIGN = "the signature is not ours: the record was changed, or another user wrote it"


def key_path(environ: Mapping[str, str]) -> Path:
    """Return the path of this user's signing key, `$XDG_CONFIG_HOME/phalanx/drill.key`."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or ".", ".config")
    return Path(home) / "phalanx" / "drill.key"


def store_path(environ: Mapping[str, str]) -> Path:
    """Return the folder with copies of this user's drill records, which outlive their runs."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    return Path(home) / "phalanx" / "drills"


def known_key(environ: Mapping[str, str]) -> bytes | None:
    """Return the signing key, or None if it is missing or other users can read it; never create one."""
    try:
        return read_secret(key_path(environ))
    except UserError:
        return None


def read_record(path: Path) -> dict[str, Any]:
    """Read a drill record as JSON values; raise UserError if the file is missing or is not a drill record."""
    if not is_file(path):
        raise mistake(str(path), "there is no such file", fix=f"name the {NAME} of a run that phalanx drill made")
    record = read_json(path)
    if record.get("v") != VERSION or not isinstance(record.get("files"), dict):
        raise mistake(str(path), "is no record of a drill", fix=f"name a {NAME} in a run that phalanx drill made")
    return record


def drill_subject(job: Mapping[str, Any], layout: Mapping[str, Any], *, base: Path) -> dict[str, str]:
    """Describe the job that a drill tested, so that `phalanx check` can match the drill with a job.

    Two jobs match if they have the same name, model (with the code of its module), precision, numerics, optimizer,
    settings for saving and recovery, and the same parallel axes. Training length, save interval and the degree of each
    axis may differ: a suite sets its own, and a job is drilled on few ranks before it runs on many. `base` is the
    folder that relative file names of the job refer to.
    """
    checkpoint, fault = at(job, "checkpoint"), at(job, "fault")
    # No training depends on the sliding window (plan/trainable.py), and drill records of 0.6 do not contain it.
    model = {key: value for key, value in at(job, "model").items() if key != "sliding_window"}
    parts = {
        "name": job.get("name"),
        "model": {**model, "module": _module_digest(text(model, "module"), base)},
        "precision": at(job, "precision"),
        "numerics": at(job, "numerics"),
        "optimizer": at(job, "optim").get("name"),
        "saves": [checkpoint.get("async"), checkpoint.get("memory_every"), "://" in text(checkpoint, "path")],
        # dead_after_s decides when a hanging rank is detected.
        "recovers": [fault.get("recovery"), fault.get("dead_after_s")],
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return {
        "job": printable(job.get("name"), most=80),
        "model": printable(model.get("name"), most=80),
        "splits": _split_axes(layout),
        "digest": hashlib.sha256(canonical.encode()).hexdigest(),
    }


def _split_axes(layout: Mapping[str, Any]) -> str:
    """List the axes that split the model, without their degrees, as "pipeline 1f1b, data, ZeRO-2"."""
    words = [axis for axis in ("tensor", "context", "expert") if (integer(layout, axis) or 1) > 1]
    if (integer(layout, "pipeline") or 1) > 1:
        words.append(f"pipeline {printable(layout.get('schedule'), most=40)}")
    if (integer(layout, "data") or 1) > 1:
        words.append(f"data, ZeRO-{integer(layout, 'zero') or 0}")
    for key in ("offload", "compression"):
        if layout.get(key) not in (None, "none"):
            words.append(f"{key} {printable(layout[key], most=40)}")
    return ", ".join(words) or "nothing"


def _module_digest(module: str, base: Path) -> str:
    """Return the digest of the user's model file, or the file's name if it is unreadable, and the builder's name."""
    if not module:
        return ""
    name, _, function = module.rpartition(":")
    try:
        with open_regular(base / name) as file:
            return f"{hashlib.sha256(file.read(MOST_MODULE_BYTES)).hexdigest()}:{function}"
    except (OSError, ValueError):
        return f"{Path(name).name}:{function}"


def check_record(path: Path, secret: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the record and a list of its problems; raise UserError if the file is not a drill record."""
    record = read_record(path)
    return record, [*_signature_problems(record, secret), *record_differences(record, path.parent)]


def is_signed(record: Mapping[str, Any], secret: bytes | None) -> bool:
    """Return True if the record's signature was made with this key."""
    return secret is not None and not _signature_problems(record, secret)


def _signature_problems(record: Mapping[str, Any], secret: bytes) -> list[str]:
    body = {name: value for name, value in record.items() if name != "signature"}
    same = hmac.compare_digest(str(record.get("signature", "")).encode(), sign_record(body, secret).encode())
    return [] if same else [FOREIGN]


def record_differences(record: Mapping[str, Any], folder: Path) -> list[str]:
    """List the differences between the evidence files in a folder and the digests in the record."""
    try:
        digests = folder_digests(folder)
    except OSError as error:
        return [f"the evidence cannot be read: {error.strerror or error}"]
    wrong = []
    for name, digest in record["files"].items():
        if digests.get(name) != digest:
            wrong.append(f"{name} {'has changed' if name in digests else 'is missing'}")
    return wrong + [f"{name} is new" for name in digests.keys() - record["files"].keys()]


def sign_record(body: Mapping[str, Any], secret: bytes) -> str:
    """Return the HMAC-SHA256 of the record as canonical JSON."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hmac.new(secret, text.encode("ascii"), hashlib.sha256).hexdigest()


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every evidence file, by path, including those of the replay and of other peers."""
    return {str(path.relative_to(folder)): file_sha256(path) for path in evidence_files(folder)}


def evidence_files(folder: Path) -> list[Path]:
    """List the files in a run folder that the verdicts of a drill rest on."""
    inner = [path for pattern in ("replay/*", "others/*") for path in folder.glob(pattern) if is_folder(path)]
    roots = [folder, *sorted(inner)]
    return sorted(path for pattern in EVIDENCE for root in roots for path in root.glob(pattern) if is_file(path))
