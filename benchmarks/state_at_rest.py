"""What comparing memory between every two updates costs on a GPU, and that it finds flipped bits.

    python benchmarks/state_at_rest.py [--device cuda] [--tokens 65536 16384] [--steps 10] [--rounds 6] [--flips 1000]
    python benchmarks/state_at_rest.py --device cpu --layers 2 --hidden 64 --vocab 320 --tokens 256 --sequence 64

One process trains a 341M Llama (24 layers, 1024 wide) in bf16 with fp32 weights and moments beside, 14 bytes per
parameter. Blocks of steps with the guard and without it take turns; a block is timed from its first launch to the end
of its last kernel. Then single bits of weights, of moments and of the model's bf16 copies are flipped and put back.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import Counter

import torch
import torch.distributed as dist

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.guard.divergence import ReplicaGuard
from phalanx.train.guard.memory_sums import load_kernel
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_settings import Settings
from phalanx.train.step_result import MemoryChanged


def build_engine(args: argparse.Namespace, tokens: int) -> Engine:
    """One rank that holds everything, in micro-batches of at most 16,384 tokens."""
    width, device = args.hidden, torch.device(args.device)
    head = 64 if width >= 512 else 16
    shape = ModelShape(
        name="llama", layers=args.layers, hidden=width, heads=width // head, kv_heads=width // head, head_dim=head,
        ffn=width * 11 // 4, vocab=args.vocab, tied=True,
    )  # fmt: skip
    micro = max(1, min(16384, tokens) // args.sequence)
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=micro, accumulation=tokens // args.sequence // micro, recompute="none", precision="bf16",
        schedule="1f1b", offload=args.offload, compression="none",
    )  # fmt: skip
    settings = Settings(layout=layout, sequence=args.sequence, compute="bf16", compile=device.type == "cuda")
    engine = Engine(shape, settings, Optim(), device=device)
    engine.initialise()
    return engine


class GuardedSteps:
    """Steps on one batch, with the guard or without it, as the training loop calls both."""

    def __init__(self, engine: Engine, tokens: int, sequence: int) -> None:
        self.engine, self.done = engine, 0
        self.guard = ReplicaGuard(
            engine.state, every=10**9, each_step=True, at_rest=engine.at_rest, device=engine.device
        )
        draw = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, engine.shape.vocab, (tokens // sequence, sequence + 1), generator=draw)

    def take(self, *, guarded: bool) -> None:
        """One step."""
        self.engine.compare_memory = self.guard.compare_memory if guarded else lambda: None
        self.engine.step(self._rows[:, :-1], self._rows[:, 1:], lr=1e-4)
        self.done += 1
        if guarded:
            assert self.guard.check(self.done) is None
        else:
            self.guard.forget()

    def time_block(self, steps: int, *, guarded: bool) -> float:
        """Seconds a step."""
        self.take(guarded=guarded)  # so that the first one that is timed has something to compare with
        wait_for(self.engine.device)
        began_s = time.perf_counter()
        for _ in range(steps):
            self.take(guarded=guarded)
        wait_for(self.engine.device)
        return (time.perf_counter() - began_s) / steps


def wait_for(device: torch.device) -> None:
    """All that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def flip(shard: TensorShard, byte: int, bit: int) -> None:
    """One bit, where it lies."""
    raw = shard.tensor.detach().view(-1).view(torch.uint8)
    raw[byte] ^= 1 << bit


def kind_of(shard: TensorShard) -> str:
    """What a tensor is for."""
    _, _, what = shard.name.partition("#")
    return {"": "weights", "model": "model's copies"}.get(what, "moments")


