"""How a rank joins the others: what of `[comm]` reaches the process group."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.plan.plan import Plan
from phalanx.train import join_group
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "first-run.toml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=["comm.init_timeout_s=77"], cluster=None, steps=0))


@pytest.mark.parametrize(
    ("device", "algorithm", "told"),
    [("cuda", "tree", "allreduce:tree"), ("cuda", "auto", "mine"), ("cpu", "tree", "mine")],
)
def test_the_job_says_how_gpus_reduce_and_how_long_all_wait(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, device: str, algorithm: str, told: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("NCCL_ALGO", "mine")
    monkeypatch.setattr(join_group.dist, "init_process_group", lambda backend, **rest: given.update(rest))
    job = replace(plan.job, comm=replace(plan.job.comm, algorithm=algorithm))
    join_group.join_group(replace(plan, job=job), torch.device(device), rank=0, world=1, store=None)
    assert (os.environ["NCCL_ALGO"], given["timeout"]) == (told, timedelta(seconds=77))
