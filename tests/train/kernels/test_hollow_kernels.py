"""Kernels of the catalogue's operations that are right at small sizes and wrong, often by little, at a timed size."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.train.kernels.lab import candidate_guard
from phalanx.train.kernels.lab.candidate_guard import judge_candidate
from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer
from phalanx.train.kernels.lab.machine_limits import MachineLimits
from phalanx.train.kernels.lab.trial_inputs import parse_shape
from phalanx.train.kernels.operations import load_all

OPS = load_all()
HOLLOW = sorted((Path(__file__).parent / "hollow").glob("*.txt"))
# Fast enough that no kernel is above the speed of light.
MACHINE = MachineLimits(bytes_per_s=1e12, flops_per_s=1e15)


@pytest.fixture(scope="module")
def server() -> Iterator[CandidateServer]:
    with CandidateServer() as server:
        yield server


@pytest.mark.parametrize("path", HOLLOW, ids=lambda path: path.stem)
def test_a_kernel_that_is_wrong_at_a_timed_size_is_refused(path: Path, server: CandidateServer) -> None:
    source = path.read_text()
    name, _, sizes = source.partition(":")[0].removeprefix("# ").partition(" ")
    verdict = judge_candidate(
        source, OPS[name], server=server, shape=parse_shape(sizes), limits=CandidateLimits(), machine=MACHINE
    )
    assert (verdict.passed, verdict.kind) == (False, "values"), verdict


@pytest.mark.parametrize("path", HOLLOW, ids=lambda path: path.stem)
def test_the_same_kernel_without_its_fault_passes(
    path: Path, server: CandidateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refuses a hollow kernel is its fault, not the way it is written.

    The trials are those of one seed: a sound kernel's error can be several times PyTorch's by luck of
    cancellation.
    """
    monkeypatch.setattr(candidate_guard, "random", SimpleNamespace(Random=lambda _seed: random.Random(7)))
    source = path.read_text()
    name, _, sizes = source.partition(":")[0].removeprefix("# ").partition(" ")
    sound = re.sub(r"^LARGE = .*$", "LARGE = 2**62", source, flags=re.MULTILINE)
    assert sound != source
    shape, limits = parse_shape(sizes), CandidateLimits()
    verdict = judge_candidate(sound, OPS[name], server=server, shape=shape, timed=False, limits=limits)
    assert verdict.passed, verdict.reason
    assert verdict.worst_error <= 1.0
