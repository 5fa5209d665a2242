"""SHA256SUMS: written as sha256sum writes it, and every change of it or of what it names is seen."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.io.checksums import (
    CHECKSUMS,
    add_checksums,
    file_sha256,
    read_checksums,
    verify_checksums,
    write_checksums,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    write_checksums(tmp_path, {name: file_sha256(tmp_path / name) for name in ("config.json", "model.safetensors")})
    return tmp_path


def damage(folder: Path) -> list[str]:
    try:
        return [one.render() for one in verify_checksums(folder, fix="copy it again")[1]]
    except UserError as error:
        return [str(error)]


def test_every_flipped_bit_is_seen(folder: Path) -> None:
    draw = random.Random(22)
    assert damage(folder) == []
    for name in ("config.json", "model.safetensors", CHECKSUMS) * 20:
        path = folder / name
        whole = path.read_bytes()
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert damage(folder), (name, data)
        path.write_bytes(whole)


def test_sha256sum_reads_it(folder: Path) -> None:
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum here")
    assert subprocess.run([tool, "-c", CHECKSUMS], cwd=folder, capture_output=True).returncode == 0
    (folder / "config.json").write_text("{}")
    assert subprocess.run([tool, "-c", CHECKSUMS], cwd=folder, capture_output=True).returncode == 1


def test_missing_files_and_others(folder: Path) -> None:
    (folder / "README.md").write_text("of somebody else")
    assert damage(folder) == []
    (folder / "config.json").unlink()
    assert damage(folder) == [f"{folder / 'config.json'}: is missing, and SHA256SUMS lists it\n  copy it again"]


def test_both_digests_count_while_files_are_replaced(folder: Path) -> None:
    add_checksums(folder, {"config.json": file_sha256(folder / "model.safetensors")})
    assert len(read_checksums(folder)["config.json"]) == 2
    shutil.copy(folder / "model.safetensors", folder / "config.json")
    assert damage(folder) == []


@pytest.mark.parametrize("text", ["", "x", f"{'0' * 64}  ../up\n", f"{'0' * 64} one-space\n", f"{'A' * 64}  a\n"])
def test_lines_that_are_none(folder: Path, text: str) -> None:
    (folder / CHECKSUMS).write_text(text)
    with pytest.raises(UserError, match="line 1 is not a digest, two spaces and a file name"):
        read_checksums(folder)
