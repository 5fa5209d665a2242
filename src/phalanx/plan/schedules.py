"""The activations that our trainer's pipeline ranks hold under each schedule, counted in layers.

The orders are those of torch.distributed.pipelining. A rank runs F (forward), B (backward) or, split in two, I
(gradients of the input) and W (gradients of the weights) of its chunks of layers, micro-batch after micro-batch. A
layer of a micro-batch is *held* from its F to its B; between I and W it is *pending*: torch keeps its whole graph, and
also the gradient at the output of every matrix. `tests/plan/test_schedules.py` compares the orders with torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake

# The weight of a pending layer, in held layers, when moments are compared: its gradients add 0.5 to 0.7.
PENDING_WEIGHT = 1.6
Action = tuple[str, int, int]  # F, B, I or W; chunk of this rank; micro-batch
Ints = NDArray[np.int64]
KINDS = "FBIW"
FORWARD, BACKWARD, INPUT, WEIGHT, ABSENT = range(5)
HELD, PENDING, LOGITS, LATE, OUTPUTS = range(5)  # indices of the quantities that a rank holds at a moment


def layers_of_stages(layers: int, stages: int, *, embed_cost: float = 0.0, head_cost: float = 0.0) -> list[range]:
    """Split layers into stages, where the embedding and the head count as `*_cost` layers.

    Every stage has at least one layer; raises UserError if there are too few layers. The load of the fullest stage is
    minimal, and among those splits the one with the lightest first and last stage is chosen.

    >>> [len(part) for part in layers_of_stages(70, 12, embed_cost=1, head_cost=1)]
    [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]
    >>> [len(part) for part in layers_of_stages(8, 4)]
    [2, 2, 2, 2]
    """
    if stages > layers:
        raise mistake(
            "parallel.pipeline",
            f"{stages} stages cannot share {layers} layers",
            why="each stage holds at least one layer",
            fix=f"use at most {layers} stages (pipeline × virtual_pipeline)",
        )
    counts = [1] * stages
    cost = [
        1.0 + (embed_cost if stage == 0 else 0.0) + (head_cost if stage == stages - 1 else 0.0)
        for stage in range(stages)
    ]
    # The lightest stage takes the next layer; on a tie an inner stage, which holds its activations for less time than
    # the first.
    lightest = [(cost[stage], stage in (0, stages - 1), -stage) for stage in range(stages)]
    heapify(lightest)
    for _ in range(layers - stages):
        weight, is_end, stage = lightest[0]
        counts[-stage] += 1
        heapreplace(lightest, (weight + 1.0, is_end, stage))
    bounds = [0, *accumulate(counts)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def is_v_shaped(schedule: str, chunks: int) -> bool:
    """Return whether a rank's second chunk runs back up the pipeline, so that one rank has the first and last stage."""
    return schedule == "zero-bubble" and chunks == 2


def my_stages(rank: int, ranks: int, chunks: int, *, v_shaped: bool) -> list[int]:
    """Return the stages of one pipeline rank: every `ranks`-th, or a pair that mirrors for V-shaped schedules.

    >>> my_stages(1, 4, 2, v_shaped=False), my_stages(1, 4, 2, v_shaped=True)
    ([1, 5], [1, 6])
    """
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """The load of one pipeline rank at its two fullest moments: during a backward, and during that of the loss."""

    layers: int
    split_layers: int  # layers whose backward is split in two: all but the first stage's, under zero-bubble
    held: int  # layers × micro-batches, including the chunk that runs backward
    pending: int
    outputs: int = 0  # outputs of chunks that were sent on and are held until their own backward
    late_logits: int = 0  # micro-batches of the head that are pending
    head_held: int = 0
    head_pending: int = 0
    head_layers: int = 0  # layers that turn from held to pending in the first half of the head's backward
    waiting_logits: int = 0  # micro-batches whose logits wait for their backward, without the one that runs backward
    head_late_logits: int = 0
    head_outputs: int = 0
    embedding: bool = False
    head: bool = False


