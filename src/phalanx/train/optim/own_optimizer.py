"""Adapter for a user's own optimizer: any torch.optim.Optimizer whose state has the shapes of its parameters.

A rank updates its shards of the parameters, so an optimizer must be elementwise wherever tensors are split: torch's
own are (all but LBFGS, Muon and Adafactor), another one declares it with an attribute `elementwise = True`. State
tensors of a parameter's shape are split, saved and resharded as the parameter is; a step count is kept; other state
is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.errors import mistake
from phalanx.job.plugin_reference import PluginReference
from phalanx.job.schema import Optim
from phalanx.train.optim.base import state_shard, total_bytes
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.plugins import load_class_or_function

WHERE = "plugins.optimizer"
# Classes of torch.optim
NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")
STEP = "step"  # the name of the step count in torch's optimizers


class OwnOptimizer:
    """A torch optimizer over this rank's shards, with the interface of `Optimizer`."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        reference: str,
        *,
        optim: Optim,
        decays: Callable[[str], bool],
        allow_code: bool,
    ) -> None:
        self.steps = 0
        self._name, self._shards = reference, [shard for shard in shards if shard.tensor.numel()]
        arguments = PluginReference.parse(reference, key=WHERE).arguments
        factory = load_class_or_function(reference, kind="optimizer", allow_code=allow_code)

        def build(members: Sequence[tuple[TensorShard, torch.Tensor]]) -> torch.optim.Optimizer:
            return _build_own(reference, factory, members, optim=optim, decays=decays, arguments=arguments)

        self._inner = build([(shard, shard.tensor) for shard in self._shards])
        # The schedule scales every group, and a user's own ratios between groups stay.
        self._ratios = [float(group["lr"]) / optim.lr for group in self._inner.param_groups]
        self._refuse_split()
        # Torch creates the state in the first step: a trial step on a copy of each parameter shows what it will be.
        self._layouts = [self._state_layout(shard, build) for shard in self._shards]
        self._count: Any = next((layout[STEP] for layout in self._layouts if STEP in layout), None)

    def _refuse_split(self) -> None:
        cls = type(self._inner)
        is_elementwise_torch = cls.__module__.startswith("torch.optim") and cls.__name__ not in NOT_ELEMENTWISE
        split_shard = next((shard for shard in self._shards if not shard.whole), None)
        if split_shard is not None and not is_elementwise_torch and not getattr(self._inner, "elementwise", False):
            raise mistake(
                WHERE,
                f"{cls.__name__} would update {split_shard.name} by its shards, {list(split_shard.tensor.shape)} of "
                f"{list(split_shard.shape)}",
                why="that is the same update only where each element is updated by itself",
                fix="set elementwise = True in its class if it is so; else parallel.zero = 0 and parallel.tensor = 1",
            )

    def _state_layout(self, shard: TensorShard, build: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
        """Return the state of one parameter after a step, by name: tensors of its shape, or the step count."""
        copy = torch.zeros_like(shard.tensor)
        copy.grad = torch.zeros_like(copy)
        trial = build([(shard, copy)])
        try:
            trial.step()
        except Exception as error:
            raise mistake(WHERE, f"{self._name} raised {type(error).__name__} in step(): {error}"[:500]) from error
        trial_state = dict(trial.state.get(copy, {}))
        for name, value in trial_state.items():
            is_count = name == STEP and (not isinstance(value, torch.Tensor) or value.numel() == 1)
            is_alike = isinstance(value, torch.Tensor) and value.shape == copy.shape and value.is_floating_point()
            if not is_count and not is_alike and value is not None:
                description = (
                    f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)[:40]
                )
                raise mistake(
                    WHERE,
                    f"{type(trial).__name__} keeps {name!r} ({description}) for {shard.name} of {list(copy.shape)}",
                    why="checkpoints split and reshard state as its parameter is split",
                    fix='keep tensors of the parameter\'s shape, and a count named "step"',
                )
        return {name: value for name, value in trial_state.items() if value is not None}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update once; parameter groups keep the ratio of their learning rate to the job's."""
        for group, ratio in zip(self._inner.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio
        self._inner.step()
        self.steps += 1

    def state(self) -> list[TensorShard]:
        """Return the state tensors; before the first step, tensors that a checkpoint can be read into."""
        state_shards = []
        for shard, layout in zip(self._shards, self._layouts, strict=True):
            live = self._inner.state.get(shard.tensor, {})
            for name, value in layout.items():
                if name != STEP:
                    state_shards.append(state_shard(shard, name, live.get(name, value)))
        return state_shards

    def stored(self) -> list[TensorShard]:
        """Return `state()`: the tensors are stored as they are."""
        return self.state()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load the state after `steps` steps; after 0 steps torch creates the state itself."""
        self.steps = steps
        if not steps:
            return
        for shard, layout in zip(self._shards, self._layouts, strict=True):
            names = [name for name in layout if name != STEP]
            values: dict[str, Any] = {name: state[f"{shard.name}#{name}"].clone() for name in names}
            if STEP in layout:
                count = layout[STEP]
                values[STEP] = torch.full_like(count, steps) if isinstance(count, torch.Tensor) else type(count)(steps)
            if values:
                self._inner.state[shard.tensor] = values

    def state_bytes(self) -> int:
        """Return the bytes of the state tensors."""
        return total_bytes([shard.tensor for shard in self.state()])


def _build_own(
    reference: str,
    factory: Any,
    members: Sequence[tuple[TensorShard, torch.Tensor]],
    *,
    optim: Optim,
    decays: Callable[[str], bool],
    arguments: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Build the optimizer: a class gets parameter groups and matching keys of [optim].

    A function (named parameters, optim).
    """
    try:
        if isinstance(factory, type):
            parameters = inspect.signature(factory).parameters
            arguments_from_job = {
                name: getattr(optim, name) for name in ("lr", "betas", "eps", "weight_decay") if name in parameters
            }
            groups: list[dict[str, Any]] = [{"params": [tensor for shard, tensor in members if decays(shard.name)]}]
            without_decay = [tensor for shard, tensor in members if not decays(shard.name)]
            groups.append(
                {"params": without_decay, "weight_decay": 0.0}
                if "weight_decay" in parameters
                else {"params": without_decay}
            )
            built: Any = factory([group for group in groups if group["params"]], **{**arguments_from_job, **arguments})
        else:
            built = factory([(shard.name, tensor) for shard, tensor in members], optim, **arguments)
    except Exception as error:
        raise mistake(WHERE, f"{reference} raised {type(error).__name__}: {error}"[:500]) from error
    if not isinstance(built, torch.optim.Optimizer):
        raise mistake(WHERE, f"{reference} made a {type(built).__name__}, not a torch.optim.Optimizer")
    return built
