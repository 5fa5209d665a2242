"""Which matrices are split how: by column going in, by row coming out, whole where a rank needs all of it."""

from __future__ import annotations

import torch

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings


def test_shapes_and_places(ranks):
    found = ranks(__file__, "shapes")
    assert found[3] == {
        "embed.tokens.weight": ((16, 32), (48, 0)),
        "attn_norm.weight": ((32,), (0,)),
        "attn.wq.weight": ((16, 32), (48, 0)),
        "attn.wk.weight": ((8, 32), (24, 0)),
        "attn.wv.weight": ((8, 32), (24, 0)),
        "attn.wo.weight": ((32, 16), (0, 48)),
        "mlp_norm.weight": ((32,), (0,)),
        "mlp.gate.weight": ((12, 32), (36, 0)),
        "mlp.up.weight": ((12, 32), (36, 0)),
        "mlp.down.weight": ((32, 12), (0, 36)),
        "norm.weight": ((32,), (0,)),
        "head.weight": ((16, 32), (48, 0)),
    }
    whole = ("attn_norm.weight", "mlp_norm.weight", "norm.weight")
    for rank, names in enumerate(found):
        assert [name for name, (_, start) in names.items() if not any(start)] == (
            list(names) if rank == 0 else list(whole)
        )


def on_rank_shapes(rank, group):
    layout = Layout(
        data=1, shard=1, tensor=4, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=True,
        micro_batch=1, accumulation=1, recompute="none", precision="fp32", schedule="1f1b", offload="none",
        compression="none",
    )  # fmt: skip
    shape = ModelShape(name="t", layers=1, hidden=32, heads=8, kv_heads=4, head_dim=8, ffn=48, vocab=64)
    engine = Engine(shape, Settings(layout=layout, sequence=16), Optim(), device=torch.device("cpu"))
    assert all(shard.owner == (rank == 0 or not shard.whole) for shard in engine.shards)
    assert all(shard.replicas == (4 if shard.whole else 1) for shard in engine.shards)
    return {shard.name.removeprefix("layers.0."): (tuple(shard.tensor.shape), shard.start) for shard in engine.shards}
