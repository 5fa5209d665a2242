"""Interface of a user's own network, and the search, call and check of the code that builds it.

The job names it as `[model] module = "my_model.py:build"`; the keys of the shape still describe its size to the
planner. That code runs only with the explicit permission of the user, since job files are passed around. An installed
package's entry point in phalanx.models (`module = "tiny-net"`) was installed on purpose, and runs without it.
"""

from __future__ import annotations

import inspect
import json
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.path_probes import is_file
from phalanx.job.model import ModelShape
from phalanx.job.plugin_reference import MODEL_GROUP, runs_named_code
from phalanx.train.models.decoder import Decoder
from phalanx.train.plugins import load_entry_point, load_module


@runtime_checkable
class Network(Protocol):
    """Interface of every network: an nn.Module whose forward takes tokens_BS (int64) and returns logits_BSV."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits_BSV of tokens_BS."""

    def blocks(self) -> Mapping[str, nn.Module]:
        """Return the modules that are sharded, recomputed and compiled separately, by name, such as "layers.3"."""


@runtime_checkable
class Staged(Protocol):
    """Interface of a network that can be split into pipeline stages."""

    def stage(self, layers: range, *, first: bool, last: bool) -> nn.Module:
        """Build a module of these layers only.

        It takes tokens_BS if `first`, else hidden_BSD, and returns logits_BSV if `last`.
        """


def build_model(shape: ModelShape, *, allow_code: bool = False, folder: Path = Path(), seed: int = 0) -> nn.Module:
    """Build the decoder, or the network that `shape.module` names; a file is relative to `folder`, the job's.

    A user's own network draws its initial weights while it is built, as in plain PyTorch after
    `torch.manual_seed(seed)`; the generators of `random` and numpy get the same seed. Raises UserError if code is
    named but not allowed, cannot be run, or builds something that is not a network.
    """
    if not shape.module:
        return Decoder(shape)
    if runs_named_code(shape.module) and not allow_code:
        raise mistake(
            f"model {shape.name}",
            f'model.module = "{shape.module}" names code to run',
            why="a job file somebody else wrote could do anything that way",
            fix="read that code, then give --allow-code (allow_code=True in Python)",
        )
    build = _find_constructor(shape.module, folder)
    model = _call_constructor(build, shape, seed)
    problems = list(_model_problems(model, shape.module))
    if problems:
        raise UserError(problems)
    assert isinstance(model, nn.Module)
    return model


def _find_constructor(name: str, folder: Path) -> Callable[..., object]:
    if not runs_named_code(name):
        return _load_packaged(name)
    location, _, function = name.rpartition(":")
    names_file = location.endswith(".py")
    if names_file and not is_file(folder / location):
        raise mistake(
            str(folder / location), "there is no such file", why=f'model.module = "{name}" is looked for beside the job'
        )
    try:
        module = load_module(str(folder / location) if names_file else location)
    except Exception as error:
        raise _constructor_failed(name, "cannot be run" if names_file else "cannot be imported", error) from error
    constructor = getattr(module, function, None)
    if not callable(constructor):
        suggestion = nearest(function, vars(module))
        raise mistake(
            name, f"{location} has no function {function}", fix=f"did you mean {suggestion}?" if suggestion else ""
        )
    return constructor  # type: ignore[no-any-return]


def _load_packaged(name: str) -> Callable[..., object]:
    try:
        factory = load_entry_point(name, MODEL_GROUP, key="model.module")
    except UserError:
        raise
    except Exception as error:
        raise _constructor_failed(name, "cannot be imported", error) from error
    if not callable(factory):
        raise mistake(
            "model.module",
            f"the entry point {name!r} of {MODEL_GROUP} is of type {type(factory).__name__}, which cannot be called",
            why="it is called as build(shape, **arguments)",
        )
    return factory  # type: ignore[no-any-return]


def _call_constructor(build: Callable[..., object], shape: ModelShape, seed: int) -> object:
    arguments = json.loads(shape.arguments) if shape.arguments else {}
    try:
        inspect.signature(build).bind(shape, **arguments)
    except TypeError as error:
        raise mistake(
            "model.arguments", f"do not fit {shape.module}: {error}", why="it is called as build(shape, **arguments)"
        ) from error
    with _seeded_generators(seed):
        try:
            return build(shape, **arguments)
        except Exception as error:
            raise _constructor_failed(shape.module, "raised", error) from error


@contextmanager
def _seeded_generators(seed: int) -> Iterator[None]:
    """Seed every generator that a constructor may draw from, and restore their states afterwards.

    Uses one thread: a product inside an initialisation (`nn.init.orthogonal_`) may round differently on another
    number of threads, and ranks have more threads where there are fewer ranks.
    """
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)


def _constructor_failed(name: str, what: str, error: Exception) -> UserError:
    """Return a user's error that points to the last line of the user's code."""
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    return mistake(
        f"{last_frame.filename}:{last_frame.lineno}", f"{name} {what}: {type(error).__name__}: {error}"[:500]
    )


def _model_problems(model: object, name: str) -> Iterator[Problem]:
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
    modules = dict(model.named_modules())
    for key, block in model.blocks().items():
        if modules.get(key) is not block:
            yield Problem(where=name, what=f'blocks() calls a part "{key}", which is not its name in the module')
