"""What test_compiled runs on every rank, and a network whose forward changes all there is to change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.train.engine import Engine
from phalanx.train.guard.compiled import CompiledComparison, code_key, compare_compiled, drawn_so_far, is_comparison_due
from phalanx.train.guard.divergence import digest_shards
from phalanx.train.state.rank_state import seed_random_state
from phalanx.train.tracing.traced_step import forget_meshes
from phalanx.train.verify.trial import Trial, rank_batch

RIGHT, WRONG = "graphs_as_they_are", "gradients_times_0.66"  # compilers


class Layer(nn.Module):
    """Draws random numbers, keeps running statistics, and counts its calls in a buffer and in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop, self.mix = nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        y = self.norm(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.mix(y).relu())


class Changing(nn.Module):
    """A decoder of such layers."""

    def __init__(self, shape: Any, layers: range | None = None, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.calls = 0
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(n): Layer(shape.hidden) for n in (layers or range(shape.layers))})
        self.head = nn.Linear(shape.hidden, shape.vocab) if last else None

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{name}": layer for name, layer in self.layers.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def changing(shape: Any) -> nn.Module:
    """As a job names it."""
    return Changing(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one rank found, and what it was left with, with and without looking."""

    found: CompiledComparison | str
    without: list[str]
    with_it: list[str]
    due: list[bool]  # never compared; on one rank; in a process that has compared the same code


def hold_against(rank: int, trials: Sequence[Trial]) -> list[Held]:
    """Steps of each trial from the same start twice, the second time with the comparison before the first."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for name, factor in ((RIGHT, 1.0), (WRONG, 0.66)):
        _register(name, factor)
    return [_held(rank, trial) for trial in trials]


def _held(rank: int, trial: Trial) -> Held:
    forget_meshes()
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"))
    engine.initialise()
    first = [shard.tensor.clone() for shard in engine.state()]
    without, with_it = [], []
    _steps(rank, engine, trial, without)
    with torch.no_grad():
        for shard, value in zip(engine.state(), first, strict=True):
            shard.tensor.copy_(value)
    engine.optimizer.load({shard.name: shard.tensor for shard in engine.optimizer.state()}, 0)
    engine.take_carried({}, 0.0)
    engine.publish()
    due = [is_comparison_due(engine, set())]
    found = compare_compiled(engine, *rank_batch(engine, trial, 0))
    key = code_key(engine)
    due += [is_comparison_due(engine, {key} if rank else set()), is_comparison_due(engine, {key})]
    _steps(rank, engine, trial, with_it)
    return Held(found=found, without=without, with_it=with_it, due=due)


def _steps(rank: int, engine: Engine, trial: Trial, into: list[str]) -> None:
    """Everything that a run carries from step to step, after each."""
    seed_random_state(trial.settings.seed, rank=rank, world=trial.settings.layout.devices)
    modules = [module for part in engine.parts for module in part.model.modules()]
    before = sum(getattr(one, "calls", 0) for one in modules)
    for step in range(trial.steps):
        result = engine.step(*rank_batch(engine, trial, step), lr=trial.lr)
        carried = [f"{name} {float(one.double().sum())!r}" for name, one in sorted(engine.carried().items())]
        buffers = [float(one.double().sum()) for part in engine.parts for one in part.model.buffers()]
        calls = sum(getattr(one, "calls", 0) for one in modules) - before
        random = int(drawn_so_far(engine.device).to(torch.int64).sum())
        state = digest_shards(engine.state())
        into.append(f"{result.loss!r} {result.grad_norm!r} {state} {carried} {buffers} {calls} {random}")


def _register(name: str, factor: float) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend

    def times(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            return [one * factor if torch.is_tensor(one) else one for one in graph(*args)]

        return make_boxed_func(run)

    def plain(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=plain, bw_compiler=times if factor != 1.0 else plain)
    register_backend(name=name, compiler_fn=backend)
