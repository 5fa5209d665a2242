"""Where ranks are: each writes its stack when it is asked, into a file of its own or, of very many, into memory."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.elastic.rank_process import find_ranks, read_stack
from phalanx.elastic.rank_slots import RankSlots
from phalanx.record.run import Run

RANK = """
import os, sys, time
from pathlib import Path
from phalanx.elastic.rank_process import take_rank
from phalanx.record.run import Run
def stuck_in_data():
    os.write(answer, b"ready\\n")
    time.sleep(600)
run, log, answer = Run(path=Path(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2] else None, os.dup(1)
for world in (8, 7):  # as in a second membership
    take_rank(run, 5, world=world, slot=0, local_world=1, host_log=log)
stuck_in_data()
"""


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_rank_says_where_it_is(tmp_path: Path, is_shared: bool) -> None:
    run = Run(path=tmp_path)
    (tmp_path / "logs").mkdir()
    log = str(run.host_log("n-1")) if is_shared else ""
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), log], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            found = find_ranks(run, {5: process.pid}, host="n-1")
            assert found[5].place.startswith("stuck_in_data (")
            assert not found[5].waits
            assert "stuck_in_data" in read_stack(run, 5, process.pid)
        finally:
            process.kill()
    names = sorted(os.listdir(tmp_path / "logs"))
    assert names == (["host-n-1.log", "host-n-1.stack"] if is_shared else ["rank-00005.log", "rank-00005.stack"])
    path = run.host_stack("n-1") if is_shared else run.stack(5)
    assert "in stuck_in_data" in path.read_text()
    assert path.read_text().startswith(f"rank 5, process {process.pid}, at ") == is_shared


def test_a_process_that_stays_in_a_membership_that_is_over_is_ended_without_a_rank_in_the_next(tmp_path: Path) -> None:
    slots = RankSlots(
        Run(path=tmp_path),
        1,
        selectors.DefaultSelector(),
        dead_after_s=5.0,
        joins_within_s=60.0,
        say=lambda *words, **fields: None,
        forget=lambda: None,
    )
    with subprocess.Popen(["sleep", "600"]) as process:
        (slot,) = slots.slots
        slot.pid, slot.member_of, slot.generation = process.pid, 1, 2
        slot.asked_s = slot.seen_s = time.monotonic()
        slots.watch()
        assert slot.killed is None, "it has time to leave"
        slot.asked_s -= 6.0
        slots.watch()
        assert slot.killed is not None
        assert slot.killed.message.startswith("did not leave its membership within fault.dead_after_s = 5 s")
        assert process.wait() == -signal.SIGKILL
