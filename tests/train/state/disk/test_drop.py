"""What was saved after the last sound step is not to be gone on from."""

from __future__ import annotations

from pathlib import Path

import torch
from phalanx.train.state.retention import delete_commits_after

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import newest, save


def test_commits_after_the_sound_step_are_gone(tmp_path: Path) -> None:
    piece = TensorShard(name="w", tensor=torch.ones(3), shape=(3,), start=(0,), replicas=1, owner=True, groups={})
    for step in (4, 8, 12):
        save(tmp_path, step=step, attempt="a", pieces=[piece], meta={}, rank=0, world=1, keep=9)
    assert [place.name for place in delete_commits_after(tmp_path, 8)] == ["step-00000012"]
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 8
