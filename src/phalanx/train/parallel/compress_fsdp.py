"""Compression inside FSDP2: its reduce-scatter of gradients, replaced module by module; and one handle for either kind.

Error feedback costs every rank a copy of the whole, unsharded gradient (4 bytes a parameter of its stage and tensor
rank): ZeRO's saving on gradients is given up for the smaller messages. `ShardedCompression.held_bytes` says how much.
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
    """FSDP2's reduce-scatter of one module, rounded; in HSDP the sum over the copies that follows stays exact."""

    def __init__(self, codec: Quantised, module: FSDPModule) -> None:
        self.codec = codec
        self._module = module
        self._prepared = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer, as FSDP2's own does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Blocking on the host with gloo; on GPUs in FSDP2's own stream, so backward goes on."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"compressed gradients are summed or averaged, not {op}")
        if not self._prepared:
            self.codec.prepare(0, _shard_sizes(self._module, output_tensor.numel()))
            self._prepared = True
        self.codec.reduce_scatter(output_tensor, input_tensor, group, key=0)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _shard_sizes(module: FSDPModule, length: int) -> list[torch.Size]:
    """The tensors in one rank's part of the buffer, in FSDP2's own order, which it tells nobody."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13, 2.11
    sizes: list[torch.Size] = [param.padded_sharded_param_size for group in groups for param in group.fsdp_params]
    found = sum(size.numel() for size in sizes)
    if found != length:
        raise RuntimeError(f"FSDP2 reduces {length:,} values of a module whose shards hold {found:,}")
    return sizes


class ShardedCompression:
    """All compressed reduce-scatters of a model: one codec a module, so that errors of like-sized buffers never mix."""

    def __init__(self, codecs: Mapping[str, Quantised]) -> None:
        self._codecs = dict(codecs)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank put on the wire so far."""
        return sum(codec.bytes_sent for codec in self._codecs.values())

    @property
    def bytes_raw(self) -> int:
        """Bytes the same sums would have taken uncompressed."""
        return sum(codec.bytes_raw for codec in self._codecs.values())

    @property
    def held_bytes(self) -> int:
        """Memory of the errors carried."""
        return sum(error.numel() * error.element_size() for error in self.state().values())

    def compress(self, on: bool) -> None:
        """Compress gradients; or sum them as they are for a while."""
        for codec in self._codecs.values():
            codec.is_off = not on

    def state(self) -> dict[str, Tensor]:
        """The errors of every module."""
        return {
            f"{module}/{name}": tensor
            for module, codec in self._codecs.items()
            for name, tensor in codec.state().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these errors."""
        for module, codec in self._codecs.items():
            start = f"{module}/"
            codec.load({name.removeprefix(start): one for name, one in state.items() if name.startswith(start)})

    def rescale(self, factor: float) -> None:
        """Bring all errors to the new loss scale."""
        for codec in self._codecs.values():
            codec.rescale(factor)


def compress_sharded(model: nn.Module, kind: str, *, where: str = "parallel.compression") -> ShardedCompression:
    """Compress the gradient reduce-scatter of every module that FSDP2 shards."""
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
    """What compresses the gradients of this rank: the exchange of whole gradients, or each stage's reduce-scatter."""

    def __init__(self, exchange: GradientExchange | None, models: Sequence[nn.Module], settings: Settings) -> None:
        self._exchange = exchange
        kind = settings.layout.compression
        sharded = exchange is None and kind != "none"
        self._stages = [compress_sharded(model, kind) for model in models] if sharded else []
        self._every = [one for one in (exchange, *self._stages) if one is not None]

    @property
    def bytes_sent(self) -> int | None:
        """Bytes put on the wire so far; None without compression."""
        if self._exchange is not None:
            return self._exchange.bytes_sent
        return sum(one.bytes_sent for one in self._stages) if self._stages else None

    def compress(self, on: bool) -> None:
        """Whether the next gradients are compressed."""
        for one in self._every:
            one.compress(on)

    def rescale(self, factor: float) -> None:
        """What is carried over to the next step, times `factor`."""
        for one in self._every:
            one.rescale(factor)

    def state(self) -> dict[str, Tensor]:
        """What is carried over to the next step: this rank's own, in this layout."""
        if self._exchange is not None:
            return self._exchange.state()
        stages = enumerate(self._stages)
        return {f"{number}/{name}": one for number, stage in stages for name, one in stage.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave."""
        if self._exchange is not None:
            self._exchange.load(state)
        for number, stage in enumerate(self._stages):
            start = f"{number}/"
            stage.load({name.removeprefix(start): one for name, one in state.items() if name.startswith(start)})
