"""Read the record of a drill, and say whether it is what was written: signature first, then digests of the evidence.

A signature is HMAC-SHA256 under a key that lies in the user's configuration folder. It says that this user's Phalanx
wrote the record and that nobody changed it since; who has the key can sign anything, so it proves nothing against its
owner. A copy in the user's store has no evidence beside it: there the signature alone is checked.
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
MOST_EVIDENCE_BYTES = 2**28  # hashed in a good second; a drill's own evidence is some hundred kilobytes
MOST_MODULE_BYTES = 2**24  # of a model's own code
REFUSED = "damaged files were refused"  # a verdict of the oracle, and what its evidence says when a restore met one
MET = " refused step-"
FOREIGN = "the signature is not ours: the record was changed, or another user wrote it"


def key_path(environ: Mapping[str, str]) -> Path:
    """Where the key of this user is kept."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or ".", ".config")
    return Path(home) / "phalanx" / "drill.key"


def store_path(environ: Mapping[str, str]) -> Path:
    """Where copies of this user's records are kept, whatever becomes of the runs."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    return Path(home) / "phalanx" / "drills"


def known_key(environ: Mapping[str, str]) -> bytes | None:
    """The key, where there is one that nobody else can read; never made here."""
    try:
        return read_secret(key_path(environ))
    except UserError:
        return None


def read_record(path: Path) -> dict[str, Any]:
    """A record as JSON values; raises UserError when it is none at all."""
    if not is_file(path):
        raise mistake(str(path), "there is no such file", fix=f"name the {NAME} of a run that phalanx drill made")
    record = read_json(path)
    if record.get("v") != VERSION or not isinstance(record.get("files"), dict):
        raise mistake(str(path), "is no record of a drill", fix=f"name a {NAME} in a run that phalanx drill made")
    return record


def drill_subject(job: Mapping[str, Any], layout: Mapping[str, Any], *, base: Path) -> dict[str, str]:
    """What a drill was made of, by which `phalanx check` tells whether it is about the same job.

    The same job has the same name, model (and code of it), precision, optimizer, ways to save and to recover, and it
    splits the model along the same axes. How much it learns, how often it saves and how many ranks an axis has may
    differ: a suite sets its own, and a job is drilled on few ranks before it runs on many. `base` is the folder that
    files of the job are sought from.
    """
    checkpoint, fault = at(job, "checkpoint"), at(job, "fault")
    # The window is only said (plan/trainable.py): nothing that runs depends on it, and drills of 0.6 do not name it.
    model = {key: value for key, value in at(job, "model").items() if key != "sliding_window"}
    parts = {
        "name": job.get("name"),
        "model": {**model, "module": _module_digest(text(model, "module"), base)},
        "precision": at(job, "precision"),
        "numerics": at(job, "numerics"),
        "optimizer": at(job, "optim").get("name"),
        "saves": [checkpoint.get("async"), checkpoint.get("memory_every"), "://" in text(checkpoint, "path")],
        "recovers": [fault.get("recovery"), fault.get("dead_after_s")],  # who hangs is noticed after dead_after_s
    }
    whole = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return {
        "job": printable(job.get("name"), most=80),
        "model": printable(model.get("name"), most=80),
        "splits": _split_axes(layout),
        "digest": hashlib.sha256(whole.encode()).hexdigest(),
    }


def _split_axes(layout: Mapping[str, Any]) -> str:
    """The axes that a model is split along, without their degrees, as "pipeline 1f1b, data, ZeRO-2"."""
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
    """Of the user's own model: its code and the function that builds it, wherever the file lies."""
    if not module:
        return ""
    name, _, function = module.rpartition(":")
    try:
        with open_regular(base / name) as file:
            return f"{hashlib.sha256(file.read(MOST_MODULE_BYTES)).hexdigest()}:{function}"
    except (OSError, ValueError):
        return f"{Path(name).name}:{function}"


def check_record(path: Path, secret: bytes) -> tuple[dict[str, Any], list[str]]:
    """The record and everything that is wrong with it; raises UserError when it is none at all."""
    record = read_record(path)
    return record, [*_signature_problems(record, secret), *record_differences(record, path.parent)]


def is_signed(record: Mapping[str, Any], secret: bytes | None) -> bool:
    """Whether its signature was made with this key."""
    return secret is not None and not _signature_problems(record, secret)


def _signature_problems(record: Mapping[str, Any], secret: bytes) -> list[str]:
    body = {name: value for name, value in record.items() if name != "signature"}
    same = hmac.compare_digest(str(record.get("signature", "")).encode(), sign_record(body, secret).encode())
    return [] if same else [FOREIGN]


def record_differences(record: Mapping[str, Any], folder: Path) -> list[str]:
    """How the evidence in a folder differs from what the record says of it."""
    try:
        found = folder_digests(folder)
    except OSError as error:
        return [f"the evidence cannot be read: {error.strerror or error}"]
    wrong = []
    for name, digest in record["files"].items():
        if found.get(name) != digest:
            wrong.append(f"{name} {'has changed' if name in found else 'is missing'}")
    return wrong + [f"{name} is new" for name in found.keys() - record["files"].keys()]


def sign_record(body: Mapping[str, Any], secret: bytes) -> str:
    """HMAC-SHA256 over the record as canonical JSON."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hmac.new(secret, text.encode("ascii"), hashlib.sha256).hexdigest()


def folder_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that the verdicts rest on, those of the replay and of other peers included."""
    return {str(path.relative_to(folder)): file_sha256(path) for path in evidence_files(folder)}


def evidence_files(folder: Path) -> list[Path]:
    """What the verdicts of a drill rest on, in a run's folder."""
    inner = [path for pattern in ("replay/*", "others/*") for path in folder.glob(pattern) if is_folder(path)]
    roots = [folder, *sorted(inner)]
    return sorted(path for pattern in EVIDENCE for root in roots for path in root.glob(pattern) if is_file(path))
