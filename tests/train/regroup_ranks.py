"""`python regroup_ranks.py OUT`: three replicas of two ranks with ZeRO-2, in float64; one is lost and rejoins.

Every rank is a forked process with the engine and the rounds of the trainer; what the coordinator would tell them is
written down here. Then the same tokens in one process. Writes what each saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.train.data.batches import IGNORED
from phalanx.train.engine import Engine
from phalanx.train.guard.divergence import digest_shards
from phalanx.train.parallel.across_replicas import AcrossReplicas, ReplicaLost
from phalanx.train.rank_settings import Settings
from phalanx.train.regroup import ReplicaRounds

REPLICAS, SHARD, SEQUENCE, STEPS = 3, 2, 16, 6
LOST, LOST_AT, BACK_AT = 1, 2, 4  # the replica dies inside step 2; steps 2 and 3 are without it
LATE = REPLICAS  # stands for its second life
SHAPE = ModelShape(name="llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
WHOLE = Layout(
    data=REPLICAS * SHARD, shard=SHARD, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=2,
    sequence_parallel=False, micro_batch=1, accumulation=2, recompute="none", precision="fp32", schedule="1f1b",
    offload="none", compression="none",
)  # fmt: skip
WAIT = timedelta(seconds=300)


def rows(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences; each data rank has another number of tokens that count, so that weights by replica would show."""
    draw = torch.Generator().manual_seed(1000 * step + data_rank)
    both = torch.randint(0, SHAPE.vocab, (2, SEQUENCE + 1), generator=draw)
    targets = both[:, 1:].clone()
    targets[1, data_rank + 3 :] = IGNORED
    return both[:, :-1], targets


def engine_of(layout: Layout, across: AcrossReplicas | None = None) -> Engine:
    settings = Settings(layout=layout, sequence=SEQUENCE, compute="fp64", reduce="fp64", master="fp64")
    made = Engine(SHAPE, settings, Optim(lr=1e-2, clip=0.5), device=torch.device("cpu"), across=across)
    made.initialise()
    return made


def message(number: int, present: list[int], port: int) -> dict[str, Any]:
    return {"round": number, "present": present, "store": ["127.0.0.1", port]}


def run_rank(life: int, position: int, port: int) -> dict[str, Any]:
    """One rank of one life of a replica: the lost one has two."""
    replicas = ModelReplicas.of(WHOLE)
    replica = LOST if life == LATE else life
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    inner = dist.PrefixStore(f"life/{life}", store)
    dist.init_process_group("gloo", store=inner, rank=position, world_size=replicas.size, timeout=WAIT)
    across = AcrossReplicas(replicas, replicas.rank(replica, position))
    others = [one for one in range(REPLICAS) if one != LOST]
    rounds_told = {0: message(0, [0, 1, 2], port), 1: message(1, others, port), 2: message(2, [0, 1, 2], port)}
    rounds = ReplicaRounds(
        across,
        generation=1,
        first=None if life == LATE else rounds_told[0],
        wait=lambda after: rounds_told[2 if life == LATE else after + 1],
        is_due=lambda: False,
        timeout_s=300.0,
    )
    engine = engine_of(replicas.inner, across)
    if life == LATE:
        with torch.no_grad():  # whatever it has is worth nothing
            for shard in engine.state():
                shard.tensor.fill_(7.0)
    step = rounds.regroup(engine, 0)
    losses, lost_in, first = {}, [], step
    while step < STEPS:
        if step == LOST_AT and life == LOST and position == 1:
            os._exit(0)  # in the step: the others have begun it
        if step == BACK_AT and life != LATE and first == 0 and not store.check([f"back/{life}/{position}"]):
            store.set(f"back/{life}/{position}", "")
            step = rounds.regroup(engine, step)
        try:
            losses[step] = engine.step(*rows(step, engine.data_rank), lr=1e-2).loss
        except ReplicaLost:
            lost_in.append(step)
            step = rounds.regroup(engine, step)
            continue
        step += 1
    tensors = {one.name: one.tensor.tolist() for one in engine.weights()}
    return {
        "first": first,
        "losses": losses,
        "lost_in": lost_in,
        "digest": digest_shards(engine.state()),
        "starts": {one.name: list(one.start) for one in engine.weights()},
        "weights": tensors,
    }


def run_alone() -> dict[str, Any]:
    """One process that learns from the same tokens: those of a replica that is left out do not count."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    every = WHOLE.data
    engine = engine_of(replace(WHOLE, data=1, shard=1, zero=0, accumulation=2 * every))
    losses = {}
    for step in range(STEPS):
        parts = [rows(step, rank) for rank in range(every)]
        if LOST_AT <= step < BACK_AT:
            absent = range(LOST * SHARD, (LOST + 1) * SHARD)
            parts = [(x, torch.full_like(y, IGNORED) if rank in absent else y) for rank, (x, y) in enumerate(parts)]
        tokens, targets = (torch.cat(some) for some in zip(*parts, strict=True))
        losses[step] = engine.step(tokens, targets, lr=1e-2).loss
    return {"losses": losses, "weights": {one.name: one.tensor.tolist() for one in engine.weights()}}


def forked(path: Path, work: Callable[[], dict[str, Any]]) -> int:
    """A process that writes what it found."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            path.write_text(json.dumps(work()))
            code = 0
        finally:
            os._exit(code)
    return pid


def main(out: Path) -> None:
    """All of them; the parent holds the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT, wait_for_workers=False)
    pids = [forked(out / "alone.json", run_alone)]
    for life in range(REPLICAS + 1):
        for position in range(SHARD):
            work = lambda life=life, position=position: run_rank(life, position, store.port)  # noqa: E731
            pids.append(forked(out / f"rank-{life}-{position}.json", work))
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
