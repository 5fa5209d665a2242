"""The planner charges for optimizer state what the trainer's optimizers keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.layout import Layout
from phalanx.plan.request import PlanRequest, request_from_job
from phalanx.plan.score import price_layouts
from phalanx.train.models.decoder import Decoder
from phalanx.train.optim.build_optimizer import build_optimizer
from phalanx.train.parallel.tensor_shard import TensorShard

JOB = """\
name = "test"
[model]
preset = "{preset}"
[data]
sequence = 1024
[batch]
global_sequences = 8
[optim]
name = "{name}"
[precision]
optimizer_state = "{state}"
[cluster]
spec = "8xH200:1"
"""
LAYOUT = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=1, accumulation=8, recompute="full", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
MASTER_BYTES = 4.0  # the planner counts the fp32 weights as optimizer state


def charged_bytes(request: PlanRequest) -> float:
    _, _, memory = price_layouts(request, [LAYOUT])
    return float(memory.optimizer[0])


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("adamw", "fp32"),
        ("adamw", "bf16"),
        ("adamw8bit", "fp32"),
        ("adafactor", "fp32"),
        ("muon", "fp32"),
        ("muon", "bf16"),
    ],
)
def test_state_bytes_are_those_the_planner_charges(tmp_path: Path, preset: str, name: str, state: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(preset=preset, name=name, state=state))
    job = load(path).job
    request, _ = request_from_job(job, resolve_cluster(job.cluster.target))
    with torch.device("meta"):
        model = Decoder(job.model)
    shards = [
        TensorShard(
            name=key,
            tensor=parameter.detach(),
            shape=tuple(parameter.shape),
            start=(0,) * parameter.ndim,
            replicas=1,
            owner=True,
            groups={},
        )
        for key, parameter in model.named_parameters()
    ]
    parameters = sum(shard.numel for shard in shards)
    optimizer = build_optimizer(shards, optim=job.optim, state_dtype=state, decays=lambda name: True)
    kept = optimizer.state_bytes() + MASTER_BYTES * parameters
    assert charged_bytes(request) == pytest.approx(kept, rel=0.003)  # norms, and Adafactor's means, are not charged
