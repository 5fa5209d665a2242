"""`phalanx scale sweep`: the grid, what is refused, and a real sweep that is interrupted, resumed and cached."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.job.load import load
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.schema import Job, Scale
from phalanx.record.run import open_run
from phalanx.scale.sweep_grid import SweepRun, decides_digest, learning_rate_and_batch, parse_budgets, sweep_runs
from phalanx.scale.sweep_shapes import shape_near
from phalanx.train.optim.learning_rate import learning_rate

sys.path.append(str(Path(__file__).parents[1]))
from tiny_dataset import write_dataset

ROOT = Path(__file__).parents[2]
JOB = """
name = "little"
[model]
layers = 1
hidden = 32
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
vocab = 300
tied = true
[data]
path = "data"
sequence = 16
tokens = 20_000
[batch]
global_tokens = 128
[optim]
lr = 1e-2
[precision]
compute = "fp32"
[train]
evaluate_sequences = 16
[cluster]
spec = "local-cpu:1"
"""
# Three sizes of two budgets, a few dozen steps each.
GRID = ["--budgets", "1.2e9,2e9", "--sizes", "3", "--tokens-per-parameter", "0.12"]


@pytest.fixture
def job() -> Job:
    """`make run`'s."""
    return load(ROOT / "examples" / "first-run.toml").job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file beside a tiny dataset."""
    path = tmp_path_factory.mktemp("sweep")
    write_dataset(path, documents=300)
    (path / "job.toml").write_text(JOB)
    return path


# ---- the grid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [3e4, 1e5, 1e6, 3e7, 1e9])
def test_shapes_come_near_the_size_in_the_proportions_of_the_job(job: Job, wanted: float) -> None:
    found = shape_near(wanted, job.model)
    assert 1 / 1.35 < count_parameters(found).total / wanted < 1.35
    assert found.hidden == found.heads * found.head_dim
    assert found.heads % found.kv_heads == 0
    assert found.layers >= 2
    assert found.ffn / found.hidden == pytest.approx(3, rel=0.2)
    assert (found.vocab, found.tied) == (job.model.vocab, job.model.tied)


def test_every_curve_spends_its_budget_around_the_optimum(job: Job) -> None:
    runs = sweep_runs(job, budgets=parse_budgets("1e13..1e15:3"), sizes=5, method="isoflop")
    assert len(runs) == 15
    for one in runs:
        assert one.flops == pytest.approx(one.budget, rel=0.03)
        assert one.tokens == one.steps * one.job.batch.global_tokens
        assert 1 / 6 < one.params / (one.budget / 120) ** 0.5 < 6


def test_runs_of_a_size_share_a_trunk_until_the_decay_begins(job: Job) -> None:
    def rate_of(run: SweepRun, step: int) -> float:
        seen = step * run.job.batch.global_tokens
        return learning_rate(run.job.optim, tokens_seen=seen, total_tokens=run.tokens)

    runs = sweep_runs(job, budgets=parse_budgets("1e13..1e15:5"), sizes=4, method="wsd")
    named = {one.name: one for one in runs}
    assert any(one.trunk for one in runs)
    for one in (one for one in runs if one.trunk):
        trunk = named[one.trunk]
        assert replace(trunk.job, name="", data=one.job.data) == replace(one.job, name="")
        assert trunk.tokens < one.tokens
        for step in range(1, trunk.decay_step + 1):
            assert rate_of(trunk, step) == rate_of(one, step)
        assert rate_of(trunk, trunk.decay_step + 1) < trunk.job.optim.lr


def test_mup_carries_the_learning_rate_over_and_step_law_lowers_it(job: Job) -> None:
    large = shape_near(5e8, job.model)
    lr, batch = learning_rate_and_batch(job, large, 1e10)
    size = count_parameters(large).total - count_parameters(large).embedding
    assert lr == pytest.approx(1.78 * size**-0.712 * 1e10**0.307)
    assert batch == pytest.approx(0.57 * 1e10**0.571)
    scaled = replace(job, scale=Scale(parametrization="mup", base_width=128), data=replace(job.data, tokens=10**9))
    assert learning_rate_and_batch(scaled, large, 1e9) == (job.optim.lr, job.batch.global_tokens)
    lr, batch = learning_rate_and_batch(scaled, large, 1e10)  # muP knows of widths, not of longer training
    assert lr == pytest.approx(job.optim.lr * 10**0.307)
    assert batch == pytest.approx(job.batch.global_tokens * 10**0.571)


def test_the_digest_is_of_what_decides_a_run(job: Job) -> None:
    one = sweep_runs(job, budgets=(1e13, 2e13), sizes=3, method="isoflop")[0]
    known = decides_digest(one, data="d")
    renamed = replace(one.job, name="other", cost=replace(job.cost, pue=1.1))
    assert decides_digest(replace(one, job=renamed), data="d") == known
    assert decides_digest(replace(one, job=replace(one.job, optim=replace(one.job.optim, lr=1e-5))), data="d") != known
    assert decides_digest(one, data="e") != known


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"budgets": "1e15,1e14"}, "budgets do not rise"),
        ({"budgets": "1e17..1e15"}, "budgets do not rise"),
        ({"budgets": "much"}, "is not a list of FLOPs"),
        ({"budgets": "1e13..inf"}, "not between 1e6 and 1e30"),
        ({"sizes": 1}, "a curve with fewer than three sizes has no lowest point"),
        ({"method": "guess"}, "use isoflop or wsd"),
        ({"budgets": "1e8,2e8"}, "but no shape comes close"),
        ({"budgets": "1e12,2e12", "sizes": 100}, "different shapes"),
        ({"budgets": "1e11,2e11", "tokens_per_parameter": 0.011}, "steps of one sequence"),
        ({"parallel": 0}, "--parallel 0"),
        ({"budgets": "1e30"}, r"more than a sweep makes in these proportions\n  the largest, 256 layers of 256 heads"),
        ({"out": ""}, "--out: is empty"),
        ({"budgets": 2e10}, "--budgets: '20000000000.0' is of type float, not a list"),
        ({"budgets": [2e10, "x"]}, "--budgets: 'x' is not a number of FLOPs"),
        ({"budgets": []}, "--budgets: is empty"),
        ({"sizes": "x"}, "--sizes: 'x' is of type str, not a whole number"),
        ({"spread": None}, "--spread: 'None' is of type NoneType, not a number"),
    ],
)
def test_what_cannot_be_swept_is_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        phalanx.scale.sweep(
            ROOT / "examples" / "first-run.toml",
            **{"budgets": "1e13,2e13", "sizes": 3, "dry_run": True, "progress": False, **options},  # type: ignore[arg-type]
        )


def test_sizes_of_which_some_are_too_large_ask_for_no_larger_budget(job: Job) -> None:
    with pytest.raises(UserError, match="lower the budgets"):
        sweep_runs(job, budgets=(1e23,), sizes=3, method="isoflop", spread=100)


def test_one_short_run_takes_few_steps(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    steps = sorted(one.steps for one in sweep_runs(job, budgets=(1e13, 2e13), sizes=3, method="isoflop"))
    assert steps[0] < steps[1]
    monkeypatch.setattr("phalanx.api.scale_sweep.ENOUGH_STEPS", steps[1])
    told: list[str] = []
    first_run = ROOT / "examples" / "first-run.toml"
    phalanx.scale.sweep(first_run, budgets=(1e13, 2e13), sizes=3, dry_run=True, progress=told.append)
    assert any(one.startswith(f"warning: 1 run takes fewer than {steps[1]} steps") for one in told)


# ---- real runs -------------------------------------------------------------------------------------------------------


def command(folder: Path, *more: str, grid: Sequence[str] = GRID) -> list[str]:
    return [sys.executable, "-m", "phalanx", "scale", "sweep", str(folder / "job.toml"), *grid, *more]


def table_of(out: Path) -> dict[str, dict[str, str]]:
    with (out / "points.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_a_sweep_that_is_interrupted_goes_on_and_is_cached(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # One worker at a time: each takes five seconds of a core to start, most of what this test takes.
    asked = command(folder, "--method", "wsd", "--out", str(out), "--parallel", "1")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if ": loss " in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130, rest
    assert "repeat the command to continue" in rest
    before = table_of(out)
    finished = {name for name, row in before.items() if row["status"] == "done"}
    assert finished
    call: dict[str, Any] = {
        "budgets": (1.2e9, 2e9),
        "sizes": 3,
        "tokens_per_parameter": 0.12,
        "method": "wsd",
        "out": out,
        "parallel": 1,
        "progress": False,
    }
    second = phalanx.scale.sweep(folder / "job.toml", **call)
    assert second.exit_code == 0, str(second)
    found = second.to_dict()
    assert {one["run"] for one in found["runs"] if one["cached"]} == finished
    after = table_of(out)
    assert all(row["status"] == "done" and float(row["loss"]) > 0 for row in after.values())
    assert all(after[name] == before[name] for name in finished)
    _a_branch_is_the_run_from_the_start(found, out, tmp_path)
    assert all(one.cached for one in phalanx.scale.sweep(folder / "job.toml", **call).outcomes)
    run = open_run(out / "runs" / found["runs"][0]["folder"])  # an ordinary run
    assert run.status()["state"] == "done"
    assert len(run.frame("loss")) == found["runs"][0]["steps"]


def _a_branch_is_the_run_from_the_start(found: dict, out: Path, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """What goes on from a trunk's checkpoint has the loss, bit for bit, of the same job trained by `phalanx train`."""
    branch = next(one for one in found["runs"] if one["trunk"])
    job = out / "runs" / branch["folder"] / "job.toml"
    whole = phalanx.train(load(job), runs=tmp_path / "whole", check=False, progress=False)
    evaluation = whole.summary().evaluation
    assert evaluation is not None
    assert evaluation.loss == branch["loss"]


def test_a_run_that_diverges_is_stopped_and_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    more = ("--parallel", "1", "--set", "optim.lr=30", "--set", "optim.clip=0")  # one process, which imports torch once
    asked = command(folder, "--out", str(out), *more, grid=["--budgets", "1.2e9", *GRID[2:]])
    assert main(asked[3:]) == 1
    assert "diverged: loss" in capsys.readouterr().out
    assert {row["status"] for row in table_of(out).values()} >= {"diverged"}
