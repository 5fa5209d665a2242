"""`phalanx scale allocate`: GPU-hours, budgets out of reach, the cluster as it was named, and what cannot be placed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.scale import allocate_budget
from phalanx.scale.allocate_text import allocation_text

sys.path.append(str(Path(__file__).parents[1]))
from made_law import made_law, write_law

ROOT = Path(__file__).parents[2]
SITES = ROOT / "examples" / "clusters" / "two-sites.toml"
SMALL = ("--vocab", "512", "--sequence", "64")


@pytest.fixture
def law(tmp_path: Path) -> Path:
    """Of runs of 1e18 to 1e20 FLOP, with a warning of its fit."""
    return write_law(tmp_path / "law.json", made_law(warnings=("two of its runs diverged",)))


def refused(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    capsys.readouterr()
    assert main(["scale", "allocate", *call]) == 2
    return capsys.readouterr().err


# ---- GPU-hours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hours", "cluster"), [(7100, "8xH100:512"), (2000, "8xH100:16")])
def test_the_planned_run_takes_the_gpu_hours(law: Path, hours: int, cluster: str) -> None:
    """7100 hours were refused by the first guess, which takes the cluster for six times as fast as it is planned."""
    found = phalanx.scale.allocate(law, gpu_hours=hours, cluster=cluster).allocation
    assert found.plan is not None
    assert found.plan.bill.device_hours == pytest.approx(hours, rel=0.01)
    assert not any("device-hours" in one for one in found.notes)


def test_hours_that_no_step_of_sizes_meets_are_noted(law: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate_budget, "HOURS_ROUNDS", 1)
    found = phalanx.scale.allocate(law, gpu_hours=7100, cluster="8xH100:512", extrapolate=True).allocation
    assert found.plan is not None
    off = 100 * (found.plan.bill.device_hours / 7100 - 1)
    assert abs(off) > 1.0
    assert any(f"{off:+.1f} % from --gpu-hours 7100" in one for one in found.notes)


def test_only_the_budget_that_hours_come_to_is_held_against_the_fit(
    law: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, str(law), "--gpu-hours", "1e6", "--cluster", "8xH100:512")
    assert "--gpu-hours: " in said
    assert "decades beyond the largest run" in said


def test_budget_and_hours_exclude_each_other(law: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not both" in refused(capsys, str(law), "--budget", "1e20", "--gpu-hours", "3", "--cluster", "8xH100:1")
    assert "needs either --budget or --gpu-hours" in refused(capsys, str(law))


# ---- budgets out of reach --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["--budget", "1.001e22"], "is 2.0004 decades beyond"),
        (["--budget", "9e15"], "is 2.05 decades below the smallest run"),
        (["--budget", "1e3"], "decades below the smallest run of the fit"),
        (["--budget", "1e3", "--extrapolate"], "less than one sequence of 4,096"),
        (["--budget", "1", "--extrapolate"], "no optimum"),
        (["--budget", "1e60", "--extrapolate"], "--budget: asks for a model of"),
        (["--budget", "1e21", "--inference-tokens", "1e26"], "--inference-tokens: 1e+26 are more than 1e+18"),
        (["--budget", "1e20", "--inference-tokens", ""], '--inference-tokens: "" is not a positive number'),
    ],
)
def test_what_the_law_cannot_carry_is_refused(
    law: Path, capsys: pytest.CaptureFixture[str], call: list[str], said: str
) -> None:
    assert said in refused(capsys, str(law), *call)


def test_a_small_budget_can_be_asked_for(law: Path) -> None:
    found = phalanx.scale.allocate(law, budget=5e15, extrapolate=True, vocab=512, sequence=64).allocation
    assert found.tokens == pytest.approx(5e15 / 6 / found.shape_params)


def test_what_speaks_against_the_fit_is_said(law: Path) -> None:
    assert "of the fit: two of its runs diverged" in phalanx.scale.allocate(law, budget=1e20).allocation.notes


def test_counts_are_readable(tmp_path: Path) -> None:
    law = made_law({"E": 1.69, "A": 1.0, "B": 410.7, "alpha": 0.34, "beta": 0.28}, flops=(1e12, 1e13))
    page = str(phalanx.scale.allocate(write_law(tmp_path / "l.json", law), budget=1e13))
    assert re.search(r"hidden 32, 1 head \(1 for keys", page)
    assert re.search(r"is [\d.]{1,4}[kM]? times off N\*", page)


# ---- the cluster -----------------------------------------------------------------------------------------------------


def test_a_cluster_file_is_found_from_the_job(
    law: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of the cluster was written: no accelerator is called two-homes."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "mycl.toml").write_text(SITES.read_text())
    monkeypatch.chdir(tmp_path)
    call = ["scale", "allocate", str(law), "--budget", "1e16", *SMALL, "--cluster", "mycl.toml"]
    assert main([*call, "--out", "jobs/job.toml"]) == 0
    assert tomllib.loads((tmp_path / "jobs" / "job.toml").read_text())["cluster"] == {"spec": "../mycl.toml"}
    assert "on mycl.toml (" in capsys.readouterr().out
    monkeypatch.chdir("/")
    assert main(["plan", str(tmp_path / "jobs" / "job.toml")]) == 0


def test_a_spec_stays_as_it_was_written(law: Path) -> None:
    found = phalanx.scale.allocate(law, budget=1e16, cluster="local-cpu:1", vocab=512, sequence=64)
    assert tomllib.loads(found.allocation.job_toml)["cluster"] == {"spec": "local-cpu:1"}
    assert "on local-cpu:1 (1 device)" in str(found)
    assert "cluster" not in tomllib.loads(phalanx.scale.allocate(law, budget=1e19).allocation.job_toml)


def test_a_job_that_cannot_be_placed_keeps_its_batch(law: Path) -> None:
    """It kept the batch of the last doubling: 67M tokens instead of 2M."""
    placed = phalanx.scale.allocate(law, budget=1e22).allocation
    found = phalanx.scale.allocate(law, budget=1e22, cluster="local-cpu:1").allocation
    assert found.plan is None
    assert found.batch_tokens == placed.batch_tokens
    assert tomllib.loads(found.job_toml)["batch"]["global_tokens"] == placed.batch_tokens
    assert any("the planner cannot place it" in one for one in found.notes)
    assert "67.1M" not in allocation_text(found)


# ---- from Python -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vocab": "x"}, "--vocab: 'x' is of type str, not a whole number"),
        ({"vocab": 1.5}, "--vocab: '1.5' is of type float, not a whole number"),
        ({"sequence": None}, "--sequence: 'None' is of type NoneType"),
        ({"vocab": 1}, "--vocab: 1 is not in 2 to 100,000,000"),
        ({"cluster": 3}, "--cluster: '3' is of type int, not a text"),
    ],
)
def test_calls_from_python(law: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        phalanx.scale.allocate(law, budget=1e20, **options)
