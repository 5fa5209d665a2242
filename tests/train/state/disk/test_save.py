"""Committing: all or nothing, kept as many as asked for, and nothing of an earlier attempt taken for ours."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from phalanx.errors import SystemFailure, UserError
from phalanx.train.state.reader import newest_checkpoint, sound_checkpoints, verify_checkpoint
from phalanx.train.state.save import save_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def shards(kit, size=1000):
    return [kit.shard("w", torch.arange(float(size))), kit.shard("n", torch.arange(3))]


def test_a_commit_is_a_folder_of_two_files_a_rank_and_a_manifest(kit, tmp_path):
    saved = kit.save_all(tmp_path, [shards(kit), []])
    assert names(tmp_path) == ["step-00000100"]
    assert names(saved.path) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00001.json",
        "rank-00001.safetensors",
    ]
    on_disk = sum(path.stat().st_size for path in saved.path.glob("rank-00000.*"))
    assert saved.bytes == on_disk


def test_the_newest_are_kept(kit, tmp_path):
    for step in (1, 2, 3, 4):
        kit.save_all(tmp_path, [shards(kit)], step=step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    kit.save_all(tmp_path, [shards(kit)], step=123456789, keep=1)
    kit.save_all(tmp_path, [shards(kit)], step=1234567890, keep=1)  # more digits than the name is padded to
    assert names(tmp_path) == ["step-1234567890"]


def test_a_broken_commit_does_not_count_as_one_of_those_kept(kit, tmp_path):
    for step in (1, 2, 3):
        kit.save_all(tmp_path, [shards(kit)], step=step, keep=2)
        if step > 1:
            (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("{}")
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]  # the only good one is the oldest
    kit.save_all(tmp_path, [shards(kit)], step=4, keep=1)
    assert names(tmp_path) == ["step-00000004"]


def test_a_step_reached_again_replaces_the_old_commit(kit, tmp_path):
    kit.save_all(tmp_path, [shards(kit)], attempt="first", meta={"try": 1})
    kit.save_all(tmp_path, [shards(kit)], attempt="second", meta={"try": 2})
    assert names(tmp_path) == ["step-00000100"]
    assert newest_checkpoint(tmp_path, verify=True).meta == {"try": 2}


def test_the_old_commit_comes_back_when_the_new_one_cannot_take_its_place(kit, tmp_path):
    def fail(name):
        if name == "set-aside":
            raise OSError(errno.EIO, "Input/output error")

    kit.save_all(tmp_path, [shards(kit)], meta={"try": 1})
    with pytest.raises(SystemFailure, match="step 100 is not saved: Input/output error"):
        kit.save_all(tmp_path, [shards(kit)], attempt="a2", meta={"try": 2}, point=fail)
    assert names(tmp_path) == ["step-00000100"]
    assert newest_checkpoint(tmp_path, verify=True).meta == {"try": 1}


def test_files_of_a_dead_attempt_are_not_ours(kit, tmp_path):
    save_checkpoint(tmp_path, step=5, attempt="dead", shards=shards(kit), meta={}, rank=1, world=2)
    with pytest.raises(SystemFailure) as caught:
        save_checkpoint(tmp_path, step=5, attempt="alive", shards=[], meta={}, rank=0, world=2, timeout_s=0.1)
    draft = tmp_path / ".tmp-step-00000005-alive"
    assert str(caught.value) == (
        f"{draft}: step 5 is not saved: rank 1 did not write its shards in 0.1 s\n"
        "  a checkpoint counts only when every rank's shards are stored; the one before is intact\n"
        "  look at the log of that rank, and that all ranks see the same file system"
    )
    assert names(tmp_path) == [".tmp-step-00000005-dead"]
    assert newest_checkpoint(tmp_path) is None


def test_drafts_nobody_touches_any_more_are_swept_and_others_are_not(kit, tmp_path):
    for name, age_s in ((".tmp-step-00000001-dead", 700), (".tmp-step-00000002-other", 1), (".old-step-00000003-x", 1)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    kit.save_all(tmp_path, [shards(kit)])
    assert names(tmp_path) == [".tmp-step-00000002-other", "step-00000100"]


def test_rank_0_waits_for_a_slow_rank(kit, tmp_path):
    began = threading.Event()

    def late():
        time.sleep(0.3)
        began.set()
        save_checkpoint(tmp_path, step=1, attempt="a", shards=shards(kit), meta={}, rank=1, world=2)

    thread = threading.Thread(target=late)
    thread.start()
    saved = save_checkpoint(tmp_path, step=1, attempt="a", shards=[], meta={}, rank=0, world=2)
    began_at_return = began.is_set()
    thread.join()
    assert began_at_return
    verify_checkpoint(saved.path)


class FullDisk:
    """os.write that fails after so many bytes, as a full disk does."""

    def __init__(self, room):
        self.room, self.write = room, os.write

    def __call__(self, descriptor, data):
        if len(data) > self.room:
            if self.room:
                self.write(descriptor, data[: self.room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return self.write(descriptor, data)


def outcome(call):
    try:
        call()
    except SystemFailure as error:
        return str(error)
    return None


def test_a_full_disk_leaves_the_commit_before_and_no_half(kit, saved, monkeypatch):
    room = 0
    while True:  # full at every amount written, until there is room for all of it
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(room))
            message = outcome(lambda: kit.save_all(saved, [shards(kit, 50)], step=300))
        if message is None:
            break
        assert message == (
            f"{saved / '.tmp-step-00000300-a1'}: step 300 is not saved: No space left on device\n"
            "  the checkpoint before it is intact\n  free space on this disk, or name another folder"
        )
        assert names(saved) == ["step-00000100", "step-00000200"]
        assert newest_checkpoint(saved, verify=True).step == 200
        room += 97
    assert room > 1000
    assert newest_checkpoint(saved, verify=True).step == 300


@pytest.mark.parametrize("has_room_for_note", [True, False])
def test_rank_0_hears_at_once_of_a_rank_that_gave_up(kit, tmp_path, monkeypatch, has_room_for_note):
    write_bytes = Path.write_bytes

    def write_nothing(path, data):
        if data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(100))
        if not has_room_for_note:
            patch.setattr(Path, "write_bytes", write_nothing)
        with pytest.raises(SystemFailure):
            save_checkpoint(tmp_path, step=1, attempt="a", shards=shards(kit), meta={}, rank=1, world=2)
    assert names(tmp_path / ".tmp-step-00000001-a") == ["rank-00001.failed"]
    with pytest.raises(SystemFailure) as caught:
        save_checkpoint(tmp_path, step=1, attempt="a", shards=[], meta={}, rank=0, world=2)
    why = "No space left on device" if has_room_for_note else "no space to say why"
    assert f"step 1 is not saved: rank-00001 gave up: {why}" in str(caught.value)
    assert names(tmp_path) == []


def test_a_really_full_disk(kit, tmp_path):
    room = tmp_path / "small"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", room], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        kit.save_all(room, [shards(kit, 100_000)], step=1)
        with pytest.raises(SystemFailure, match="No space left on device"):
            kit.save_all(room, [shards(kit, 200_000)], step=2)
        assert names(room) == ["step-00000001"]
        assert newest_checkpoint(room, verify=True).step == 1
        kit.save_all(room, [shards(kit, 90_000)], step=3)
        assert newest_checkpoint(room, verify=True).step == 3
    finally:
        subprocess.run(["umount", room], check=True)


def test_old_commits_go_first_where_the_disk_is_full_and_the_newest_stays(kit, tmp_path, monkeypatch):
    """Room for two and a half: of three that are to be kept, as many are as fit beside the next."""
    room = 2.5 * kit.save_all(tmp_path / "measured", [shards(kit)], step=1).bytes
    root = tmp_path / "checkpoints"
    real = os.statvfs(tmp_path)

    def statvfs(path):
        used = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        fields = [*real[:10], real.f_fsid]
        fields[0:2], fields[4] = [1, 1], max(0, int(room - used))
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert kit.save_all(root, [shards(kit)], step=1, keep=3).deleted_for_room == ()
    assert kit.save_all(root, [shards(kit)], step=2, keep=3).deleted_for_room == (1,)
    assert names(root) == ["step-00000002"]
    room *= 4
    for step in (3, 4):
        assert kit.save_all(root, [shards(kit)], step=step, keep=3).deleted_for_room == ()
    assert names(root) == ["step-00000002", "step-00000003", "step-00000004"]
    room = 0.0  # somebody else filled it: the newest stays though nothing fits
    assert kit.save_all(root, [shards(kit)], step=5, keep=3).deleted_for_room == (2, 3, 4)
    assert names(root) == ["step-00000005"]


def test_a_limit_on_the_size_of_files(kit, tmp_path):
    """As a full disk, without root: the operating system refuses in the middle of the tensors."""
    kit.save_all(tmp_path, [shards(kit)], step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = outcome(lambda: kit.save_all(tmp_path, [shards(kit, 50_000)], step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message == (
        f"{tmp_path / '.tmp-step-00000002-a1'}: step 2 is not saved: File too large\n"
        "  the checkpoint before it is intact\n  free space on this disk, or name another folder"
    )
    assert names(tmp_path) == ["step-00000001"]
    assert newest_checkpoint(tmp_path, verify=True).step == 1
    kit.save_all(tmp_path, [shards(kit, 50_000)], step=2)
    assert newest_checkpoint(tmp_path, verify=True).step == 2


def test_a_rank_whose_folder_was_taken_away_says_why(kit, tmp_path):
    def vanish(name):
        if name == "data":
            shutil.rmtree(tmp_path)

    with pytest.raises(SystemFailure, match="step 1 is not saved: rank 0 gave up and took the folder away"):
        save_checkpoint(tmp_path, step=1, attempt="a", shards=shards(kit), meta={}, rank=1, world=2, point=vanish)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attempt": "../up"}, "attempt: '../up' cannot be part of a folder name\n  use letters, digits, '.' and '_'"),
        ({"meta": {"loss": float("nan")}}, "checkpoint: meta cannot be written as JSON: "),
        ({"meta": {"path": Path("x")}}, "checkpoint: meta cannot be written as JSON: "),
        ({"rank": 2}, "checkpoint: step 1, keep 2, rank 2 of 2 cannot be saved"),
        ({"keep": 0}, "checkpoint: step 1, keep 0, rank 0 of 2 cannot be saved"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_written(tmp_path, changes, message):
    call = {"step": 1, "attempt": "a", "shards": [], "meta": {}, "rank": 0, "world": 2, "keep": 2, **changes}
    with pytest.raises(UserError) as caught:
        save_checkpoint(tmp_path, **call)
    assert str(caught.value).startswith(message)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda kit: [kit.shard("w", torch.ones(2)), kit.shard("w", torch.ones(2))], "w: names two shards of one rank"),
        (
            lambda kit: [kit.shard("w", torch.ones(2, dtype=torch.complex64))],
            "w: is complex64, which a checkpoint cannot",
        ),
        (lambda kit: [kit.shard("w", torch.ones(2), (3,), (2,))], "w: starts at [2] with [2], outside the whole [3]"),
        (lambda kit: [kit.shard("__metadata__", torch.ones(2))], "__metadata__: names two shards of one rank, or is"),
    ],
)
def test_wrong_shards_are_refused(kit, tmp_path, make, message):
    with pytest.raises(UserError) as caught:
        kit.save_all(tmp_path, [make(kit)])
    assert str(caught.value).startswith(message)
    assert names(tmp_path) == []


def test_of_4096_ranks_rank_0_reads_one_note_each_and_the_others_none(kit, tmp_path):
    """Nothing a rank does grows with the world; what rank 0 does grows by one note of 200 bytes a rank."""
    opened, counting = [], True
    sys.addaudithook(lambda event, args: opened.append(args[0]) if counting and event == "open" else None)
    save_checkpoint(tmp_path, step=1, attempt="a", shards=shards(kit), meta={}, rank=1, world=4096)
    assert 0 < len(opened) < 100
    draft = tmp_path / ".tmp-step-00000001-a"
    for rank in range(2, 4096):
        for ending in (".json", ".safetensors", ".done"):
            os.link(draft / f"rank-00001{ending}", draft / f"rank-{rank:05d}{ending}")
    opened.clear()
    save_checkpoint(tmp_path, step=1, attempt="a", shards=shards(kit), meta={}, rank=0, world=4096)
    counting = False
    assert 4000 < len(opened) < 4096 + 100
    assert [found.world for found in sound_checkpoints(tmp_path)] == [4096]
