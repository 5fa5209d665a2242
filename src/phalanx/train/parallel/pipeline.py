"""Pipeline parallelism: which layers stand on which stage, and the schedule that drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from phalanx.errors import mistake
from phalanx.train.models.decoder import Decoder

# Our names -> torch's. Zero-bubble with two chunks per rank is the V-shaped schedule (Qi et al. 2024).
CLASSES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}

Schedule = PipelineScheduleMulti | PipelineScheduleSingle


def split_layers(layers: int, stages: int, *, embed_cost: float = 0.0, head_cost: float = 0.0) -> list[range]:
    """Layers of each stage; the embedding and the head weigh as much as `*_cost` layers.

    Every stage has at least one layer where there are enough. The fullest stage is as light as can be, and among those
    splits the lightest ends win.

    >>> [len(part) for part in split_layers(70, 12, embed_cost=1, head_cost=1)]
    [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]
    >>> [len(part) for part in split_layers(8, 4)]
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
    for _ in range(layers - stages):
        # The lightest stage takes the next layer; on a tie an inner one, whose activations are held for less long.
        lightest = min(range(stages), key=lambda s: (cost[s], s in (0, stages - 1), -s))
        counts[lightest] += 1
        cost[lightest] += 1.0
    bounds = [sum(counts[:s]) for s in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def my_stages(rank: int, ranks: int, chunks: int, *, v_shaped: bool) -> list[int]:
    """Stages of one pipeline rank: every `ranks`-th, or down and up again for V-shaped schedules.

    >>> my_stages(1, 4, 2, v_shaped=False), my_stages(1, 4, 2, v_shaped=True)
    ([1, 5], [1, 6])
    """
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def schedule_class(name: str, chunks: int) -> type[Schedule]:
    """torch's schedule for our name; refuses what does not go together."""
    multi = name in ("interleaved", "zero-bubble")
    if chunks > 1 and not multi:
        raise mistake(
            "parallel.schedule",
            f'"{name}" runs one chunk of layers per rank, virtual_pipeline is {chunks}',
            fix='use schedule = "interleaved" or "zero-bubble", or virtual_pipeline = 1',
        )
    if name == "interleaved" and chunks == 1:
        name = "1f1b"  # with one chunk the two are the same order
    found: type[Schedule] = get_schedule_class("ZBVZeroBubble" if is_v_shaped(name, chunks) else CLASSES[name])
    return found


def is_v_shaped(name: str, chunks: int) -> bool:
    """Whether a rank's second chunk comes back down the pipeline, so that first and last stage share a rank."""
    return name == "zero-bubble" and chunks == 2


def check_micro_batches(name: str, chunks: int, ranks: int, micro_batches: int) -> None:
    """Refuse counts the schedule cannot order, before anything waits for anything."""
    rounds = max(1, micro_batches // ranks)
    if (name == "zero-bubble" or chunks > 1) and micro_batches % rounds:
        near = micro_batches // ranks * ranks
        raise mistake(
            "batch.micro",
            f"{micro_batches} micro-batches do not make whole rounds of {ranks} pipeline ranks",
            why=f'the "{name}" schedule works in rounds',
            fix=f"use {near} or {near + ranks} micro-batches per step (batch.micro, batch.global_sequences, data)",
        )


def build_schedule(
    parts: Sequence[tuple[int, Decoder]],
    *,
    stages: int,
    group: ProcessGroup,
    name: str,
    micro_batches: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    shapes: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> tuple[Schedule, list[PipelineStage]]:
    """The schedule over this rank's stages; shapes are given, so nothing is negotiated at run time."""
    chunks = stages // group.size()
    check_micro_batches(name, chunks, group.size(), micro_batches)
    if name in ("1f1b", "interleaved") and chunks == 1 and micro_batches < group.size():
        name = "gpipe"  # too few micro-batches ever to alternate: the two orders are one, and torch refuses the first
    made: list[Any] = []
    for index, part in parts:
        given, made_of_it = shapes(index)
        made.append(
            PipelineStage(part, index, stages, device, group=group, input_args=(given,), output_args=(made_of_it,))
        )
    kind = schedule_class(name, chunks)
    arguments: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    for stage in made:
        _greet_others_only(stage)
    if issubclass(kind, PipelineScheduleMulti):
        with _all_chunks_stay(chunks):
            return kind(made, **arguments), made
    return kind(made[0], **arguments), made


@contextmanager
def _all_chunks_stay(chunks: int) -> Iterator[None]:
    """Let a rank hold the gathered weights of all its chunks.

    torch's schedules drop those beyond three and gather them again: 22 gathers a step for 8 with four chunks of
    Llama 3.1 405B on 16,384 ranks (docs/trace.md), where ZeRO 1 and 2 keep their weights by definition.
    """
    added = schedules._add_unshard_reshard
    schedules._add_unshard_reshard = partial(added, max_active_stages=max(chunks, 3))
    try:
        yield
    finally:
        schedules._add_unshard_reshard = added


def _greet_others_only(stage: Any) -> None:
    """torch 2.11 begins with a message to each neighbouring stage; on the bend of a V that is the rank itself."""
    greetings = stage._get_init_p2p_neighbors_ops
    me = dist.get_rank()
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in greetings() if op.peer != me]


def assume_static(schedule: Schedule) -> None:
    """Skip the messages of the first step: torch 2.13 votes on whether all shapes are known, 2.11 greets neighbours."""
    from torch.distributed.pipelining import _utils

    known = getattr(_utils, "InferenceMode", None)  # torch 2.11 does not vote

    def agreed(stages: Sequence[PipelineStage], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = known.STATIC if known is not None else None

    schedule._warmup_p2p = agreed  # type: ignore[method-assign,assignment]
    for stage in [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages:
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign,assignment]


def home_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """The pipeline rank that holds a stage.

    >>> [[home_of(stage, 2, v_shaped=shape) for stage in range(4)] for shape in (False, True)]
    [[0, 1, 0, 1], [0, 1, 1, 0]]
    """
    return 2 * ranks - 1 - stage if v_shaped and stage >= ranks else stage % ranks


def forward_only(
    parts: Sequence[tuple[int, Decoder]],
    first_input: torch.Tensor,
    *,
    stages: int,
    group: ProcessGroup,
    v_shaped: bool,
    like: Callable[[int], torch.Tensor],
) -> torch.Tensor | None:
    """One micro-batch through the whole pipeline without gradients; the output on the last stage's rank.

    torch's own `schedule.eval` fails for zero-bubble and V-shaped orders (2.13), and evaluation needs no order at all.
    """
    passed: torch.Tensor | None = None
    for index, part in sorted(parts, key=lambda one: one[0]):
        x = first_input
        if index:
            source = home_of(index - 1, group.size(), v_shaped=v_shaped)
            if source == group.rank():
                assert passed is not None
                x = passed
            else:
                x = torch.empty_like(like(index), device=first_input.device)
                dist.recv(x, group=group, group_src=source)
        passed = part(x)
        target = home_of(index + 1, group.size(), v_shaped=v_shaped)
        if index < stages - 1 and target != group.rank():
            assert passed is not None
            dist.send(passed.contiguous(), group=group, group_dst=target)
    return passed if any(index == stages - 1 for index, _ in parts) else None
