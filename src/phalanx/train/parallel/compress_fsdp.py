"""Gradient compression in FSDP2's reduce-scatters, and one interface to sharded and unsharded compression.

Error feedback costs every rank a copy of the whole, unsharded gradient (4 bytes per parameter of its stage and tensor
rank): ZeRO's saving on gradients is given up for smaller messages. `ShardedCompression.held_bytes` measures that
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from phalanx.errors import mistake
from phalanx.train.parallel.compress import FORMATS, KINDS, Quantised
from phalanx.train.parallel.gradients import GradientExchange
from phalanx.train.rank_settings import Settings


class CompressedReduceScatter:
    """FSDP2's reduce-scatter of one module, with compression; HSDP's all-reduce over the copies stays exact."""

    def __init__(self, codec: Quantised, module: FSDPModule) -> None:
        self.codec = codec
        self._module = module
        self._prepared = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, as FSDP2's own reduce-scatter does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce-scatter the gradient; blocks the host on gloo, runs in FSDP2's stream on GPUs."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"compressed gradients are summed or averaged, not {op}")
        if not self._prepared:
            self.codec.prepare(0, _shard_sizes(self._module, output_tensor.numel()))
            self._prepared = True
        self.codec.reduce_scatter(output_tensor, input_tensor, group, key=0)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _shard_sizes(module: FSDPModule, length: int) -> list[torch.Size]:
    """Return the sizes of the tensors in one rank's part of the buffer, in the order of FSDP2's private state."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13, 2.11
    sizes: list[torch.Size] = [param.padded_sharded_param_size for group in groups for param in group.fsdp_params]
    num_values = sum(size.numel() for size in sizes)
    if num_values != length:
        raise RuntimeError(f"FSDP2 reduces {length:,} values of a module whose shards hold {num_values:,}")
    return sizes


class ShardedCompression:
    """All compressed reduce-scatters of a model, with one codec per module so that their errors never mix."""

    def __init__(self, codecs: Mapping[str, Quantised]) -> None:
        self._codecs = dict(codecs)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank put on the wire so far."""
        return sum(codec.bytes_sent for codec in self._codecs.values())

    @property
    def bytes_raw(self) -> int:
        """Bytes that the same sums would have taken uncompressed."""
        return sum(codec.bytes_raw for codec in self._codecs.values())

    @property
    def held_bytes(self) -> int:
        """Memory of the carried errors, in bytes."""
        return sum(error.numel() * error.element_size() for error in self.state().values())

    def compress(self, on: bool) -> None:
        """Switch compression on, or off for exact sums."""
        for codec in self._codecs.values():
            codec.is_off = not on

    def state(self) -> dict[str, Tensor]:
        """Return the errors of every module."""
        return {
            f"{module}/{name}": tensor
            for module, codec in self._codecs.items()
            for name, tensor in codec.state().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the errors of every module."""
        for module, codec in self._codecs.items():
            prefix = f"{module}/"
            codec.load({name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)})

    def rescale(self, factor: float) -> None:
        """Multiply all errors by the change of the loss scale."""
        for codec in self._codecs.values():
            codec.rescale(factor)


def compress_sharded(model: nn.Module, kind: str, *, where: str = "parallel.compression") -> ShardedCompression:
    """Replace the gradient reduce-scatter of every module that FSDP2 shards by a compressed one.

    Raises UserError if `kind` is unknown or does not work on sharded gradients.
    """
    if kind not in FORMATS:
        raise mistake(
            where,
            f'"{kind}" does not work on sharded gradients' if kind in KINDS else f'there is no compression "{kind}"',
            why="FSDP2 reduces flat shards, in which matrices are cut at any row: they have no factors"
            if kind in KINDS
            else "",
            fix=f"use {', '.join(FORMATS)} with ZeRO" + (f", or zero = 0 with {kind}" if kind in KINDS else ""),
        )
    codecs = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            codecs[name] = Quantised(FORMATS[kind])
            module.set_custom_reduce_scatter(CompressedReduceScatter(codecs[name], module))  # type: ignore[arg-type]
    return ShardedCompression(codecs)


class GradientCompression:
    """Gradient compression of this rank: of the exchange of unsharded gradients, or of each stage's reduce-scatters."""

    def __init__(self, exchange: GradientExchange | None, models: Sequence[nn.Module], settings: Settings) -> None:
        self._exchange = exchange
        kind = settings.layout.compression
        sharded = exchange is None and kind != "none"
        self._stages = [compress_sharded(model, kind) for model in models] if sharded else []
        self._every = [compressor for compressor in (exchange, *self._stages) if compressor is not None]

    @property
    def bytes_sent(self) -> int | None:
        """Bytes put on the wire so far; None without compression."""
        if self._exchange is not None:
            return self._exchange.bytes_sent
        return sum(compression.bytes_sent for compression in self._stages) if self._stages else None

    def compress(self, on: bool) -> None:
        """Switch compression of the next gradients on or off."""
        for compressor in self._every:
            compressor.compress(on)

    def rescale(self, factor: float) -> None:
        """Multiply the carried errors by `factor`."""
        for compressor in self._every:
            compressor.rescale(factor)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors carried to the next step, valid for this rank in this layout."""
        if self._exchange is not None:
            return self._exchange.state()
        stages = enumerate(self._stages)
        return {f"{number}/{name}": tensor for number, stage in stages for name, tensor in stage.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors returned by `state`."""
        if self._exchange is not None:
            self._exchange.load(state)
        for number, stage in enumerate(self._stages):
            prefix = f"{number}/"
            stage.load({name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)})
