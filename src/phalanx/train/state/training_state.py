"""The state of a run in a checkpoint, and its restoration: weights, optimizer, buffers, and a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import PhalanxError, Problem, SystemFailure
from phalanx.train.engine import Engine
from phalanx.train.model_stages import copy_weights
from phalanx.train.models.hf_weights import read_hf, read_named
from phalanx.train.models.own_model import PREFIX
from phalanx.train.optim.scaler import LossScale
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location
from phalanx.train.state.rank_state import (
    capture_random_state,
    private_shards,
    read_private_tensors,
    restore_random_state,
)
from phalanx.train.state.reader import CheckpointReader, StateSource, own_first, sound_checkpoints
from phalanx.train.state.restore import prepare_restore
from phalanx.units import plural

# The last three: another program's manifest
UNREADABLE = (PhalanxError, OSError, KeyError, TypeError, ValueError)
MOST_REASON = 2048  # bytes of a reason that one rank sends to all others


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredRun:
    """Result of a restore: `step` steps are done. `warnings` describe newer checkpoints that could not be used."""

    step: int = 0
    data: str = ""  # digest of the tokens the checkpoint was trained on
    warnings: tuple[str, ...] = ()


def checkpoint_meta(engine: Engine, *, step: int, tokens: int, data: str, run_id: str = "") -> dict[str, Any]:
    """Return a checkpoint's metadata. The sampler's position is the step, on which alone its order depends."""
    return {
        "step": step,
        "run": run_id,
        "tokens": tokens,
        "data": data,
        **state_numbers(engine),
        "carried_unit": engine.unit,
        "layout": asdict(engine.settings.layout),
        "own": _own_names(engine),
    }


def _own_names(engine: Engine) -> dict[str, Any] | None:
    """Return, for a user's own network, the other names of tied tensors, and the names of buffers."""
    if engine.outline is None:
        return None
    buffers = [name for name, spec in engine.outline.tensors.items() if not spec.is_parameter and spec.saved]
    return {"tied": dict(engine.outline.tied), "buffers": buffers}


def checkpoint_shards(engine: Engine) -> list[TensorShard]:
    """Return everything a checkpoint stores of this rank: its shards of the model's state, and its private tensors."""
    return [*engine.state(), *private_shards(dist.get_rank(), engine.carried())]


def checkpoint_rank_meta(engine: Engine) -> dict[str, Any]:
    """Return each rank's metadata in a checkpoint: its random state."""
    return capture_random_state(engine.device)


def restore_from_replicas(engine: Engine, source: StateSource) -> RestoredRun:
    """Load the replicas in memory; returns warnings if a rank could not. All ranks must call this."""
    failure = _load_state(engine, lambda: source, cast=False)
    if failure:
        return RestoredRun(warnings=(failure,))
    return RestoredRun(step=source.step, data=str(source.meta.get("data", "")))


def restore_newest_checkpoint(
    engine: Engine, root: Location | str, *, at_most: int | None = None, run_id: str = ""
) -> RestoredRun:
    """Load the newest checkpoint that is intact for every rank; step 0 if there is none. All ranks must call this.

    `at_most` excludes later steps, after which something went wrong. Checkpoints of another run than `run_id` come
    last, with a warning.
    """
    warnings: list[str] = []
    checkpoints = [
        candidate for candidate in sound_checkpoints(root, warnings) if at_most is None or candidate.step <= at_most
    ]
    checkpoints, foreign = own_first(checkpoints, run_id)
    for checkpoint in checkpoints:
        failure = _load_state(engine, lambda place=checkpoint.path: CheckpointReader(place), cast=True)  # type: ignore[misc]
        if not failure:
            data = str(checkpoint.meta.get("data", ""))
            foreign_warnings = [
                text
                for candidate, text in foreign.items()
                if candidate.step > checkpoint.step or candidate is checkpoint
            ]
            return RestoredRun(step=checkpoint.step, data=data, warnings=(*warnings, *foreign_warnings))
        warnings.append(failure)
    if warnings:
        raise _no_checkpoint_left(root, warnings)
    return RestoredRun()


