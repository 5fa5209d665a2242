"""A trial: a few steps of a small model under one layout on random data, with all results to compare.

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
HELD_OUT = 10**6  # the seed of the evaluation batch, which is not trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Description of a trial. Two trials that differ only in their layout must have the same outcome."""

    shape: ModelShape
    settings: Settings
    sequences: int  # of the global batch
    optim: Optim = field(default_factory=Optim)
    steps: int = 5
    lr: float = 1e-2
    state_dtype: str = "fp32"
    resume: str = ""  # a folder of checkpoints: continues from the newest, of any layout
    save: str = ""  # folder for a checkpoint after the last step
    loss_scale: float = 0.0  # first scale of fp16, if not the default
    # The gradient of this rank is infinite in the first step, as from a defective memory chip
    broken_rank: int = -1
    device: str = "cpu"
    tensors: bool = True  # compare gradients and weights one by one; else only losses and gradient norms
    evaluate: bool = True  # a held-out batch before the first step and after the last


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeShard:
    """A rank's region of one tensor."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    owner: bool
    digest: str
    values: Array | None  # of the owner only: the other ranks must hold the same


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """Results of one rank."""

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
    """Results of a trial: the numbers that all ranks share, and full tensors joined from their regions."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    tokens: list[int]
    evaluations: list[tuple[float, int]]
    grads: list[dict[str, Array]]
    params: list[dict[str, Array]]
    quarrels: list[str]  # descriptions of ranks that should hold the same values and do not
    loss_scale: float
    seconds: float  # of the slowest rank, without start-up
    graphs: tuple[int, int] = (0, 0)  # of all ranks: found in the compile cache, and not found there

    @property
    def digest(self) -> str:
        """Digest of all parameters after the last step."""
        sha256 = hashlib.sha256()
        for name, values in sorted(self.params[-1].items()):
            sha256.update(name.encode())
            sha256.update(np.ascontiguousarray(values).tobytes())
        return sha256.hexdigest()


def run_trial(
    trial: Trial, *, limit_s: float | None = None, debug: bool = True, place: TrialPlace = CORES
) -> TrialOutcome:
    """Run a trial on as many ranks as its layout has, on the trial's kind of device."""
    world, place = trial.settings.layout.devices, replace(place, device=trial.device)
    return join_rank_outcomes(run_ranks(run_trial_rank, world, trial, limit_s=limit_s, debug=debug, place=place))