def rank_order(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> Iterator[Action]:
    """Yield the actions of a rank in a step of `count` micro-batches, in order."""
    num_done: Counter[tuple[int, int]] = Counter()
    for key in zip(*(column.tolist() for column in _task_columns(schedule, rank, ranks, chunks, count)), strict=True):
        yield KINDS[key[0]], key[1], num_done[key]
        num_done[key] += 1


def _task_columns(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> tuple[Ints, Ints]:
    """Return the actions as two columns, kind and chunk; the n-th of a pair belongs to micro-batch n."""
    is_single = schedule in ("1f1b", "interleaved") and chunks == 1
    if schedule == "gpipe" or (is_single and count < ranks):
        kinds = np.repeat((FORWARD, BACKWARD), count)
    elif is_single:
        first = min(count, ranks - rank)
        steady = np.tile((BACKWARD, FORWARD), count - first)
        kinds = np.concatenate((np.full(first, FORWARD), steady, np.full(first, BACKWARD)))
    elif is_v_shaped(schedule, chunks):
        return _v_order(rank, ranks, count)
    else:
        return _rounds_order(rank, ranks, chunks, count, split=schedule == "zero-bubble")
    return kinds, np.zeros_like(kinds)


def _rounds_order(rank: int, ranks: int, chunks: int, count: int, *, split: bool) -> tuple[Ints, Ints]:
    """Return interleaved 1F1B, or the zero-bubble order made of it, whose W follow `rank` operations after their I."""
    per_round = count // max(1, count // ranks)
    total = chunks * count
    warm_up = min((chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank), total)
    forward = np.arange(total) // per_round % chunks
    backward = chunks - 1 - forward
    num_late = min(rank, total)
    # One row per backward: a forward before it while any remain, and the W of an earlier one after it.
    rows = np.full((total, 3), ABSENT)
    chunk_of = np.zeros((total, 3), dtype=np.int64)
    rows[: total - warm_up, 0], chunk_of[: total - warm_up, 0] = FORWARD, forward[warm_up:]
    rows[:, 1], chunk_of[:, 1] = INPUT if split else BACKWARD, backward
    if split:
        rows[num_late:, 2], chunk_of[num_late:, 2] = WEIGHT, backward[: total - num_late]
    is_present = rows != ABSENT
    last_weights = backward[total - num_late :] if split else backward[:0]
    kinds = np.concatenate((np.full(warm_up, FORWARD), rows[is_present], np.full(last_weights.size, WEIGHT)))
    return kinds, np.concatenate((forward[:warm_up], chunk_of[is_present], last_weights))


def _v_order(rank: int, ranks: int, count: int) -> tuple[Ints, Ints]:
    """Return torch's V-shaped zero-bubble order (Qi et al. 2024, section 6); with fewer micro-batches it has gaps."""
    padded_count = max(2 * ranks - 1, count)
    actions = [(FORWARD, 0)] * (2 * (ranks - rank) - 1)
    actions += [(FORWARD, 1), (FORWARD, 0)] * rank
    actions += [(FORWARD, 1), (INPUT, 1), (WEIGHT, 1)] * (ranks - rank)
    first, second = 2 * ranks - 1 - rank, ranks
    while second < first or first < padded_count:
        if first < padded_count:
            actions.append((FORWARD, 0))
            first += 1
        actions += [(INPUT, 0), (WEIGHT, 0), (FORWARD, 1), (INPUT, 1), (WEIGHT, 1)]
        second += 1
    actions += [(INPUT, 0), (INPUT, 1)] * rank
    actions += [(INPUT, 0), (WEIGHT, 0)] * (ranks - rank)
    actions += [(WEIGHT, 1)] * padded_count + [(WEIGHT, 0)] * padded_count
    kinds, chunk_of = np.array(actions).T
    is_kept = np.zeros(kinds.size, dtype=bool)
    for kind in (FORWARD, INPUT, WEIGHT):
        for chunk in (0, 1):  # torch drops actions beyond the last micro-batch
            is_kept[np.flatnonzero((kinds == kind) & (chunk_of == chunk))[:count]] = True
    return kinds[is_kept], chunk_of[is_kept]


def rank_load(schedule: str, rank: int, ranks: int, chunks: int, count: int, *, layers: Sequence[range]) -> StageLoad:
    """Return the load of one rank."""
    return rank_loads(schedule, [rank], ranks, chunks, count, layers=layers)[0]


def rank_loads(
    schedule: str, some: Sequence[int], ranks: int, chunks: int, count: int, *, layers: Sequence[range]
) -> list[StageLoad]:
    """Return the loads of some ranks; each array has one row per rank, as all ranks run equally many actions."""
    v_shaped = is_v_shaped(schedule, chunks)
    stages = [my_stages(rank, ranks, chunks, v_shaped=v_shaped) for rank in some]
    sizes = [[len(layers[stage]) for stage in rank_stages] for rank_stages in stages]
    lasts = [rank_stages.index(len(layers) - 1) if len(layers) - 1 in rank_stages else -1 for rank_stages in stages]
    tasks = [_task_columns(schedule, rank, ranks, chunks, count) for rank in some]
    kinds, chunk_of = np.stack([kind for kind, _ in tasks]), np.stack([chunk for _, chunk in tasks])
    row = np.arange(len(some))[:, None]
    size = np.array(sizes)[row, chunk_of]
    forward, backward, inputs, weights = (kinds == kind for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
    # The I of the first stage does nothing: torch leaves its whole backward to its W.
    has_input_gradient = np.array(stages)[row, chunk_of] > 0
    becomes_pending, pending_ends, at_last = (
        inputs & has_input_gradient,
        weights & has_input_gradient,
        chunk_of == np.array(lasts)[:, None],
    )
    # [held, pending, logits, late, outputs; rank; task]
    changes = np.stack(
        (
            size * (1 * forward - backward - becomes_pending - (weights & ~has_input_gradient)),
            size * (1 * becomes_pending - pending_ends),
            at_last * (1 * forward - backward - inputs),
            at_last * (1 * becomes_pending - pending_ends),
            ~at_last * (1 * forward - backward - weights),
        )
    )
    after = np.cumsum(changes, axis=2)
    before = after - changes
    grows, goes_back = forward | becomes_pending, at_last & (backward | inputs)
    loads = []
    for index, (rank_stages, rank_sizes, last) in enumerate(zip(stages, sizes, lasts, strict=True)):
        held, pending, _, late, outputs = _fullest_moment(after[:, index], grows[index], (HELD, PENDING, LATE, OUTPUTS))
        at_head = _fullest_moment(before[:, index], goes_back[index], (HELD, PENDING, LOGITS, LATE, OUTPUTS))
        split = schedule == "zero-bubble"
        loads.append(
            StageLoad(
                layers=sum(rank_sizes),
                split_layers=sum(size for size, stage in zip(rank_sizes, rank_stages, strict=True) if stage)
                if split
                else 0,
                held=held,
                pending=pending,
                late_logits=late,
                outputs=outputs,
                head_outputs=at_head[OUTPUTS],
                head_held=at_head[HELD],
                head_pending=at_head[PENDING],
                head_layers=rank_sizes[last] if last >= 0 and split else 0,
                # Without the micro-batch that runs backward.
                waiting_logits=max(at_head[LOGITS] - 1, 0),
                head_late_logits=at_head[LATE],
                embedding=0 in rank_stages,
                head=last >= 0,
            )
        )
    return loads


def _fullest_moment(moments: Ints, where: NDArray[np.bool_], order: tuple[int, ...]) -> list[int]:
    """Return the held quantities at the moment with the most layers, pending ones weighted; `order` breaks ties."""
    candidates = moments[:, where]
    if not candidates.shape[1]:
        return [0] * len(moments)
    weight = candidates[HELD] + PENDING_WEIGHT * candidates[PENDING]
    candidates = candidates[:, weight == weight.max()]
    # The first of equals.
    fullest: list[int] = max(candidates.T.tolist(), key=itemgetter(*order))
    return fullest


# Micro-batches that are simulated of a schedule without whole rounds.
MOST_PLAYED = 1024


@lru_cache(maxsize=4096)
def stage_loads(
    schedule: str, ranks: int, chunks: int, count: int, num_layers: int, *, embed_cost: float, head_cost: float
) -> tuple[StageLoad, ...]:
    """Return the loads of the four ranks that may be the fullest: first, second, last but one and last.

    Held activations fall along the pipeline and pending ones rise; the ends may hold a layer less for embedding and
    head. In a short pipeline the same rank occurs several times.
    """
    # The plan of another trainer may have degrees that are not legal here.
    chunks, ranks = max(chunks, 1), max(1, min(ranks, num_layers))
    # The search calls this before it knows which layouts are legal.
    if ranks * chunks > num_layers:
        chunks = max(1, num_layers // ranks)
    if ranks == 1:
        schedule, chunks, count = "1f1b", 1, 1
    in_rounds = count % ranks == 0 or chunks == 1 or is_v_shaped(schedule, chunks)
    # Later rounds repeat the first three; a rank with one chunk has no rounds.
    num_played = 1 if schedule == "gpipe" else min(count, 3 * ranks if in_rounds else MOST_PLAYED)
    loads = _played_loads(schedule, ranks, chunks, num_played, num_layers, embed_cost, head_cost)
    if schedule == "gpipe":
        return tuple(
            replace(
                load,
                held=load.held * count,
                head_held=load.head_held * count,
                outputs=load.outputs * count,
                waiting_logits=count - 1,
            )
            for load in loads
        )
    return loads


@lru_cache(maxsize=4096)
def _played_loads(
    schedule: str, ranks: int, chunks: int, played: int, num_layers: int, embed_cost: float, head_cost: float
) -> tuple[StageLoad, ...]:
    """Return the loads for `played` micro-batches, cached because many calls of a search simulate the same."""
    layers = layers_of_stages(num_layers, ranks * chunks, embed_cost=embed_cost, head_cost=head_cost)
    chosen = [0, min(1, ranks - 1), max(ranks - 2, 0), ranks - 1]
    distinct_ranks = list(dict.fromkeys(chosen))
    by_rank = dict(
        zip(distinct_ranks, rank_loads(schedule, distinct_ranks, ranks, chunks, played, layers=layers), strict=True)
    )
    return tuple(by_rank[rank] for rank in chosen)
