"""What is put is held, in memory that outlives the process, and never half."""

import pytest
import torch

from phalanx.elastic.rank_link import Interrupted
from phalanx.elastic.replica_store import BUFFERS, ReplicaStore
from phalanx.elastic.restore_point import ReplicaInfo, find_restore_points
from phalanx.errors import SystemFailure, UserError
from phalanx.train.state.checkpoint_index import StoredShard
from phalanx.train.state.in_memory import InMemoryCheckpointer
from phalanx.train.state.restore import load_shards
from phalanx.train.state.save import save_checkpoint


def load_all(kit, source, tensors, world):
    """Restore into `world` ranks and compare every bit."""
    right = kit.cut(tensors, world)
    for rank, (expected, shards) in enumerate(zip(right, kit.emptied(right), strict=True)):
        load_shards(source, shards, rank=rank, world=world)
        assert all(kit.same_bits(a.tensor, b.tensor) for a, b in zip(expected, shards, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_any_number_of_ranks_restores_what_four_put(kit, replica_store, world):
    kit.put_all(replica_store, kit.state(5), 4, step=5)
    load_all(kit, kit.source(replica_store), kit.state(5), world)


def test_the_disk_gives_the_same_bits(kit, replica_store, tmp_path):
    tensors = kit.state(3)
    kit.put_all(replica_store, tensors, 4, step=3)
    for rank in (3, 2, 1, 0):
        shards = kit.cut(tensors, 4)[rank]
        saved = save_checkpoint(tmp_path, step=3, attempt="a", shards=shards, meta={"step": 3}, rank=rank, world=4)
    for rank in range(3):
        memory, disk = kit.emptied(kit.cut(tensors, 3))[rank], kit.emptied(kit.cut(tensors, 3))[rank]
        load_shards(kit.source(replica_store), memory, rank=rank, world=3)
        load_shards(saved.path, disk, rank=rank, world=3)
        assert all(kit.same_bits(a.tensor, b.tensor) for a, b in zip(memory, disk, strict=True))


def test_a_source_says_what_was_put(kit, replica_store):
    kit.put_all(replica_store, kit.state(), 4, step=7, generation=2)
    source = kit.source(replica_store)
    assert (source.step, source.world, source.meta) == (7, 4, {"step": 7})
    assert source.where == "memory of step 7 (generation 2)"
    assert source.index(2).meta == {"seed": 7}
    assert [source.count(rank) for rank in range(4)] == [6, 5, 5, 4]  # 5 rows are 2, 2, 1, 0
    assert isinstance(source.index(0).shards[0], StoredShard)


def test_what_is_held_is_told_without_reading_it(kit, replica_store):
    kit.put_all(replica_store, kit.state(), 2, step=7, generation=2)
    first = replica_store.held()[0]
    assert first == ReplicaInfo(
        rank=0, world=2, generation=2, step=7, slot=0, kind="own", buffer=0, tensors=6, size_bytes=first.size_bytes
    )
    assert first.size_bytes == sum(p.tensor.numel() * p.tensor.element_size() for p in kit.cut(kit.state(), 2)[0])
    assert ReplicaInfo.from_json(first.to_json()) == first


def test_the_copy_is_taken_before_put_returns(kit, replica_store):
    shards = kit.cut(kit.state(), 1)[0]
    keeper = kit.keeper(replica_store, 0, 1)
    keeper.put(1, shards, {}, held=-1)
    for shard in shards:
        shard.tensor.zero_()
    keeper.close()
    load_all(kit, kit.source(replica_store), kit.state(), 1)


def test_a_copy_of_what_a_collective_left_half_done_never_counts(kit, replica_store):
    """The formation ended while the copy was taken: what it waited for on the device was cut short."""
    is_over = []

    def check():
        if is_over:
            raise Interrupted

    keeper = kit.keeper(replica_store, 0, 1, check=check)
    (shards,) = kit.cut(kit.state(), 1)
    keeper.put(1, shards, {"step": 1}, held=-1)
    is_over.append(True)
    with pytest.raises(Interrupted):
        keeper.put(2, shards, {"step": 2}, held=-1)
    keeper.close()
    assert [one.step for one in replica_store.held()] == [1]


def test_strided_tensors_are_put_in_row_order(kit, replica_store):
    weight = torch.randn(5, 3)
    keeper = kit.keeper(replica_store, 0, 1)
    keeper.put(1, [kit.shard("w", weight.t().contiguous().t())], {}, held=-1)
    keeper.close()
    target = kit.shard("w", torch.zeros(5, 3))
    load_shards(kit.source(replica_store), [target])
    assert torch.equal(target.tensor, weight)


def test_a_model_of_another_shape_is_refused(kit, replica_store):
    kit.put_all(replica_store, {"w": torch.zeros(4, 4)}, 2, step=1)
    with pytest.raises(UserError) as caught:
        load_shards(kit.source(replica_store), [kit.shard("w", torch.zeros(4, 5))])
    assert str(caught.value).startswith("memory of step 1 (generation 1): w is [4, 4] there and [4, 5] in this model")


def test_two_buffers_are_used_while_all_ranks_keep_up(kit, replica_store):
    keepers = [kit.keeper(replica_store, rank, 2) for rank in range(2)]
    for step in range(1, 8):
        kit.put_all(replica_store, kit.state(step), 2, step=step, held=step - 1 if step > 1 else -1, keepers=keepers)
        assert keepers[0].safe_step == step
    assert sorted({one.step for one in replica_store.held()}) == [6, 7]
    assert not replica_store.segment("own", 0, 2).size_bytes
    for keeper in keepers:
        keeper.close()


def test_while_the_others_lag_three_are_kept_and_then_all_ranks_wait(kit, replica_store):
    keepers = [kit.keeper(replica_store, rank, 2) for rank in range(2)]
    for step in range(1, 10):
        kit.put_all(replica_store, kit.state(step), 2, step=step, held=1 if step > 1 else -1, keepers=keepers)
    assert sorted(one.step for one in replica_store.held() if one.rank == 0) == [1, 2, 3]  # 1 is what all hold
    assert [keeper.skipped for keeper in keepers] == [6, 6]
    kit.put_all(replica_store, kit.state(10), 2, step=10, held=3, keepers=keepers)
    assert sorted(one.step for one in replica_store.held() if one.rank == 0) in ([1, 3, 10], [2, 3, 10])
    for keeper in keepers:
        keeper.close()


def test_a_new_generation_keeps_what_it_was_restored_from_until_all_hold_more(kit, replica_store):
    kit.put_all(replica_store, kit.state(1), 4, step=1)
    kit.put_all(replica_store, kit.state(2), 4, step=2)
    kit.put_all(replica_store, kit.state(3), 4, step=3)
    # Rank 2 fell; what slot 2 holds of step 2 is still needed when its process serves as another rank.
    keepers = [
        kit.keeper(replica_store, rank, 3, generation=2, slot=slot, restored=(1, 2))
        for rank, slot in enumerate((2, 0, 1))
    ]
    for step in (3, 4):
        kit.put_all(replica_store, kit.state(step), 3, step=step, generation=2, held=-1, keepers=keepers)
    newest = find_restore_points({"here": replica_store.held()})
    assert [(one.generation, one.step, one.world) for one in newest] == [(2, 4, 3), (2, 3, 3), (1, 2, 4)]
    load_all(kit, kit.source(replica_store, choice=newest[-1]), kit.state(2), 2)
    kit.put_all(replica_store, kit.state(5), 3, step=5, generation=2, held=-1, keepers=keepers)
    assert [keeper.skipped for keeper in keepers] == [1, 1, 1]
    kit.put_all(replica_store, kit.state(6), 3, step=6, generation=2, held=4, keepers=keepers)
    assert [keeper.skipped for keeper in keepers] == [1, 1, 1]
    for keeper in keepers:
        keeper.close()


def test_ranks_with_and_without_the_old_snapshot_leave_out_the_same_steps(kit, replica_store):
    """A rank in a fresh slot has a buffer more to spare, and must not use it: all ranks hold the same steps."""
    kit.put_all(replica_store, kit.state(2), 2, step=2)
    keepers = [
        kit.keeper(replica_store, rank, 2, generation=2, slot=slot, restored=(1, 2)) for rank, slot in enumerate((0, 3))
    ]
    for step in range(3, 9):
        kit.put_all(replica_store, kit.state(step), 2, step=step, generation=2, held=-1, keepers=keepers)
    held = [{one.step for one in replica_store.held() if one.slot == slot and one.generation == 2} for slot in (0, 3)]
    assert held == [{3, 4}, {3, 4}]
    for keeper in keepers:
        keeper.close()


def test_a_snapshot_that_could_not_be_used_stays_and_is_not_in_the_way(kit, replica_store):
    """Step 9 was chosen and turned out damaged, so the generation began from step 2 on the disk: 9 is never passed."""
    kit.put_all(replica_store, kit.state(9), 2, step=9)
    keepers = [kit.keeper(replica_store, rank, 2, generation=2, restored=(1, 9)) for rank in range(2)]
    for step in range(3, 8):
        kit.put_all(replica_store, kit.state(step), 2, step=step, held=keepers[0].safe_step, keepers=keepers)
    assert [keeper.skipped for keeper in keepers] == [0, 0]
    assert {one.step for one in replica_store.held() if one.generation == 2} == {6, 7}
    for keeper in keepers:
        keeper.close()


def test_memory_reserved_is_the_memory_used(kit, replica_store):
    keeper, shards = kit.keeper(replica_store, 0, 1), kit.cut(kit.state(), 1)[0]
    keeper.reserve(shards)
    keeper._reservation.wait()
    sizes = [segment.size_bytes for segment in replica_store.buffers("own", 0)]
    assert sizes[0] == sizes[1] > 0
    assert sizes[2] == 0
    assert replica_store.held() == []
    for step in range(1, 4):
        keeper.put(step, shards, {}, held=keeper.safe_step)
        keeper._sealer.wait()
    keeper.close()
    assert [segment.size_bytes for segment in replica_store.buffers("own", 0)] == sizes


def test_copies_that_are_left_out_are_told_once_and_when_they_are_well_again(kit, replica_store):
    told = []
    keeper, shards = (
        kit.keeper(replica_store, 0, 1, tell=lambda **fields: told.append(fields)),
        kit.cut(kit.state(), 1)[0],
    )
    for step in range(1, BUFFERS + 3):  # nobody agrees that any of them is safe
        keeper.put(step, shards, {}, held=-1)
        keeper._sealer.wait()
    keeper.put(9, shards, {}, held=keeper.safe_step)
    keeper.close()
    assert told == [
        {"step": 4, "trouble": "", "is_skipped": True, "skipped": 1},
        {"step": 9, "trouble": "", "is_skipped": False, "skipped": 2},
    ]


def test_trouble_is_told_without_keys(kit, replica_store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setattr(InMemoryCheckpointer, "trouble", "no copy for hf_abcdefgh")
    told = []
    keeper = kit.keeper(replica_store, 0, 1, tell=lambda **fields: told.append(fields["trouble"]))
    keeper.put(1, kit.cut(kit.state(), 1)[0], {}, held=-1)
    keeper.close()
    assert told == ["no copy for [HF_TOKEN]"]


def test_meta_that_is_no_json_is_an_error_of_the_next_put(kit, replica_store):
    keeper, shards = kit.keeper(replica_store, 0, 1), kit.cut(kit.state(), 1)[0]
    keeper.put(1, shards, {"loss": float("nan")}, held=-1)
    keeper._sealer.wait()
    with pytest.raises(ValueError, match="JSON"):
        keeper.put(2, shards, {}, held=-1)
    assert replica_store.held() == []
    keeper.close()


def test_several_threads_sum_up_the_same(kit, replica_store, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    keeper = kit.keeper(replica_store, 0, 1)
    for step in (1, 2, 3):
        keeper.put(step, kit.cut(kit.state(step), 1)[0], {}, held=-1)
    keeper.close()
    for choice in find_restore_points({"here": replica_store.held()}):
        load_all(kit, kit.source(replica_store, choice=choice), kit.state(choice.step), 3)
    assert {one.step for one in replica_store.held()} == {1, 2, 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_tensors_are_put_and_restored(kit, replica_store):
    tensors = kit.state(4)
    keeper = kit.keeper(replica_store, 0, 1)
    keeper.put(4, [kit.shard(name, tensor.cuda()) for name, tensor in tensors.items()], {}, held=-1)
    keeper.close()
    load_all(kit, kit.source(replica_store), tensors, 2)


def test_without_memfd_a_nameless_file_will_do(kit, monkeypatch):
    monkeypatch.delattr("os.memfd_create", raising=False)
    replica_store = ReplicaStore(1)
    kit.put_all(replica_store, kit.state(6), 1, step=6)
    load_all(kit, kit.source(replica_store), kit.state(6), 2)
    replica_store.close()


def test_no_memory_is_a_message_and_not_a_signal(kit, replica_store, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    keeper = kit.keeper(replica_store, 0, 1)
    with pytest.raises(SystemFailure) as caught:
        keeper.put(1, [kit.shard("w", torch.zeros(1000))], {}, held=-1)
    assert str(caught.value).splitlines() == [
        "checkpoint.memory_every: no 9,376 bytes of host memory for a copy of the state: No space left on device",
        "  a rank that fails is restored from copies of the last steps; checkpoints on disk are written from one",
        "  memory_every = 0 for checkpoints on disk alone (one copy instead of three), or fewer ranks on this host",
    ]
    assert replica_store.held() == []
    keeper.close()
