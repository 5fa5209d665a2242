"""Steps on candidates: one of each kind, and what is finished is kept when Ctrl-C comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.api import fabric_design
from phalanx.api.fabric_design import JobStep, job_steps
from phalanx.cli.main import main
from phalanx.cli.output import note
from phalanx.errors import UserError, mistake
from phalanx.job.load import load
from phalanx.network.fabric.design import DesignRequest, design_fabrics, nominal_ratio
from phalanx.network.fabric.design_verdict import Prices
from phalanx.network.fabric.fabric_text import format_percent
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.sim.months.causes import network_share

JOB = str(Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml")
FOUND = design_fabrics(DesignRequest(gpus=64, nic_gbps=400, tiers=2))


def row(fabric: Fabric) -> JobStep:
    return JobStep(fabric=fabric.name, step_s=1.0, slowest_axis="", slowest_share=1.0, crossing_share=0.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load(JOB), allow_unfinishable=True)


def test_one_of_each_kind(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_design, "_job_step", lambda _, fabric: row(fabric))
    made = job_steps(plan, FOUND, Prices(), note)
    kinds = [(nominal_ratio(one), one.rails, one.planes == 1) for one in made.steps_s]
    assert len(set(kinds)) == len(kinds) == 12
    assert kinds[0] == (1.0, 1, False)


def test_ctrl_c_keeps_what_is_finished(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Fabric] = []

    def step(_: Plan, fabric: Fabric) -> JobStep:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(fabric)
        return row(fabric)

    monkeypatch.setattr(fabric_design, "_job_step", step)
    made = job_steps(plan, FOUND, Prices(), note)
    assert made.interrupted
    assert list(made.steps_s) == done
    assert "stopped by Ctrl-C: 2 designs are compared" in capsys.readouterr().err
    done.clear()
    assert main(["fabric", "design", "--job", JOB, "--tiers", "2"]) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert "The job's step takes 1.00 s" in said
    assert f"waits for the network {format_percent(network_share(plan))} of its time" in said


def test_a_design_the_engine_refuses_is_left_out(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(_: Plan, fabric: Fabric) -> JobStep:
        if fabric.planes == 1:
            raise mistake("x", "too large")
        return row(fabric)

    monkeypatch.setattr(fabric_design, "_job_step", step)
    assert all(one.planes > 1 for one in job_steps(plan, FOUND, Prices(), note).steps_s)

    def never(_: Plan, fabric: Fabric) -> JobStep:
        raise mistake("x", f"{fabric.name} is too large")

    monkeypatch.setattr(fabric_design, "_job_step", never)
    with pytest.raises(UserError, match="is too large"):
        job_steps(plan, FOUND, Prices(), note)
