"""Files that are not job files get one clear sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.job.load import load


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        (b"a = 1\n" * 200_000, "", "is larger than 1 MiB"),
        (b"a = 1\nb = \0", ":2", "holds a NUL byte"),
        (b"a = 1\nb = '\xff'", ":2", "byte 0xff is not UTF-8"),
        (b"\n\na == 1\n", ":3", "is not TOML: invalid value"),
        (b"name = first-run\n", ":1", "is not TOML: invalid value"),
        (b"[model\n", ":1", "is not TOML: expected ']' at the end of a table"),
        (b"a = 1\na = 2\n", ":2", "is not TOML: cannot overwrite a value"),
        (b"\na = " + b"[" * 40 + b"]" * 40, ":2", "nests deeper than 32 levels"),
        (b"a = " + b"1" * 5000, "", "holds a value no computer can use: Exceeds the limit"),
        (b"b = 1\na = 2026-13-40\n", ":2", "2026-13-40 is no date"),
        (b"a = 2026-02-31", ":1", "2026-02-31 is no date"),
    ],
)
def test_hostile_content(tmp_path: Path, content: bytes, where: str, what: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}{where}: "), refusal(path)
    assert what.lower() in refusal(path).lower()


def test_missing_file_names_the_near_miss(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text("")
    path = tmp_path / "lama.toml"
    assert refusal(path) == f"{path}: there is no such job file\n  did you mean {tmp_path / 'llama.toml'}?"


def test_folder_device_and_odd_names(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("")
    assert (
        refusal(tmp_path) == f"{tmp_path}: is a folder, not a job file\n  name a file in it, such as {tmp_path}/a.toml"
    )
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or pipe" in refusal(tmp_path / "pipe")
    assert "is not a file name" in refusal(Path("a\0b"))
    assert "is a file, not a folder" in refusal(tmp_path / "a.toml" / "b.toml")


def test_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\npreset = "gpt2"\n')
    assert load(path).job.model.layers == 12
