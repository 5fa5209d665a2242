"""Saving in a thread: the values of the moment, one at a time, errors not lost."""

import errno
import os
import threading
import time

import pytest
import torch

from phalanx.errors import SystemFailure
from phalanx.train.state.async_saver import AsyncSaver
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.restore import load_shards


def saver_of(root, **options):
    return AsyncSaver(root, attempt="a", rank=0, world=1, **options)


def test_what_is_saved_is_the_state_at_the_call(kit, tmp_path):
    go = threading.Event()
    saver = saver_of(tmp_path, point=lambda name: name != "begin" or go.wait())
    weight = torch.ones(4)
    saver.save(step=1, shards=[kit.shard("w", weight)], meta={"step": 1})
    assert saver.busy
    weight.fill_(2)  # the training goes on while the thread has not written a byte
    go.set()
    assert saver.wait().step == 1
    assert not saver.busy
    target = torch.zeros(4)
    load_shards(newest_checkpoint(tmp_path).path, [kit.shard("w", target)])
    assert target.tolist() == [1.0] * 4


def test_only_one_is_in_flight(kit, tmp_path):
    running, most = [], []

    def point(name):
        if name == "begin":
            running.append(name)
            most.append(len(running))
        if name == "prune":
            running.pop()

    saver = saver_of(tmp_path, point=point)
    for step in range(5):
        assert saver.save(step=step, shards=[kit.shard("w", torch.full((9,), float(step)))], meta={}) >= 0
    assert saver.wait().step == 4
    assert most == [1] * 5


def test_host_memory_is_used_again(kit, tmp_path):
    saver, shards = saver_of(tmp_path), [kit.shard("w", torch.ones(4)), kit.shard("x", torch.ones(2))]
    saver.reserve(shards)
    saver._copies._reservation.wait()
    assert list(tmp_path.iterdir()) == []
    reserved = saver._copies._segment
    assert reserved.size_bytes >= 24
    saver.save(step=2, shards=[kit.shard("w", torch.zeros(4)), kit.shard("x", torch.full((3,), 5.0))], meta={})
    saver.wait()
    assert saver._copies._segment is reserved
    targets = torch.ones(4), torch.ones(3)
    load_shards(newest_checkpoint(tmp_path).path, [kit.shard("w", targets[0]), kit.shard("x", targets[1])])
    assert not targets[0].any()
    assert targets[1].tolist() == [5.0] * 3


def test_a_save_of_nothing_is_a_save(kit, tmp_path):
    saver = saver_of(tmp_path)
    saver.reserve([])
    saver.save(step=1, shards=[], meta={})
    assert saver.wait().step == 1


def test_memory_that_cannot_be_had_is_told_by_the_save(kit, tmp_path, monkeypatch):
    def refuse(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    saver, shards = saver_of(tmp_path), [kit.shard("w", torch.ones(4))]
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    saver.reserve(shards)
    with pytest.raises(SystemFailure, match="no 16 bytes of host memory"):
        saver.save(step=1, shards=shards, meta={})


def test_the_same_step_is_not_written_twice(kit, tmp_path):
    saver = saver_of(tmp_path)
    for _ in range(2):
        saver.save(step=1, shards=[kit.shard("w", torch.ones(4))], meta={})
    assert saver.wait().step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_step_may_be_saved_again_while_rank_0_has_not_committed_the_first(kit, tmp_path):
    saver = AsyncSaver(tmp_path, attempt="a", rank=1, world=2)
    for step in (1, 2, 1):
        saver.save(step=step, shards=[kit.shard("w", torch.ones(4))], meta={})
    assert saver.wait().step == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".tmp-step-00000001-a.1", ".tmp-step-00000001-a.3", ".tmp-step-00000002-a.2"]


@pytest.mark.parametrize("call", ["wait", "save"])
def test_an_error_surfaces_at_the_next_call_and_the_next_save_works(kit, tmp_path, call):
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    saver, shards = saver_of(root), [kit.shard("w", torch.ones(4))]
    saver.save(step=1, shards=shards, meta={})
    while saver.busy:
        time.sleep(0.01)
    root.unlink()
    with pytest.raises(SystemFailure, match="step 1 is not saved: Not a directory"):
        saver.wait() if call == "wait" else saver.save(step=2, shards=shards, meta={})
    saver.save(step=2, shards=shards, meta={})
    assert saver.wait().step == 2
    assert newest_checkpoint(root, verify=True).step == 2


def test_after_one_rank_failed_the_next_save_is_of_all_ranks(kit, tmp_path):
    def fail_once(name):
        if name == "data" and not failed:
            failed.append(name)
            raise OSError(28, "No space left on device")

    failed = []
    savers = [
        AsyncSaver(tmp_path, attempt="a", rank=rank, world=2, point=point, timeout_s=20)
        for rank, point in ((0, lambda name: None), (1, fail_once))
    ]
    outcomes = []
    for step in (1, 2):
        for rank, saver in enumerate(savers):
            try:
                saver.save(step=step, shards=[kit.shard(f"w{rank}", torch.full((4,), float(step)))], meta={})
            except SystemFailure as error:
                outcomes.append(str(error).splitlines()[0].partition(": ")[2])
    assert [saver.wait().step for saver in savers] == [2, 2]
    assert outcomes == [
        "step 1 is not saved: rank-00001 gave up: No space left on device",
        "step 1 is not saved: No space left on device",
    ]
    assert newest_checkpoint(tmp_path, verify=True).step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
