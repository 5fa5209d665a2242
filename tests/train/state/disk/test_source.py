"""Anything that has indexes and tensors can be restored from, not only a folder."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from phalanx.train.state.checkpoint_index import DamagedCheckpoint, RankIndex, damaged_checkpoint
from phalanx.train.state.reader import CheckpointReader
from phalanx.train.state.restore import load_shards, prepare_restore
from phalanx.train.state.shards import lay_out_shards, region_of, whole_region


class Memory:
    """Shards of a world, as a source; `asked` says which ranks were read."""

    where, step, meta = "memory", 7, {"tokens": 70}

    def __init__(self, ranks, broken=()):
        self.ranks, self.world, self.broken, self.asked = ranks, len(ranks), broken, []

    def count(self, rank):
        return sum(shard.owner for shard in self.ranks[rank])

    def index(self, rank):
        self.asked.append(rank)
        shards = tuple(
            replace(shard, offset=place) for place, shard in enumerate(lay_out_shards(self.ranks[rank], rank))
        )
        return RankIndex(rank=rank, header_bytes=0, header_sha256="", shards=shards, meta={})

    @contextmanager
    def open(self, rank):
        yield Opened(self.ranks[rank], rank in self.broken)


class Opened:
    def __init__(self, shards, broken):
        self.shards, self.broken = shards, broken

    def check(self, shards):
        if self.broken:
            raise damaged_checkpoint("memory", "is gone")

    def read(self, shard, part):
        held = self.shards[shard.offset]
        return held.tensor[part.within(region_of(held))]


def rows(kit, world, fill=None):
    w = torch.arange(48.0).reshape(12, 4)
    step = 12 // world
    parts = [w[rank * step : (rank + 1) * step].clone() for rank in range(world)]
    if fill is not None:
        parts = [torch.full_like(part, fill) for part in parts]
    return [[kit.shard("w", part, w.shape, (rank * step, 0))] for rank, part in enumerate(parts)]


def test_another_world_fills_its_shards_from_it(kit):
    source, right = Memory(rows(kit, 4)), rows(kit, 3)
    for rank, (mine,) in enumerate(rows(kit, 3, fill=-1.0)):
        source.asked.clear()
        load_shards(source, [mine], rank=rank, world=3)
        assert torch.equal(mine.tensor, right[rank][0].tensor)
        assert len(source.asked) <= 3  # those near it in the old world, and no more


def test_what_it_refuses_changes_nothing(kit):
    source = Memory(rows(kit, 4), broken={3})
    (mine,) = rows(kit, 2, fill=-1.0)[1]
    with pytest.raises(DamagedCheckpoint, match="memory: is gone"):
        prepare_restore(source, [mine], rank=1, world=2)
    assert bool((mine.tensor == -1).all())
    load_shards(source, rows(kit, 2)[0])  # the broken rank is not needed here


def test_a_folder_is_one(kit, tmp_path):
    path = kit.save_all(tmp_path, rows(kit, 4), step=9, meta={"tokens": 5}, generation=3).path
    source = CheckpointReader(path)
    assert (source.where, source.step, source.world, source.meta) == (str(path), 9, 4, {"tokens": 5})
    assert [source.count(rank) for rank in range(4)] == [1] * 4
    entry = source.index(2).shards[0]
    with source.open(2) as tensors:
        tensors.check([entry])
        assert tensors.read(entry, entry.region).flatten().tolist() == [float(n) for n in range(24, 36)]
    assert whole_region(entry.shape).volume == 48
