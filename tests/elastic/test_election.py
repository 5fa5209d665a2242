"""Who coordinates: one at a time, a silent holder loses its term, and what was written down is read whole."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.elastic.coordinator_memory import CoordinatorMemory, known_coordinator
from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.election import Deposed, ElectionUnavailable, choose_election, open_election, run_name
from phalanx.elastic.file_election import FileElection, Watched, check_locks, newest_term, read_sign
from phalanx.elastic.membership import HostSlot, Membership
from phalanx.errors import SystemFailure, UserError
from phalanx.plan.layout import Layout
from phalanx.record.run import Run, create_run

HELD_S = 60.0
HOLDER = """
import sys, time
from phalanx.elastic.election import Deposed
from phalanx.elastic.file_election import FileElection
from phalanx.record.run import open_run
election = FileElection(open_run(sys.argv[1]), lease_s=5.0, renew_s=0.02)
assert election.take()
print("holds", flush=True)
try:
    while True:
        election.renew()
        time.sleep(0.005)
except Deposed:
    print("deposed", flush=True)
"""
LAYOUT = Layout(
    data=4, shard=4, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=3, sequence_parallel=False,
    micro_batch=2, accumulation=2, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "x", job_toml="", job={}, plan_json="{}")


@pytest.fixture
def hold(run: Run) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Another process that holds the term."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def election(run: Run, *, lease_s: float = HELD_S) -> FileElection:
    return FileElection(run, lease_s=lease_s, renew_s=0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def memory(run: Run) -> CoordinatorMemory:
    return CoordinatorMemory(run, started_s=1.0)


def test_a_holder_that_lives_keeps_its_term(run: Run, hold: Callable[[], subprocess.Popen[str]]) -> None:
    hold()
    assert not election(run).take(), "it counts on"
    assert (newest_term(run), election(run).is_held()) == (1, True)


def test_a_holder_that_dies_is_followed_at_once(run: Run, hold: Callable[[], subprocess.Popen[str]]) -> None:
    process = hold()
    process.kill()
    process.wait()
    following = election(run)
    assert not following.is_held()
    assert (following.take(), following.term) == (True, 2)


def test_a_frozen_holder_loses_its_term_and_ends_when_it_wakes_up(
    run: Run, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    process = hold()
    os.kill(process.pid, signal.SIGSTOP)
    following = election(run, lease_s=0.3)
    assert (following.take(), following.term) == (True, 2), "though the frozen one has its lock"
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout is not None
    assert process.stdout.readline() == "deposed\n"
    following.renew()


def test_a_term_that_was_given_back_is_free(run: Run) -> None:
    first, second = election(run), election(run)
    assert first.take()
    first.release()
    assert (second.is_held(), second.take(), second.term) == (False, True, 2)


def test_of_many_that_come_at_once_one_is_elected(run: Run) -> None:
    everybody = [election(run, lease_s=0.2) for _ in range(8)]
    start, elected = threading.Barrier(len(everybody)), []

    def take(one: FileElection) -> None:
        start.wait()
        if one.take():
            elected.append(one.term)

    threads = [threading.Thread(target=take, args=(one,)) for one in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(elected)) == len(elected), "a term has one holder"
    alive = [one for one in everybody if one.term == newest_term(run)]
    assert len(alive) == 1


def test_a_holder_of_an_older_term_finds_out(run: Run) -> None:
    old, new = election(run), election(run)
    assert old.take()
    assert new._claim(2)
    new.check()
    with pytest.raises(Deposed):
        old.check()


def test_what_an_agent_has_watched_counts_for_the_lease(run: Run) -> None:
    """A count that has stood still for longer than a lease: whoever is started then takes over at once."""
    holder = election(run)
    assert holder.take()
    term, count = read_sign(run)

    def never(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    def late(watched: Watched) -> FileElection:
        return FileElection(run, lease_s=4.0, watched=watched, clock=lambda: 100.0, sleep=never)

    for seen in (Watched(term=term, count=count, since_s=97.0), Watched(term=term, count=count - 1, since_s=1.0)):
        with pytest.raises(AssertionError, match="waits"):
            late(seen).take()
    following = late(Watched(term=term, count=count, since_s=95.0))
    assert (following.take(), following.term) == (True, 2)


def test_who_is_which_rank_is_written_only_when_it_changes(run: Run) -> None:
    """What is written every second is small for any number of ranks; a process that dies between both loses nothing."""
    one = memory(run)
    slots = tuple(HostSlot("a", slot) for slot in range(4))
    membership = Membership(generation=1, layout=LAYOUT, slots=slots)
    saved = SavedState(generation=1, membership=membership, pids=(1, 2, 3, 4), running=True, peers={"a": {}})
    one.save(saved, ("127.0.0.1", 1), term=1)
    written = {path.name: path.stat().st_mtime_ns for path in run.path.glob("coordinator-members-*")}
    one.save(replace(saved, step=5), ("127.0.0.1", 1), term=1)
    assert {path.name: path.stat().st_mtime_ns for path in run.path.glob("coordinator-members-*")} == written
    before = (run.path / "coordinator.json").read_text()
    later = replace(saved, step=6, membership=membership.renumbered(2), generation=2)
    one.save(later, ("127.0.0.1", 1), term=1)
    assert (memory(run).load(), known_coordinator(run)) == (later, (("127.0.0.1", 1), 1))
    written = {path.name: path.stat().st_mtime_ns for path in run.path.glob("coordinator-members-*")}
    following = memory(run)
    following.save(following.load(), ("127.0.0.1", 2), term=2)
    assert {path.name: path.stat().st_mtime_ns for path in run.path.glob("coordinator-members-*")} == written
    one.save(later, ("127.0.0.1", 1), term=1)
    (run.path / "coordinator.json").write_text(before)  # it died after the first of both files
    assert memory(run).load() == replace(saved, step=5)


def test_what_another_launch_knew_is_not_taken_up(run: Run) -> None:
    memory(run).save(SavedState(step=5, generation=3), ("127.0.0.1", 1), term=1)
    assert CoordinatorMemory(run, started_s=2.0).load().step == -1


def test_files_of_old_terms_go(run: Run) -> None:
    for _ in range(6):
        one = election(run)
        assert one.take()
        one.release()
    assert (newest_term(run), len(list((run.path / "coordinator.terms").iterdir()))) == (6, 3)


def test_the_count_is_what_shows_life_on_another_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are not trusted between machines: a holder there that is silent for the lease is over."""
    first, second = election(run), election(run, lease_s=0.2)
    assert first.take()
    path = run.path / "coordinator.terms" / "00000001"
    path.write_text(json.dumps({"count": 1, "machine": "another"}))
    stop = threading.Event()

    def count() -> None:
        number = 1
        while not stop.is_set():
            number += 1
            path.write_text(json.dumps({"count": number, "machine": "another"}))
            time.sleep(0.005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert not second.take()
    finally:
        stop.set()
        thread.join()
    assert (second.take(), second.term) == (True, 2)


# ---- which election --------------------------------------------------------------------------------------------------


def test_locks_are_tried_with_a_second_process(tmp_path: Path) -> None:
    check_locks(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


def test_a_file_system_whose_locks_keep_nobody_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network mount with `nolock`, or one that answers every lock with success."""
    monkeypatch.setattr("phalanx.elastic.file_election.fcntl.flock", lambda file, how: None)
    with pytest.raises(ElectionUnavailable, match=r"a lock does not keep another process out \(free\)"):
        check_locks(tmp_path)


def test_the_next_election_is_taken_where_the_first_does_not_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    closed = f"etcd:http://127.0.0.1:{free_port()}"
    assert choose_election([closed, "kubernetes", "file"], run) == "file"
    with pytest.raises(SystemFailure) as refusal:
        choose_election([closed, "kubernetes"], run)
    said = str(refusal.value)
    for part in ("Connection refused", "this is no pod of a Kubernetes cluster", "set fault.election to another one"):
        assert part in said


@pytest.mark.parametrize("choice", ["zookeeper", "etcd", "etcd:", "etcd:ftp://a", "kubernetes:A_b", "file:x", ""])
def test_an_election_that_nobody_knows_is_refused(run: Run, choice: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        open_election(choice, run)


def test_runs_that_share_a_service_have_names_of_their_own(tmp_path: Path) -> None:
    names = [
        run_name(create_run(tmp_path / str(number), "My_Job", job_toml="", job={}, plan_json="{}"))
        for number in range(2)
    ]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"phalanx-[a-z0-9-]{1,60}[a-z0-9]", name) for name in names), names
