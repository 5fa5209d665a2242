"""A rank of an epoch that is over cannot commit, and a new epoch waits for a commit that is going on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from phalanx.elastic.fence import begin_generation, commit_fence, current_generation
from phalanx.errors import SystemFailure
from phalanx.record.run import Run, create_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "fenced", job_toml="", job={}, plan_json="{}")


def test_epochs_before_the_first(run: Run) -> None:
    assert current_generation(run) == 0
    with commit_fence(run, 0):
        pass


def test_a_rank_of_an_older_epoch_is_refused(run: Run) -> None:
    begin_generation(run, 3)
    with commit_fence(run, 3):
        pass
    with pytest.raises(SystemFailure) as caught, commit_fence(run, 2):
        raise AssertionError("it was let in")
    assert str(caught.value) == (
        f"{run.path}: this rank is of generation 2, and 3 has begun: it may not commit\n  others train in its place"
    )


def test_a_new_epoch_waits_for_a_commit(run: Run) -> None:
    begin_generation(run, 1)
    inside, seen = threading.Event(), []

    def commit() -> None:
        with commit_fence(run, 1):
            inside.set()
            time.sleep(0.3)
            seen.append(current_generation(run))

    thread = threading.Thread(target=commit)
    thread.start()
    inside.wait(300)
    begin_generation(run, 2)
    thread.join(300)
    assert (seen, current_generation(run)) == ([1], 2)


def test_a_commit_that_hangs_does_not_hold_up_the_others_forever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.elastic.fence.WAIT_S", 0.2)
    with commit_fence(run, 0):  # a process that was stopped in here
        begin_generation(run, 1)
        assert current_generation(run) == 1
