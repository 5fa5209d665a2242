"""What a ZeRO stage costs on the wire: how often weights are gathered and gradients reduced in a step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings

LAYERS, MICRO_BATCHES = 3, 4
SHARDED = LAYERS + 2  # every block, the embedding, norm and head


class Counted(TorchDispatchMode):
    """Counts the collectives of FSDP2."""

    gathers = reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.gathers += "allgather" in name or "all_gather_into" in name
        self.reductions += "reduce_scatter" in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("zero", "shape", "gathers", "reductions"),
    [
        (1, {}, SHARDED, SHARDED),  # once a step
        (2, {}, SHARDED, SHARDED * MICRO_BATCHES),  # gradients after every micro-batch, so that only shards are kept
        # Blocks for forward and again for backward; the head, used last and first, once; the embedding, whose backward
        # needs no weight, once.
        (3, {}, (2 * LAYERS + 2) * MICRO_BATCHES, SHARDED * MICRO_BATCHES),
        (3, {"tied": True}, (2 * LAYERS + 1) * MICRO_BATCHES, (LAYERS + 1) * MICRO_BATCHES),
        # BLOOM's embedding ends in a norm, and that one's backward does need its weight.
        (3, {"embedding_norm": True}, (2 * LAYERS + 3) * MICRO_BATCHES, SHARDED * MICRO_BATCHES),
    ],
)
def test_collectives_of_a_step(zero, shape, gathers, reductions, ranks):
    found = ranks(__file__, "step", zero=zero, shape=shape)
    assert found == [(gathers, reductions)] * 4


def on_rank_step(rank, group, zero, shape):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a view that nobody changes in place
    layout = Layout(
        data=4, shard=4, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=zero,
        sequence_parallel=False, micro_batch=1, accumulation=MICRO_BATCHES, recompute="none", precision="fp32",
        schedule="1f1b", offload="none", compression="none",
    )  # fmt: skip
    given = {
        "name": "t",
        "layers": LAYERS,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 48,
        "vocab": 64,
    }
    engine = Engine(
        ModelShape(**given | shape), Settings(layout=layout, sequence=16), Optim(), device=torch.device("cpu")
    )
    engine.initialise()
    tokens = torch.randint(0, 64, (MICRO_BATCHES, 16), generator=torch.Generator().manual_seed(rank))
    engine.step(tokens, tokens, lr=1e-3)
    with Counted() as counted:
        engine.step(tokens, tokens, lr=1e-3)
    return counted.gathers, counted.reductions
