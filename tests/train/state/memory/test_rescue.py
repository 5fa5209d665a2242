"""A run ends while memory holds a newer step than the disk: it is written, as a checkpoint like any other."""

import threading

import pytest

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import Lineage
from phalanx.errors import SystemFailure
from phalanx.train.state.reader import CheckpointReader
from phalanx.train.state.rescue import RescueOrder, claim_place, leave_place, rescue_places, rescue_state
from phalanx.train.state.restore import load_shards


def order_for(*hosts, at_most=None):
    lineage = Lineage().begin(1, source=None)
    return RescueOrder(generation=1, hosts=hosts, lineage=lineage, at_most=at_most)


def assert_same(kit, tensors, place, world):
    right = kit.cut(tensors, world)
    for rank, (expected, shards) in enumerate(zip(right, kit.emptied(right), strict=True)):
        load_shards(place, shards, rank=rank, world=world)
        assert all(kit.same_bits(a.tensor, b.tensor) for a, b in zip(expected, shards, strict=True))


def test_the_newest_step_in_memory_becomes_a_checkpoint(kit, replica_store, tmp_path):
    kit.put_all(replica_store, kit.state(5), 4, step=5)
    kit.put_all(replica_store, kit.state(6), 4, step=6)
    full, free = tmp_path / "no folder", tmp_path / "free"
    full.write_text("a file stands where the checkpoints should go")
    saved = rescue_state(
        tmp_path, order_for("here"), host="here", replica_store=replica_store, places=[full, free], keep=2
    )
    assert saved is not None
    assert (saved.step, saved.path.parent) == (6, free)
    assert CheckpointReader(saved.path).meta == {"step": 6}
    assert_same(kit, kit.state(6), saved.path, 3)


def test_nothing_is_written_that_the_disk_has_or_that_is_not_to_be_trusted(kit, replica_store, tmp_path):
    kit.put_all(replica_store, kit.state(5), 4, step=5)
    for at_most, newer_than in ((None, 5), (4, 0)):
        order, places = order_for("here", at_most=at_most), [tmp_path / "c"]
        found = rescue_state(
            tmp_path, order, host="here", replica_store=replica_store, places=places, keep=2, newer_than=newer_than
        )
        assert found is None
    assert not (tmp_path / "c").exists()


def test_two_hosts_write_their_ranks_into_the_next_folder_that_they_share_and_the_first_commits(
    kit, replica_store, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    full = tmp_path / "full"
    full.write_text("a file stands where the checkpoints should go")
    places = rescue_places(full, tmp_path)
    assert places[:3] == [full, tmp_path / "checkpoints", tmp_path / "local" / f"phalanx-{tmp_path.name}"]
    here, there = replica_store, ReplicaStore(4)
    tensors = kit.state(7)
    for rank, shards in enumerate(kit.cut(tensors, 4)):
        keeper = kit.keeper(here if rank < 2 else there, rank, 4, slot=rank % 2)
        keeper.put(7, shards, {"step": 7}, held=-1, rank_meta={"seed": 7})
        keeper._sealer.wait()
        keeper.close()
    found = {}

    def work(host, store):
        order = order_for("here", "there")
        found[host] = rescue_state(tmp_path, order, host=host, replica_store=store, places=places, keep=2)

    threads = [threading.Thread(target=work, args=pair) for pair in (("here", here), ("there", there))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found["there"] is None
    assert (found["here"].step, found["here"].path.parent) == (7, tmp_path / "checkpoints")
    assert not list((tmp_path / "local").iterdir()), "which no other host sees"
    assert_same(kit, tensors, found["here"].path, 4)
    there.close()


def test_a_folder_for_all_is_ours_alone_or_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = tmp_path / "runs" / "one"
    place = rescue_places(run / "checkpoints", run)[1]
    assert place == tmp_path / "phalanx-one"
    place.mkdir(mode=0o755)
    claim_place(place, run)
    assert place.stat().st_mode & 0o777 == 0o700
    leave_place(place, run)
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(SystemFailure, match="belongs to somebody else, or is no folder"):
        claim_place(place, run)
    place.unlink()
    place.mkdir()
    monkeypatch.setattr("os.geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(SystemFailure, match="belongs to somebody else"):
        claim_place(place, run)


def test_a_copy_that_is_damaged_is_not_written(kit, replica_store, tmp_path):
    kit.put_all(replica_store, kit.state(5), 4, step=5)
    segment = next(one for one in replica_store.buffers("own", 2) if one.header() is not None)
    segment.view()[4096 + 3] ^= 1
    with pytest.raises(SystemFailure, match=r"step 5 is not saved: .* is not what was written"):
        rescue_state(
            tmp_path, order_for("here"), host="here", replica_store=replica_store, places=[tmp_path / "c"], keep=2
        )
    assert not list((tmp_path / "c").glob("step-*"))
