"""Tensor parallelism: which matrices are split by column, which by row, and where the sequence is split in between."""

from __future__ import annotations

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.moe import Moe
from phalanx.train.parallel.vocabulary import VocabularyParallel

COLUMN = ("attn.wq", "attn.wk", "attn.wv")
MLP_COLUMN = ("gate", "up")


def split_tensors(model: Decoder, mesh: DeviceMesh, *, sequence: bool, loss_parallel: bool) -> None:
    """Split a stage over the tensor group, except for experts, which `expert.py` splits."""
    between = Shard(1) if sequence else Replicate()
    _split_ends(model, mesh, between, sequence=sequence, loss_parallel=loss_parallel)
    for block in model.layers.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh, _block_styles(block, between, sequence=sequence))


def _split_ends(
    model: Decoder, mesh: DeviceMesh, between: Shard | Replicate, *, sequence: bool, loss_parallel: bool
) -> None:
    styles: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        # Positions and a norm, which are added to the token vectors, need the whole sequence.
        extra = model.embed.positions is not None or model.embed.norm is not None
        output = Replicate() if extra else between
        styles["embed.tokens"] = VocabularyParallel(output=output)
        if extra and sequence:
            styles["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if model.head is not None:
        logits = Shard(-1) if loss_parallel else Replicate()
        styles["head"] = ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel
        )
        if sequence:
            styles["norm"] = SequenceParallel()
    parallelize_module(model, mesh, styles)
    if model.embed is not None:
        # A compiled block must not receive an asynchronous tensor: its backward would not support it.
        model.embed.register_forward_hook(
            lambda _, __, out: out.wait() if isinstance(out, AsyncCollectiveTensor) else out
        )


def _block_styles(block: Block, between: Shard | Replicate, *, sequence: bool) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN}
    styles["attn.wo"] = RowwiseParallel(output_layouts=between)
    if block.attn.q_norm is not None:
        # Normed per head, and heads are split: the weight is replicated, and its gradient is a sum over the ranks.
        styles |= {
            f"attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")
        }
    moe = isinstance(block.mlp, Moe)
    dense = block.mlp.shared if isinstance(block.mlp, Moe) else block.mlp
    path = "mlp.shared" if moe else "mlp"
    if dense is not None:
        styles |= {f"{path}.{name}": ColwiseParallel() for name in MLP_COLUMN if getattr(dense, name, None) is not None}
        styles[f"{path}.down"] = RowwiseParallel(output_layouts=between)
    if sequence:
        # Experts take plain tensors: they send tokens to other ranks themselves.
        styles |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel(use_local_output=moe)}
    # Also where nothing is gathered: several matrices read the input, and its gradient should be summed once, not
    # for each of them (docs/trace.md: five all-reduces in a layer's backward instead of two).
    styles["attn"] = PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))
    if dense is not None:
        styles[path] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    return styles
