"""A rank never runs what was compiled for another place in the mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from phalanx.train.parallel.compiling import prepare_compiler
from phalanx.train.parallel.dims import ParallelDims, build_meshes

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
dims = ParallelDims(data=1, shard=1, tensor=2, context=1, pipeline=1, expert=1, zero=0)
meshes = build_meshes(dims, "cpu", experts=False)
prepare_compiler(meshes)
whole = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
logits = DTensor.from_local(whole.chunk(2, dim=-1)[rank].clone(), meshes.dense["tensor"], [Shard(-1)])
targets = torch.arange(8) * 2
with loss_parallel():
    loss = torch.compile(F.cross_entropy)(logits, targets)
print(float((loss.full_tensor() - F.cross_entropy(whole, targets)).abs()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_second_start_loads_its_own_code_from_the_cache(tmp_path: Path) -> None:
    # One thread compiles: otherwise every rank starts a pool of processes that import torch.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for start in ("cold", "warm"):
        commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / start)] for rank in range(2)]
        ranks = [
            subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for one in commands
        ]
        for rank, process in enumerate(ranks):
            out, errors = process.communicate()
            assert process.returncode == 0, errors
            assert float(out) < 1e-6, f"rank {rank}, {start} compile cache"
