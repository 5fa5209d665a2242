"""Construction of the optimizer that a job configures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from phalanx.job.schema import Optim
from phalanx.plan.parametrization import ParameterScales, standard_scales
from phalanx.train.optim.adafactor import Adafactor
from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.base import Optimizer
from phalanx.train.optim.compact import CompactAdamW
from phalanx.train.optim.muon import Muon, takes_muon
from phalanx.train.optim.own_optimizer import OwnOptimizer
from phalanx.train.parallel.tensor_shard import TensorShard

__all__ = ["Optimizer", "build_optimizer"]


def build_optimizer(
    shards: Sequence[TensorShard],
    *,
    optim: Optim,
    state_dtype: str,
    decays: Callable[[str], bool],
    tables: Collection[str] = (),
    own: str = "",
    allow_code: bool = False,
    scales: ParameterScales = standard_scales,
) -> Optimizer:
    """Build an optimizer over this rank's shards.

    Args:
        shards: This rank's shards of the parameters.
        optim: The job's [optim] section.
        state_dtype: The job's precision.optimizer_state; Adafactor's small state stays in fp32.
        decays: Returns whether weight decay applies to a parameter, by name.
        tables: Names of weights of a user's own network that are embeddings or a head.
        own: Reference of a user's own optimizer, which is used instead.
        allow_code: Whether code that the reference names may run.
        scales: Factors of the parametrization on learning rate, weight decay and epsilon.
    """
    if own:
        return OwnOptimizer(shards, own, optim=optim, decays=decays, allow_code=allow_code)
    if optim.name == "adafactor":
        beta2, weight_decay = optim.betas[1], optim.weight_decay
        return Adafactor(shards, beta2=beta2, weight_decay=weight_decay, decays=decays, scales=scales)
    if optim.name == "muon":
        return Muon(
            [shard for shard in shards if takes_muon(shard, tables)],
            momentum=optim.betas[0],
            weight_decay=optim.weight_decay,
            decays=decays,
            kind=state_dtype,
            rest=_build_adamw(
                [shard for shard in shards if not takes_muon(shard, tables)], optim, state_dtype, decays, scales
            ),
            scales=scales,
        )
    return _build_adamw(shards, optim, "int8" if optim.name == "adamw8bit" else state_dtype, decays, scales)


def _build_adamw(
    shards: Sequence[TensorShard], optim: Optim, kind: str, decays: Callable[[str], bool], scales: ParameterScales
) -> Optimizer:
    """Build torch's AdamW if weights and moments share one wide format, else `CompactAdamW`."""
    betas, eps, weight_decay = optim.betas, optim.eps, optim.weight_decay
    if kind == "fp32" and all(shard.tensor.dtype in (torch.float32, torch.float64) for shard in shards):
        return AdamW(shards, betas=betas, eps=eps, weight_decay=weight_decay, decays=decays, scales=scales)
    return CompactAdamW(
        shards, betas=betas, eps=eps, weight_decay=weight_decay, decays=decays, kind=kind, scales=scales
    )
