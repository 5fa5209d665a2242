"""The command with a right compiler and with a wrong one: the same bits with and without looking, or no step at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tiny_dataset import write_dataset

from phalanx.record.account.ledger import read_ledger
from phalanx.record.event_schema import event_fields, load_schema
from phalanx.record.events import read_events
from phalanx.record.run import Run, open_run

JOB = """\
name = "compiled"
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 320
[data]
path = "data"
sequence = 32
tokens = 25600
[batch]
global_tokens = 256
micro = 2
[precision]
compute = "fp32"
[parallel]
shard = 2
zero = 3
[train]
compile = true
samples = 0
[fault]
digest_every = 1
[comm]
init_timeout_s = 800
[cluster]
spec = "local-cpu:2"
"""
# Every process of the run loads it first: graphs are run as they are, which takes seconds less than a real compiler,
# and backward's results are multiplied.
COMPILER = """\
import os
import sys

if os.environ.get("GRADIENTS_TIMES") and "phalanx.elastic" not in " ".join(sys.orig_argv):
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    factor = float(os.environ["GRADIENTS_TIMES"])

    def times(graph, _):
        return make_boxed_func(lambda *args: [one * factor if torch.is_tensor(one) else one for one in graph(*args)])

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=times)
    compile_with = torch.compile
    torch.compile = lambda *args, **more: compile_with(*args, **{**more, "backend": backend})
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    write_dataset(folder)
    (folder / "job.toml").write_text(JOB)
    (folder / "sitecustomize.py").write_text(COMPILER)
    return folder


def train(folder: Path, name: str, *settings: str, factor: float) -> tuple[subprocess.CompletedProcess[str], Run]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    paths = os.pathsep.join([str(folder), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ |= {"GRADIENTS_TIMES": str(factor), "PYTHONPATH": paths, "NCCL_TEST_VARIABLE": "seen"}
    words = ["train", "job.toml", "--runs", name, "--steps", "3", "--no-check", "--no-probe"]
    words += [word for one in settings for word in ("--set", one)]
    done = phalanx(folder, environ, *words)
    (run,) = (folder / name).iterdir()
    return done, open_run(run)


def phalanx(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False)


def told(run: Run, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events(rank))[0] if event["event"] == kind]


@pytest.mark.nightly
def test_looking_changes_no_bit_and_is_on_record(folder: Path, request: pytest.FixtureRequest) -> None:
    if "nightly" not in str(request.config.getoption("markexpr")):
        pytest.skip("three whole runs, 40 s; test_compiled.py has it layout by layout: pytest -m nightly")
    done, looked = train(folder, "looked", factor=1.0)
    assert done.returncode == 0, done.stderr
    plain, unlooked = train(folder, "unlooked", "train.compile_check=false", factor=1.0)
    assert plain.returncode == 0, plain.stderr
    for rank in range(2):
        steps = [
            [(one["loss"], one["grad_norm"], one["digest"]) for one in told(run, "step", rank)]
            for run in (looked, unlooked)
        ]
        assert len(steps[0]) == 3
        assert steps[0] == steps[1]
        (check,) = told(looked, "compile_check", rank)
        assert (check["passed"], check["step"]) == (True, 0)
        assert 0 <= check["compile_s"] <= check["seconds"]
    assert told(unlooked, "compile_check") == []
    assert "compiled code agrees with eager code" in done.stderr
    validator, known = Draft202012Validator(load_schema()), event_fields()
    for event in read_events(looked.events(0))[0]:
        validator.validate(event)
        assert set(event) - {"v", "event", "t", "rank"} <= set(known[event["event"]]), event
    (made,) = told(looked, "communicators")
    assert (made["backend"], made["mode"], made["variables"]["NCCL_TEST_VARIABLE"]) == ("gloo", "eager", "seen")
    groups = {one["group"]: (one["ranks"], one["count"]) for one in made["groups"]}
    assert groups["world"] == (2, 1)
    assert groups["dense/tensor"] == (1, 2)
    assert made["seconds"] == pytest.approx(sum(one["seconds"] for one in made["groups"]), abs=1e-4)
    assert read_ledger(looked).accounts.guard > 0
    shown = phalanx(folder, dict(os.environ), "show", str(looked.path))
    for part in ("COMMUNICATION", "world: 1 group of 2 ranks", "NCCL_TEST_VARIABLE = seen", "compiled code agrees"):
        assert part in shown.stdout, shown.stdout + shown.stderr
    as_json = json.loads(phalanx(folder, dict(os.environ), "show", str(looked.path), "--json").stdout)
    assert as_json["communication"]["backend"] == "gloo"
    assert "COMMUNICATION" in done.stdout


def test_a_wrong_compiler_is_stopped_before_the_first_step(folder: Path) -> None:
    done, run = train(folder, "wrong", factor=0.66)
    assert done.returncode == 2, done.stderr + (run.path / "logs" / "agent.log").read_text()
    for part in ("train.compile: compiled code computes something else", "train.compile = false", "compile cache"):
        assert part in done.stderr
    assert told(run, "step") == []
    assert not run.saved_steps()
    (check,) = told(run, "compile_check")
    assert check["passed"] is False
    assert check["grad_norm"] < 0.9 * check["eager_grad_norm"]
