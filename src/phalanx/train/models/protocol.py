"""A network of the user's own: what it must offer, and how the code that builds it is found and checked.

The job names it as `[model] module = "my_model.py:build"`; the keys of the shape still tell the planner its size.
That code is run only when the person at the keyboard allows it, since job files are passed around.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from phalanx.arch.counts import count_parameters
from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.models.decoder import Decoder

GAP = 0.02  # parameters may differ from the shape by this share before the plan's memory is called wrong


@runtime_checkable
class Network(Protocol):
    """What every network offers: an nn.Module whose forward takes tokens_BS (int64) and returns logits_BSV."""

    def forward(self, x: Tensor) -> Tensor:
        """logits_BSV of tokens_BS."""

    def blocks(self) -> Mapping[str, nn.Module]:
        """The repeated parts by their name in the module, such as "layers.3": sharded, recomputed, compiled alone."""


@runtime_checkable
class Staged(Protocol):
    """A network that can be cut into pipeline stages."""

    def stage(self, layers: range, *, first: bool, last: bool) -> nn.Module:
        """A module of these layers only: takes tokens_BS when first, else hidden_BSD; gives logits_BSV when last."""


def build_model(shape: ModelShape, *, allow_code: bool = False, folder: Path = Path(), seed: int = 0) -> nn.Module:
    """Our decoder, or the network `shape.module` names; a file is looked for from `folder`, the job's.

    A network of the user's own draws its first weights while it is built, from torch's generator set to `seed`.
    Raises UserError when code is named but not allowed, cannot be run, or builds something that is no network.
    """
    if not shape.module:
        return Decoder(shape)
    if not allow_code:
        raise mistake(
            f"model {shape.name}",
            f'model.module = "{shape.module}" names code to run',
            why="a job file somebody else wrote could do anything that way",
            fix="read that code, then say --allow-code",
        )
    build = _find(shape.module, folder)
    model = _call(build, shape, seed)
    problems = list(_problems(model, shape.module))
    if problems:
        raise UserError(problems)
    assert isinstance(model, nn.Module)
    return model


class OwnStage(nn.Module):
    """A network of the user's own, or one stage of it, with the outside of our decoder: what the engine works on.

    Weights get their first values by name, as all others, since a rank may hold only a part of them.
    """

    def __init__(self, shape: ModelShape, network: nn.Module, *, last: bool = True) -> None:
        super().__init__()
        assert isinstance(network, Network)
        self.shape = shape
        self.positions: Tensor | None = None  # of the decoder; a network of one's own counts for itself
        self.network = network
        self.layers = dict(network.blocks())  # a plain dict: the modules stay registered under their own names only
        self.embed = None
        self.norm = nn.Identity() if last else None
        self.head = nn.Identity() if last else None
        self._shared = _shared_parameters(network)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnStage:
        super()._apply(fn, recurse)
        self.tie()  # to_empty() from the meta device makes new parameters, one per name
        return self

    def forward(self, x: Tensor) -> Tensor:
        """As the network's own."""
        out: Tensor = self.network(x)
        return out

    def blocks(self) -> Mapping[str, nn.Module]:
        """The network's own, by their names from here."""
        return {f"network.{name}": block for name, block in self.layers.items()}

    def tie(self) -> None:
        """Make one again of what the network built as one parameter under several names."""
        for (module, name), *others in self._shared:
            for other, again in others:
                setattr(other, again, getattr(module, name))


