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
