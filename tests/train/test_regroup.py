"""A model replica that is lost, left out and built again, against one process that learns from the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("regroup_ranks.py")
LOST, LATE = 1, 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("regroup")
    subprocess.run([sys.executable, str(SCRIPT), str(out)], check=True, timeout=600)
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_survivors_repeat_the_step_and_keep_all_others(found: dict[str, Any]) -> None:
    for life in (0, 2):
        for position in (0, 1):
            rank = found[f"rank-{life}-{position}"]
            assert rank["lost_in"] == [2]
            assert list(rank["losses"]) == [str(step) for step in range(6)]
    assert f"rank-{LOST}-1" not in found  # it died


def test_losses_and_weights_are_those_of_one_process_with_the_same_tokens(found: dict[str, Any]) -> None:
    alone = found["alone"]
    rank = found["rank-0-0"]
    for step, loss in alone["losses"].items():
        assert rank["losses"][step] == pytest.approx(loss, abs=1e-12)
    for name, values in alone["weights"].items():
        whole = torch.tensor(values, dtype=torch.float64)
        for position in (0, 1):
            part = found[f"rank-0-{position}"]
            mine = torch.tensor(part["weights"][name], dtype=torch.float64)
            wanted = whole
            for dim, (start, size) in enumerate(zip(part["starts"][name], mine.shape, strict=True)):
                wanted = wanted.narrow(dim, start, size)
            assert torch.allclose(mine, wanted, rtol=0, atol=1e-12), name


def test_the_replica_that_rejoins_has_the_same_bits_as_the_others(found: dict[str, Any]) -> None:
    for position in (0, 1):
        late = found[f"rank-{LATE}-{position}"]
        assert late["first"] == 4
        assert list(late["losses"]) == ["4", "5"]
        digests = {found[f"rank-{life}-{position}"]["digest"] for life in (0, 2, LATE)}
        assert len(digests) == 1
