"""[sync]: jobs without it stay as they were, and what is refused or said to do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.io.codec import json_values
from phalanx.job.load import ResolvedJob, job_to_dict, load

JOB = """
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 256
[batch]
global_tokens = 1024
[cluster]
spec = "local-cpu:1"
"""


def read(tmp_path: Path, sync: str) -> ResolvedJob:
    (tmp_path / "job.toml").write_text(JOB + f"[sync]\n{sync}\n" if sync else JOB)
    return load(tmp_path / "job.toml")


def refusal(tmp_path: Path, sync: str) -> str:
    with pytest.raises(UserError) as error:
        read(tmp_path, sync)
    return str(error.value)


def test_a_job_without_peers_is_written_as_before(tmp_path: Path) -> None:
    for sync in ("", 'mode = "every-step"'):
        job = read(tmp_path, sync).job
        assert "sync" not in job_to_dict(job)
        assert "sync" not in json_values(job)


def test_a_job_with_peers_is_written_whole(tmp_path: Path) -> None:
    resolved = read(tmp_path, 'mode = "diloco"\npeers = 4\ninner_steps = 20')
    assert not resolved.warnings
    written = job_to_dict(resolved.job)["sync"]
    assert isinstance(written, dict)
    assert (written["mode"], written["inner_steps"], written["outer_learning_rate"]) == ("diloco", 20, "auto")
    assert "sync.inner_steps" in str(resolved)


@pytest.mark.parametrize(
    ("sync", "what"),
    [
        ('mode = "diloco"\ninner_steps = 0', "sync.inner_steps = 0 is below 1"),
        ('mode = "quorum"\npeers = 3\nquorum = 4', "sync.quorum = 4 is more than sync.peers = 3"),
        ('mode = "target-batch"\npeers = 5', "sync.peers = 5 share a global batch of 4 sequences"),
        ('mode = "diloco"\ninner_steps = 4\nfragments = 5', "sync.fragments = 5 with sync.inner_steps = 4"),
        ('mode = "diloco"\ninner_steps = 4\ndelay_steps = 4', "delay_steps = 4 with a fragment sent every 4 steps"),
        ('mode = "diloco"\ndead_after_s = 1\nheartbeat_s = 0.5', "sync.dead_after_s = 1 with sync.heartbeat_s = 0.5"),
        ('mode = "gossip"', "is not a choice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(tmp_path: Path, sync: str, what: str) -> None:
    assert what in refusal(tmp_path, sync)


@pytest.mark.parametrize(
    ("sync", "what"),
    [
        ("inner_steps = 20", 'sync.inner_steps has no effect with sync.mode = "every-step"'),
        ('mode = "target-batch"\nquorum = 2', 'sync.quorum has no effect with sync.mode = "target-batch"'),
        ('mode = "diloco"\nsynchronous_steps = 0', "without a warm-up"),
        ('mode = "target-batch"\ncodec = "topk-2bit"', "cost 0.57 nats"),
        ('mode = "diloco"\ncodec = "int4"\nfeedback = 0', "leaves out is lost"),
    ],
)
def test_what_does_nothing_or_costs_loss_is_said(tmp_path: Path, sync: str, what: str) -> None:
    assert any(what in one.render() for one in read(tmp_path, sync).warnings)


def test_warm_up_is_a_fifth_of_the_steps_unless_told(tmp_path: Path) -> None:
    assert read(tmp_path, 'mode = "diloco"').job.sync.warm_up_steps(100) == 20
    assert read(tmp_path, 'mode = "diloco"\nsynchronous_steps = 7').job.sync.warm_up_steps(100) == 7
