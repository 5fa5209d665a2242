"""The record of a drill: what was injected, what came of it, the verdicts, and digests of the evidence; signed.

The signature says that this user's Phalanx wrote the record and that nobody changed it since. The key is made once and
stays in the user's configuration folder; who has it can sign anything, so it proves nothing against its owner.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, UserError, WorldError, mistake
from phalanx.files import replace_text
from phalanx.record.run import Run, read_json
from phalanx.train.supervise.secret import make_secret, read_secret

VERSION = 1
NAME = "drill-record.json"
EVIDENCE = ("events-*.jsonl", "supervisor.jsonl", "drill.json", "plan.json", "job.json", "drill/fired-*.json")


def key_path(environ: Mapping[str, str]) -> Path:
    """Where the key of this user is kept."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or ".", ".config")
    return Path(home) / "phalanx" / "drill.key"


def key(path: Path) -> bytes:
    """The key, made when there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            return make_secret(path)
    except OSError as error:
        what = f"cannot be made: {error.strerror or error}"
        raise WorldError(Problem(where=str(path), what=what, fix="set XDG_CONFIG_HOME to a writable folder")) from None
    except UserError:  # another drill made it in this moment
        pass
    return read_secret(path)


def write_record(run: Run, body: Mapping[str, Any], secret: bytes) -> Path:
    """Add versions and digests of the evidence, sign, and put it into the run."""
    whole = {"v": VERSION, **body, "versions": versions(), "files": digests(run.path)}
    signed = {**whole, "signature": sign(whole, secret)}
    path = run.path / NAME
    replace_text(path, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")
    return path


def check_record(path: Path, secret: bytes) -> tuple[dict[str, Any], list[str]]:
    """The record and everything that is wrong with it; raises UserError when it is none at all."""
    if not path.is_file():
        raise mistake(str(path), "there is no such file", fix=f"name the {NAME} of a run that phalanx drill made")
    record = read_json(path)
    if record.get("v") != VERSION or not isinstance(record.get("files"), dict):
        raise mistake(str(path), "is no record of a drill", fix=f"name a {NAME} in a run that phalanx drill made")
    wrong = []
    body = {name: value for name, value in record.items() if name != "signature"}
    if not hmac.compare_digest(str(record.get("signature", "")).encode(), sign(body, secret).encode()):
        wrong.append("the signature is not ours: the record was changed, or another user wrote it")
    found = digests(path.parent)
    for name, digest in record["files"].items():
        if found.get(name) != digest:
            wrong.append(f"{name} {'has changed' if name in found else 'is missing'}")
    wrong += [f"{name} is new" for name in found.keys() - record["files"].keys()]
    return record, wrong


def sign(body: Mapping[str, Any], secret: bytes) -> str:
    """HMAC-SHA256 over the record as canonical JSON."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hmac.new(secret, text.encode("ascii"), hashlib.sha256).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that the verdicts rest on, those of the replay included."""
    paths = [path for pattern in EVIDENCE for root in _roots(folder) for path in root.glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(paths)}


def _roots(folder: Path) -> list[Path]:
    return [folder, *sorted(path for path in folder.glob("replay/*") if path.is_dir())]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("phalanx", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found
