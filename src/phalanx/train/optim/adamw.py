"""AdamW (Loshchilov & Hutter 2019), both moments in full precision.

It uses torch's fused kernel over all shards at once, or on a GPU Phalanx's Triton kernel, shard by shard, where that
was measured to be faster: on an H200 by a sixth for large shards, while many small ones take the host longer to
launch than to update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.optim.adamw import adamw

from phalanx.plan.parametrization import ParameterScale, ParameterScales, standard_scales
from phalanx.train.kernels.adamw import adamw_step_
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, Timing, choice_key, choose_measured, time_in_turn
from phalanx.train.kernels.triton_support import can_launch
from phalanx.train.optim.base import shard_gradient, state_shard, total_bytes
from phalanx.train.parallel.tensor_shard import TensorShard

# Devices with a fused kernel on every supported torch; others use the foreach one
FUSED = ("cpu", "cuda")


class AdamW:
    """AdamW over shards; it is elementwise, so any split of the tensors gives the same update."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decays: Callable[[str], bool],
        scales: ParameterScales = standard_scales,
    ) -> None:
        self.steps = 0
        self._shards = list(shards)
        self._betas, self._eps = betas, eps
        self._first = [torch.zeros_like(shard.tensor, requires_grad=False) for shard in shards]
        self._second = [torch.zeros_like(shard.tensor, requires_grad=False) for shard in shards]
        self._groups = _kernel_groups(self._shards, weight_decay, decays, scales)
        self.kernel = BUILTIN  # or "triton"
        self._state = [  # built once, because the guard reads it in every step
            state_shard(shard, name, tensor)
            for shard, *moments in zip(self._shards, self._first, self._second, strict=True)
            for name, tensor in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every shard."""
        self._update(lr, [shard_gradient(shard) for shard in self._shards], self.kernel)
        self.steps += 1

    @torch.no_grad()
    def step_each(self, lr: float, *, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """Update shard by shard in order, and call `before` and `after` with the index of each."""
        group_of = {i: group for group, members in self._groups.items() for i in members}
        for i, group in sorted(group_of.items()):
            before(i)
            self._update(lr, {i: shard_gradient(self._shards[i])}, self.kernel, {group: [i]})
            after(i)
        self.steps += 1

    def _update(
        self,
        lr: float,
        grads: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        kernel: str,
        groups: Mapping[KernelGroup, Sequence[int]] | None = None,
    ) -> None:
        for (device, _, weight_decay, scale), members in (self._groups if groups is None else groups).items():
            if kernel == "triton":
                for i in members:
                    adamw_step_(
                        self._shards[i].tensor,
                        grads[i].contiguous(),
                        self._first[i],
                        self._second[i],
                        lr=lr * scale.lr,
                        betas=self._betas,
                        eps=self._eps * scale.eps,
                        decay=weight_decay * scale.weight_decay,
                        step=self.steps + 1,
                    )
                continue
            # The kernel reads each tensor's step count from a tensor and adds one to it.
            counts = torch.full((len(members),), float(self.steps), dtype=torch.float32, device=device)
            fused = device.type in FUSED
            adamw(
                [self._shards[i].tensor for i in members],
                [grads[i] for i in members],
                [self._first[i] for i in members],
                [self._second[i] for i in members],
                [],
                list(counts.unbind()),
                fused=fused,
                foreach=not fused,
                amsgrad=False,
                maximize=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr * scale.lr,
                weight_decay=weight_decay * scale.weight_decay,
                eps=self._eps * scale.eps,
            )

    @property
    def takes_own_kernel(self) -> bool:
        """True if the Triton kernel can update these shards: on fewer than 32 bits it would compute another update."""
        shards = [shard.tensor for shard in self._shards]
        return can_launch(*shards) and all(
            tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in shards
        )

    @torch.no_grad()
    def choose_kernel(self, folder: Path | None) -> KernelChoice | None:
        """Return the faster kernel for these shards on their GPU, measured once; None if there is no choice.

        It must run before the first step: the moments are still zero and serve as gradients too, so that no value
        changes.
        """
        shards = [shard.tensor for shard in self._shards if shard.tensor.numel()]
        if self.steps or not shards or not self.takes_own_kernel:
            return None
        device = shards[0].device
        shape = {"tensors": len(shards), "parameters": sum(tensor.numel() for tensor in shards)}

        def measure() -> dict[str, Timing]:
            updates = {name: partial(self._update, 0.0, self._first, name) for name in (BUILTIN, "triton")}
            return time_in_turn(updates, device, with_host=True) or {BUILTIN: Timing(median_ms=math.inf)}

        key = choice_key("adamw", shape, torch.float32, device)
        return choose_measured("AdamW", key, (BUILTIN, "triton"), measure, folder=folder)

    def state(self) -> list[TensorShard]:
        """Return the live moments: writing into them loads a state."""
        return list(self._state)

    def stored(self) -> list[TensorShard]:
        """Return `state()`: the moments are stored as they are."""
        return self.state()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Copy the moments from `state`."""
        for shard in self.state():
            shard.tensor.copy_(state[shard.name])
        self.steps = steps

    def state_bytes(self) -> int:
        """Return the bytes of two moments in the weights' format: 8 per fp32 parameter."""
        return total_bytes([*self._first, *self._second])


KernelGroup = tuple[torch.device, torch.dtype, float, ParameterScale]


def _kernel_groups(
    shards: Sequence[TensorShard], weight_decay: float, decays: Callable[[str], bool], scales: ParameterScales
) -> dict[KernelGroup, list[int]]:
    """Group the indices of the shards that one kernel call can update; shards without elements are left out."""
    groups: dict[KernelGroup, list[int]] = {}
    for i, shard in enumerate(shards):
        if shard.tensor.numel():
            decay = weight_decay if decays(shard.name) else 0.0
            scale = scales(shard.name, len(shard.shape))
            groups.setdefault((shard.tensor.device, shard.tensor.dtype, decay, scale), []).append(i)
    return groups
