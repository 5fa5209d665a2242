"""AdamW (Loshchilov & Hutter 2019), both moments in full precision.

torch's fused kernel over all shards at once, or on a GPU our own, shard by shard, where that was measured to be faster:
on an H200 by a sixth for large shards, while many small ones take the host longer to launch than to update.
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

FUSED = ("cpu", "cuda")  # devices with a fused kernel on every torch we support; others take the foreach one


class AdamW:
    """Elementwise, so a shard needs nothing of its neighbours and any split gives the same update."""

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
        self._state = [  # made once: the guard asks for it in every step
            state_shard(shard, name, tensor)
            for shard, *moments in zip(self._shards, self._first, self._second, strict=True)
            for name, tensor in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every shard."""
        self._update(lr, [shard_gradient(shard) for shard in self._shards], self.kernel)
        self.steps += 1

    @torch.no_grad()
    def step_each(self, lr: float, *, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """The same update shard by shard in their order; told are their places, before and after each."""
        kinds = {i: kind for kind, members in self._groups.items() for i in members}
        for i, kind in sorted(kinds.items()):
            before(i)
            self._update(lr, {i: shard_gradient(self._shards[i])}, self.kernel, {kind: [i]})
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
            # The kernel counts each tensor's steps in a tensor of its own and adds one to it.
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
        """Whether our kernel can update these shards; in fewer than 32 bits it would be another optimizer."""
        shards = [shard.tensor for shard in self._shards]
        return can_launch(*shards) and all(
            one.is_cuda and one.dtype == torch.float32 and one.is_contiguous() for one in shards
        )

    @torch.no_grad()
    def choose_kernel(self, folder: Path | None) -> KernelChoice | None:
        """The faster kernel for these shards on their GPU, measured once; None where there is no choice.

        Before the first step: moments are zero and stand for gradients too, so that nothing changes.
        """
        shards = [shard.tensor for shard in self._shards if shard.tensor.numel()]
        if self.steps or not shards or not self.takes_own_kernel:
            return None
        device = shards[0].device
        shape = {"tensors": len(shards), "parameters": sum(one.numel() for one in shards)}

        def measure() -> dict[str, Timing]:
            updates = {name: partial(self._update, 0.0, self._first, name) for name in (BUILTIN, "triton")}
            return time_in_turn(updates, device, with_host=True) or {BUILTIN: Timing(median_ms=math.inf)}

        key = choice_key("adamw", shape, torch.float32, device)
        return choose_measured("AdamW", key, (BUILTIN, "triton"), measure, folder=folder)

    def state(self) -> list[TensorShard]:
        """The live moments: writing into them is loading."""
        return list(self._state)

    def stored(self) -> list[TensorShard]:
        """The same."""
        return self.state()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Copy the moments in."""
        for shard in self.state():
            shard.tensor.copy_(state[shard.name])
        self.steps = steps

    def state_bytes(self) -> int:
        """Two moments in the weights' own format: 8 bytes per fp32 parameter."""
        return total_bytes([*self._first, *self._second])


KernelGroup = tuple[torch.device, torch.dtype, float, ParameterScale]


def _kernel_groups(
    shards: Sequence[TensorShard], weight_decay: float, decays: Callable[[str], bool], scales: ParameterScales
) -> dict[KernelGroup, list[int]]:
    """Positions of the shards one kernel call can take; a shard without elements needs none."""
    groups: dict[KernelGroup, list[int]] = {}
    for i, shard in enumerate(shards):
        if shard.tensor.numel():
            decay = weight_decay if decays(shard.name) else 0.0
            scale = scales(shard.name, len(shard.shape))
            groups.setdefault((shard.tensor.device, shard.tensor.dtype, decay, scale), []).append(i)
    return groups
