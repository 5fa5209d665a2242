"""Errors of files that cannot be written: each names the file, the reason, and the space where space is the matter."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main as cli
from phalanx.errors import SystemFailure, UserError
from phalanx.io.files import replace_text, write_text
from phalanx.io.write_errors import errors_name, free_bytes, write_failure


def refuse(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "3 B are needed and 7.00 kB are free on its file system"),
        (errno.EDQUOT, "3 B are needed and 7.00 kB are free on its file system; the quota of this user or project"),
        (errno.EROFS, "name another --out"),
        (errno.EACCES, "name another --out"),
        (errno.EIO, "name another --out"),
        (errno.EMFILE, f"this process has {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files open (ulimit -n)"),
        (errno.EFBIG, "the file would exceed the limit of the process (ulimit -f)"),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
def test_a_failed_write_names_the_file_and_the_reason(tmp_path, monkeypatch, number, why) -> None:
    monkeypatch.setattr(os, "fsync", refuse(number))  # as the write of an open file does, it names no file
    monkeypatch.setattr("phalanx.io.write_errors.free_bytes", lambda path: 7000.0)
    with pytest.raises(SystemFailure) as caught:
        write_text(tmp_path / "a.txt", "xyz", fix="name another --out")
    head, *rest = str(caught.value).split("\n")
    assert head == f"{tmp_path / 'a.txt'}: cannot be written: {os.strerror(number)}"
    assert rest[0].startswith(f"  {why}")
    assert rest[-1] == "  name another --out"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["9" * 400, "circle/a.txt"])
def test_an_impossible_path_is_a_mistake_of_the_call(tmp_path, name) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match="is not a possible path: ") as caught:
        write_text(tmp_path / name, "x")
    assert len(str(caught.value)) < 500


def test_replace_text_puts_the_name_of_the_caller_into_the_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as caught:
        replace_text(tmp_path / "a.txt", "x")
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_a_device_keeps_its_name_and_reports_no_free_space() -> None:
    with pytest.raises(SystemFailure) as caught:
        write_text(Path("/dev/full"), "x", fix="name another --out")
    assert str(caught.value) == (
        "/dev/full: cannot be written: No space left on device\n  1 B are needed\n  name another --out"
    )


def test_free_space_is_that_of_the_nearest_folder(tmp_path) -> None:
    found = os.statvfs(tmp_path)
    assert free_bytes(tmp_path / "absent" / "a.txt") == pytest.approx(found.f_bavail * found.f_frsize, rel=0.5)
    assert free_bytes("9" * 5000) is None


def test_errors_name_leaves_a_name_that_is_there() -> None:
    with pytest.raises(FileNotFoundError) as caught, errors_name("other"):
        open("absent")  # noqa: SIM115 -- it raises
    assert caught.value.filename == "absent"
    with pytest.raises(OSError, match="x") as caught_bare, errors_name("other"):
        raise OSError(errno.EIO, "x")
    assert caught_bare.value.filename == "other"


def test_write_failure_of_an_error_without_a_number() -> None:
    assert str(write_failure("a", OSError("the store is away"))) == "a: cannot be written: the store is away"


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 3), (errno.EACCES, 3), (errno.EMFILE, 3), (errno.ENAMETOOLONG, 2), (errno.EISDIR, 3)],
)
def test_an_error_of_the_system_is_never_an_internal_error(monkeypatch, capsys, number, code) -> None:
    def fail(arguments: list[str]) -> int:
        raise OSError(number, os.strerror(number), "/data/tokens.bin")

    monkeypatch.setattr(cli, "_dispatch_verb", fail)
    assert cli.main(["plan"]) == code
    err = capsys.readouterr().err
    assert err.startswith("/data/tokens.bin: ")
    assert os.strerror(number) in err
    assert "internal error" not in err


def test_a_limit_on_file_sizes_names_the_file(tmp_path) -> None:
    """A real failure, of the kernel's making."""
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from phalanx.errors import SystemFailure; from phalanx.io.files import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 5000)\n"
        "except SystemFailure as error: print(error)\n"
    )
    path = tmp_path / "a.txt"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{path}: cannot be written: File too large\n  the file would exceed the limit of")
