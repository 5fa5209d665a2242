"""Whether a run is over: ended, or nobody writes and nobody holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record.run import Run
from phalanx.record.run_lock import SILENT_S, is_run_over, last_written


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = write_run(tmp_path, ranks=1, hosts=1, steps=2, incidents=0, finished=False)
    for path in made.path.iterdir():
        os.utime(path, (1000.0, 1000.0))
    return made


def test_silence_ends_a_run_that_nobody_holds(run: Run) -> None:
    assert last_written(run) == 1000.0
    assert not is_run_over(run, now_s=1000.0 + SILENT_S - 1)
    assert is_run_over(run, now_s=1000.0 + SILENT_S)
    assert is_run_over(run)
    with run.held():
        assert not is_run_over(run)


def test_any_file_that_grows_is_a_word(run: Run) -> None:
    for path in (run.events(0), run.supervisor, run.path / "status.json"):
        os.utime(path, (2000.0, 2000.0))
        assert not is_run_over(run, now_s=2000.0 + SILENT_S - 1)
        os.utime(path, (1000.0, 1000.0))


def test_what_the_caller_heard_counts(run: Run) -> None:
    """The clock of the disk may be behind."""
    assert not is_run_over(run, heard_s=5000.0, now_s=5000.0 + SILENT_S - 1)
    assert is_run_over(run, heard_s=5000.0, now_s=5000.0 + SILENT_S)


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_a_run_that_says_so_is_over(run: Run, state: str) -> None:
    run.set_status(state)
    with run.held():
        assert is_run_over(run)


def test_an_empty_folder_is_over(tmp_path: Path) -> None:
    assert last_written(Run(path=tmp_path)) == 0.0
    assert is_run_over(Run(path=tmp_path))
