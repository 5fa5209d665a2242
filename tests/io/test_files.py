"""Writing a file whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import SystemFailure
from phalanx.io.files import replace_text, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_old_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old\n" * 1000)
    write_text(path, "naïve\r\n")
    assert path.read_bytes() == b"na\xc3\xafve\r\n"  # no newline is translated
    assert names(tmp_path) == ["a.txt"]


def test_a_bare_name_is_written_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(Path("a.txt"), "x")
    assert names(tmp_path) == ["a.txt"]


def test_a_name_as_long_as_the_disk_takes(tmp_path):
    path = tmp_path / ("x" * 255)
    write_text(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(tmp_path, mask, mode):
    old = os.umask(mask)
    try:
        write_text(tmp_path / "a.txt", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/a.txt", "No such file or directory"), ("file/a.txt", "Not a directory"), ("folder", "Is a directory")],
)
def test_what_cannot_be_written_says_so_and_leaves_nothing(tmp_path, name, reason):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemFailure) as caught:
        write_text(tmp_path / name, "x", fix="name another --out")
    assert str(caught.value) == f"{tmp_path / name}: cannot be written: {reason}\n  name another --out"
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failure_half_way_keeps_the_old_file_and_no_other(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_):
        raise error

    monkeypatch.setattr(failing, fail)
    with pytest.raises(type(error)):
        replace_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_text_that_is_no_utf8_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a.txt", "\ud800")
    assert names(tmp_path) == []


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"print(open({str(pipe)!r}).read())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as reader:
        write_text(pipe, "through")
        assert reader.communicate(timeout=300)[0] == "through\n"
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_device_is_written_into_and_never_replaced(tmp_path):
    """Through a link: a rename that went wrong would replace the link, not the machine's /dev/null."""
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    write_text(link, "x")
    assert link.is_symlink()
    assert names(tmp_path) == ["null"]
