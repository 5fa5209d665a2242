"""Verdicts on runs that leave lost model replicas out: a good record is believed, and each lie is found by its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from phalanx.plan.layout import Layout
from phalanx.train.drill.judge import Verdict, judge_replay
from phalanx.train.drill.replica_history import ReplicaPresence, judge_replica_history, left_out_ranks
from phalanx.train.drill.step_history import DrillHistory, build_history

Story = Any  # conftest.Story
BATCH = 8


def layout(world: int) -> dict[str, Any]:
    return asdict(
        Layout(
            data=world, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0,
            sequence_parallel=False, micro_batch=1, accumulation=1, recompute="none", precision="fp32",
            schedule="1f1b", offload="none", compression="none",
        )
    )  # fmt: skip


def expected(step: int) -> Sequence[int]:
    return range(BATCH * step, BATCH * (step + 1))


def regroup(story: Story, step: int, present: Sequence[int], behind: Sequence[int] = ()) -> None:
    for rank in present:
        told = {"step": step, "present": list(present), "behind": rank in behind}
        story.write("regroup", rank=rank, round=0, seconds=0.1, **told)


def begin(story: Story, world: int) -> None:
    story.epoch(world, step=0, source="start")
    story.supervisor[0]["layout"] = layout(world)
    regroup(story, 0, range(world))


def finish(story: Story) -> Story:
    """Replicas are copies: the same digest on every rank."""
    for one in story.ranks:
        if one["event"] == "step":
            one["digest"] = f"after {one['step']}"
    story.end()
    return story


@pytest.fixture
def left_out(story: Story) -> Story:
    """Four replicas of a rank; replica 2 is lost in step 3, which rank 0 alone finished with it, and is back for 6."""
    begin(story, 4)
    for step in range(3):
        story.step(step)
    story.step(3, ranks=[0])
    story.incident(2)
    story.supervisor.append(dict(story.supervisor[-1], event="replica", replica=2, state="left out", round=1, step=3))
    regroup(story, 4, [0, 1, 3], behind=[1, 3])  # ranks 1 and 3 take the state of rank 0
    for step in (4, 5):
        story.step(step, ranks=[0, 1, 3])
    story.write("ready", rank=2, step=6, source="replica")
    story.supervisor.append(dict(story.supervisor[-1], state="rejoined", t=story.t))
    regroup(story, 6, range(4), behind=[2])
    for step in (6, 7):
        story.step(step)
    return finish(story)


def history(story: Story) -> DrillHistory:
    return build_history(story.supervisor, story.ranks)


def verdicts(story: Story) -> dict[str, Verdict]:
    told = history(story)
    found = judge_replica_history(told, ReplicaPresence.of(told), expected=expected, replay=None)
    return {verdict.name: verdict for verdict in found}


def test_a_good_record_is_believed(left_out: Story) -> None:
    found = verdicts(left_out)
    assert [verdict for verdict in found.values() if not verdict.ok] == []
    assert found["steps in order"].evidence == "1 generation, 8 steps done, 2 without a replica, 0 undone"
    assert "2 shares of left-out replicas skipped" in found["every sample in one step"].evidence
    assert found["other replicas kept their processes"].evidence == (
        "1 replica left out, 1 came back, everything rebuilt 0 times"
    )
    told = history(left_out)
    presence = ReplicaPresence.of(told)
    assert left_out_ranks(told, presence) == {"4": [2], "5": [2]}
    assert not presence.is_exact(told), "three numbers are added in another order than four"


def find(story: Story, **wanted: object) -> dict[str, Any]:
    return next(one for one in story.ranks if all(one.get(key) == value for key, value in wanted.items()))


def step_missing(story: Story) -> None:
    story.ranks.remove(find(story, event="step", step=5, rank=1))


def step_twice(story: Story) -> None:
    story.ranks.append(dict(find(story, event="step", step=7, rank=1)))


def others_present(story: Story) -> None:
    find(story, event="regroup", step=4, rank=1)["present"] = [0, 1, 2, 3]


def other_bits(story: Story) -> None:
    find(story, event="step", step=6, rank=2)["digest"] = "not what the others have"


def absent_rank_learns(story: Story) -> None:
    at = story.ranks.index(find(story, event="step", step=4, rank=3))
    story.ranks.insert(at + 1, dict(find(story, event="step", step=4, rank=3), rank=2, samples=[36, 37]))


def foreign_sample(story: Story) -> None:
    find(story, event="step", step=6, rank=3)["samples"][0] = 3


def no_list(story: Story) -> None:
    find(story, event="step", step=6, rank=3)["samples"] = None


def other_process(story: Story) -> None:
    story.write("ready", rank=3, step=6, source="replica")


@pytest.mark.parametrize(
    ("lie", "verdict"),
    [
        (step_missing, "steps in order"),
        (step_twice, "steps in order"),
        (others_present, "steps in order"),
        (other_bits, "replicas agree"),
        (absent_rank_learns, "every sample in one step"),
        (foreign_sample, "every sample in one step"),
        (no_list, "every sample in one step"),
        (other_process, "other replicas kept their processes"),
    ],
)
def test_each_lie_is_found(left_out: Story, lie: Callable[[Story], None], verdict: str) -> None:
    lie(left_out)
    assert not verdicts(left_out)[verdict].ok


def test_without_a_left_out_replica_nothing_is_proved_of_the_others(story: Story) -> None:
    begin(story, 2)
    story.step(0)
    finish(story)
    found = verdicts(story)["other replicas kept their processes"]
    assert not found.ok
    assert not found.judged


@pytest.mark.parametrize(("loss", "is_ok"), [(1.0002, True), (1.01, False)])
def test_sums_in_another_order_compare_losses(story: Story, loss: float, is_ok: bool) -> None:
    begin(story, 2)
    story.step(0)
    for one in story.ranks:
        if one["event"] == "step":
            one["loss"] = 1.0
    told = history(finish(story))
    for one in story.ranks:
        if one["event"] == "step":
            one["loss"], one["digest"] = loss, "other bits"
    replayed = history(story)
    assert judge_replay(told, replayed, is_exact=False).ok is is_ok
