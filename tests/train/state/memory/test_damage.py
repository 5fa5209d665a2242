"""A bit that is not as it was written is never trained on."""

import random

import pytest

from phalanx.elastic.replica_store import DATA_AT, HEADER_BYTES
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.restore import load_shards

FLIPS = 200


def spots(source, segment, rank):
    """Every byte of a snapshot that means something."""
    header = segment.header()
    entries = source.index(rank).shards
    inside = [at for entry in entries for at in range(entry.offset, entry.offset + entry.size_bytes)]
    return [*range(HEADER_BYTES), *inside, *range(header.index_at, header.end)]


def test_every_flipped_bit_is_found(kit, replica_store):
    kit.put_all(replica_store, kit.state(), 2, step=9)
    segment, rng = replica_store.segment("own", 1, 0), random.Random(0)
    choice = kit.source(replica_store)._choice
    places = spots(kit.source(replica_store), segment, 1)
    refused = 0
    for _ in range(FLIPS):
        at, bit = rng.choice(places), 1 << rng.randrange(8)
        segment.view()[at] ^= bit
        held = {one.rank for one in replica_store.held()}
        shards = kit.emptied(kit.cut(kit.state(), 1))[0]
        with pytest.raises(DamagedCheckpoint):
            load_shards(kit.source(replica_store, choice=choice), shards)
        assert all((one.tensor == 1).all() for one in shards)  # nothing was filled
        assert held == ({0} if at < HEADER_BYTES else {0, 1})  # a header that is wrong is none
        refused += 1
        segment.view()[at] ^= bit
    assert refused == FLIPS
    load_shards(kit.source(replica_store), kit.emptied(kit.cut(kit.state(), 1))[0])


def test_the_message_names_the_tensor_and_every_copy(kit, replica_store):
    kit.put_all(replica_store, kit.state(), 2, step=9)
    source = kit.source(replica_store)
    entry = next(entry for entry in source.index(1).shards if entry.name == "norm.weight")
    replica_store.segment("own", 1, 0).view()[entry.offset] ^= 1
    with pytest.raises(DamagedCheckpoint) as caught:
        load_shards(kit.source(replica_store), kit.emptied(kit.cut(kit.state(), 1))[0])
    text = str(caught.value).splitlines()
    assert text[0].startswith(
        "memory of step 9 (generation 1): holds no intact copy of norm.weight of rank 1: here: norm.weight"
    )
    assert text[1:] == ["  training would go on with wrong numbers", "  restore the checkpoint before it"]


def test_a_snapshot_that_was_overwritten_meanwhile_is_not_taken_for_the_one_chosen(kit, replica_store):
    kit.put_all(replica_store, kit.state(1), 1, step=1)
    source = kit.source(replica_store)
    keeper = kit.keeper(replica_store, 0, 1, generation=2)
    kit.put_all(replica_store, kit.state(2), 1, step=1, generation=2, held=5, keepers=[keeper])
    keeper.close()
    with pytest.raises(DamagedCheckpoint, match="it is no longer there"):
        load_shards(source, kit.emptied(kit.cut(kit.state(), 1))[0])


def test_a_header_cannot_point_outside_its_segment(kit, replica_store):
    kit.put_all(replica_store, kit.state(), 1, step=1)
    from dataclasses import replace

    segment = replica_store.segment("own", 0, 0)
    segment.seal(replace(segment.header(), index_at=segment.size_bytes))
    assert replica_store.held() == []
    assert DATA_AT >= HEADER_BYTES
