"""What a run does with its checkpoints when it goes on: never start again from zero without a word."""

from __future__ import annotations

import pytest

from phalanx.errors import SystemFailure
from phalanx.train.verify.trial import run_trial


def flip(path, place=40):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_damaged_manifests_are_no_reason_to_start_again(trial, tmp_path):
    run_trial(trial(steps=1, save=str(tmp_path)))
    flip(next(tmp_path.glob("step-*/manifest.json")))
    with pytest.raises(SystemFailure) as caught:
        run_trial(trial(steps=1, resume=str(tmp_path)), debug=False)
    assert "none of 1 checkpoint can be read" in str(caught.value)
    assert "start a new run, or delete the damaged folders" in str(caught.value)


def test_what_another_rank_could_not_read_is_named(trial, tmp_path):
    """Two shards: rank 0 reads its own, and hears what is wrong with that of rank 1."""
    layout = {"data": 2, "shard": 2, "zero": 3, "micro_batch": 1}
    run_trial(trial(steps=1, save=str(tmp_path), **layout))
    file = next(tmp_path.glob("step-*/rank-00001.safetensors"))
    flip(file, -1)
    with pytest.raises(SystemFailure) as caught:
        run_trial(trial(steps=1, resume=str(tmp_path), **layout), debug=False)
    said = str(caught.value).splitlines()[0]
    assert f"none of 1 checkpoint can be read: rank 1: {file}: holds another " in said
    assert said.endswith(" than was written: its digest differs")
