"""Where a step's time goes on one GPU, by kernel: `gpu_training.py`'s shapes under torch's profiler.

PYTHONPATH=src python benchmarks/step_kernels.py [--shape 1.2b] [--compute fp8] [--apart] [--top 40]
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from gpu_training import batch_tokens, shape_of

from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.parallel.float8_choice import fuse_layers
from phalanx.train.rank_settings import Settings


def main() -> None:
    """One step, profiled, after four."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.2b")
    parser.add_argument("--compute", default="bf16")
    parser.add_argument("--apart", action="store_true", help="fp8 with each matrix on its own")
    parser.add_argument("--top", type=int, default=40)
    args = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shape, sequence, micro_tokens = shape_of(32000, args.shape), 2048, 32768
    if args.shape == "8b-slice":
        sequence, micro_tokens = 8192, 16384
    micro, batch = micro_tokens // sequence, batch_tokens(shape) // sequence
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=micro, accumulation=batch // micro, recompute="none", precision=args.compute, schedule="1f1b",
        offload="none", compression="none",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        settings = Settings(layout=layout, sequence=sequence, compute=args.compute, compile=True)
        engine = Engine(shape, settings, Optim(), device=torch.device("cuda"))
        if args.compute == "fp8":
            for part in engine.parts:
                fuse_layers(list(part.model.layers.values()), fused=not args.apart)
        engine.initialise()
        rows = torch.randint(0, shape.vocab, (batch, sequence + 1), device="cuda")
        for _ in range(4):
            engine.step(rows[:, :-1], rows[:, 1:], lr=1e-4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.step(rows[:, :-1], rows[:, 1:], lr=1e-4)
            torch.cuda.synchronize()
        found = sorted(
            ((one.self_device_time_total / 1e3, one.count, one.key) for one in profile.key_averages()), reverse=True
        )
        print(f"{args.shape} {args.compute}: {sum(one[0] for one in found):.1f} ms of kernels")
        for spent_ms, count, name in found[: args.top]:
            print(f"{spent_ms:8.2f} ms {count:5d} × {name[:150]}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
