"""Small plans, made once, and steps built by hand."""

import pytest

from phalanx.plan.make import make_plan
from phalanx.sim.step.step_work import LayerPass, Sharing, StepWork

JOB = """\
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 64
micro = 1
[parallel]
schedule = "{schedule}"
pipeline = {pipeline}
tensor = 1
context = {context}
zero = {zero}
shard = {shard}
recompute = "none"
[cluster]
spec = "8xH100:4"
"""


def make(folder, *, schedule="1f1b", pipeline=4, zero=1, shard=8, context=1):
    path = folder / "job.toml"
    path.write_text(JOB.format(schedule=schedule, pipeline=pipeline, zero=zero, shard=shard, context=context))
    return make_plan(str(path))


@pytest.fixture(scope="session")
def piped(tmp_path_factory):
    """Four stages of 8 data ranks."""
    return make(tmp_path_factory.mktemp("piped"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """ZeRO-3 over 32 ranks in four domains."""
    return make(tmp_path_factory.mktemp("sharded"), pipeline=1, zero=3, shard=32)


def sharing(**seconds):
    none = dict.fromkeys(("reduce_s", "again_s", "after_s", "gather_s", "layer_gather_s", "layer_scatter_s"), 0.0)
    return Sharing(**{"tier": "nic", "overlap": 0.5, "gather_overlap": 0.5, **none, **seconds})


def by_hand(**changes):
    """Two stages of one layer: forward 1 s, backward 2 s, four micro-batches, nothing else."""
    stages = changes.pop("stages", 2)
    shared = changes.pop("shared", sharing())
    chunks = changes.get("chunks", 1)
    base = {
        "schedule": "1f1b",
        "layers": (chunks,) * stages,
        "chunks": 1,
        "micros": 4,
        "forward": LayerPass(compute_s=1.0, inner=()),
        "backward": LayerPass(compute_s=2.0, inner=()),
        "weight_s": 0.0,
        "head_forward_s": 0.0,
        "head_backward_s": 0.0,
        "send_s": 0.0,
        "send_exposed": 0.0,
        "send_tier": "nic",
        "host_micro_s": 0.0,
        "sharing": (shared,) * stages,
        "optimizer_s": 0.0,
        "host_step_s": 0.0,
    }
    return StepWork(**{**base, **changes})
