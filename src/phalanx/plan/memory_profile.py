"""What a framework keeps in memory, as a profile, and the bytes of a pipeline stage that no activation adds to."""

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

FEEDBACK_BYTES = 4.0  # per gradient of a whole layer: what compression rounded away and adds to the next step, in fp32
OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS = 2, 3  # indices in cases.OFFLOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """What a framework keeps, in bytes per element; the defaults are mixed-precision AdamW as Megatron does it."""

    gradient_bytes: Number = 4.0
    gradient_bytes_fp16: Number = 4.0  # the same for fp16 with loss scaling, which often accumulates in fp16
    optimizer_bytes: Number = 12.0  # fp32 master weights and two moments
    table_optimizer_bytes: Number = 0.0  # more of them for embedding and head, which Muon leaves to AdamW
    hidden_copies: Number = 4.0  # tensors of [tokens, hidden] a layer keeps, split only by sequence parallelism
    gathered_kept: Number = 0.0  # of these, inputs of tensor-parallel matrices kept gathered instead of gathered again
    shard_copy: Number = 1.0  # 1: a 16-bit copy of ZeRO-3's shards beside the master weights
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
    # The rest describes our own trainer, whose step can be traced: what it keeps is counted tensor by tensor.
    counted: Number = 0.0  # 1: by `trainer_memory.py`, and hidden_copies to logit_bytes above are not looked at
    compiled: Number = 0.0  # 1: blocks and loss are compiled, except under a schedule that splits backward
    chunked_loss: Number = 0.0  # 1: large logits are held in parts (lean_step.py)
    float8_head: Number = 0.0  # 1: and their products are in fp8, which keeps copies of what it multiplies
    dropped_product: Number = 0.0  # 1: backward makes the product of a large gated MLP again
    heads_copies: Number = 0.0  # further tensors of the queries' width that context parallelism keeps (Ulysses: 1)
    sequence_copies: Number = 0.0  # whole sequences of keys and values in one layer's backward (all-gather: 3)


@cache
def memory_profiles() -> dict[str, MemoryProfile]:
    """Shipped memory profiles by framework; always holds `default`."""
    text = shipped_text(__file__, "memory.toml")
    return {name: MemoryProfile(**values) for name, values in tomllib.loads(text).items()}


def stack_memory(chosen: list[MemoryProfile]) -> MemoryProfile:
    """One profile whose fields are arrays: row by row, the profiles given."""
    names = [field.name for field in fields(MemoryProfile)]
    return MemoryProfile(**{name: np.asarray([getattr(one, name) for one in chosen]) for name in names})


def offloads_activations(c: Cases) -> NDArray[np.bool_]:
    """True where activations leave for host memory.

    What selective recompute keeps stays on the device: torch caches it past the hooks of saved tensors.
    """
    leave: NDArray[np.bool_] = (c.offload == OFFLOAD_ACTIVATIONS) & (c.recompute != SELECTIVE)
    return leave


def head_layers(c: Cases) -> Floats:
    """The output head in units of a layer, by parameters: what a balanced split counts it as."""
    moe_share = c.moe_layers / c.layers
    mlp = (1.0 - moe_share) * mlp_weights(c, c.ffn)
    mlp = mlp + moe_share * mlp_weights(c, c.expert_ffn * c.topk + c.shared_ffn)
    return c.vocab * c.hidden / (attention_weights(c) + mlp)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStage:
    """How much of the model a stage holds, and of how many micro-batches at once."""

    layers: Floats
    in_flight: Floats
    tables: Floats  # embedding matrices it holds
    head: Floats  # 1 where it computes logits


def state_bytes(c: Cases, f: MemoryProfile, stage: HeldStage) -> dict[str, Floats]:
    """The bytes of a stage that do not depend on its activations."""
    w = rank_weights(c, stage_layers=stage.layers)
    dense = w.dense - w.embedding + stage.tables * c.vocab * c.hidden / c.tp
    size = element_bytes(c)
    shard = np.where(c.zero >= 1, c.shard, 1.0)
    # Parameters in host memory: their gradients and optimizer live there too; what is gathered is on the device.
    resident = np.where(c.offload == OFFLOAD_PARAMETERS, 0.0, 1.0)
    expert_shard = np.where(c.zero >= 1, expert_sharers(c, w.expert_replicas), 1.0)

    gradient_bytes = np.where(c.precision == FP16, f.gradient_bytes_fp16, f.gradient_bytes)

    def held(least_zero: int) -> Floats:
        split = c.zero >= least_zero
        return dense / np.where(split, shard, 1.0) + w.experts / np.where(split, expert_shard, 1.0)

    state = held(1) * f.optimizer_bytes + stage.tables * c.vocab * c.hidden / c.tp / shard * f.table_optimizer_bytes
    # In a pipeline ZeRO-3 cannot drop gathered layers between micro-batches: the stage keeps its full weights and
    # accumulates full gradients (torchtitan's reshard_after_forward default).
    stays = (c.zero == 3) & (c.pp > 1)
    unsharded = np.where(stays, (dense + w.experts) * (size + gradient_bytes), 2.0 * w.layer * size)
    return {
        "weights": held(3) * size * resident * np.where(c.zero == 3, f.shard_copy, 1.0),
        # A pipeline reduces gradients once, after the last micro-batch: until then ZeRO-2 holds whole ones there.
        "gradients": np.where((c.zero == 2) & (c.pp > 1), dense + w.experts, held(2)) * gradient_bytes * resident,
        "optimizer": np.where(c.offload == 1, 0.0, state * resident),
        "gathered": np.where(c.zero == 3, unsharded, 0.0),
        "buffers": f.base_bytes + np.where(c.compression > 0, (dense + w.experts) * FEEDBACK_BYTES, 0.0),
    }


def all_parts(state: dict[str, Floats], activations: Floats, logits: Floats) -> dict[str, Floats]:
    """All parts of a stage, in the order in which they are added up."""
    buffers = state.pop("buffers")
    return {**state, "activations": activations, "logits": logits, "buffers": buffers}


def sum_parts(parts: dict[str, Floats]) -> Floats:
    """All bytes of a stage, added up in the order of `all_parts`."""
    return sum(parts.values(), np.zeros(()))
