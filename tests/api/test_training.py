"""`phalanx.train` from Python: real ranks, an interrupt as a notebook's kernel gets it, and what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.api.train_inputs import TrainCall, plan_call
from phalanx.api.training import _asked_of_all, make_run_folder
from phalanx.job.schema import PluginReferences
from phalanx.train.callbacks import Callback

JOB = """\
name = "small"
[model]
preset = "phalanx-tiny"
layers = 2
hidden = 64
[data]
path = "data"
sequence = 64
tokens = 20480
[batch]
global_tokens = 2048
[precision]
compute = "fp32"
[fault]
recovery = "stop"
[cluster]
spec = "local-cpu:1"
"""
# As in a notebook: the process goes on after the interrupt, with the run in its hands.
INTERRUPTED = """
import phalanx
run = phalanx.train(phalanx.load("job.toml"), steps=100_000, progress=False)
print(repr(run), len(run.saved_steps()), len(run.frame("loss")), flush=True)
more = phalanx.train(resume=run, steps=max(run.saved_steps()) + 3, progress=False)
print(repr(more), more.path == run.path)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job")
    text = "\n\n".join(f"document {number} says that {number * 7} is not {number * 3}" for number in range(600))
    (root / "text.txt").write_text(text)
    made = phalanx.data.build(root / "data", [root / "text.txt"], vocab=300, heldout=0.1, split_on="blank")
    assert made.sizes()["train"]["documents"] > 400
    (root / "job.toml").write_text(JOB)
    return root


@pytest.mark.slow
def test_an_interrupt_saves_and_returns_the_run(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 300
        while not any(b'"step"' in one.read_bytes() for one in (folder / "runs").glob("*/events-00000.jsonl")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("<Run: runs/small-")
    assert ", stopped> 1 " in first
    assert second.endswith(", done> True")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    return folder


def test_a_dry_run_is_the_plan_and_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    plan = phalanx.dry_run(phalanx.load("job.toml"), steps=7, cluster="local-cpu:2", runs="none", progress=said.append)
    assert (plan.duration.steps, plan.layout.devices) == (7, 2)
    assert any(line.startswith("check: ") for line in said)
    assert capsys.readouterr().err == ""
    assert not (here / "none").exists()
    again = phalanx.dry_run("job.toml", plan=phalanx.plan("job.toml"), progress=False)
    assert again.job.data.paths == (str(here / "data"),)
    mine = phalanx.dry_run("job.toml", callbacks=[Counts()], metrics=(), progress=False)
    assert [one.rpartition(":")[2] for one in mine.job.plugins.callbacks] == ["Counts"]
    with pytest.raises(TypeError, match=r"dry_run\(\) got an unexpected keyword argument 'colour'"):
        phalanx.dry_run("job.toml", colour=1)


class Counts(Callback):
    """A callback of a person's own."""


def halved(logits: object, targets: object) -> None:
    """Stands for a loss of a person's own."""


def test_a_run_with_objects_continues_with_the_same_objects(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the run may be anybody's: they need `allow_code`, and what is given again takes their place."""
    objects = {"callbacks": (Counts(),), "loss": halved}
    plan, _, _ = plan_call(TrainCall(job="job.toml", plugins=objects), here=True)
    carried = replace(plan.job.plugins, callbacks=("phalanx_job_source:Counts",), source=("class Counts: pass",))
    begun = replace(plan, job=replace(plan.job, plugins=carried))
    run = make_run_folder(begun, TrainCall(name="objects", tell=lambda _: None), None, started=0.0, data_s=0.0)
    monkeypatch.setattr(phalanx.Run, "saved_steps", lambda self: [1])

    def continued(**options: object) -> PluginReferences:
        return plan_call(TrainCall(resume=run, steps=12, **options), here=True)[0].job.plugins  # type: ignore[arg-type]

    assert continued(plugins=objects) == plan.job.plugins, "each of them once, and no source that nothing uses"
    assert continued(plugins=objects, allow_code=True) == plan.job.plugins
    assert continued(allow_code=True) == carried
    with pytest.raises(phalanx.UserError, match=r"allow_code=True in Python\); or give the run the same") as refused:
        continued(plugins={"callbacks": (Counts(),)})
    assert [one.where for one in refused.value.problems] == ["plugins.loss"], "the callback is given, the loss is not"
    with pytest.raises(phalanx.UserError, match=r"plugins\.source: '1 line of Python' is code"):
        continued(plugins={"loss": halved})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "no job file is named"),
        ({"job": "job.toml", "resume": "runs/x"}, "JOB and --resume exclude each other"),
        ({"job": "job.toml", "steps": 0}, "--steps 0 is below 1"),
        ({"job": "job.toml", "hosts": 3}, "3 hosts for 1 rank"),
    ],
)
def test_what_is_refused(here: Path, options: dict[str, object], told: str) -> None:
    with pytest.raises(phalanx.UserError, match=told):
        phalanx.train(progress=False, **options)  # type: ignore[arg-type]


def test_ranks_compare_the_job_and_not_the_seconds_of_a_search() -> None:
    """Every rank of `srun python train.py` loads or plans for itself; what they train must be the same."""
    job = phalanx.load(Path(__file__).parents[2] / "examples/llama-3-8b-64xH100.toml")
    other = replace(job, job=replace(job.job, optim=replace(job.job.optim, lr=1e-9)))
    plans = [phalanx.plan(one, "8xH100:4", calibration=None) for one in (job, other)]
    slower = replace(plans[0], search=replace(plans[0].search, seconds=99.0))
    assert _asked_of_all(TrainCall(job=job)) == _asked_of_all(TrainCall(job=job.job))
    assert _asked_of_all(TrainCall(job=job)) != _asked_of_all(TrainCall(job=other))
    assert _asked_of_all(TrainCall(plan=plans[0])) == _asked_of_all(TrainCall(plan=slower))
    assert _asked_of_all(TrainCall(plan=plans[0])) != _asked_of_all(TrainCall(plan=plans[1]))
