"""A trial: a few steps of a small model under one layout on random data, and everything there is to compare of it.

B sequences of the global batch, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.train.data.batches import IGNORED
from phalanx.train.engine import Engine
from phalanx.train.optim.base import Optimizer
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_settings import Settings
from phalanx.train.state.save import save_checkpoint
from phalanx.train.state.training_state import (
    checkpoint_meta,
    checkpoint_rank_meta,
    checkpoint_shards,
    restore_newest_checkpoint,
)
from phalanx.train.verify.ranks import CORES, TrialPlace, run_ranks

Array = NDArray[Any]
HELD_OUT = 10**6  # the seed of the batch that is evaluated, not learned from


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is run. Two trials that differ only in their layout must give the same."""

    shape: ModelShape
    settings: Settings
    sequences: int  # of the global batch
    optim: Optim = field(default_factory=Optim)
    steps: int = 5
    lr: float = 1e-2
    state_dtype: str = "fp32"
    resume: str = ""  # a folder of checkpoints: goes on from the newest, of whatever layout
    save: str = ""  # where to write one after the last step
    loss_scale: float = 0.0  # first scale of fp16, when not the default
    broken_rank: int = -1  # the gradient of this rank is infinite in the first step, as from a bad memory chip
    device: str = "cpu"
    tensors: bool = True  # compare gradients and weights one by one; else losses and gradient norms alone
    evaluate: bool = True  # a held-out batch before the first step and after the last


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeShard:
    """A rank's box of one tensor."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    owner: bool
    digest: str
    values: Array | None  # of the owner only: the others must hold the same


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    tokens: list[int]
    evaluations: list[tuple[float, int]]  # before the first and after the last step
    grads: list[list[OutcomeShard]]  # of every step that was not skipped, clipped
    params: list[list[OutcomeShard]]  # after every step
    loss_scale: float
    seconds: float
    graphs: tuple[int, int] = (0, 0)  # compiled graphs: found in the compile cache, and not found there


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """What a trial gave: the numbers every rank agreed on and whole tensors put together from their boxes."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    tokens: list[int]
    evaluations: list[tuple[float, int]]
    grads: list[dict[str, Array]]
    params: list[dict[str, Array]]
    quarrels: list[str]  # ranks that should hold the same and do not
    loss_scale: float
    seconds: float  # of the slowest rank, without the start
    graphs: tuple[int, int] = (0, 0)  # of all ranks: found in the compile cache, and not found there

    @property
    def digest(self) -> str:
        """One digest of all parameters after the last step."""
        found = hashlib.sha256()
        for name, values in sorted(self.params[-1].items()):
            found.update(name.encode())
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()


def run_trial(
    trial: Trial, *, limit_s: float | None = None, debug: bool = True, place: TrialPlace = CORES
) -> TrialOutcome:
    """Run a trial on as many ranks as its layout has, on the trial's kind of device."""
    world, place = trial.settings.layout.devices, replace(place, device=trial.device)
    return join_rank_outcomes(run_ranks(run_trial_rank, world, trial, limit_s=limit_s, debug=debug, place=place))


