"""How often to save, once it is known what saving costs; and that what was saved after the last trusted step goes."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.elastic.fence import begin_generation
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.run_sections import Checkpoint, FaultSettings
from phalanx.plan.reliability import daly_interval
from phalanx.plan.reliability import predict_reliability as plan
from phalanx.record.run import Run
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.retention import CheckpointInterval, delete_commits_after
from phalanx.train.state.save import save_checkpoint
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


def test_commits_after_the_sound_step_are_gone(tmp_path: Path) -> None:
    shard = TensorShard(name="w", tensor=torch.ones(3), shape=(3,), start=(0,), replicas=1, owner=True, groups={})
    for step in (4, 8, 12):
        save_checkpoint(tmp_path, step=step, attempt="a", shards=[shard], meta={}, rank=0, world=1, keep=9)
    assert [place.name for place in delete_commits_after(tmp_path, 8)] == ["step-00000012"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 8


def test_a_rank_deletes_what_a_verdict_says_is_not_sound(tmp_path: Path) -> None:
    """When the state was found astray, before anything else; not when a newer membership has begun."""
    run = Run(path=tmp_path)
    shard = TensorShard(name="w", tensor=torch.ones(3), shape=(3,), start=(0,), replicas=1, owner=True, groups={})
    for step in (4, 8, 12):
        save_checkpoint(run.checkpoints, step=step, attempt="a", shards=[shard], meta={}, rank=0, world=1, keep=9)
    rank = SimpleNamespace(run=run)
    begin_generation(run, 3)
    Rank._delete_untrusted(rank, 2, 4)
    assert run.saved_steps() == [4, 8, 12]  # it is too late for a rank of generation 2
    Rank._delete_untrusted(rank, 3, 8)
    assert run.saved_steps() == [4, 8]
