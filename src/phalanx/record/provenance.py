"""Provenance of a run: package versions, the commit of the code, digests of code and job, and redaction of secrets."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.io.packages import installed_version

PACKAGES = ("torch", "numpy", "safetensors")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MOST_BYTES = 2**22  # of packed-refs


def job_provenance(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for `launch.json`.

    `commit` is empty outside a git checkout; there `code` identifies the source.
    """
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in PACKAGES},
            # For a source tree that was never installed, a digest of its files.
            "phalanx": installed_version("phalanx") or f"source {our_code()}",
        },
        "commit": commit_of(Path(__file__).resolve().parents[3]),
        "code": our_code(),
        "job_digest": job_digest(job),
    }


def job_digest(job: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the resolved job, independent of the order of its keys.

    >>> job_digest({"a": 1, "b": 2}) == job_digest({"b": 2, "a": 1}) != job_digest({"a": 1})
    True
    """
    text = json.dumps(job, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def commit_of(root: Path) -> str:
    """Return the commit checked out in a folder, read from git's own files; empty if there is none."""
    try:
        folder = root / ".git"
        if folder.is_file():  # a worktree
            folder = root / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        name = head.removeprefix("ref:").strip()
        commit = head if name == head else _git_ref(folder, name)
    except (OSError, ValueError):
        return ""
    return commit if COMMIT.fullmatch(commit) else ""


def _git_ref(folder: Path, name: str) -> str:
    """Return the commit of a branch from its ref file or packed-refs; worktrees share the main folder's refs."""
    shared = folder / "commondir"
    roots = [folder, *([folder / shared.read_text(encoding="utf-8").strip()] if shared.is_file() else [])]
    for root in roots:
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8").strip()
        packed = root / "packed-refs"
        if packed.is_file() and packed.stat().st_size <= MOST_BYTES:
            for line in packed.read_text(encoding="utf-8").splitlines():
                if line.endswith(f" {name}"):
                    return line.split(" ")[0]
    return ""


@functools.cache
def our_code() -> str:
    """Return the digest of the running Phalanx source.

    A version covers many commits, and a commit hides local changes.
    """
    return code_digest(Path(__file__).resolve().parents[1])


def code_digest(package: Path) -> str:
    """Return the SHA-256 over the names and bytes of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


# ---- redaction of secrets --------------------------------------------------------------------------------------------


_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY|AUTH|COOKIE|DSN", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")  # user:password@host
# Shorter values are words such as "true": removing them would garble the message.
LEAST_LENGTH = 6


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Return the text without the values of variables whose names look secret, and without passwords in URLs.

    >>> redact("401 for hf_abcdefgh at https://me:pw@host/x", {"HF_TOKEN": "hf_abcdefgh"})
    '401 for [HF_TOKEN] at https://[password]@host/x'
    """
    secrets = {value: name for name, value in environ.items() if len(value) >= LEAST_LENGTH and _SECRET.search(name)}
    # Longest first: one secret may contain another.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"[{secrets[value]}]")
    return _IN_URL.sub("[password]", text)
