"""The shelf of runs: what is opened, how fresh it is, and what makes room."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.web.run_store import MOST_OPEN, RunStore, open_run_store


def test_a_history_is_never_older_than_its_mark(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="grows", ranks=1, steps=5, finished=False, incidents=0, hosts=1)
    store = RunStore(tmp_path, clock=lambda: 0.0)  # no time passes: the files alone tell
    for step in (5, 6, 7):
        with store.history("grows") as history:
            assert history.last_step == step - 1
        with run.events(0).open("a") as file:
            file.write(json.dumps({"v": 1, "event": "step", "t": 1.0, "rank": 0, "step": step, "loss": 1.0}) + "\n")


def test_a_run_made_again_is_another_one(tmp_path: Path) -> None:
    write_run(tmp_path, name="again", ranks=1, steps=5, incidents=0, hosts=1)
    store = RunStore(tmp_path)
    with store.history("again") as history:
        assert history.last_step == 4
    (tmp_path / "again").rename(tmp_path / "old")
    write_run(tmp_path, name="again", ranks=1, steps=3, incidents=0, hosts=1)
    with store.history("again") as history:
        assert history.last_step == 2


def test_old_histories_make_room(tmp_path: Path) -> None:
    first = write_run(tmp_path, name="run-0", ranks=1, steps=2, incidents=0, hosts=1)
    for number in range(1, MOST_OPEN + 5):
        shutil.copytree(first.path, tmp_path / f"run-{number}")
    store = RunStore(tmp_path)
    for number in range(MOST_OPEN + 5):
        with store.history(f"run-{number}"):
            pass
    assert len(store._opened) == MOST_OPEN


def test_one_run_is_a_shelf_of_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="one", ranks=1, steps=2, incidents=0, hosts=1)
    write_run(tmp_path, name="other", ranks=1, steps=2, incidents=0, hosts=1)
    store = open_run_store(run.path)
    assert [found.name for found in store.runs()] == ["one"]
    with pytest.raises(UserError, match="there is no run called 'other' here"):
        store.run("other")


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="there is no such folder of runs"):
        open_run_store(tmp_path / "file")
    assert open_run_store(tmp_path).runs() == []  # an empty one waits for its first run
