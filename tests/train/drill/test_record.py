"""The signed record: every change of it or of its evidence is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.record.drill import check_record, key_path
from phalanx.record.run import Run
from phalanx.train.drill.report import drill_key, write_record

BODY = {"faults": ["kill"], "verdicts": [{"name": "x", "ok": True, "evidence": ""}]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "events-00000.jsonl").write_text('{"event":"step"}\n')
    (tmp_path / "supervisor.jsonl").write_text("")
    replay = tmp_path / "replay" / "again"
    replay.mkdir(parents=True)
    (replay / "events-00000.jsonl").write_text("")
    return Run(path=tmp_path)


def test_a_record_that_nobody_touched(run: Run) -> None:
    path = write_record(run, BODY, b"k" * 32)
    record, wrong = check_record(path, b"k" * 32)
    assert wrong == []
    assert list(record["files"]) == ["events-00000.jsonl", "replay/again/events-00000.jsonl", "supervisor.jsonl"]
    assert record["versions"]["torch"]


def test_every_change_is_found(run: Run, tmp_path: Path) -> None:
    path = write_record(run, BODY, b"k" * 32)
    changed = "the signature is not ours: the record was changed, or another user wrote it"
    assert check_record(path, b"x" * 32)[1] == [changed]
    (tmp_path / "events-00000.jsonl").write_text("")
    (tmp_path / "supervisor.jsonl").unlink()
    (tmp_path / "events-00007.jsonl").write_text("")
    assert check_record(path, b"k" * 32)[1] == [
        "events-00000.jsonl has changed",
        "supervisor.jsonl is missing",
        "events-00007.jsonl is new",
    ]
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "faults": []}))
    assert changed in check_record(path, b"k" * 32)[1]


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = key_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    first = drill_key(path)
    assert drill_key(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(UserError):
        drill_key(path)


def test_another_file_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(UserError) as caught:
        check_record(path, b"")
    assert str(caught.value).startswith(f"{path}: is no record of a drill")
