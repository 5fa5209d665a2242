"""First values of a parameter of our decoder, keyed by its name: every rank, stage and shard draws the same for it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

STD = 0.02  # Radford et al. 2019 (GPT-2); projections into the residual stream are divided by √(2 · layers) there
RESIDUAL = (".attn.wo.weight", ".mlp.down.weight", ".mlp.shared.down.weight", ".mlp.experts.down")
LEAST_THREADED = 2**20  # numbers; fewer are drawn at once
ROWS = 256  # rows drawn from one key: a rank that holds a tenth of a tensor draws a tenth of it


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
    """The first value of the whole tensor `name` of a model of `layers` layers, on the CPU.

    `rows` gives only those of dimension 0 (experts, for [E, F, D]), bit for bit those of the whole. Numbers are drawn
    in float32 and cast, so that every dtype starts from the same model. `factor` is the parametrization's.
    """
    rows = range(size[0]) if rows is None else rows
    part = (len(rows), *size[1:])
    kind = name.rpartition(".")[2]
    if kind == "bias":
        return torch.zeros(part, dtype=dtype)
    if len(size) == 1:
        assert kind == "weight", f"{name}: only biases and scales of norms are vectors of our decoder"
        return torch.full(part, factor, dtype=dtype)
    std = (STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL) else STD) * factor
    block = 1 if len(size) > 2 else ROWS
    drawn = torch.empty(part, dtype=torch.float32)

    def draw_block(index: int) -> None:
        begin, end = index * block, min((index + 1) * block, size[0])
        random = torch.Generator().manual_seed(_tensor_key(seed, name, index))
        values = torch.empty((end - begin, *size[1:]), dtype=torch.float32).normal_(0.0, std, generator=random)
        low, high = max(begin, rows.start), min(end, rows.stop)
        drawn[low - rows.start : high - rows.start] = values[low - begin : high - begin]

    blocks = range(rows.start // block, -(-rows.stop // block))
    if drawn.numel() < LEAST_THREADED or torch.get_num_threads() == 1:
        for index in blocks:
            draw_block(index)
    else:  # each block has a generator of its own: the order does not matter, and a billion numbers take a core 8 s
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw_block, blocks))
    return drawn.to(dtype)


def _tensor_key(seed: int, name: str, index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: manual_seed takes no more from Python