def _shared_parameters(network: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def build_stage(
    shape: ModelShape, *, layers: range, first: bool, last: bool, allow_code: bool = False, folder: Path = Path()
) -> Decoder:
    """One stage of the job's network, for the engine: call it with torch.device("meta") on."""
    if not shape.module:
        return Decoder(shape, layers=layers, first=first, last=last)
    network = build_model(shape, allow_code=allow_code, folder=folder)
    if not (first and last):
        assert isinstance(network, Staged), "refuse_layout() comes first"
        network = network.stage(layers, first=first, last=last)
    return cast(Decoder, OwnStage(shape, network, last=last))  # the same outside, by hand


def refuse_layout(shape: ModelShape, network: nn.Module, layout: Layout) -> None:
    """Raises UserError when the layout needs what a network of the user's own does not offer."""
    if not shape.module:
        return
    problems = []
    if layout.pipeline > 1 and not isinstance(network, Staged):
        problems.append(
            Problem(
                where="parallel.pipeline",
                what=f"pipeline = {layout.pipeline}, but {shape.module} offers no stage(layers, first, last)",
                why="only its author knows how it may be cut",
                fix="write stage(), or set parallel.pipeline = 1",
            )
        )
    for axis in ("tensor", "context", "expert"):
        degree = getattr(layout, axis)
        if degree > 1:
            problems.append(
                Problem(
                    where=f"parallel.{axis}",
                    what=f"{axis} = {degree} with a network of your own, {shape.module}",
                    why="only our own layers are split that way yet",
                    fix=f"set parallel.{axis} = 1; data, shard, zero, recompute and offload work",
                )
            )
    if problems:
        raise UserError(problems)


def differs_from_shape(model: nn.Module, shape: ModelShape) -> Problem | None:
    """A warning when the network is not of the size the plan was made for."""
    real = sum(parameter.numel() for parameter in model.parameters())
    planned = count_parameters(shape).total
    if abs(real / planned - 1.0) <= GAP:
        return None
    return Problem(
        where=f"model {shape.name}",
        what=f"{shape.module} built {real:,} parameters, the shape says {planned:,}",
        why="memory and step time were planned for the shape",
        fix="change layers, hidden, ffn or vocab under [model] to describe it",
    )


def _find(name: str, folder: Path) -> Callable[..., object]:
    place, _, function = name.rpartition(":")
    module = _from_file(folder / place, name) if place.endswith(".py") else _from_package(place, name)
    found = getattr(module, function, None)
    if not callable(found):
        close = nearest(function, vars(module))
        raise mistake(name, f"{place} has no function {function}", fix=f"did you mean {close}?" if close else "")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise mistake(str(path), "there is no such file", why=f'model.module = "{name}" is looked for beside the job')
    key = f"phalanx_module_{path.stem}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickles of the user's look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise _failed(name, "cannot be run", error) from error
    return module


def _from_package(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise _failed(name, "cannot be imported", error) from error


def _call(build: Callable[..., object], shape: ModelShape, seed: int) -> object:
    arguments = json.loads(shape.arguments) if shape.arguments else {}
    try:
        inspect.signature(build).bind(shape, **arguments)
    except TypeError as error:
        raise mistake(
            "model.arguments", f"do not fit {shape.module}: {error}", why="it is called as build(shape, **arguments)"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(shape, **arguments)
        except Exception as error:
            raise _failed(shape.module, "raised", error) from error


def _failed(name: str, what: str, error: Exception) -> UserError:
    """The user's own mistake, with the last line of the user's own code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return mistake(f"{last.filename}:{last.lineno}", f"{name} {what}: {type(error).__name__}: {error}"[:500])


def _problems(model: object, name: str) -> Iterator[Problem]:
    if not isinstance(model, nn.Module):
        yield Problem(where=name, what=f"returned {type(model).__name__}, not a torch.nn.Module")
        return
    if not isinstance(model, Network):
        yield Problem(
            where=name,
            what=f"{type(model).__name__} has no blocks()",
            why="sharding, recompute and compilation go block by block",
            fix='add def blocks(self): return {f"layers.{i}": b for i, b in enumerate(self.layers)}',
        )
        return
    parts = dict(model.named_modules())
    for key, block in model.blocks().items():
        if parts.get(key) is not block:
            yield Problem(where=name, what=f'blocks() calls a part "{key}", which is not its name in the module')
