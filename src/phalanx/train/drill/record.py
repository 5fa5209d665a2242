"""Write the record of a drill: what was injected, what came of it, the verdicts, and digests of the evidence; signed.

`phalanx.record.drill` reads and verifies it, and says what a signature proves.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.elastic.handshake import make_secret, read_secret
from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.io.files import replace_text
from phalanx.record.drill import NAME, VERSION, digests, read_record, sign
from phalanx.record.provenance import our_code
from phalanx.record.run import Run

MOST_STORED = 64  # copies in the user's store: some kilobytes each


def key(path: Path) -> bytes:
    """The key, made when there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            return make_secret(path)
    except OSError as error:
        what = f"cannot be made: {error.strerror or error}"
        raise SystemFailure(
            Problem(where=str(path), what=what, fix="set XDG_CONFIG_HOME to a writable folder")
        ) from None
    except UserError:  # another drill made it in this moment
        pass
    return read_secret(path)


def write_record(run: Run, body: Mapping[str, Any], secret: bytes, *, clock: Callable[[], float] = time.time) -> Path:
    """Add the time, what ran and digests of the evidence, sign, and put it into the run."""
    ran = {"made_s": round(clock(), 3), "world": run.world() or 0, "versions": versions(), "code": our_code()}
    whole = {"v": VERSION, **body, **ran, "files": digests(run.path)}
    signed = {**whole, "signature": sign(whole, secret)}
    path = run.path / NAME
    replace_text(path, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")
    return path


def store(record: Path, folder: Path) -> Path:
    """Keep a copy where later checks look, the newest of its kind; raises SystemFailure when it cannot be written."""
    name = _name(read_record(record))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / name, record.read_text(encoding="utf-8"))
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MOST_STORED:]:
            with suppress(OSError):
                path.unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise SystemFailure(
            Problem(where=str(folder), what=what, fix="set XDG_DATA_HOME to a writable folder")
        ) from None
    return folder / name


def _name(record: Mapping[str, Any]) -> str:
    """One file per profile, part of the suite and job; drills of a job outside the suite share one."""
    words = [str(record.get(name) or "other") for name in ("profile", "part")]
    words.append(_subject_name(record.get("subject")))
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower())[:40] for word in words if word) + ".json"


def _subject_name(subject: object) -> str:
    """Of the drilled job: its name, and enough of its digests that two jobs of one name are kept apart."""
    if not isinstance(subject, dict):
        return ""
    told = f"{subject.get('digest')} {subject.get('splits')}"
    return f"{str(subject.get('job'))[:24]}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("phalanx", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found
