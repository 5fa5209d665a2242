"""Two errors of torch.compile that train wrong models without a word, each in a few lines without Phalanx.

    python benchmarks/torch_compile_errors.py        # CPU, gloo, two processes; about a minute

Seen on 2026-11-16. torch 2.11: the gradient through a filled tensor is 0.0. torch 2.13: the loss over a split
vocabulary is off by 0.6 on the second start. `train/parallel/exchanges.py` and `train/parallel/compiling.py` keep
them away.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

RANKS = 2


def split_vocabulary_loss(rank: int) -> float:
    """A compiled cross entropy over a vocabulary split over two ranks: which half is mine is a constant of the code."""
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    whole = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    logits = DTensor.from_local(whole.chunk(RANKS, dim=-1)[rank].clone().requires_grad_(), mesh, [Shard(-1)])
    with loss_parallel():
        loss = torch.compile(F.cross_entropy)(logits, torch.arange(8) * 2)
        loss.backward()
    right = F.cross_entropy(whole, torch.arange(8) * 2)
    return float((loss.detach().full_tensor() - right).abs())


class Filled(torch.autograd.Function):
    """An all-to-all over one rank, written as c10d has it: the output is made first and filled then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Filled.forward(ctx, grad)


def gradient_through_filled() -> float:
    """Norm of a gradient that must be 2 sqrt(4)."""
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda one: Filled.apply(one * 2).sum(), backend="aot_eager")(x).backward()
    assert x.grad is not None
    return float(x.grad.norm())


def rank_main(rank: int, ranks: int, store: str) -> None:
    """What one process of a start does; the last rank speaks, because it loads what another rank compiled."""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if ranks == 1:
        print(f"  gradient through a filled tensor: {gradient_through_filled():.1f} instead of 4.0", flush=True)
    else:
        error = split_vocabulary_loss(rank)
        if rank == ranks - 1:
            print(f"  loss over a split vocabulary: off by {error:.2e}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Everything twice over one compile cache."""
    if len(sys.argv) == 4:
        rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        for start in ("cold", "warm"):
            print(f"torch {torch.__version__}, {start} compile cache", flush=True)
            for ranks in (1, RANKS):
                command = [sys.executable, __file__]
                arguments = [[str(rank), str(ranks), f"{folder}/{start}-{ranks}"] for rank in range(ranks)]
                for one in [subprocess.Popen([*command, *more], env=environment) for more in arguments]:
                    one.wait()


if __name__ == "__main__":
    main()
