"""What test_compiled runs on every rank, and a network whose forward changes all there is to change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.train.checkpoint.random_state import seed_random
from phalanx.train.engine import Engine
from phalanx.train.guard.compiled import Comparison, code_key, compare_compiled, drawn_so_far, is_due
from phalanx.train.guard.digest import digest_pieces
from phalanx.train.tracing.dry import _forget_meshes
from phalanx.train.verify.trial import Trial, _mine

BACKEND = "gradients_times"  # graphs as aot_eager runs them, backward's results times a factor


class Layer(nn.Module):
    """Draws random numbers, keeps running statistics, and counts its calls in a buffer and in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop, self.mix = nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.mix(y).relu())


class Changing(nn.Module):
    """A decoder of such layers."""

    def __init__(self, shape: Any, layers: range | None = None, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.calls = 0
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(n): Layer(shape.hidden) for n in (layers or range(shape.layers))})
        self.head = nn.Linear(shape.hidden, shape.vocab) if last else None

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

    found: Comparison | str
    without: list[str]
    with_it: list[str]
    due: list[bool]  # never compared; on one rank; in a process that has compared the same code


def hold_against(rank: int, trials: Sequence[Trial], factor: float) -> list[Held]:
    """Each trial twice, once with the comparison before its first step."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    _register(factor)
    return [_held(rank, trial) for trial in trials]


def _held(rank: int, trial: Trial) -> Held:
    without, with_it = [], []
    engine = _built(rank, trial)
    _steps(engine, trial, without)
    engine, compared = _built(rank, trial), set[str]()
    due = [is_due(engine, compared)]
    found = compare_compiled(engine, *_mine(engine, trial, 0))
    key = code_key(engine)
    due.append(is_due(engine, {key} if rank else set()))
    due.append(is_due(engine, {key}))
    _steps(engine, trial, with_it)
    return Held(found=found, without=without, with_it=with_it, due=due)


def _built(rank: int, trial: Trial) -> Engine:
    _forget_meshes()
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"))
    engine.initialise()
    seed_random(trial.settings.seed, rank=rank, world=trial.settings.layout.devices)
    return engine


def _steps(engine: Engine, trial: Trial, into: list[str]) -> None:
    """Everything that a run carries from step to step, after each."""
    for step in range(trial.steps):
        result = engine.step(*_mine(engine, trial, step), lr=trial.lr)
        carried = [f"{name} {float(one.double().sum())!r}" for name, one in sorted(engine.carried().items())]
        buffers = [float(one.double().sum()) for part in engine.parts for one in part.model.buffers()]
        calls = [getattr(one, "calls", 0) for part in engine.parts for one in part.model.modules()]
        random = int(drawn_so_far(engine.device).to(torch.int64).sum())
        state = digest_pieces(engine.state())
        into.append(f"{result.loss!r} {result.grad_norm!r} {state} {carried} {buffers} {sum(calls)} {random}")


def _register(factor: float) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend

    def times(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            found = graph(*args)
            return [one * factor if torch.is_tensor(one) and one.is_floating_point() else one for one in found]

        from functorch.compile import make_boxed_func

        return make_boxed_func(run)

    def plain(graph: Any, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=plain, bw_compiler=times if factor != 1.0 else plain)
    register_backend(name=BACKEND, compiler_fn=backend)
