"""The same small model under other people's recovery, for recovery.py: workers of torchrun and of torchft.

    torchrun ... benchmarks/recovery_workers.py torchrun FOLDER
    python benchmarks/recovery_workers.py torchft FOLDER N

Both write a line of JSON per step to FOLDER/steps-N.jsonl, with the time at which the step had ended.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from phalanx.job.load import load
from phalanx.train.models.decoder import Decoder

JOB = Path(__file__).parent.parent / "examples" / "drill.toml"
SAVE_EVERY = 10  # steps; a save here takes about as long as a step
ROWS, MICRO = 4, 2  # of each of four ranks: the job's 16 sequences


def model_of() -> tuple[Decoder, int]:
    """The drill's model with its first weights, and the length of its sequences."""
    job = load(str(JOB)).job
    model = Decoder(job.model)
    model.init_weights(0)
    return model, job.data.sequence


def learn(model: torch.nn.Module, vocab: int, sequence: int, seed: int) -> None:
    """Forward and backward of this rank's rows."""
    rows = torch.randint(0, vocab, (ROWS, sequence + 1), generator=torch.Generator().manual_seed(seed))
    for part in rows.split(MICRO):
        logits = model(part[:, :-1])
        (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * MICRO / ROWS).backward()


@contextmanager
def log_of(folder: Path, number: int) -> Iterator[Any]:
    """A function that writes one line."""
    with open(folder / f"steps-{number}.jsonl", "a", encoding="utf-8") as file:

        def write(**fields: Any) -> None:
            file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **fields}) + "\n")
            file.flush()

        yield write


def under_torchrun(folder: Path) -> None:
    """FSDP2, a checkpoint every few steps, and after a restart the newest of them."""
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, sequence = model_of()
    vocab = model.shape.vocab
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    step = restore(folder, model, optimizer)
    with log_of(folder, rank) as write:
        while True:
            learn(model, vocab, sequence, seed=1000 * step + rank)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            write(step=step, world=dist.get_world_size(), epoch=attempt)
            step += 1
            if step % SAVE_EVERY == 0:
                save(folder, model, optimizer, step)


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"checkpoint-{step}")
    if dist.get_rank() == 0:
        (folder / "newest.tmp").write_text(str(step))
        os.replace(folder / "newest.tmp", folder / "newest")


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (folder / "newest").exists():
        return 0
    step = int((folder / "newest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"checkpoint-{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step


def under_torchft(folder: Path, number: int) -> None:
    """A replica group of one rank: torchft shards inside a group, and loses a group as a whole."""
    logging.disable(logging.INFO)
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    model, sequence = model_of()
    vocab = model.shape.vocab
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        replica_id=f"replica_{number}_",
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    with log_of(folder, number) as write:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()  # asks for the quorum of this step
            learn(wrapped, vocab, sequence, seed=1000 * before + number)
            optimizer.step()
            if manager.current_step() > before:  # else a peer was lost in it, and nobody took it
                write(step=before, world=manager.num_participants(), epoch=manager.num_participants())


def lighthouse(folder: Path) -> None:
    """torchft's meeting point, with the patience of its documentation's examples cut to a second."""
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    address = house.address().replace("[::]", "localhost")
    (folder / "address.json").write_text(json.dumps({"address": address}) + "\n", encoding="utf-8")
    time.sleep(3600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "torchrun":
        under_torchrun(Path(sys.argv[2]))
    elif sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]))
    else:
        under_torchft(Path(sys.argv[2]), int(sys.argv[3]))
