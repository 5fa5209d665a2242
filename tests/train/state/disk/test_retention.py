"""How often to save, once it is known what saving costs; which checkpoints go, and that a roll-back costs none."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.elastic.fence import begin_generation
from phalanx.elastic.untrusted import set_untrusted_aside, untrusted_steps
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.run_sections import Checkpoint, FaultSettings
from phalanx.plan.reliability import daly_interval
from phalanx.plan.reliability import predict_reliability as plan
from phalanx.record.run import Run
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import retention
from phalanx.train.state.paths import commit_step
from phalanx.train.state.reader import list_commits, newest_checkpoint
from phalanx.train.state.retention import (
    CheckpointInterval,
    CommitState,
    delete_commits_after,
    expendable_steps,
    steps_to_prune,
)
from phalanx.train.state.save import SavedCheckpoint, save_checkpoint
from phalanx.train.state.storage import open_storage
from phalanx.train.worker import Rank

MTBF_S = 10_000.0


def interval(**changes):
    return CheckpointInterval(**{"interval_s": 300.0, "mtbf_s": MTBF_S, "measured": True, "now_s": 50.0, **changes})


def test_the_plan_decides_until_something_was_measured():
    clock = interval()
    assert [clock.due(now_s) for now_s in (50.0, 349.0, 350.0)] == [False, False, True]
    clock.persisted(900.0)  # without a blocking cost nothing is known
    assert clock.interval_s == 300.0


def test_the_measured_cost_takes_the_place_of_the_predicted_one():
    clock = interval()
    clock.saved(now_s=400.0, blocked_s=2.0)
    assert clock.interval_s == pytest.approx(daly_interval(2.0, MTBF_S))
    assert not clock.due(400.0 + clock.interval_s - 1)
    assert clock.due(400.0 + clock.interval_s + 1)


def test_one_slow_save_changes_nothing():
    clock = interval()
    for blocked_s in (0.5, 0.5, 60.0, 0.5, 0.5):
        clock.saved(now_s=0.0, blocked_s=blocked_s)
    assert clock.interval_s == pytest.approx(daly_interval(0.5, MTBF_S))
    for _ in range(5):
        clock.saved(now_s=0.0, blocked_s=3.0)  # but a lasting change does
    assert clock.interval_s == pytest.approx(daly_interval(3.0, MTBF_S))


def test_saves_do_not_pile_up():
    clock = interval()
    clock.saved(now_s=0.0, blocked_s=0.01)
    clock.persisted(700.0)
    assert clock.interval_s == 700.0


def test_no_failures_no_checkpoints_in_between():
    clock = interval(mtbf_s=math.inf, interval_s=math.inf)
    clock.saved(now_s=0.0, blocked_s=1.0)
    assert not clock.due(1e12)


def test_an_interval_of_the_job_stays(reliability):
    clock = CheckpointInterval.of(reliability, Checkpoint(interval_s=60.0), now_s=0.0)
    clock.saved(now_s=0.0, blocked_s=100.0)
    assert clock.interval_s == reliability.interval_s
    assert CheckpointInterval.of(reliability, Checkpoint(), now_s=0.0).interval_s == reliability.interval_s


@pytest.fixture
def reliability():
    cluster = resolve_cluster("8xH100:2")
    return plan(
        cluster, checkpoint=Checkpoint(interval_s=60.0), fault=FaultSettings(), state_bytes=1e12, devices=16, step_s=5.0
    )


SHARD = TensorShard(name="w", tensor=torch.ones(3), shape=(3,), start=(0,), replicas=1, owner=True, groups={})


def save(root: Path, *steps: int, keep: int = 9, trusted_step: int | None = None) -> SavedCheckpoint:
    for step in steps:
        saved = save_checkpoint(
            root,
            step=step,
            attempt="a",
            shards=[SHARD],
            meta={},
            rank=0,
            world=1,
            keep=keep,
            trusted_step=lambda: trusted_step,
        )
    return saved


def committed(root: Path) -> list[int]:
    return [commit_step(place.name) or 0 for place in list_commits(root)]


def commits(*steps: int, damaged: int = -1) -> list[CommitState]:
    return [CommitState(step=step, is_intact=step != damaged) for step in steps]


def test_commits_after_the_sound_step_are_gone(tmp_path: Path) -> None:
    save(tmp_path, 4, 8, 12)
    assert delete_commits_after(tmp_path, 8) == [12]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 8


def test_commits_that_nothing_replaces_are_not_deleted(tmp_path: Path) -> None:
    save(tmp_path, 8, 12)
    assert delete_commits_after(tmp_path, 7) == []
    assert committed(tmp_path) == [12, 8]
    (tmp_path / "step-00000008" / "manifest.json").write_text("damaged")
    assert delete_commits_after(tmp_path, 8) == [], "a damaged one replaces nothing"


def test_the_newest_checkpoint_from_before_a_streak_outlives_it(tmp_path: Path) -> None:
    """Steps 20 to 29 are skipped and saved: what the roll-back goes back to is still there."""
    save(tmp_path, 17, 18, 19, keep=3)
    save(tmp_path, *range(21, 30), keep=3, trusted_step=20)
    assert committed(tmp_path) == [29, 28, 19], "in the place of one of the three, so that the disk need not be larger"
    save(tmp_path, 30, keep=3, trusted_step=30)  # a step was taken: the streak is over
    assert committed(tmp_path) == [30, 29, 28]


def test_with_one_kept_the_checkpoint_from_before_a_streak_comes_on_top(tmp_path: Path) -> None:
    save(tmp_path, 19, keep=1)
    save(tmp_path, 21, 22, keep=1, trusted_step=20)
    assert committed(tmp_path) == [22, 19]
    save(tmp_path, 23, keep=1, trusted_step=23)
    assert committed(tmp_path) == [23]


@pytest.mark.parametrize(
    ("found", "keep", "trusted_step", "surplus"),
    [
        (commits(23, 22, 21, 20, 19), 3, 20, {21, 19}),  # exactly as far as the last trusted step
        (commits(23, 22, 21, 20, 19), 3, 21, {20, 19}),  # among the newest anyway
        (commits(23, 22, 21, 20, 19, damaged=20), 3, 20, {21}),  # the newest that can be read; a person looks at 20
        (commits(23, 22, 21), 2, 5, {21}),  # nothing from before is there
        (commits(23, 22, 21, 20, damaged=22), 2, None, {20}),  # damaged ones do not count, and newer ones stay
        (commits(23, 22, 21, 20, damaged=20), 3, None, {20}),  # older than all that is kept: it goes
        (commits(23, damaged=23), 1, 20, set()),  # nothing can be read: nothing goes
        (commits(), 3, 20, set()),
        (commits(23, 22), 0, None, {22}),
    ],
)
def test_what_is_pruned_follows_from_the_steps(
    found: list[CommitState], keep: int, trusted_step: int | None, surplus: set[int]
) -> None:
    assert steps_to_prune(found, keep=keep, trusted_step=trusted_step) == surplus


@pytest.mark.parametrize(
    ("found", "trusted_step", "first_to_go"),
    [
        (commits(23, 22, 20, 19), None, [19, 20, 22]),
        (commits(23, 22, 20, 19), 20, [19, 22]),
        (commits(23, 22, 20, damaged=23), 20, []),  # 22 is the newest that can be read
        (commits(23, 22, damaged=23), None, []),
        (commits(), 20, []),
    ],
)
def test_a_full_disk_costs_neither_the_newest_nor_the_trusted_checkpoint(
    found: list[CommitState], trusted_step: int | None, first_to_go: list[int]
) -> None:
    assert expendable_steps(found, trusted_step=trusted_step) == first_to_go


def test_a_full_disk_costs_what_was_set_aside_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(path=tmp_path)
    save(run.checkpoints, 4, 8, 12)
    set_untrusted_aside(run, after=8)
    free = [0, 0, 10**12]  # deleting one is enough
    monkeypatch.setattr(retention, "_free_bytes", lambda root: free.pop(0))
    assert retention.make_room(open_storage(run.checkpoints)) == [12]
    assert (committed(run.checkpoints), untrusted_steps(run, after=0)) == ([8, 4], [])


def test_what_a_roll_back_set_aside_goes_when_training_has_passed_it(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    save(run.checkpoints, 4, 8, 12, 16)
    set_untrusted_aside(run, after=8)
    assert (committed(run.checkpoints), untrusted_steps(run, after=0)) == ([8, 4], [12, 16])
    assert save(run.checkpoints, 10, trusted_step=10).deleted_untrusted == ()
    assert save(run.checkpoints, 13, trusted_step=12).deleted_untrusted == (), "13 may be unsound itself"
    assert save(run.checkpoints, 14, trusted_step=14).deleted_untrusted == (12,)
    assert untrusted_steps(run, after=0) == [16]
    assert save(run.checkpoints, 16, trusted_step=16).deleted_untrusted == (16,)
    assert committed(run.checkpoints) == [16, 14, 13, 10, 8, 4]


def test_a_step_can_be_set_aside_twice(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    for _ in range(2):
        save(run.checkpoints, 4, 8)
        set_untrusted_aside(run, after=4)
        assert committed(run.checkpoints) == [4]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "untrusted-step-00000008", "untrusted-step-00000008-2"]
    assert save(run.checkpoints, 8, trusted_step=8).deleted_untrusted == (8,)
    assert untrusted_steps(run, after=0) == []


def test_a_rank_sets_aside_what_a_verdict_says_is_not_sound(tmp_path: Path) -> None:
    """When the state was found untrusted, before anything else; not when a newer membership has begun."""
    run = Run(path=tmp_path)
    save(run.checkpoints, 4, 8, 12)
    rank = SimpleNamespace(run=run)
    begin_generation(run, 3)
    Rank._set_untrusted_aside(rank, 2, 4)
    assert run.saved_steps() == [4, 8, 12]  # it is too late for a rank of generation 2
    Rank._set_untrusted_aside(rank, 3, 8)
    assert run.saved_steps() == [4, 8]
    assert untrusted_steps(run, after=8) == [12]
