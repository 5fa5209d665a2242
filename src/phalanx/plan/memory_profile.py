"""The memory profile of a framework, and the bytes of a pipeline stage that do not depend on its activations."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from phalanx.io.files import shipped_text
from phalanx.plan.cases import FP16, Cases, Floats
from phalanx.plan.compute import SELECTIVE, element_bytes
from phalanx.plan.physics import Number
from phalanx.plan.weights import attention_weights, expert_sharers, mlp_weights, rank_weights

# Per gradient of a whole layer: the rounding error of compression, added to the next step's gradient, in fp32.
FEEDBACK_BYTES = 4.0
OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS = 2, 3  # indices in cases.OFFLOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """The memory that a framework uses, in bytes per element; the defaults are mixed-precision AdamW in Megatron."""

    gradient_bytes: Number = 4.0
    gradient_bytes_fp16: Number = 4.0  # the same for fp16 with loss scaling, which often accumulates in fp16
    optimizer_bytes: Number = 12.0  # fp32 master weights and two moments
    # Additional bytes for embedding and head, which Muon leaves to AdamW.
    table_optimizer_bytes: Number = 0.0
    hidden_copies: Number = 4.0  # tensors of [tokens, hidden] a layer keeps, split only by sequence parallelism
    gathered_kept: Number = 0.0  # of these, inputs of tensor-parallel matrices that are kept gathered
    shard_copy: Number = 1.0  # 1: a 16-bit copy of ZeRO-3's shards in addition to the master weights
    width_copies: Number = 1.0  # multiple of the textbook count for tensors split by tensor parallelism
    narrow_copies: Number = 1.0  # further multiple under fp8 and fp4, where some linears keep one-byte inputs
    gathered_copies: Number = 4.0  # transient full-width [tokens, hidden] buffers of gathers around the head
    selective_kept: Number = 0.65  # share of activations that selective recompute keeps
    pipeline_fragmentation: Number = 1.0  # reserved over allocated activations once forwards and backwards alternate
    logit_bytes: Number = 8.0  # per logit on the last stage: 16-bit logits, fp32 copy, gradient
    base_bytes: Number = 1.0e9  # communicator buffers, workspaces, buckets
    usable: Number = 0.92  # share of the device's memory that tensors can fill (context, ECC, fragmentation)
    balanced_stages: Number = 1.0  # as in physics.Profile
    light_first: Number = (
        1.0  # 1: of an uneven split the first stage, which holds most micro-batches, gets a layer less
    )
    # The rest describes our own trainer, whose step can be traced: its tensors are counted one by one.
    counted: Number = 0.0  # 1: use `trainer_memory.py`, and ignore hidden_copies to logit_bytes above
    compiled: Number = 0.0  # 1: blocks and loss are compiled, except under a schedule that splits backward
    chunked_loss: Number = 0.0  # 1: large logits are held in chunks (lean_step.py)
    # 1: the head's products are in fp8 as well, which keeps copies of its inputs.
    float8_head: Number = 0.0
    dropped_product: Number = 0.0  # 1: backward computes the product of a large gated MLP again
    heads_copies: Number = 0.0  # further tensors of the queries' width that context parallelism keeps (Ulysses: 1)
    sequence_copies: Number = 0.0  # whole sequences of keys and values in one layer's backward (all-gather: 3)


@cache
def memory_profiles() -> dict[str, MemoryProfile]:
    """Return the shipped memory profiles by framework, including `default`."""
    text = shipped_text(__file__, "memory.toml")
    return {name: MemoryProfile(**values) for name, values in tomllib.loads(text).items()}


def stack_memory(chosen: list[MemoryProfile]) -> MemoryProfile:
    """Return one profile whose fields are arrays with one entry per given profile."""
    names = [field.name for field in fields(MemoryProfile)]
    return MemoryProfile(**{name: np.asarray([getattr(profile, name) for profile in chosen]) for name in names})


def offloads_activations(c: Cases) -> NDArray[np.bool_]:
    """Return a mask of the cases whose activations are moved to host memory.

    The tensors that selective recompute keeps stay on the device: torch caches them past the hooks of saved tensors.
    """
    is_offloaded: NDArray[np.bool_] = (c.offload == OFFLOAD_ACTIVATIONS) & (c.recompute != SELECTIVE)
    return is_offloaded


def head_layers(c: Cases) -> Floats:
    """Return the output head in units of a layer, by parameters, as a balanced split counts it."""
    moe_share = c.moe_layers / c.layers
    mlp = (1.0 - moe_share) * mlp_weights(c, c.ffn)
    mlp = mlp + moe_share * mlp_weights(c, c.expert_ffn * c.topk + c.shared_ffn)
    return c.vocab * c.hidden / (attention_weights(c) + mlp)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStage:
    """The part of the model that a stage holds, and of how many micro-batches at once."""

    layers: Floats
    in_flight: Floats
    tables: Floats  # embedding matrices that it holds
    head: Floats  # 1 where the stage computes logits


def state_bytes(c: Cases, f: MemoryProfile, stage: HeldStage) -> dict[str, Floats]:
    """Return the bytes of a stage that do not depend on its activations."""
    w = rank_weights(c, stage_layers=stage.layers)
    dense = w.dense - w.embedding + stage.tables * c.vocab * c.hidden / c.tp
    size = element_bytes(c)
    shard = np.where(c.zero >= 1, c.shard, 1.0)
    # Parameters in host memory: their gradients and optimizer state are there too; gathered layers are on the device.
    resident = np.where(c.offload == OFFLOAD_PARAMETERS, 0.0, 1.0)
    expert_shard = np.where(c.zero >= 1, expert_sharers(c, w.expert_replicas), 1.0)

    gradient_bytes = np.where(c.precision == FP16, f.gradient_bytes_fp16, f.gradient_bytes)

    def held_weights(least_zero: int) -> Floats:
        is_split = c.zero >= least_zero
        return dense / np.where(is_split, shard, 1.0) + w.experts / np.where(is_split, expert_shard, 1.0)

    state_bytes_ = (
        held_weights(1) * f.optimizer_bytes + stage.tables * c.vocab * c.hidden / c.tp / shard * f.table_optimizer_bytes
    )
    # In a pipeline ZeRO-3 cannot drop gathered layers between micro-batches: the stage keeps its full weights and
    # accumulates full gradients (torchtitan's reshard_after_forward default).
    keeps_gathered = (c.zero == 3) & (c.pp > 1)
    gathered_bytes = np.where(keeps_gathered, (dense + w.experts) * (size + gradient_bytes), 2.0 * w.layer * size)
    return {
        "weights": held_weights(3) * size * resident * np.where(c.zero == 3, f.shard_copy, 1.0),
        # A pipeline reduces gradients once, after the last micro-batch: until then ZeRO-2 holds whole ones there.
        "gradients": np.where((c.zero == 2) & (c.pp > 1), dense + w.experts, held_weights(2))
        * gradient_bytes
        * resident,
        "optimizer": np.where(c.offload == 1, 0.0, state_bytes_ * resident),
        "gathered": np.where(c.zero == 3, gathered_bytes, 0.0),
        "buffers": f.base_bytes + np.where(c.compression > 0, (dense + w.experts) * FEEDBACK_BYTES, 0.0),
    }


def all_parts(state: dict[str, Floats], activations: Floats, logits: Floats) -> dict[str, Floats]:
    """Return all parts of a stage, in the order in which they are added up."""
    buffers = state.pop("buffers")
    return {**state, "activations": activations, "logits": logits, "buffers": buffers}


def sum_parts(parts: dict[str, Floats]) -> Floats:
    """Return all bytes of a stage, added up in the order of `all_parts`."""
    return sum(parts.values(), np.zeros(()))
