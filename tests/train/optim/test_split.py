"""Four gloo processes hold parts of tensors: every optimizer gives what one process with whole tensors gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("split_world.py")
Found = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of the four ranks found, by optimizer, kind and tensor."""
    folder = tmp_path_factory.mktemp("split")
    ranks = [subprocess.Popen([sys.executable, "-W", "error", str(WORKER), str(r), str(folder)]) for r in range(4)]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0] * 4
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("kind", ["weights", "state", "resumed"])
def test_split_equals_whole(found: list[Found], name: str, kind: str) -> None:
    for rank in found:
        assert {tensor: off for tensor, off in rank[name][kind].items() if not off < 1e-12} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_every_element_of_the_state_has_one_owner_and_the_replicas_it_says(found: list[Found], name: str) -> None:
    for rank in found:
        assert {tensor: off for tensor, off in rank[name]["owned"].items() if off} == {}
