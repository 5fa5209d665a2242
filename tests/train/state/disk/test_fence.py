"""Who may commit: the fence around the commit, and a save that is given up because its ranks are gone."""

import threading
from contextlib import contextmanager

import pytest
import torch

from phalanx.errors import Problem, SystemFailure
from phalanx.train.state import async_saver
from phalanx.train.state.async_saver import AsyncSaver, HostCopies
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.restore import load_shards
from phalanx.train.state.save import SaveAbandoned, save_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def shard_of(kit, value=1.0, size=1000):
    return kit.shard("w", torch.full((size,), value))


@contextmanager
def closed():
    raise SystemFailure(Problem(where="generation 3", what="is over: generation 4 has begun"))
    yield


def test_a_fence_that_refuses_leaves_the_commit_before_and_nothing_else(kit, tmp_path):
    kit.save_all(tmp_path, [[shard_of(kit)]], step=1)
    for step in (1, 2):  # replacing a step, and a new one
        with pytest.raises(SystemFailure) as caught:
            kit.save_all(tmp_path, [[shard_of(kit, 2.0)]], step=step, attempt="old", fence=closed)
        assert str(caught.value) == "generation 3: is over: generation 4 has begun"
        assert names(tmp_path) == ["step-00000001"]
    target = shard_of(kit, 0.0)
    load_shards(newest_checkpoint(tmp_path, verify=True).path, [target])
    assert bool((target.tensor == 1).all())


def test_the_fence_is_around_the_commit_and_only_rank_0_enters_it(kit, tmp_path):
    told = []

    @contextmanager
    def fence():
        told.append("in")
        yield
        told.append("out")

    kit.save_all(tmp_path, [[shard_of(kit)], []], fence=fence, point=told.append)
    rank = ["begin", "data", "index", "done"]
    assert told == [*rank, *rank, "all", "manifest", "in", "set-aside", "out", "commit", "in", "out", "prune"]


def test_the_manifest_says_which_generation_wrote_it(kit, tmp_path):
    saver = AsyncSaver(tmp_path, attempt="a", rank=0, world=1, generation=5)
    saver.save(step=1, shards=[shard_of(kit)], meta={})
    saver.wait()
    assert newest_checkpoint(tmp_path).generation == 5


def test_drafts_of_fenced_epochs_are_swept_at_the_next_commit(kit, tmp_path):
    for attempt in ("old.1", "new.3"):
        save_checkpoint(tmp_path, step=7, attempt=attempt, shards=[shard_of(kit)], meta={}, rank=1, world=2)
    kit.save_all(tmp_path, [[shard_of(kit)]], step=5, attempt="new.2")
    assert names(tmp_path) == [".tmp-step-00000007-new.3", ".tmp-step-00000007-old.1", "step-00000005"]  # no epochs
    kit.save_all(tmp_path, [[shard_of(kit)]], step=6, attempt="new.2", generation=2)
    assert names(tmp_path) == [".tmp-step-00000007-new.3", "step-00000005", "step-00000006"]  # a rank is ahead of us


def test_a_save_that_waits_for_a_lost_rank_is_given_up(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(async_saver, "ABANDON_S", 60.0)  # a machine that is busy with other tests is slow
    waits = threading.Event()
    copies = HostCopies()
    saver = AsyncSaver(
        tmp_path, attempt="a", rank=0, world=2, copies=copies,
        point=lambda name: waits.set() if name == "done" else None,
    )  # fmt: skip
    saver.save(step=1, shards=[shard_of(kit)], meta={})
    waits.wait(60)
    thread = saver._current
    saver.abandon()
    assert not thread.is_alive()
    assert not saver.busy
    assert saver.wait() is None  # nothing was saved, and that is no error
    assert names(tmp_path) == []
    after = AsyncSaver(tmp_path, attempt="b", rank=0, world=1, copies=copies)
    before = copies._segment
    assert before is not None
    after.save(step=1, shards=[shard_of(kit, 3.0)], meta={})
    assert after.wait().step == 1
    assert copies._segment is before  # no fresh memory
    saver.abandon()  # once more: there is nothing left


def test_a_save_held_by_the_disk_goes_on_alone_and_commits_nothing(kit, tmp_path):
    held, disk = threading.Event(), threading.Event()

    def point(name):
        if name == "all":
            held.set()
            disk.wait(60)

    copies = HostCopies()
    saver = AsyncSaver(tmp_path, attempt="a", rank=0, world=1, copies=copies, point=point)
    saver.save(step=1, shards=[shard_of(kit)], meta={})
    held.wait(60)
    thread, before = saver._current, copies._segment
    values = torch.frombuffer(before.view(), dtype=torch.float32, count=shard_of(kit).tensor.numel())
    saver.abandon()
    assert thread.is_alive()
    copies.take([shard_of(kit, 2.0)])
    assert bool((values == 1).all())  # the thread may still read from it
    disk.set()
    thread.join(60)
    assert names(tmp_path) == []
    copies.leave_to(threading.Thread())
    copies.take([shard_of(kit, 3.0)])
    assert copies._segment is before  # its reader has ended


def test_a_rank_that_is_given_up_while_it_writes_stops(kit, tmp_path):
    given_up = threading.Event()
    with pytest.raises(SaveAbandoned):
        save_checkpoint(
            tmp_path, step=1, attempt="a", shards=[shard_of(kit)], meta={}, rank=1, world=2, abandoned=given_up,
            point=lambda name: given_up.set() if name == "begin" else None,
        )  # fmt: skip
    assert names(tmp_path / ".tmp-step-00000001-a") == ["rank-00001.failed"]