def _load_state(engine: Engine, find: Callable[[], StateSource], *, cast: bool) -> str:
    """Fill the engine from a source; return an empty string if every rank has done so, else the first failure.

    If a rank finds the source unusable beforehand, nothing has changed; if reading fails later, everything may have.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    weights, optimizer = engine.weights(), engine.optimizer.state()
    failure = ""
    try:
        source = find()
        shards = [*weights, *optimizer, *engine.peer_state]
        prepared = prepare_restore(source, shards, cast=cast, rank=rank, world=world)
    except UNREADABLE as error:
        failure = str(error) or type(error).__name__
    if first_failure := first_reason(failure, engine.device):
        return first_failure
    try:
        prepared.fill()
        _restore_beside_tensors(engine, optimizer, source)
    except UNREADABLE as error:
        failure = f"{type(error).__name__}: {error}"
    return first_reason(failure, engine.device)


@torch.no_grad()
def load_hf_weights(engine: Engine, folder: Path) -> None:
    """Start from a Hugging Face folder: each rank reads the tensors of which it has a shard, one at a time.

    A user's own network has its own names: those of its state_dict(), as `phalanx export` writes them.
    """
    if engine.outline is not None:
        shapes = {name: spec.shape for name, spec in engine.outline.tensors.items() if spec.saved}
        names = {shard.name.removeprefix(PREFIX) for shard in engine.weights()}
        values = read_named(folder, shapes, wanted=names, others=engine.outline.tied)
        copy_weights(values, engine.parts, engine.weights(), prefix=PREFIX)
        engine.publish()
        return
    shards: dict[str, list[TensorShard]] = {}
    for shard in engine.shards:
        shards.setdefault(shard.name, []).append(shard)
    for name, tensor in read_hf(folder, engine.shape, wanted=shards):
        for shard in shards[name]:
            region = tensor
            for dim, (start, size) in enumerate(zip(shard.start, shard.tensor.shape, strict=True)):
                region = region.narrow(dim, start, size)
            shard.tensor.copy_(region)
    engine.publish()


def state_numbers(engine: Engine) -> dict[str, Any]:
    """Return the numbers in an engine's state, which are the same on every rank."""
    return {
        "optimizer_steps": engine.optimizer.steps,
        "loss_scale": engine.loss_scale.state() if engine.loss_scale is not None else None,
        "spikes": engine.spikes.state(),
        "noise": engine.noise.state(),
    }


def take_state_numbers(engine: Engine, optimizer: list[TensorShard], meta: Mapping[str, Any]) -> None:
    """Restore what `state_numbers` returned; the weights and the `optimizer`'s state have already been filled."""
    engine.optimizer.load({shard.name: shard.tensor for shard in optimizer}, int(meta["optimizer_steps"]))
    if engine.loss_scale is not None and not engine.loss_scale.fixed and meta.get("loss_scale"):
        engine.loss_scale = LossScale.load(meta["loss_scale"])
    if meta.get("spikes"):
        engine.spikes.load(meta["spikes"])
    if meta.get("noise"):
        engine.noise.load(meta["noise"])


def _restore_beside_tensors(engine: Engine, optimizer: list[TensorShard], source: StateSource) -> None:
    meta, rank, world = source.meta, dist.get_rank(), dist.get_world_size()
    take_state_numbers(engine, optimizer, meta)
    if world == source.world and meta.get("layout") == asdict(engine.settings.layout):
        engine.take_carried(read_private_tensors(source, rank), unit=float(meta.get("carried_unit") or 0.0))
    restore_random_state(source, rank=rank, world=world, device=engine.device)
    # Each rank's own, or rank 0's for all
    callback_state = source.index(rank if world == source.world else 0).meta.get("callbacks")
    engine.restored_extras = {
        "callbacks": callback_state or {},
        "data_position": meta.get("data_position"),
        "skipped_in_a_row": meta.get("skipped_in_a_row"),
    }
    engine.publish()


def first_reason(mine: str, device: torch.device) -> str:
    """Return the reason of the lowest rank that failed, on every rank alike; empty if none did.

    The parameter is this rank's reason. So a rank that cannot read its part does not leave the others waiting, and
    every rank can report the cause.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    rank, world = dist.get_rank(), dist.get_world_size()
    lowest_failed = torch.tensor([rank if mine else world], device=device)
    dist.all_reduce(lowest_failed, op=dist.ReduceOp.MIN)
    failed_rank = int(lowest_failed.item())
    if failed_rank == world:
        return ""
    message = torch.zeros(MOST_REASON, dtype=torch.uint8)
    if rank == failed_rank:
        text = f"rank {rank}: {mine}".encode()[:MOST_REASON]
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, src=failed_rank)
    return message.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _no_checkpoint_left(root: Location | str, warnings: list[str]) -> SystemFailure:
    first = warnings[0].splitlines()[0]
    return SystemFailure(
        Problem(
            where=str(root),
            what=f"none of {plural(len(warnings), 'checkpoint')} can be read: {first}",
            why="starting again from step 0 would throw the run away without asking",
            fix="start a new run, or delete the damaged folders",
        )
    )
