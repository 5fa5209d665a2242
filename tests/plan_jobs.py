"""Jobs and questions for planner tests, written as a person would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import ResolvedJob, load
from phalanx.plan.request import PlanRequest, request_from_job

TEMPLATE = """\
name = "test"
[model]
preset = "{preset}"
[data]
sequence = {sequence}
tokens = "1B"
[batch]
global_sequences = {batch}
[cluster]
spec = "{cluster}"
"""

MakeJob = Callable[..., ResolvedJob]
MakeAsk = Callable[..., PlanRequest]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """A loaded job; keyword arguments are `--set` overrides with dots written as double underscores."""

    def make(preset: str = "llama-3-8b", cluster: str = "8xH100:2", *, sequence: int = 4096, batch: int = 128, **sets):
        path = tmp_path / "job.toml"
        path.write_text(TEMPLATE.format(preset=preset, cluster=cluster, sequence=sequence, batch=batch))
        return load(path, overrides=[f"{key.replace('__', '.')}={value}" for key, value in sets.items()])

    return make


@pytest.fixture
def make_ask(make_job: MakeJob) -> MakeAsk:
    """The question such a job asks."""

    def make(*args, **kwargs) -> PlanRequest:
        resolved = make_job(*args, **kwargs)
        request, _ = request_from_job(
            resolved.job,
            resolve_cluster(resolved.job.cluster.target),
            origins={key: origin.where for key, origin in resolved.origins.items()},
        )
        return request

    return make
