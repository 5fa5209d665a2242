"""Small states cut over ranks, a replica store or two, and what a rank does with them."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import find_restore_points
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.in_memory import InMemoryCheckpointer
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.train.state.replica_server import ReplicaServer

SECRET = bytes(range(32))


def shard(name, tensor, shape=None, start=None, owner=True):
    shape = tuple(tensor.shape) if shape is None else tuple(shape)
    start = (0,) * len(shape) if start is None else tuple(start)
    return TensorShard(name=name, tensor=tensor, shape=shape, start=start, replicas=1, owner=owner, groups={})


def state(seed=0):
    """Whole tensors of all kinds: split ones, a scalar, any bits at all."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.tokens.weight": torch.randn(13, 6, generator=draw),
        "layers.0.attn.wq.weight": torch.randn(8, 6, generator=draw, dtype=torch.float64),
        "layers.0.mlp.experts.up": torch.randn(4, 5, 3, generator=draw).bfloat16(),
        "layers.0.mlp.router.counts": torch.randint(0, 2**40, (5,), generator=draw),
        "norm.weight": torch.randint(-(2**15), 2**15, (7,), generator=draw, dtype=torch.int16).view(torch.float16),
        "scale": torch.randn((), generator=draw),
    }


def cut(tensors, world):
    """As FSDP cuts: rows dealt to ranks, the last ones fewer or none; a scalar on all of them, written by the first."""
    ranks = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        for rank in range(world):
            if not tensor.dim():
                ranks[rank].append(shard(name, tensor.clone(), owner=rank == 0))
                continue
            rows = -(-tensor.shape[0] // world)
            part = tensor[rank * rows : (rank + 1) * rows].clone()
            begin = min(rank * rows, tensor.shape[0])
            ranks[rank].append(shard(name, part, tensor.shape, (begin, *[0] * (tensor.dim() - 1))))
    return ranks


def emptied(ranks):
    return [[shard(p.name, torch.ones_like(p.tensor), p.shape, p.start, p.owner) for p in shards] for shards in ranks]


def same_bits(one, other):
    def bits(tensor):
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def keeper(replica_store, rank, world, *, generation=1, slot=None, **options):
    options = {"peer": None, **options}
    return InMemoryCheckpointer(
        replica_store,
        slot=rank if slot is None else slot,
        rank=rank,
        world=world,
        generation=generation,
        secret=SECRET,
        **options,
    )


def put_all(replica_store, tensors, world, *, step, generation=1, held=-1, keepers=None):
    """Every rank puts its part, and all of it is complete."""
    own = keepers is None
    keepers = keepers or [keeper(replica_store, rank, world, generation=generation) for rank in range(world)]
    for one, shards in zip(keepers, cut(tensors, world), strict=True):
        one.put(step, shards, {"step": step}, held=held, rank_meta={"seed": step})
    for one in keepers:
        one._sealer.wait()
        if own:
            one.close()


def source(replica_store, host="here", *, choice=None, peers=None):
    choice = choice or find_restore_points({host: replica_store.held()})[0]
    return ReplicaSource(choice, replica_store=replica_store, local_host=host, peers=peers or {}, secret=SECRET)


def fork(work, *arguments):
    """Run in a child process; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, none of which hold a lock
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*arguments)
        code = 0
    finally:
        os._exit(code)


def reap(child):
    """How a child ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        SECRET=SECRET,
        shard=shard,
        state=state,
        cut=cut,
        emptied=emptied,
        same_bits=same_bits,
        keeper=keeper,
        put_all=put_all,
        source=source,
        fork=fork,
        reap=reap,
    )


@pytest.fixture
def replica_store():
    made = ReplicaStore(4)
    yield made
    made.close()


@pytest.fixture
def serve():
    """Starts replica servers that end with the test."""
    servers = []

    def start(replica_store, host="there"):
        servers.append(ReplicaServer(replica_store, secret=SECRET, address="127.0.0.1", host=host))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
