"""Shards of small tensors, cut in every way a layout can cut them, and worlds that save them rank by rank."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.save import SavedCheckpoint, save_checkpoint

Spans = list[tuple[int, int]]


def shard(name, tensor, shape=None, start=None, owner=True):
    shape = tuple(tensor.shape) if shape is None else tuple(shape)
    start = (0,) * len(shape) if start is None else tuple(start)
    return TensorShard(name=name, tensor=tensor, shape=shape, start=start, replicas=1, owner=owner, groups={})


def chunks(size: int, count: int) -> Spans:
    """As torch.chunk and FSDP cut: equal chunks, the last ones smaller or empty."""
    step = -(-size // count) if size else 0
    edges = [min(size, step * place) for place in range(count + 1)]
    return list(pairwise(edges))


def split(spans: Spans, kind: str, count: int, rng: random.Random) -> list[Spans]:
    """`count` boxes that tile the box `spans`; some may be empty."""
    if count == 1 or not spans:
        return [spans] + [[(0, 0)] * len(spans) if spans else None for _ in range(count - 1)]
    if kind == "uneven":
        dim = rng.randrange(len(spans))
        low, high = spans[dim]
        at = rng.randint(low, high)
        left = rng.randint(1, count - 1)
        halves = [[*spans[:dim], half, *spans[dim + 1 :]] for half in ((low, at), (at, high))]
        return split(halves[0], kind, left, rng) + split(halves[1], kind, count - left, rng)
    dim = 0 if kind == "rows" else len(spans) - 1
    low, high = spans[dim]
    return [[*spans[:dim], (low + a, low + b), *spans[dim + 1 :]] for a, b in chunks(high - low, count)]


def cut(tensors, world: int, rng: random.Random, kinds=("whole", "rows", "columns", "uneven", "replicas")):
    """For every rank its shards: each tensor cut in a way of its own, the boxes dealt to ranks at random."""
    ranks = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        kind = rng.choice(kinds)
        parts = {"whole": 1, "replicas": rng.randint(1, world)}.get(kind, world)
        boxes = split([(0, size) for size in tensor.shape], kind, parts, rng)
        holders = rng.sample(range(world), world)
        for place, rank in enumerate(holders):
            owner = place < len(boxes)
            if not owner and kind != "replicas":
                continue
            box = boxes[place % len(boxes)]
            if box is None:
                continue
            local = tensor[tuple(slice(a, b) for a, b in box)].clone()
            ranks[rank].append(shard(name, local, tensor.shape, [a for a, _ in box], owner))
    return ranks


def emptied(ranks):
    """The same shards with nothing in them yet."""

    def blank(one):
        return shard(one.name, torch.full_like(one.tensor, 1), one.shape, one.start, one.owner)

    return [[blank(one) for one in shards] for shards in ranks]


def save_all(root: Path, ranks, *, step=100, attempt="a1", meta=None, **options) -> SavedCheckpoint:
    """Every rank saves, rank 0 last: it then finds all notes and never waits."""
    for rank in reversed(range(len(ranks))):
        saved = save_checkpoint(
            root,
            step=step,
            attempt=attempt,
            shards=ranks[rank],
            meta=meta or {},
            rank=rank,
            world=len(ranks),
            **options,
        )
    return saved


def some_tensors(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.tokens.weight": torch.randn(13, 6, generator=draw),
        "layers.0.attn.wq.weight": torch.randn(8, 6, generator=draw, dtype=torch.float64),
        "layers.0.mlp.experts.up": torch.randn(4, 5, 3, generator=draw).bfloat16(),
        "layers.0.mlp.router.counts": torch.arange(5),
        "norm.weight": torch.randn(7, generator=draw).half(),
        "norm.weight#exp_avg": torch.randn(7, generator=draw),
        "scale": torch.tensor(3.5),
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        shard=shard, cut=cut, emptied=emptied, save_all=save_all, some_tensors=some_tensors, same_bits=same_bits
    )


@pytest.fixture
def saved(tmp_path):
    """Two commits of four ranks, steps 100 and 200, in tmp_path/checkpoints."""
    root, rng = tmp_path / "checkpoints", random.Random(0)
    for step in (100, 200):
        save_all(root, cut(some_tensors(step), 4, rng), step=step, meta={"tokens": step * 1000})
    return root
