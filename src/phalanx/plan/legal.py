"""Which layouts are legal: how state can be shared, the sequence split and activations recomputed."""

from __future__ import annotations

import numpy as np

from phalanx.plan.ask import Ask
from phalanx.plan.cases import OFFLOAD, RECOMPUTE, SCHEDULES
from phalanx.plan.grid import Bools, Ints

NONE, FULL, DOMAIN, GIVEN = range(4)  # who shares a sharded copy


def shard_size(ask: Ask, c: dict[str, Ints]) -> Ints:
    """Ranks that share one copy of the sharded state."""
    replicas = c["dp"] * c["cp"]
    inside = np.maximum(1, ask.cluster.domain_devices // c["tp"])
    given = int(ask.fixed.get("shard", 1))
    return np.select([c["group"] == FULL, c["group"] == DOMAIN, c["group"] == GIVEN], [replicas, inside, given], 1)


def may_share(ask: Ask, c: dict[str, Ints]) -> Bools:
    """Whether the state can be sharded so."""
    replicas, shard = c["dp"] * c["cp"], shard_size(ask, c)
    within = (shard > 1) & (shard < replicas) & (replicas % shard == 0)
    alone = replicas == 1
    grouped: Bools = np.select(
        [c["group"] == DOMAIN, c["group"] == GIVEN], [within & ~alone, replicas % shard == 0], np.ones_like(within)
    ).astype(bool)
    if "zero" in ask.fixed:
        return grouped
    staged = np.isin(c["zero"], ask.limits.zero_with_pipeline) | (c["pp"] == 1)
    # ZeRO-2 between micro-batches either keeps whole gradients (then it is ZeRO-1) or reduces them every time.
    whole = (c["zero"] != 2) | (ask.global_sequences == c["dp"] * c["micro_batch"])
    # One rank alone has nobody to share with, but may keep its parameters in host memory.
    hosted = c["offload"] == OFFLOAD.index("parameters")
    legal: Bools = grouped & staged & whole & ((c["zero"] == 0) | ~alone | hosted)
    return legal


def may_split_sequence(ask: Ask, c: dict[str, Ints]) -> Bools:
    """Whether norms can be split along the sequence, or not."""
    slices = (ask.sequence // c["cp"]) % c["tp"] == 0
    # Without tensor parallelism there is nothing for sequence parallelism to split: one of the two rows is kept.
    unsplit = (c["tp"] == 1) & (c["sp"] == 0)
    if ask.fixed.get("sequence_parallel") is True:
        unsplit = c["tp"] == 1
    legal: Bools = unsplit | ((c["tp"] > 1) & ((c["sp"] == 0) | slices))
    return legal


def may_recompute(ask: Ask, c: dict[str, Ints]) -> Bools:
    """Whether the schedule can recompute so."""
    if ask.limits.selective_zero_bubble:
        return np.ones_like(c["recompute"] + c["pp"], dtype=bool)
    bubble, kept = SCHEDULES.index("zero-bubble"), RECOMPUTE.index("selective")
    legal: Bools = ~((c["pp"] > 1) & (c["schedule"] == bubble) & (c["recompute"] == kept))
    return legal
