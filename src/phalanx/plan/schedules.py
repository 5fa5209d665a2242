"""What our trainer's pipeline ranks hold at once: the orders of torch.distributed.pipelining, counted in layers.

A rank runs F (forward), B (backward) or, split in two, I (gradients of the input) and W (gradients of the weights) of
its chunks of layers, micro-batch after micro-batch. A layer of a micro-batch is *held* from its F to its B; between I
and W it is *pending*: torch keeps its whole graph, and the gradient at the output of every matrix beside it.
`tests/plan/test_schedules.py` holds the orders against torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from phalanx.errors import mistake

PENDING_WEIGHT = 1.6  # held layers that a pending one weighs when moments are compared: its gradients are 0.5 to 0.7
Action = tuple[str, int, int]  # F, B, I or W; chunk of this rank; micro-batch


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
    if schedule == "gpipe" or (schedule in ("1f1b", "interleaved") and chunks == 1 and count < ranks):
        yield from (("F", 0, index) for index in range(count))
        yield from (("B", 0, index) for index in range(count))
    elif schedule in ("1f1b", "interleaved") and chunks == 1:
        first = min(count, ranks - rank)
        yield from (("F", 0, index) for index in range(first))
        for index in range(count):
            yield ("B", 0, index)
            if first + index < count:
                yield ("F", 0, first + index)
    elif is_v_shaped(schedule, chunks):
        yield from _v_order(rank, ranks, count)
    else:
        yield from _rounds_order(rank, ranks, chunks, count, split=schedule == "zero-bubble")


def _rounds_order(rank: int, ranks: int, chunks: int, count: int, *, split: bool) -> Iterator[Action]:
    """Interleaved 1F1B, and the zero-bubble order made of it, whose W follow `rank` operations behind their I."""
    per_round = count // max(1, count // ranks)
    total = chunks * count
    warm_up = min((chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank), total)
    done: dict[tuple[str, int], int] = {}

    def next_of(kind: str, chunk: int) -> Action:
        index = done.get((kind, chunk), 0)
        done[kind, chunk] = index + 1
        return kind, chunk, index

    def backward_chunk(place: int) -> int:
        return chunks - 1 - (place // per_round) % chunks

    for place in range(warm_up):
        yield next_of("F", (place // per_round) % chunks)
    late = 0
    for place in range(total):
        if warm_up + place < total:
            yield next_of("F", ((warm_up + place) // per_round) % chunks)
        yield next_of("I" if split else "B", backward_chunk(place))
        if split and place >= rank:
            yield next_of("W", backward_chunk(late))
            late += 1
    for place in range(late, total if split else late):
        yield next_of("W", backward_chunk(place))


def _v_order(rank: int, ranks: int, count: int) -> Iterator[Action]:
    """The V-shaped zero-bubble order (Qi et al. 2024, section 6) as torch makes it; fewer micro-batches leave gaps."""
    least = max(2 * ranks - 1, count)
    actions: list[tuple[str, int]] = [("F", 0)] * (2 * (ranks - rank) - 1)
    actions += [("F", 1), ("F", 0)] * rank
    actions += [("F", 1), ("I", 1), ("W", 1)] * (ranks - rank)
    first, second = 2 * ranks - 1 - rank, ranks
    while second < first or first < least:
        if first < least:
            actions.append(("F", 0))
            first += 1
        actions += [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
        second += 1
    actions += [("I", 0), ("I", 1)] * rank
    actions += [("I", 0), ("W", 0)] * (ranks - rank)
    done: dict[tuple[str, int], int] = {}
    for kind, chunk in [*actions, *[("W", 1)] * least, *[("W", 0)] * least]:
        index = done.get((kind, chunk), 0)
        done[kind, chunk] = index + 1
        if index < count:
            yield kind, chunk, index


def rank_load(schedule: str, rank: int, ranks: int, chunks: int, count: int, *, layers: Sequence[range]) -> StageLoad:
    """The fullest moments of a rank."""
    v_shaped = is_v_shaped(schedule, chunks)
    mine = my_stages(rank, ranks, chunks, v_shaped=v_shaped)
    sizes = [len(layers[stage]) for stage in mine]
    last = mine.index(len(layers) - 1) if len(layers) - 1 in mine else -1
    held = pending = logits = late = outputs = 0
    best, at_head = (0.0, 0, 0, 0, 0), (0.0, 0, 0, 0, 0, 0)
    for kind, chunk, _ in rank_order(schedule, rank, ranks, chunks, count):
        size = sizes[chunk]
        starts = mine[chunk] == 0  # its I does nothing: torch leaves the whole backward of the first stage to its W
        if kind == "F":
            held += size
            logits += chunk == last
            outputs += chunk != last
            best = max(best, (held + PENDING_WEIGHT * pending, held, pending, late, outputs))
        if kind in ("B", "I") and chunk == last:
            at_head = max(at_head, (held + PENDING_WEIGHT * pending, held, pending, logits - 1, late, outputs))
            logits -= 1
        if kind in ("B", "W"):
            outputs -= chunk != last
        if kind == "B" or (kind == "W" and starts):
            held -= size
        elif kind == "I" and not starts:
            held, pending = held - size, pending + size
            late += chunk == last
            best = max(best, (held + PENDING_WEIGHT * pending, held, pending, late, outputs))
        elif kind == "W":
            pending -= size
            late -= chunk == last
    return StageLoad(
        layers=sum(sizes),
        split_layers=sum(size for size, stage in zip(sizes, mine, strict=True) if stage)
        if schedule == "zero-bubble"
        else 0,
        held=best[1],
        pending=best[2],
        late_logits=best[3],
        outputs=best[4],
        head_outputs=at_head[5],
        head_held=at_head[1],
        head_pending=at_head[2],
        head_layers=sizes[last] if last >= 0 and schedule == "zero-bubble" else 0,
        waiting_logits=at_head[3],
        head_late_logits=at_head[4],
        embedding=0 in mine,
        head=last >= 0,
    )


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
    in_rounds = count % ranks == 0 or schedule == "1f1b" or is_v_shaped(schedule, chunks)
    # Later rounds repeat the first three.
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
    by_rank = {rank: rank_load(schedule, rank, ranks, chunks, played, layers=layers) for rank in dict.fromkeys(chosen)}
    return tuple(by_rank[rank] for rank in chosen)
