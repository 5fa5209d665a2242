"""What an agent loads for processes that it forks later: nothing is left behind, and no bit of a step changes."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.elastic.preload import Preload
from phalanx.job.load import load
from phalanx.plan.make import plan as make_plan
from phalanx.plan.plan import Plan
from phalanx.train import first_step
from phalanx.train.engine import Engine
from phalanx.train.first_step import is_worth_loading, load_first_step, try_first_step
from phalanx.train.settings import Settings
from phalanx.train.tracing.traced_step import constant_values, fake_world, forget_meshes

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
TENSOR = ("parallel.tensor=2", "parallel.shard=2", "parallel.zero=1", "train.compile=false")


def planned(*overrides: str) -> Plan:
    return make_plan(load(str(JOB), overrides=overrides))


def forked(work: Any) -> str:
    """What `work` returns in a forked process, where whatever it leaves behind troubles no other test."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(writing, str(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def first_bits(plan: Plan, *, loaded: bool) -> str:
    """Digest of the gradients of the first step of rank 2, in a group that moves nothing: a function of the bits."""
    torch.set_num_threads(1)
    if loaded:
        load_first_step(plan.job, plan.layout, on_gpu=False)
    forget_meshes()
    settings = replace(Settings.of(plan.job, plan.layout, on_gpu=False), compile_backend="aot_eager")
    seen: list[bytes] = []
    with fake_world(2, plan.layout.devices):
        engine = Engine(plan.job.model, settings, plan.job.optim, device=torch.device("cpu"), read=constant_values)
        engine.initialise()
        engine.on_gradients_ready = lambda grads: seen.extend(grad.numpy().tobytes() for grad in grads)
        tokens = torch.arange(2 * settings.sequence).view(2, -1) % plan.job.model.vocab
        engine.step(tokens, tokens, lr=1e-3)
    return f"{len(seen)} {hashlib.sha256(b''.join(seen)).hexdigest()}"


@pytest.mark.parametrize("overrides", [TENSOR, ("train.compile=true",)], ids=["tensor", "compiled"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_forked_process_computes_the_same_bits_with_and_without(overrides: tuple[str, ...]) -> None:
    plan = planned(*overrides)
    without, with_it = (forked(lambda loaded=loaded: first_bits(plan, loaded=loaded)) for loaded in (False, True))
    assert without == with_it
    assert not without.startswith("0 ")


def test_it_does_not_start_cuda_where_there_is_a_gpu() -> None:
    """A machine that says it has a GPU, and a CUDA that must not be started: no rank forked later could use it."""
    plan = planned("train.compile=true")

    def started(*_: object) -> None:
        raise AssertionError("CUDA was started")

    def look() -> str:
        torch.cuda._lazy_init = started
        torch.cuda.is_available = torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        load_first_step(plan.job, plan.layout, on_gpu=False)
        return "not started"

    assert forked(look) == "not started"


def test_nothing_is_left_behind() -> None:
    plan = planned(*TENSOR)

    def look() -> str:
        torch.set_num_threads(2)
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        (said,) = try_first_step(plan.job, plan.layout, on_gpu=False)
        c10d = dist.distributed_c10d
        assert float(said) > 0
        assert not dist.is_initialized()
        assert c10d._world.group_count == 0
        assert not c10d._world.pg_map
        assert torch.equal(torch_state, torch.get_rng_state())
        assert random.getstate() == python_state
        assert torch.get_num_threads() == 2
        assert torch.cuda.get_rng_state.__module__ == "torch.cuda.random"
        assert torch.accelerator.is_available.__module__ == "torch.accelerator"
        assert not torch.cuda.is_initialized()
        return "nothing"

    assert forked(look) == "nothing"


def test_its_mesh_is_one_that_no_rank_has() -> None:
    """What torch keeps for a mesh is found by its ranks: another rank's would be taken for one's own, silently."""
    for tensor, shard in ((2, 2), (3, 3), (4, 1)):
        layout = replace(planned(*TENSOR).layout, tensor=tensor, shard=shard, data=shard)
        small = first_step._small_settings(Settings(layout=layout, sequence=64)).layout
        assert small.tensor not in (1, tensor)
        assert small.shard not in (1, shard)


def test_it_is_worth_it_where_a_first_step_is_long() -> None:
    def worth(*overrides: str, on_gpu: bool = False) -> bool:
        plan = planned(*overrides)
        return is_worth_loading(plan.job, plan.layout, on_gpu=on_gpu)

    assert worth(*TENSOR)
    assert worth(on_gpu=True)  # compiled there unless the job says otherwise
    assert not worth()


def test_a_failure_is_told_and_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(*TENSOR)
    monkeypatch.setattr(first_step, "Engine", lambda *_, **__: 1 / 0)
    assert try_first_step(plan.job, plan.layout, on_gpu=False) == ["failed: ZeroDivisionError: division by zero"]
    assert not dist.is_initialized()


def ended(preload: Preload) -> Preload:
    while not preload.is_over:
        preload.turn(lambda: None)
    return preload


def test_an_agent_loads_what_went_well_in_a_process_of_its_own() -> None:
    done: list[int] = []
    assert ended(Preload(lambda: done.append(1), lambda: ["0.1"], dead_after_s=5.0)).refused == ""
    assert done == [1]


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        (lambda: ["has used CUDA"], "has used CUDA"),
        (lambda: ["1.5"], "took 1.5 s"),  # an agent that counts as lost after 5 s
        (lambda: os._exit(9), "ended without a word"),
    ],
)
def test_an_agent_leaves_alone_what_did_not(attempt: Any, refused: str) -> None:
    done: list[int] = []
    assert ended(Preload(lambda: done.append(1), attempt, dead_after_s=5.0)).refused == refused
    assert done == []
