"""Initial values of the decoder's parameters, keyed by name: every rank, stage and shard draws the same numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Radford et al. 2019 (GPT-2); projections into the residual stream are divided by √(2 · layers) there
STD = 0.02
RESIDUAL = (".attn.wo.weight", ".mlp.down.weight", ".mlp.shared.down.weight", ".mlp.experts.down")
LEAST_THREADED = 2**20  # numbers; fewer are drawn without threads
# Rows drawn from one key: a rank that holds a tenth of a tensor draws about a tenth of its numbers
ROWS = 256


def draw_values(
    name: str,
    size: Sequence[int],
    *,
    seed: int,
    layers: int,
    dtype: torch.dtype = torch.float32,
    rows: range | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return the initial value of the tensor `name` of a model of `layers` layers, on the CPU.

    `rows` limits it to those of dimension 0 (experts, for [E, F, D]), bit-identical to those of the full tensor.
    Numbers are drawn in float32 and cast, so that every dtype starts from the same model. `factor` is the
    parametrization's.
    """
    rows = range(size[0]) if rows is None else rows
    part_shape = (len(rows), *size[1:])
    kind = name.rpartition(".")[2]
    if kind == "bias":
        return torch.zeros(part_shape, dtype=dtype)
    if len(size) == 1:
        assert kind == "weight", f"{name}: only biases and scales of norms are vectors of our decoder"
        return torch.full(part_shape, factor, dtype=dtype)
    std = (STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL) else STD) * factor
    block = 1 if len(size) > 2 else ROWS
    values_drawn = torch.empty(part_shape, dtype=torch.float32)

    def draw_block(index: int) -> None:
        begin, end = index * block, min((index + 1) * block, size[0])
        random = torch.Generator().manual_seed(_tensor_key(seed, name, index))
        values = torch.empty((end - begin, *size[1:]), dtype=torch.float32).normal_(0.0, std, generator=random)
        low, high = max(begin, rows.start), min(end, rows.stop)
        values_drawn[low - rows.start : high - rows.start] = values[low - begin : high - begin]

    blocks = range(rows.start // block, -(-rows.stop // block))
    if values_drawn.numel() < LEAST_THREADED or torch.get_num_threads() == 1:
        for index in blocks:
            draw_block(index)
    # Each block has its own generator, so the order does not matter; a billion numbers take one core 8 s
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw_block, blocks))
    return values_drawn.to(dtype)


def _tensor_key(seed: int, name: str, index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    # 63 bits: the largest seed that manual_seed takes
    return int.from_bytes(digest[:8], "big") >> 1
