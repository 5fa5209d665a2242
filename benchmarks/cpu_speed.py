"""Tokens per second of the engine, a bare DistributedDataParallel loop and Accelerate with FSDP2: one run, 2 CPU ranks.

    python benchmarks/cpu_speed.py [--rounds 5] [--steps 4]

Same model code, same batch, same fused optimizer, gradient clipping in all three. Rounds of the contestants alternate,
so that a busy neighbour hurts them alike; the median of the paired ratios is what counts. Processor seconds of a rank
are given too: they leave out waiting, but hardly notice a neighbour.

Accelerate 1.15 drops an FSDP plugin on a CPU without a word and wraps the model in DistributedDataParallel. So its
state is set to FSDP by hand, and what it made of the model is checked; how it runs left alone is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.models.decoder import Decoder
from phalanx.train.rank_settings import Settings

SHAPE = ModelShape(name="small", layers=6, hidden=384, heads=6, kv_heads=2, head_dim=64, ffn=1024, vocab=8192)
SEQUENCE, BATCH, MICRO, RANKS = 256, 16, 8, 2  # no accumulation: all three then move the same bytes
Step = Callable[[], None]


def layout(zero: int) -> Layout:
    return Layout(
        data=RANKS, shard=RANKS if zero else 1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1,
        zero=zero, sequence_parallel=False, micro_batch=MICRO, accumulation=BATCH // RANKS // MICRO, recompute="none",
        precision="fp32", schedule="1f1b", offload="none", compression="none",
    )  # fmt: skip


def ours(zero: int, rows: torch.Tensor) -> Step:
    settings = Settings(layout=layout(zero), sequence=SEQUENCE)
    engine = Engine(SHAPE, settings, Optim(), device=torch.device("cpu"))
    engine.initialise()
    return lambda: engine.step(rows[:, :-1], rows[:, 1:], lr=1e-4) and None


def bare_ddp(rows: torch.Tensor) -> Step:
    model = Decoder(SHAPE)
    model.init_weights(0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    parts = rows.split(MICRO)

    def step() -> None:
        optimizer.zero_grad()
        for index, part in enumerate(parts):
            wrapped.require_backward_grad_sync = index == len(parts) - 1
            logits = wrapped(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / len(parts)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def with_accelerate(rows: torch.Tensor, *, sharded: bool) -> Step:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, GradientAccumulationPlugin

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    parts = rows.split(MICRO)
    accumulation = GradientAccumulationPlugin(num_steps=len(parts), sync_with_dataloader=False)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_plugin=accumulation)
    if sharded:
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = Decoder(SHAPE)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, FSDPModule) is not sharded:
        raise RuntimeError(f"Accelerate made a {type(model).__name__} of the model")

    def step() -> None:
        for part in parts:
            with accelerator.accumulate(model):
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        loss.item()

    return step


def rank_main(rank: int, folder: str, rounds: int, steps: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    rows = torch.randint(0, SHAPE.vocab, (BATCH // RANKS, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    makers = {
        "bare DDP": bare_ddp, "ours, replicated": lambda r: ours(0, r),
        "accelerate, left alone": lambda r: with_accelerate(r, sharded=False),
        "accelerate FSDP2": lambda r: with_accelerate(r, sharded=True), "ours, ZeRO-3": lambda r: ours(3, r),
    }  # fmt: skip
    contestants: dict[str, Step] = {}
    for name, make in makers.items():
        try:
            contestants[name] = make(rows)
            contestants[name]()
        except Exception as error:
            if rank == 0:
                print(f"{name}: not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            contestants.pop(name, None)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    worked: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            taken[name].append((time.perf_counter() - began) / steps)
            worked[name].append((time.process_time() - used) / steps)
    if rank == 0:
        report(taken, worked)
    dist.barrier()
    dist.destroy_process_group()


def report(taken: dict[str, list[float]], worked: dict[str, list[float]]) -> None:
    for name, times in taken.items():
        step_s, processor_s = statistics.median(times), statistics.median(worked[name])
        rate = round(BATCH * SEQUENCE / step_s)
        print(
            json.dumps(
                {"contestant": name, "tokens_per_s": rate, "step_s": round(step_s, 3), "cpu_s": round(processor_s, 3)}
            )
        )
    for mine, other in (("ours, replicated", "bare DDP"), ("ours, ZeRO-3", "accelerate FSDP2")):
        if mine in taken and other in taken:
            wall, processor = (
                statistics.median(b / a for a, b in zip(times[mine], times[other], strict=True))
                for times in (taken, worked)
            )
            rounds = len(taken[mine])
            print(f"{mine} / {other}: {wall:.3f}, by processor time {processor:.3f} (median of {rounds} paired rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, args.rounds, args.steps)) for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
