"""What our trainer's pipeline ranks hold at once: the orders of torch.distributed.pipelining, counted in layers.

A rank runs F (forward), B (backward) or, split in two, I (gradients of the input) and W (gradients of the weights) of
its chunks of layers, micro-batch after micro-batch. A layer of a micro-batch is *held* from its F to its B; between I
and W it is *pending*: torch keeps its whole graph, and the gradient at the output of every matrix beside it.
`tests/plan/test_schedules.py` holds the orders against torch's own.
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

PENDING_WEIGHT = 1.6  # held layers that a pending one weighs when moments are compared: its gradients are 0.5 to 0.7
Action = tuple[str, int, int]  # F, B, I or W; chunk of this rank; micro-batch
Ints = NDArray[np.int64]
KINDS = "FBIW"
FORWARD, BACKWARD, INPUT, WEIGHT, ABSENT = range(5)
HELD, PENDING, LOGITS, LATE, OUTPUTS = range(5)  # what a rank has at a moment


def layers_of_stages(layers: int, stages: int, *, embed_cost: float = 0.0, head_cost: float = 0.0) -> list[range]:
    """Layers of each stage; the embedding and the head weigh as much as `*_cost` layers.

    Every stage has at least one layer where there are enough. The fullest stage is as light as can be, and among those
    splits the lightest ends win.

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
    cost = [1.0 + (embed_cost if s == 0 else 0.0) + (head_cost if s == stages - 1 else 0.0) for s in range(stages)]
    # The lightest stage takes the next layer; on a tie an inner one, whose activations are held for less long.
    lightest = [(cost[s], s in (0, stages - 1), -s) for s in range(stages)]
    heapify(lightest)
    for _ in range(layers - stages):
        weight, is_end, stage = lightest[0]
        counts[-stage] += 1
        heapreplace(lightest, (weight + 1.0, is_end, stage))
    bounds = [0, *accumulate(counts)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def is_v_shaped(schedule: str, chunks: int) -> bool:
    """Whether a rank's second chunk comes back down the pipeline, so that first and last stage share a rank."""
    return schedule == "zero-bubble" and chunks == 2


def my_stages(rank: int, ranks: int, chunks: int, *, v_shaped: bool) -> list[int]:
    """Stages of one pipeline rank: every `ranks`-th, or down and up again for V-shaped schedules.

    >>> my_stages(1, 4, 2, v_shaped=False), my_stages(1, 4, 2, v_shaped=True)
    ([1, 5], [1, 6])
    """
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """One pipeline rank at its two full moments: some backward, and (where it has the head) that of the loss."""

    layers: int
    split_layers: int  # whose backward is split in two: all but the first stage's, under zero-bubble
    held: int  # layers × micro-batches, the chunk that goes backward included
    pending: int
    outputs: int = 0  # of chunks that were sent on and are held until their own backward
    late_logits: int = 0  # micro-batches of the head that are pending
    head_held: int = 0
    head_pending: int = 0
    head_layers: int = 0  # that turn from held to pending in the first half of the head's backward
    waiting_logits: int = 0  # micro-batches whose logits wait for their backward, beside the one that goes backward
    head_late_logits: int = 0
    head_outputs: int = 0
    embedding: bool = False
    head: bool = False


def rank_order(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> Iterator[Action]:
    """What a rank does in a step of `count` micro-batches, in order."""
    done: Counter[tuple[int, int]] = Counter()
    for key in zip(*(column.tolist() for column in _task_columns(schedule, rank, ranks, chunks, count)), strict=True):
        yield KINDS[key[0]], key[1], done[key]
        done[key] += 1


def _task_columns(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> tuple[Ints, Ints]:
    """The same as two columns, kind and chunk: the n-th of a pair is that of micro-batch n."""
    single = schedule in ("1f1b", "interleaved") and chunks == 1
    if schedule == "gpipe" or (single and count < ranks):
        kinds = np.repeat((FORWARD, BACKWARD), count)
    elif single:
        first = min(count, ranks - rank)
        steady = np.tile((BACKWARD, FORWARD), count - first)
        kinds = np.concatenate((np.full(first, FORWARD), steady, np.full(first, BACKWARD)))
    elif is_v_shaped(schedule, chunks):
        return _v_order(rank, ranks, count)
    else:
        return _rounds_order(rank, ranks, chunks, count, split=schedule == "zero-bubble")
    return kinds, np.zeros_like(kinds)


def _rounds_order(rank: int, ranks: int, chunks: int, count: int, *, split: bool) -> tuple[Ints, Ints]:
    """Interleaved 1F1B, and the zero-bubble order made of it, whose W follow `rank` operations behind their I."""
    per_round = count // max(1, count // ranks)
    total = chunks * count
    warm_up = min((chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank), total)
    forward = np.arange(total) // per_round % chunks
    backward = chunks - 1 - forward
    late = min(rank, total)
    # A row for every backward: a forward before it while there are any, and the W of an earlier one after it.
    rows = np.full((total, 3), ABSENT)
    of = np.zeros((total, 3), dtype=np.int64)
    rows[: total - warm_up, 0], of[: total - warm_up, 0] = FORWARD, forward[warm_up:]
    rows[:, 1], of[:, 1] = INPUT if split else BACKWARD, backward
    if split:
        rows[late:, 2], of[late:, 2] = WEIGHT, backward[: total - late]
    there = rows != ABSENT
    rest = backward[total - late :] if split else backward[:0]
    kinds = np.concatenate((np.full(warm_up, FORWARD), rows[there], np.full(rest.size, WEIGHT)))
    return kinds, np.concatenate((forward[:warm_up], of[there], rest))


def _v_order(rank: int, ranks: int, count: int) -> tuple[Ints, Ints]:
    """The V-shaped zero-bubble order (Qi et al. 2024, section 6) as torch makes it; fewer micro-batches leave gaps."""
    least = max(2 * ranks - 1, count)
    actions = [(FORWARD, 0)] * (2 * (ranks - rank) - 1)
    actions += [(FORWARD, 1), (FORWARD, 0)] * rank
    actions += [(FORWARD, 1), (INPUT, 1), (WEIGHT, 1)] * (ranks - rank)
    first, second = 2 * ranks - 1 - rank, ranks
    while second < first or first < least:
        if first < least:
            actions.append((FORWARD, 0))
            first += 1
        actions += [(INPUT, 0), (WEIGHT, 0), (FORWARD, 1), (INPUT, 1), (WEIGHT, 1)]
        second += 1
    actions += [(INPUT, 0), (INPUT, 1)] * rank
    actions += [(INPUT, 0), (WEIGHT, 0)] * (ranks - rank)
    actions += [(WEIGHT, 1)] * least + [(WEIGHT, 0)] * least
    kinds, of = np.array(actions).T
    there = np.zeros(kinds.size, dtype=bool)
    for kind in (FORWARD, INPUT, WEIGHT):
        for chunk in (0, 1):  # torch drops what is beyond the last micro-batch
            there[np.flatnonzero((kinds == kind) & (of == chunk))[:count]] = True
    return kinds[there], of[there]


def rank_load(schedule: str, rank: int, ranks: int, chunks: int, count: int, *, layers: Sequence[range]) -> StageLoad:
    """The fullest moments of a rank."""
    return rank_loads(schedule, [rank], ranks, chunks, count, layers=layers)[0]


def rank_loads(
    schedule: str, some: Sequence[int], ranks: int, chunks: int, count: int, *, layers: Sequence[range]
) -> list[StageLoad]:
    """The fullest moments of some ranks, a row of each array for each: all ranks do the same number of things."""
    v_shaped = is_v_shaped(schedule, chunks)
    stages = [my_stages(rank, ranks, chunks, v_shaped=v_shaped) for rank in some]
    sizes = [[len(layers[stage]) for stage in mine] for mine in stages]
    lasts = [mine.index(len(layers) - 1) if len(layers) - 1 in mine else -1 for mine in stages]
    tasks = [_task_columns(schedule, rank, ranks, chunks, count) for rank in some]
    kinds, of = np.stack([kind for kind, _ in tasks]), np.stack([chunk for _, chunk in tasks])
    row = np.arange(len(some))[:, None]
    size = np.array(sizes)[row, of]
    forward, backward, inputs, weights = (kinds == kind for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
    # The I of the first stage does nothing: torch leaves its whole backward to its W.
    waits = np.array(stages)[row, of] > 0
    turns, ends, at_last = inputs & waits, weights & waits, of == np.array(lasts)[:, None]
    # [held, pending, logits, late, outputs; rank; task]
    changes = np.stack(
        (
            size * (1 * forward - backward - turns - (weights & ~waits)),
            size * (1 * turns - ends),
            at_last * (1 * forward - backward - inputs),
            at_last * (1 * turns - ends),
            ~at_last * (1 * forward - backward - weights),
        )
    )
    after = np.cumsum(changes, axis=2)
    before = after - changes
    grows, goes_back = forward | turns, at_last & (backward | inputs)
    found = []
    for index, (mine, own, last) in enumerate(zip(stages, sizes, lasts, strict=True)):
        held, pending, _, late, outputs = _fullest_moment(after[:, index], grows[index], (HELD, PENDING, LATE, OUTPUTS))
        at_head = _fullest_moment(before[:, index], goes_back[index], (HELD, PENDING, LOGITS, LATE, OUTPUTS))
        split = schedule == "zero-bubble"
        found.append(
            StageLoad(
                layers=sum(own),
                split_layers=sum(size for size, stage in zip(own, mine, strict=True) if stage) if split else 0,
                held=held,
                pending=pending,
                late_logits=late,
                outputs=outputs,
                head_outputs=at_head[OUTPUTS],
                head_held=at_head[HELD],
                head_pending=at_head[PENDING],
                head_layers=own[last] if last >= 0 and split else 0,
                waiting_logits=max(at_head[LOGITS] - 1, 0),  # beside its own
                head_late_logits=at_head[LATE],
                embedding=0 in mine,
                head=last >= 0,
            )
        )
    return found


def _fullest_moment(moments: Ints, where: NDArray[np.bool_], order: tuple[int, ...]) -> list[int]:
    """What is held at the place with the most layers, those pending weighted; of equals the most of each, in order."""
    here = moments[:, where]
    if not here.shape[1]:
        return [0] * len(moments)
    weight = here[HELD] + PENDING_WEIGHT * here[PENDING]
    here = here[:, weight == weight.max()]
    fullest: list[int] = max(here.T.tolist(), key=itemgetter(*order))  # the first of equals
    return fullest


MOST_PLAYED = 1024  # micro-batches of a schedule without whole rounds


@lru_cache(maxsize=4096)
def stage_loads(
    schedule: str, ranks: int, chunks: int, count: int, num_layers: int, *, embed_cost: float, head_cost: float
) -> tuple[StageLoad, ...]:
    """The ranks one of which is the fullest: first and second, last but one and last (the same one several times).

    Held activations fall along the pipeline and pending ones rise; the ends hold a layer less for embedding and head.
    """
    chunks, ranks = max(chunks, 1), max(1, min(ranks, num_layers))  # an odd plan of another trainer may say anything
    if ranks * chunks > num_layers:  # the search asks before it knows what is legal
        chunks = max(1, num_layers // ranks)
    if ranks == 1:
        schedule, chunks, count = "1f1b", 1, 1
    in_rounds = count % ranks == 0 or chunks == 1 or is_v_shaped(schedule, chunks)
    # Later rounds repeat the first three; a rank with one chunk knows no rounds.
    played = 1 if schedule == "gpipe" else min(count, 3 * ranks if in_rounds else MOST_PLAYED)
    loads = _played_loads(schedule, ranks, chunks, played, num_layers, embed_cost, head_cost)
    if schedule == "gpipe":
        return tuple(
            replace(
                one,
                held=one.held * count,
                head_held=one.head_held * count,
                outputs=one.outputs * count,
                waiting_logits=count - 1,
            )
            for one in loads
        )
    return loads


@lru_cache(maxsize=4096)
def _played_loads(
    schedule: str, ranks: int, chunks: int, played: int, num_layers: int, embed_cost: float, head_cost: float
) -> tuple[StageLoad, ...]:
    """Kept beside `stage_loads`: a search asks for hundreds of counts of micro-batches, most of which play the same."""
    layers = layers_of_stages(num_layers, ranks * chunks, embed_cost=embed_cost, head_cost=head_cost)
    chosen = [0, min(1, ranks - 1), max(ranks - 2, 0), ranks - 1]
    some = list(dict.fromkeys(chosen))
    by_rank = dict(zip(some, rank_loads(schedule, some, ranks, chunks, played, layers=layers), strict=True))
    return tuple(by_rank[rank] for rank in chosen)
