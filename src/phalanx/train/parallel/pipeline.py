"""Pipeline parallelism: the pipeline schedules, built on torch's, and which rank holds which stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    get_schedule_class,
)

from phalanx.errors import mistake
from phalanx.plan.pipeline_order import numbered_actions
from phalanx.plan.schedules import is_v_shaped
from phalanx.train.models.decoder import Decoder
from phalanx.train.parallel.stage import LeanStage

# Phalanx's names -> torch's. Zero-bubble with two chunks per rank is the V-shaped schedule (Qi et al. 2024).
CLASSES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}

Schedule = PipelineScheduleMulti | PipelineScheduleSingle


# Letters of plan/pipeline_order.py -> torch's kinds of action.
ACTION_KINDS = {
    "F": schedules._ComputationType.FORWARD,
    "B": schedules._ComputationType.FULL_BACKWARD,
    "I": schedules._ComputationType.BACKWARD_INPUT,
    "W": schedules._ComputationType.BACKWARD_WEIGHT,
}


class _OwnOrder(schedules._PipelineScheduleRuntime):  # type: ignore[misc]
    """torch's schedule runtime for a user-defined order of actions; it adds the sends and receives."""

    def __init__(self, stages: list[Any], order: Sequence[str], **arguments: Any) -> None:
        super().__init__(stages, **arguments)
        self.pipeline_order = {
            rank: [schedules._Action(rank, ACTION_KINDS[kind], number) for kind, number in numbered_actions(text)]
            for rank, text in enumerate(order)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def schedule_class(name: str, chunks: int) -> type[Schedule]:
    """Return torch's schedule class for a Phalanx name; raise UserError for combinations that do not exist."""
    multi = name in ("interleaved", "zero-bubble")
    if chunks > 1 and not multi:
        raise mistake(
            "parallel.schedule",
            f'"{name}" runs one chunk of layers per rank, virtual_pipeline is {chunks}',
            fix='use schedule = "interleaved" or "zero-bubble", or virtual_pipeline = 1',
        )
    if name == "interleaved" and chunks == 1:
        name = "1f1b"  # with one chunk the two are the same order
    found_class: type[Schedule] = get_schedule_class("ZBVZeroBubble" if is_v_shaped(name, chunks) else CLASSES[name])
    return found_class


def check_micro_batches(name: str, chunks: int, ranks: int, micro_batches: int) -> None:
    """Raise UserError if the schedule cannot order this number of micro-batches."""
    # torch's looped schedules process the micro-batches in equal rounds.
    rounds = max(1, micro_batches // ranks)
    if (name == "zero-bubble" or chunks > 1) and micro_batches % rounds:
        lower = micro_batches // ranks * ranks
        raise mistake(
            "batch.micro",
            f"{micro_batches} micro-batches do not make whole rounds of {ranks} pipeline ranks",
            why=f'the "{name}" schedule works in rounds',
            fix=f"use {lower} or {lower + ranks} micro-batches per step (batch.micro, batch.global_sequences, data)",
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
    order: Sequence[str] = (),
) -> tuple[Schedule, list[LeanStage]]:
    """Build the schedule over this rank's stages; shapes are known, so nothing is negotiated at run time.

    A user-defined `order` holds for one number of ranks and micro-batches; other numbers (a batch ramp, a run that
    lost ranks) use the schedule `name`.
    """
    chunks = stages // group.size()
    fits = len(order) == stages == group.size() and order[0].count("F") == micro_batches
    if not fits:
        check_micro_batches(name, chunks, group.size(), micro_batches)
    if not fits and name in ("1f1b", "interleaved") and chunks == 1 and micro_batches < group.size():
        # With so few micro-batches the two orders are the same, and torch refuses 1F1B
        name = "gpipe"
    kind = _OwnOrder if fits else schedule_class(name, chunks)
    lean_stages: list[Any] = []
    for index, model in parts:
        input_shape, output_shape = shapes(index)
        lean_stages.append(
            LeanStage(
                model,
                index,
                stages,
                device,
                group=group,
                input_args=(input_shape,),
                output_args=(output_shape,),
                sends_alone=kind is not Schedule1F1B,
            )
        )
    # scale_grads=False: the loss is already divided by the tokens of the whole batch.
    arguments: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    for stage in lean_stages:
        _greet_others_only(stage)
    if issubclass(kind, _OwnOrder):
        with _all_chunks_stay(chunks):
            return kind(lean_stages, order, **arguments), lean_stages
    if issubclass(kind, PipelineScheduleMulti):
        with _all_chunks_stay(chunks):
            return kind(lean_stages, **arguments), lean_stages
    return kind(lean_stages[0], **arguments), lean_stages


@contextmanager
def _all_chunks_stay(chunks: int) -> Iterator[None]:
    """Let a rank hold the gathered weights of all its chunks.

    torch's schedules drop those beyond three and gather them again: 22 gathers per step for 8 with four chunks of
    Llama 3.1 405B on 16,384 ranks (docs/trace.md), where ZeRO 1 and 2 keep their weights by definition.
    """
    add_unshard_reshard = schedules._add_unshard_reshard
    schedules._add_unshard_reshard = partial(add_unshard_reshard, max_active_stages=max(chunks, 3))
    try:
        yield
    finally:
        schedules._add_unshard_reshard = add_unshard_reshard


def _greet_others_only(stage: Any) -> None:
    """Drop a stage's greeting to its own rank, its neighbour at the bend of a V-shaped pipeline (torch 2.11)."""
    greeting_ops = stage._get_init_p2p_neighbors_ops
    own_rank = dist.get_rank()
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in greeting_ops() if op.peer != own_rank]


def assume_static(schedule: Schedule) -> None:
    """Skip the messages of the first step: torch 2.13 votes on whether all shapes are known, 2.11 greets neighbours."""
    from torch.distributed.pipelining import _utils

    # torch 2.11 does not vote
    inference_mode = getattr(_utils, "InferenceMode", None)

    def skip_vote(stages: Sequence[PipelineStage], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = inference_mode.STATIC if inference_mode is not None else None

    schedule._warmup_p2p = skip_vote  # type: ignore[method-assign,assignment]
    for stage in [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages:
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign,assignment]


def home_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank that holds a stage.

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
    """Run one micro-batch through the whole pipeline without gradients; return the output on the last stage's rank.

    torch's own `schedule.eval` fails for zero-bubble and V-shaped orders (2.13), and evaluation needs no order.
    """
    output: torch.Tensor | None = None
    for index, model in sorted(parts, key=lambda stage: stage[0]):
        x = first_input
        if index:
            source = home_of(index - 1, group.size(), v_shaped=v_shaped)
            if source == group.rank():
                assert output is not None
                x = output
            else:
                x = torch.empty_like(like(index), device=first_input.device)
                dist.recv(x, group=group, group_src=source)
        output = model(x)
        target = home_of(index + 1, group.size(), v_shaped=v_shaped)
        if index < stages - 1 and target != group.rank():
            assert output is not None
            dist.send(output.contiguous(), group=group, group_dst=target)
    return output if any(index == stages - 1 for index, _ in parts) else None
