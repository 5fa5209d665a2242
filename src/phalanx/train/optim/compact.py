"""AdamW with moments, or weights, stored in fewer bits than it computes with: bf16 or 8-bit blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from phalanx.plan.parametrization import ParameterScales, standard_scales
from phalanx.train.optim.base import shard_gradient, state_shard, total_bytes
from phalanx.train.optim.moments import (
    Kept,
    MomentFormat,
    dice_key,
    element_positions,
    high_bits,
    low_bits,
    mix_bits,
    moment_format,
    readable_moment,
    rounding_bits,
    to_bf16,
    working_dtype,
)
from phalanx.train.parallel.tensor_shard import TensorShard

# Elements updated at once, on a CPU and on a GPU: temporaries of 128 kB stay in the second-level cache (9 times as
# fast as those of whole tensors of a million), and those of a GPU stay small next to a model.
AT_ONCE = (1 << 15, 1 << 26)
Advance = Callable[..., None]


class CompactAdamW:
    """AdamW computed in fp32, one shard at a time, so that only that shard's moments are ever decoded."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decays: Callable[[str], bool],
        kind: str,
        scales: ParameterScales = standard_scales,
    ) -> None:
        self.steps = 0
        self._shards = list(shards)
        self._betas, self._eps, self._kind = betas, eps, kind
        self._scales = [scales(shard.name, len(shard.shape)) for shard in shards]
        self._decay = [
            weight_decay * scale.weight_decay if decays(shard.name) else 0.0
            for shard, scale in zip(shards, self._scales, strict=True)
        ]
        self._forms = moment_format(kind, signed=True), moment_format(kind, signed=False)
        self._first = [self._forms[0].zeros(shard.tensor.numel(), shard.tensor) for shard in shards]
        self._second = [self._forms[1].zeros(shard.tensor.numel(), shard.tensor) for shard in shards]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every shard."""
        self.steps += 1
        numbers, keys = self._step_numbers(lr)
        for i, shard in enumerate(self._shards):
            weight, grad, count = shard.tensor.reshape(-1), shard_gradient(shard).reshape(-1), shard.tensor.numel()
            advance, at_once = _shard_update(self._kind, compiled=shard.tensor.is_cuda), AT_ONCE[shard.tensor.is_cuda]
            positions = element_positions(shard) if count else weight
            for start in range(0, count, at_once):
                stop = min(count, start + at_once)
                first = self._forms[0].part(self._first[i], start, stop)
                second = self._forms[1].part(self._second[i], start, stop)
                slice_positions = positions[start:stop] if positions.dim() else positions + start
                advance(weight[start:stop], grad[start:stop], first, second, slice_positions, numbers[i], keys[i])
            if not shard.tensor.is_contiguous():  # otherwise reshape made a copy
                shard.tensor.copy_(weight.view(shard.tensor.shape))

    def _step_numbers(self, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers that change every step, one row per shard; as tensors, so that no value is compiled in."""
        (beta1, beta2), step = self._betas, self.steps
        shared_numbers = (1.0 - beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step)
        numbers = [
            [*shared_numbers, self._eps * scale.eps, lr * scale.lr, 1.0 - lr * scale.lr * decay]
            for scale, decay in zip(self._scales, self._decay, strict=True)
        ]
        keys = [dice_key(shard.name, step) for shard in self._shards]
        like = self._shards[0].tensor if self._shards else torch.zeros(0)
        dtype = working_dtype(like.dtype)
        return (
            torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True),
            torch.tensor(keys, dtype=torch.int32).to(like.device, non_blocking=True),
        )

    def state(self) -> list[TensorShard]:
        """Return the moments as floats; 8-bit ones are decoded, so call it only to save or to load."""
        return [
            state_shard(shard, name, readable_moment(form, moments[i], shard.tensor))
            for i, shard in enumerate(self._shards)
            for name, form, moments in zip(
                ("exp_avg", "exp_avg_sq"), self._forms, (self._first, self._second), strict=True
            )
        ]

    def stored(self) -> list[TensorShard]:
        """Return the moments as stored: 8-bit ones as codes and scales."""
        return [
            stored_shard
            for i, shard in enumerate(self._shards)
            for name, moment in (("exp_avg", self._first[i]), ("exp_avg_sq", self._second[i]))
            for stored_shard in kept_shards(shard, name, moment)
        ]

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Encode the moments again; a state written by the same layout comes back bit by bit."""
        for i, shard in enumerate(self._shards):
            load_kept(self._first[i], self._forms[0], state[f"{shard.name}#exp_avg"], shard, steps)
            load_kept(self._second[i], self._forms[1], state[f"{shard.name}#exp_avg_sq"], shard, steps)
        self.steps = steps

    def state_bytes(self) -> int:
        """Return the bytes of the moments: 4 per parameter in bf16, 2.03 in 8-bit blocks."""
        return total_bytes([tensor for moment in (*self._first, *self._second) for tensor in moment])


@cache
def _shard_update(kind: str, *, compiled: bool) -> Advance:
    """Build the update of one shard for one kind of moments; on a GPU compiled into one kernel for all sizes."""
    forms = moment_format(kind, signed=True), moment_format(kind, signed=False)

    def advance(
        weight: torch.Tensor,
        grad: torch.Tensor,
        first: Kept,
        second: Kept,
        where: torch.Tensor,
        numbers: torch.Tensor,
        by: torch.Tensor,
    ) -> None:
        """Update flat tensors in place.

        `where` is every element's position, or a scalar, the first one's, if they are consecutive.
        """
        new1, beta2, correct1, correct2, eps, lr, shrink = numbers.unbind()
        wide = grad.to(numbers.dtype)
        m = torch.lerp(forms[0].decode(first, numbers.dtype), wide, new1)
        v = beta2 * forms[1].decode(second, numbers.dtype) + (1.0 - beta2) * wide * wide
        if not where.dim():
            where = where + torch.arange(weight.numel(), dtype=torch.int32, device=weight.device)
        bits = mix_bits(where, by)
        # Two independent numbers from the same bits: one per moment.
        copy_kept(first, forms[0].encode(m, low_bits(bits)))
        copy_kept(second, forms[1].encode(v, high_bits(bits)))
        wide = shrink * weight.to(numbers.dtype) - lr * (m / correct1) / ((v / correct2).sqrt() + eps)
        weight.copy_(to_bf16(wide, low_bits(mix_bits(bits, by))) if weight.dtype == torch.bfloat16 else wide)

    return torch.compile(advance, dynamic=True) if compiled else advance


def apply_update(shard: TensorShard, update: torch.Tensor, *, lr: float, weight_decay: float, step: int) -> None:
    """Apply weight = weight · (1 - lr · decay) - lr · update in the working format.

    Bf16 weights are rounded stochastically.
    """
    wide = shard.tensor.to(update.dtype).mul(1.0 - lr * weight_decay).add_(update, alpha=-lr)
    if shard.tensor.dtype == torch.bfloat16:
        wide = to_bf16(wide, low_bits(rounding_bits(shard, step)).view(shard.tensor.shape))
    shard.tensor.copy_(wide)


def copy_kept(old: Kept, new: Kept) -> None:
    """Copy encoded tensors into the stored ones."""
    for tensor, value in zip(old, new, strict=True):
        tensor.copy_(value)


def kept_shards(shard: TensorShard, name: str, kept: Kept) -> list[TensorShard]:
    """Return the stored tensors of a moment as shards, under the moment's name."""
    return [state_shard(shard, name, kept[0]), *(state_shard(shard, f"{name}.scale", scale) for scale in kept[1:])]


def load_kept(kept: Kept, form: MomentFormat, value: torch.Tensor, shard: TensorShard, steps: int) -> None:
    """Encode a loaded state tensor, which may be the stored one itself."""
    if shard.tensor.numel():
        copy_kept(kept, form.encode(value.to(device=kept[0].device).reshape(-1), low_bits(rounding_bits(shard, steps))))