def flip_many(steps: GuardedSteps, flips: int) -> Counter[tuple[str, bool]]:
    """(kind, whether it was found and named rightly) of single bits anywhere in each kind of tensor."""
    draw, found = random.Random(22), Counter[tuple[str, bool]]()
    held = [shard for shard in steps.engine.at_rest() if shard.tensor.numel()]
    for kind in sorted({kind_of(shard) for shard in held}):
        mine = [shard for shard in held if kind_of(shard) == kind]
        for _ in range(flips):
            shard = draw.choice(mine)
            byte = draw.randrange(shard.tensor.numel() * shard.tensor.element_size())
            bit = draw.randrange(8)
            steps.guard.check(steps.done, is_saved=shard.tensor.device.type != steps.engine.device.type)
            assert steps.guard._sums._kept is not None
            steps.guard._sums._kept.in_host()  # what is offloaded is added up in a thread
            flip(shard, byte, bit)
            is_found = bool(steps.guard.compare_memory()) and steps.guard.name_changed(0).tensors == (shard.name,)
            flip(shard, byte, bit)
            found[kind, is_found] += 1
    return found


def flip_between_steps(steps: GuardedSteps) -> None:
    """In a weight, a moment and a copy: the next step is not taken, and says why."""
    for kind in ("weights", "moments", "model's copies"):
        shard = next((one for one in steps.engine.at_rest() if kind_of(one) == kind and one.tensor.numel() > 9), None)
        if shard is None:
            continue
        steps.take(guarded=True)
        if shard.tensor.device.type != steps.engine.device.type:
            print(f"{kind}: in host memory, which is looked at in steps whose digests are compared alone")
            continue
        flip(shard, 9, 3)
        try:
            steps.take(guarded=True)
            print(f"{kind}: SILENT")
        except MemoryChanged:
            print(f"{kind}: {steps.guard.name_changed(steps.done).problem().render().splitlines()[0]}")
        flip(shard, 9, 3)


def main() -> None:
    """Print a row for each batch size, then what came of the flips."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 16384], help="of a step")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--offload", default="none", choices=["none", "optimizer"])
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flips", type=int, default=1000, help="of each kind of tensor")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        print(f"{name}, torch {torch.__version__}, offload {args.offload}", flush=True)
        for tokens in args.tokens:
            steps = GuardedSteps(build_engine(args, tokens), tokens, args.sequence)
            measure(steps, tokens, args)
        if on_gpu:
            print("sums by one kernel" if load_kernel() is not None else "sums by torch: no Triton, or no compiler")
        flip_between_steps(steps)
        found = flip_many(steps, args.flips)
        for (kind, is_found), count in sorted(found.items()):
            print(f"{kind}: {count:,} flips {'found, and the tensor named' if is_found else 'MISSED'}")
        dist.destroy_process_group()


def measure(steps: GuardedSteps, tokens: int, args: argparse.Namespace) -> None:
    """One row."""
    resting = steps.engine.at_rest()
    size = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in resting)
    for guarded in (False, True):  # compiled, and the kernel loaded
        steps.time_block(2, guarded=guarded)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.rounds):
        for guarded in (False, True) if number % 2 else (True, False):
            times[guarded].append(steps.time_block(args.steps, guarded=guarded))
    without_s, with_s = (statistics.median(times[guarded]) for guarded in (False, True))
    wait_for(steps.engine.device)
    began_s = time.perf_counter()
    for _ in range(10):
        steps.guard.check(steps.done)
        steps.guard.compare_memory()
    wait_for(steps.engine.device)
    both_s = (time.perf_counter() - began_s) / 10
    print(
        f"{tokens:,} tokens a step, {size / 1e9:.2f} GB in {len(resting)} tensors: "
        f"{without_s * 1e3:.2f} ms without, {with_s * 1e3:.2f} ms with, {with_s / without_s - 1:+.2%}; "
        f"the guard's two passes alone {both_s * 1e3:.2f} ms "
        f"(blocks without {min(times[False]) * 1e3:.2f} to {max(times[False]) * 1e3:.2f}, "
        f"with {min(times[True]) * 1e3:.2f} to {max(times[True]) * 1e3:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
