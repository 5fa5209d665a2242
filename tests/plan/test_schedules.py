"""The orders of our pipelines are torch's own, and what a rank holds at once follows from them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.plan.schedules import is_v_shaped, layers_of_stages, rank_load, rank_order, stage_loads
from phalanx.train.parallel.pipeline import schedule_class


class Stage:
    """What torch's schedules ask a stage for while they work out their order."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.submod, self.is_first, self.is_last = torch.nn.Identity(), index == 0, index == stages - 1
        self.has_backward = False
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_order(name: str, ranks: int, chunks: int, count: int, rank: int):
    """(kind, chunk, micro-batch) of every action that computes, as torch orders them."""
    stages = ranks * chunks
    v_shaped = is_v_shaped(name, chunks)
    mine = [rank, stages - 1 - rank] if v_shaped else [rank + chunk * ranks for chunk in range(chunks)]
    made = [Stage(index, rank, ranks, stages) for index in mine]
    arguments = {"n_microbatches": count, "loss_fn": lambda *_: None}
    kind = schedule_class(name, chunks)
    whole = kind(made, **arguments) if issubclass(kind, torch_schedules.PipelineScheduleMulti) else None
    assert whole is not None
    return [
        (
            "FIBW"[
                ["FORWARD", "BACKWARD_INPUT", "FULL_BACKWARD", "BACKWARD_WEIGHT"].index(action.computation_type.name)
            ],
            mine.index(action.stage_index),
            action.microbatch_index,
        )
        for action in whole.pipeline_order[rank]
        if action is not None
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "count"),
    [
        ("interleaved", 2, 2, 8),
        ("interleaved", 4, 3, 8),
        ("interleaved", 4, 2, 10),  # rounds of five
        ("interleaved", 4, 2, 3),
        ("zero-bubble", 2, 1, 6),
        ("zero-bubble", 4, 1, 8),
        ("zero-bubble", 4, 3, 8),
        ("zero-bubble", 2, 2, 6),
        ("zero-bubble", 4, 2, 12),
        ("zero-bubble", 4, 2, 5),  # fewer than the V is made for
    ],
)
def test_the_order_is_torchs(name, ranks, chunks, count):
    for rank in range(ranks):
        assert list(rank_order(name, rank, ranks, chunks, count)) == torch_order(name, ranks, chunks, count, rank)


def test_what_the_single_orders_hold():
    """GPipe everything, 1F1B as many as ranks follow; too few micro-batches make the two one."""
    layers = layers_of_stages(8, 4)
    held = {
        (name, count): [rank_load(name, rank, 4, 1, count, layers=layers).held for rank in range(4)]
        for name, count in (("gpipe", 6), ("1f1b", 6), ("1f1b", 3))
    }
    assert held == {("gpipe", 6): [12] * 4, ("1f1b", 6): [8, 6, 4, 2], ("1f1b", 3): [6] * 4}


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_micro_batches_hold_no_more(name, chunks, ranks):
    """What `stage_loads` counts on when it plays three rounds for all."""
    layers = layers_of_stages(40, ranks * chunks, embed_cost=1.0, head_cost=1.7)
    few, many = (
        [rank_load(name, rank, ranks, chunks, rounds * ranks, layers=layers) for rank in range(ranks)]
        for rounds in (3, 9)
    )
    assert few == many
    if chunks == 1:  # no rounds: an odd number of micro-batches holds no more either
        assert few == [rank_load(name, rank, ranks, 1, 9 * ranks + 1, layers=layers) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)])
def test_one_of_four_ranks_is_the_fullest(name, chunks, ranks):
    costs = {"embed_cost": 1.0, "head_cost": 1.23}
    layers = layers_of_stages(80, ranks * chunks, **costs)
    every = [rank_load(name, rank, ranks, chunks, 3 * ranks, layers=layers) for rank in range(ranks)]
    chosen = stage_loads(name, ranks, chunks, 3 * ranks, 80, **costs)

    def weight(load):
        return load.held + 1.6 * load.pending

    assert max(map(weight, chosen)) >= 0.97 * max(map(weight, every))


def test_a_pipeline_that_the_model_cannot_fill_is_still_priced():
    """The search asks for memory before it knows what is legal."""
    assert stage_loads("interleaved", 8, 4, 16, 12, embed_cost=0.0, head_cost=0.5)[0].layers >= 1
    assert stage_loads("1f1b", 10**12, 1, 16, 4, embed_cost=0.0, head_cost=0.5)[-1].layers == 1  # as four stages