def make_batch(step: int, *, sequences: int, sequence: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens_BS and targets_BS of a step, whatever the layout; a few targets of the first sequence do not count."""
    drawn = torch.Generator().manual_seed(1000 + step)
    tokens_BL = torch.randint(0, vocab, (sequences, sequence + 1), generator=drawn)
    targets_BS = tokens_BL[:, 1:].clone()
    targets_BS[0, : max(1, sequence // 5)] = IGNORED
    return tokens_BL[:, :-1].contiguous(), targets_BS


def run_trial_rank(rank: int, trial: Trial) -> RankOutcome:
    """One rank of a trial, inside a process group."""
    began_s = time.perf_counter()
    # FSDP2 warns of views that nobody changes in place: the embedding's output under tensor parallelism is one.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    device = torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")
    engine = Engine(trial.shape, trial.settings, trial.optim, device=device, state_dtype=trial.state_dtype)
    first = 0
    if trial.resume:
        engine.initialise_unsaved()  # what the checkpoint does not hold
        first = restore_newest_checkpoint(engine, Path(trial.resume)).step
    if not first:
        engine.initialise()
    if trial.loss_scale and engine.loss_scale is not None:
        engine.loss_scale = replace(engine.loss_scale, scale=trial.loss_scale)
    watched = WatchedOptimizer(engine.optimizer, engine.shards if trial.tensors else ())
    engine.optimizer = watched
    if rank == trial.broken_rank:
        _break_once(engine)
    evaluations = [engine.evaluate(*rank_batch(engine, trial, HELD_OUT))] if trial.evaluate else []
    results, params = [], []
    for step in range(first, first + trial.steps):
        results.append(engine.step(*rank_batch(engine, trial, step), lr=trial.lr))
        params.append([_outcome_shard(shard, shard.tensor) for shard in engine.shards] if trial.tensors else [])
    if trial.evaluate:
        evaluations.append(engine.evaluate(*rank_batch(engine, trial, HELD_OUT)))
    if trial.save:
        save_trial_state(engine, Path(trial.save), step=first + trial.steps, rank=rank)
    return RankOutcome(
        losses=[one.loss for one in results],
        norms=[one.grad_norm for one in results],
        skipped=[one.skipped for one in results],
        tokens=[one.tokens for one in results],
        evaluations=evaluations,
        grads=watched.grads,
        params=params,
        loss_scale=engine.loss_scale.scale if engine.loss_scale is not None else 1.0,
        seconds=time.perf_counter() - began_s,
        graphs=_count_graphs() if trial.settings.compile else (0, 0),
    )


def _count_graphs() -> tuple[int, int]:
    """Compiled graphs of this process that were in torch's compile cache, and that were not."""
    from torch._dynamo.utils import counters

    kept = [(counters["aot_autograd"], "autograd_cache"), (counters["inductor"], "fxgraph_cache")]
    hits, misses = (sum(int(table[f"{name}_{end}"]) for table, name in kept) for end in ("hit", "miss"))
    return hits, misses


def rank_batch(engine: Engine, trial: Trial, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This data rank's sequences of the global batch."""
    whole = make_batch(step, sequences=trial.sequences, sequence=trial.settings.sequence, vocab=trial.shape.vocab)
    ranks, index = engine.dims.data, engine.meshes.index("data")
    tokens_BS, targets_BS = (one.chunk(ranks)[index] for one in whole)
    return tokens_BS, targets_BS


class WatchedOptimizer:
    """An optimizer that remembers the gradients it was given."""

    def __init__(self, inner: Optimizer, shards: Sequence[TensorShard]) -> None:
        self._inner, self._shards = inner, shards
        self.steps = inner.steps
        self.grads: list[list[OutcomeShard]] = []

    def step(self, lr: float) -> None:
        """Note the gradients, then update."""
        self.grads.append(
            [_outcome_shard(shard, shard.tensor.grad) for shard in self._shards if shard.tensor.grad is not None]
        )
        self._inner.step(lr)
        self.steps = self._inner.steps

    def state(self) -> list[TensorShard]:
        """As the optimizer's."""
        return self._inner.state()

    def stored(self) -> list[TensorShard]:
        """As the optimizer's."""
        return self._inner.stored()

    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """As the optimizer's."""
        self._inner.load(state, steps)

    def state_bytes(self) -> int:
        """As the optimizer's."""
        return self._inner.state_bytes()


def _outcome_shard(shard: TensorShard, tensor: torch.Tensor) -> OutcomeShard:
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        values = values.float()
    array: Array = values.numpy().copy()
    return OutcomeShard(
        name=shard.name,
        shape=shard.shape,
        start=shard.start,
        size=array.shape,
        owner=shard.owner,
        digest=hashlib.sha256(array.tobytes()).hexdigest(),
        values=array if shard.owner else None,
    )


def _break_once(engine: Engine) -> None:
    whole = engine._gradients

    def broken() -> list[torch.Tensor]:
        grads = whole()
        grads[0].view(-1)[:1] = math.inf
        engine._gradients = whole  # type: ignore[method-assign]
        return grads

    engine._gradients = broken  # type: ignore[method-assign]


def save_trial_state(engine: Engine, root: Path, *, step: int, rank: int) -> None:
    """Write a checkpoint as the loop does."""
    meta = checkpoint_meta(engine, step=step, tokens=0, data="random")
    save_checkpoint(
        root,
        step=step,
        attempt="trial",
        shards=checkpoint_shards(engine),
        meta=meta,
        rank=rank,
        world=engine.dims.world,
        rank_meta=checkpoint_rank_meta(engine),
    )


# ---- from the shards of all ranks to whole tensors -------------------------------------------------------------------


def join_rank_outcomes(ranks: Sequence[RankOutcome]) -> TrialOutcome:
    """One outcome of the whole job; where ranks contradict each other, their quarrels are listed."""
    first = ranks[0]
    quarrels = [
        f"rank {rank} saw other losses than rank 0" for rank, one in enumerate(ranks) if not _outcomes_agree(first, one)
    ]
    grads, params = [], []
    for step in range(len(first.params)):
        whole, found = _whole_tensors([one.params[step] for one in ranks])
        params.append(whole)
        quarrels += [f"step {step + 1}: {text}" for text in found]
    for number in range(len(first.grads)):
        grads.append(_whole_tensors([one.grads[number] for one in ranks])[0])
    return TrialOutcome(
        losses=first.losses,
        norms=first.norms,
        skipped=first.skipped,
        tokens=first.tokens,
        evaluations=first.evaluations,
        grads=grads,
        params=params,
        quarrels=quarrels,
        loss_scale=first.loss_scale,
        seconds=max(one.seconds for one in ranks),
        graphs=(sum(one.graphs[0] for one in ranks), sum(one.graphs[1] for one in ranks)),
    )


def _outcomes_agree(a: RankOutcome, b: RankOutcome) -> bool:
    same = all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a.losses, b.losses, strict=True))
    return same and a.skipped == b.skipped and a.evaluations == b.evaluations and a.loss_scale == b.loss_scale


def _whole_tensors(ranks: Sequence[Sequence[OutcomeShard]]) -> tuple[dict[str, Array], list[str]]:
    """Whole tensors by name, and what is wrong with the boxes: copies that differ, places no rank holds."""
    whole: dict[str, Array] = {}
    digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    quarrels: list[str] = []
    filled: dict[str, int] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            if digests.setdefault((part.name, part.start, part.size), part.digest) != part.digest:
                quarrels.append(f"rank {rank} holds another copy of {part.name}")
            if part.values is not None:
                into = whole.setdefault(part.name, np.full(part.shape, np.nan, dtype=part.values.dtype))
                into[tuple(slice(i, i + n) for i, n in zip(part.start, part.values.shape, strict=True))] = part.values
                filled[part.name] = filled.get(part.name, 0) + part.values.size
    for name, values in whole.items():
        if filled[name] != values.size:
            quarrels.append(f"{name} has {values.size:,} values, owners hold {filled[name]:,}")
    return whole, quarrels
