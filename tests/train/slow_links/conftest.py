"""Fixtures of peers that are threads of one process: `trials.train(plan, 3)`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_dataset import write_dataset
from torch.distributed import HashStore

from phalanx.train.rank_settings import Settings
from phalanx.train.telemetry.clock import HostClock

sys.path.insert(0, str(Path(__file__).parent))

from peer_trials import PeerTrials


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("peers-data"), documents=400)


@pytest.fixture
def world():
    """The torch world of one rank that all threads share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def trials(tmp_path: Path, dataset: Path, world, monkeypatch: pytest.MonkeyPatch) -> PeerTrials:
    monkeypatch.setattr(HostClock, "observe_waits", lambda self: nullcontext())  # it is made for one rank per process
    return PeerTrials(tmp_path, dataset)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine computes in float64."""
    make = Settings.of.__func__

    def wider(cls, *arguments, **options):
        return replace(make(cls, *arguments, **options), compute="fp64", reduce="fp64", master="fp64")

    monkeypatch.setattr(Settings, "of", classmethod(wider))