def make_batch(step: int, *, sequences: int, sequence: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens_BS and targets_BS of a step; a few targets of the first sequence do not count."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens_BL = torch.randint(0, vocab, (sequences, sequence + 1), generator=generator)
    targets_BS = tokens_BL[:, 1:].clone()
    targets_BS[0, : max(1, sequence // 5)] = IGNORED
    return tokens_BL[:, :-1].contiguous(), targets_BS


def run_trial_rank(rank: int, trial: Trial) -> RankOutcome:
    """Run one rank of a trial inside a process group."""
    began_s = time.perf_counter()
    # FSDP2 warns of views even if no code changes them in place, such as the embedding's output under tensor
    # parallelism.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    device = torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")
    engine = Engine(trial.shape, trial.settings, trial.optim, device=device, state_dtype=trial.state_dtype)
    first = 0
    if trial.resume:
        # Initialises what the checkpoint does not contain
        engine.initialise_unsaved()
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
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        skipped=[result.skipped for result in results],
        tokens=[result.tokens for result in results],
        evaluations=evaluations,
        grads=watched.grads,
        params=params,
        loss_scale=engine.loss_scale.scale if engine.loss_scale is not None else 1.0,
        seconds=time.perf_counter() - began_s,
        graphs=_count_graphs() if trial.settings.compile else (0, 0),
    )


def _count_graphs() -> tuple[int, int]:
    """Count the compiled graphs of this process that were in torch's compile cache, and those that were not."""
    from torch._dynamo.utils import counters

    tables = [(counters["aot_autograd"], "autograd_cache"), (counters["inductor"], "fxgraph_cache")]
    hits, misses = (sum(int(table[f"{name}_{ending}"]) for table, name in tables) for ending in ("hit", "miss"))
    return hits, misses


def rank_batch(engine: Engine, trial: Trial, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this data rank's sequences of the global batch."""
    global_batch = make_batch(
        step, sequences=trial.sequences, sequence=trial.settings.sequence, vocab=trial.shape.vocab
    )
    ranks, index = engine.dims.data, engine.meshes.index("data")
    tokens_BS, targets_BS = (tensor.chunk(ranks)[index] for tensor in global_batch)
    return tokens_BS, targets_BS


class WatchedOptimizer:
    """An optimizer that records the gradients it receives."""

    def __init__(self, inner: Optimizer, shards: Sequence[TensorShard]) -> None:
        self._inner, self._shards = inner, shards
        self.steps = inner.steps
        self.grads: list[list[OutcomeShard]] = []

    def step(self, lr: float) -> None:
        """Record the gradients, then update."""
        self.grads.append(
            [_outcome_shard(shard, shard.tensor.grad) for shard in self._shards if shard.tensor.grad is not None]
        )
        self._inner.step(lr)
        self.steps = self._inner.steps

    def state(self) -> list[TensorShard]:
        """Return the wrapped optimizer's state."""
        return self._inner.state()

    def stored(self) -> list[TensorShard]:
        """Return the wrapped optimizer's stored state."""
        return self._inner.stored()

    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load into the wrapped optimizer."""
        self._inner.load(state, steps)

    def state_bytes(self) -> int:
        """Return the wrapped optimizer's bytes."""
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
    original = engine._gradients

    def broken_gradients() -> list[torch.Tensor]:
        grads = original()
        grads[0].view(-1)[:1] = math.inf
        engine._gradients = original  # type: ignore[method-assign]
        return grads

    engine._gradients = broken_gradients  # type: ignore[method-assign]


def save_trial_state(engine: Engine, root: Path, *, step: int, rank: int) -> None:
    """Write a checkpoint as the training loop does."""
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


# ---- from the shards of all ranks to full tensors --------------------------------------------------------------------


def join_rank_outcomes(ranks: Sequence[RankOutcome]) -> TrialOutcome:
    """Join the outcomes of all ranks; contradictions between ranks are listed in `quarrels`."""
    first = ranks[0]
    quarrels = [
        f"rank {rank} saw other losses than rank 0"
        for rank, outcome in enumerate(ranks)
        if not _outcomes_agree(first, outcome)
    ]
    grads, params = [], []
    for step in range(len(first.params)):
        tensors, tensor_quarrels = _whole_tensors([outcome.params[step] for outcome in ranks])
        params.append(tensors)
        quarrels += [f"step {step + 1}: {text}" for text in tensor_quarrels]
    for number in range(len(first.grads)):
        grads.append(_whole_tensors([outcome.grads[number] for outcome in ranks])[0])
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
        seconds=max(outcome.seconds for outcome in ranks),
        graphs=(sum(outcome.graphs[0] for outcome in ranks), sum(outcome.graphs[1] for outcome in ranks)),
    )


def _outcomes_agree(a: RankOutcome, b: RankOutcome) -> bool:
    losses_agree = all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a.losses, b.losses, strict=True))
    return losses_agree and a.skipped == b.skipped and a.evaluations == b.evaluations and a.loss_scale == b.loss_scale


def _whole_tensors(ranks: Sequence[Sequence[OutcomeShard]]) -> tuple[dict[str, Array], list[str]]:
    """Return full tensors by name, and problems: copies that differ, values that no rank holds."""
    tensors: dict[str, Array] = {}
    digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    quarrels: list[str] = []
    filled: dict[str, int] = {}
    for rank, shards in enumerate(ranks):
        for shard in shards:
            if digests.setdefault((shard.name, shard.start, shard.size), shard.digest) != shard.digest:
                quarrels.append(f"rank {rank} holds another copy of {shard.name}")
            if shard.values is not None:
                tensor = tensors.setdefault(shard.name, np.full(shard.shape, np.nan, dtype=shard.values.dtype))
                tensor[
                    tuple(
                        slice(start, start + length)
                        for start, length in zip(shard.start, shard.values.shape, strict=True)
                    )
                ] = shard.values
                filled[shard.name] = filled.get(shard.name, 0) + shard.values.size
    for name, values in tensors.items():
        if filled[name] != values.size:
            quarrels.append(f"{name} has {values.size:,} values, owners hold {filled[name]:,}")
    return tensors, quarrels
