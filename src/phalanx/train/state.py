"""What a run is between two steps, and how it is put back: weights, optimizer, buffers and the few numbers beside."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import PhalanxError, Problem, WorldError
from phalanx.train.checkpoint.find import candidates
from phalanx.train.checkpoint.load import prepare
from phalanx.train.checkpoint.source import Source
from phalanx.train.engine import Engine
from phalanx.train.models.hf_weights import read_hf
from phalanx.train.optim.scaler import LossScale
from phalanx.train.parallel.pieces import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Where a run goes on: `step` steps are done. `warnings` tell of newer checkpoints that could not be used."""

    step: int = 0
    data: str = ""  # digest of the tokens the checkpoint had learnt from
    warnings: tuple[str, ...] = ()


def meta_of(engine: Engine, *, step: int, tokens: int, data: str) -> dict[str, Any]:
    """What a checkpoint keeps beside tensors. The sampler's place is the step: its order depends on nothing else."""
    return {
        "step": step,
        "tokens": tokens,
        "data": data,
        "optimizer_steps": engine.optimizer.steps,
        "loss_scale": engine.loss_scale.state() if engine.loss_scale is not None else None,
        "spikes": engine.spikes.state(),
        "layout": asdict(engine.settings.layout),
    }


def restore_copies(engine: Engine, source: Source) -> Restored:
    """Load the copies that memory holds; with warnings, and nothing loaded, when a rank could not. All call this."""
    weights, optimizer = engine.weights(), engine.optimizer.state()
    failure = ""
    try:
        ready = prepare(source, [*weights, *optimizer], rank=dist.get_rank(), world=dist.get_world_size())
    except (PhalanxError, OSError) as error:
        failure = str(error)
    if not _all_agree(failure == "", engine.device):
        return Restored(warnings=(failure or f"{source.where}: another rank could not read it",))
    ready.fill()
    _take(engine, optimizer, source.meta)
    return Restored(step=source.step, data=str(source.meta.get("data", "")))


def restore_newest(engine: Engine, root: Path, *, at_most: int | None = None) -> Restored:
    """Load the newest checkpoint that is whole for every rank; step 0 when there is none. All ranks must call this.

    `at_most` leaves out those of more steps: something went wrong after it.
    """
    warnings: list[str] = []
    knows = False
    found = list(candidates(root, warnings)) if root.is_dir() else []
    found = [one for one in found if at_most is None or one.step <= at_most]
    for checkpoint in found:
        weights, optimizer = engine.weights(), engine.optimizer.state()
        failure = ""
        try:
            ready = prepare(
                checkpoint.path,
                [*weights, *optimizer],
                cast=True,
                rank=dist.get_rank(),
                world=dist.get_world_size(),
            )
        except PhalanxError as error:
            failure = str(error)
        if _all_agree(failure == "", engine.device):
            ready.fill()
            _take(engine, optimizer, checkpoint.meta)
            data = str(checkpoint.meta.get("data", ""))
            return Restored(step=checkpoint.step, data=data, warnings=tuple(warnings))
        warnings.append(failure or f"{checkpoint.path.name}: another rank could not read it")
        knows = knows or bool(failure)
    if warnings:
        if found and not knows:
            time.sleep(1.0)  # the rank that knows the reason is to be heard first
        raise _none_left(root, warnings)
    return Restored()


@torch.no_grad()
def take_weights(engine: Engine, folder: Path) -> None:
    """Start from a Hugging Face folder: each rank reads the tensors it has a part of, one at a time."""
    pieces: dict[str, list[Piece]] = {}
    for piece in engine.pieces:
        pieces.setdefault(piece.name, []).append(piece)
    for name, whole in read_hf(folder, engine.shape, wanted=pieces):
        for piece in pieces[name]:
            part = whole
            for dim, (start, size) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
                part = part.narrow(dim, start, size)
            piece.tensor.copy_(part)
    engine.publish()


def _take(engine: Engine, optimizer: list[Any], meta: Any) -> None:
    engine.optimizer.load({piece.name: piece.tensor for piece in optimizer}, int(meta["optimizer_steps"]))
    if engine.loss_scale is not None and meta.get("loss_scale"):
        engine.loss_scale = LossScale.load(meta["loss_scale"])
    if meta.get("spikes"):
        engine.spikes.load(meta["spikes"])
    engine.publish()


def _all_agree(mine: bool, device: torch.device) -> bool:
    """Whether every rank says yes; one that cannot read its part must not leave the others waiting."""
    vote = torch.tensor([0 if mine else 1], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vote)
    return int(vote.item()) == 0


def _none_left(root: Path, warnings: list[str]) -> WorldError:
    told = [text for text in warnings if not text.endswith("another rank could not read it")]
    first = (told or warnings)[0].splitlines()[0]
    return WorldError(
        Problem(
            where=str(root),
            what=f"no checkpoint of {len(warnings)} can be read: {first}",
            why="starting again from step 0 would throw the run away without asking",
            fix="start a new run, or delete the damaged folders",
        )
    )
