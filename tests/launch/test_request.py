"""What is asked of a launch system, from the plan alone; the script that says so; what a host makes of it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.job.run_sections import LaunchChoice
from phalanx.launch.node import HostLine, conclude_run, own_address, prepare_run
from phalanx.launch.resource_request import LaunchRequest, launch_request, placement_cost
from phalanx.launch.settings import LaunchSettings, launch_settings
from phalanx.launch.slurm_script import SlurmFacts, batch_script
from phalanx.record.run import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan() -> phalanx.Plan:
    job = phalanx.load(
        ROOT / "examples" / "llama-3-8b-64xH100.toml", overrides=["parallel.tensor=8", "parallel.pipeline=2"]
    )
    return phalanx.plan(job)


def request_for(plan: phalanx.Plan, run: str = "/shared/runs/a", **settings: object) -> LaunchRequest:
    chosen = LaunchSettings(on="slurm", **settings)  # type: ignore[arg-type]
    return launch_request(plan, chosen, run=Path(run), python="/shared/env/bin/python", name="llama", spares=1)


def test_the_plan_says_hosts_time_and_nearness(plan: phalanx.Plan) -> None:
    asked = request_for(plan)
    assert (asked.hosts, asked.spares, asked.all_hosts, asked.devices_per_host) == (8, 1, 9, 8)
    assert plan.duration.wall_s_high < asked.time_limit_s <= plan.duration.wall_s_high + 660
    assert asked.checkpoint == "/shared/runs/a/checkpoints"
    # Tensor groups fill a host; the data and pipeline axes go over several.
    assert [group.hosts for group in asked.placement] == sorted({group.hosts for group in asked.placement})
    assert "tensor" not in [axis for group in asked.placement for axis in group.axes]
    assert placement_cost(plan).startswith("with 1/2 of the bandwidth between hosts a step takes")
    assert request_for(plan, hosts=16).devices_per_host == 4
    with pytest.raises(phalanx.UserError, match="65 hosts for 64 ranks"):
        request_for(plan, hosts=65)


def test_the_script_is_complete_and_quotes_what_a_stranger_wrote(plan: phalanx.Plan, tmp_path: Path) -> None:
    hostile = f"{tmp_path}/it's; touch {tmp_path}/pwned $(touch {tmp_path}/pwned)"
    asked = request_for(
        plan,
        run=hostile,
        queue="gpu",
        modules=("cuda/12.8",),
        image="nvcr.io#nvidia/pytorch:25.06-py3",
        mounts=("/data:/mnt",),
        environ={"GREETING": "a b; $(x)"},
        options=("--constraint=h100&ib",),
        preamble=("ulimit -l unlimited",),
    )
    text = batch_script([asked], SlurmFacts(leaf_nodes=4, most_time_s=86400.0))
    lines = text.splitlines()
    for wanted in (
        "--nodes=9",
        "--gpus-per-node=8",
        "--time=1440",
        "--partition=gpu",
        "--switches=3@5:00",
        "--requeue",
    ):
        assert f"#SBATCH {wanted}" in lines
    assert f'#SBATCH --chdir="{hostile}"' in lines
    assert lines.index("module load cuda/12.8") < lines.index("ulimit -l unlimited")
    assert "export GREETING='a b; $(x)'" in lines
    assert "--container-image='nvcr.io#nvidia/pytorch:25.06-py3'" in text
    # The shell takes it for one name, and runs nothing of it.
    name = next(line for line in lines if line.startswith("RUN="))
    done = subprocess.run(["bash", "-c", f'{name}; printf %s "$RUN"'], capture_output=True, text=True, check=True)
    assert done.stdout == hostile
    assert not (tmp_path / "pwned").exists()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    with pytest.raises(phalanx.UserError, match="cannot be written into a batch script"):
        batch_script([replace(asked, run="/a\nb")], SlurmFacts())
    several = batch_script([replace(asked, run=f"/runs/{number}", group="sweep") for number in range(3)], SlurmFacts())
    assert "#SBATCH --array=0-2" in several.splitlines()
    assert subprocess.run(["bash", "-n"], input=several, text=True, check=False).returncode == 0


def test_settings_come_from_the_call_then_the_job_then_the_user_then_the_site(tmp_path: Path) -> None:
    for name, text in (
        ("user", 'queue = "mine"\nqos = "long"\nenviron = ["A=user"]\npreamble = ["true"]\n'),
        ("site", 'queue = "all"\naccount = "nlp"\nenviron = ["A=site", "B=site"]\n'),
    ):
        (tmp_path / name / "phalanx").mkdir(parents=True)
        (tmp_path / name / "phalanx" / "launch.toml").write_text(text)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "user"), "XDG_CONFIG_DIRS": str(tmp_path / "site")}
    found = launch_settings(LaunchChoice(qos="short"), environ, on="slurm", hosts=3)
    assert (found.on, found.hosts, found.qos, found.queue, found.account) == ("slurm", 3, "short", "mine", "nlp")
    assert (found.environ, found.preamble) == ({"A": "user", "B": "site"}, ("true",))
    (tmp_path / "user" / "phalanx" / "launch.toml").write_text('queu = "x"\nhosts = 0\n')
    with pytest.raises(phalanx.UserError) as caught:
        launch_settings(LaunchChoice(), environ)
    assert 'launch.toml:1: a launch file has no key "queu"\n  did you mean "queue"?' in str(caught.value)
    assert "launch.toml:2: hosts is below 1" in str(caught.value)
    for wrong, said in ((["A"], "is not NAME=VALUE"), (["A B=1"], "is not NAME=VALUE")):
        with pytest.raises(phalanx.UserError, match=said):
            launch_settings(LaunchChoice(environ=tuple(wrong)), {})
    for given, said in (
        ({"time_s": 0.0}, "--time-s 0.0: is not above 0\n  use a number above 0 and up to 1e+09"),
        ({"time_s": float("nan")}, "--time-s nan: is not a finite number"),
        ({"hosts": 0}, "--hosts 0: is below 1\n  use 1 or more"),
        ({"queue": "a;b"}, "--queue a;b: has the wrong form"),
    ):
        with pytest.raises(phalanx.UserError) as caught:
            launch_settings(LaunchChoice(), {}, **given)
        assert str(caught.value).startswith(said)
        assert "auto" not in str(caught.value)  # which the command line does not take


def test_hosts_are_ordered_by_topology_and_too_few_end_the_launch(tmp_path: Path) -> None:
    lines = [HostLine.parse(f"spine.{leaf}.{name} {name} 10.0.0.1") for leaf, name in
             (("leaf10", "n2"), ("leaf9", "n10"), ("leaf9", "n9"))]  # fmt: skip
    assert [one.name for one in sorted(lines, key=lambda one: one.order)] == ["n9", "n10", "n2"]
    assert own_address("lo") == own_address("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(phalanx.UserError, match="has no address on ib7"):
        own_address("ib7")
    with pytest.raises(phalanx.SystemFailure, match="1 of 2 hosts answered: n1"):
        prepare_run(Run(path=tmp_path), ["module said hello", "x n1 10.0.0.1", "y n2 nonsense"], hosts=2, slots=1)
    run = Run(path=tmp_path)
    with pytest.raises(phalanx.SystemFailure, match="1 of 2 hosts answered: n1; n2: has no address on ib7"):
        prepare_run(run, ["! n2: has no address on ib7", "x n1 10.0.0.1"], hosts=2, slots=1)
    # What `phalanx why` answers with, and a run that is complete stays so.
    assert run.status()["message"] == "1 of 2 hosts answered: n1; n2: has no address on ib7"
    run.set_status("done")
    prepare_run(run, [], hosts=2, slots=1)
    assert run.status()["state"] == "done"


@pytest.mark.parametrize(
    ("signal", "wanted"),
    [("", ["prepare", "serve", "conclude"]), ("USR1", ["prepare", "serve", "conclude"]), ("TERM", ["prepare"])],
)
def test_signals_while_the_nodes_gather_are_not_lost(
    plan: phalanx.Plan, tmp_path: Path, signal: str, wanted: list[str]
) -> None:
    """The time limit asks for a checkpoint as soon as there is a run, a preemption sends the job back to the queue."""
    (tmp_path / "logs").mkdir()
    stand_ins = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; [ "$5" != describe ] || [ -z "$SIGNAL" ] ||'
        ' kill -s "$SIGNAL" "$PPID"; exec "$@"',
        "python": 'cd "$RUN_FOLDER"; [ "$4" = describe ] || echo "$4" >>called; [ "$4" != prepare ] || rm -f stop',
        "squeue": "echo RUNNING",
        "scontrol": 'echo "$@" >>"$RUN_FOLDER/asked"',
        "sleep": "true",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    asked = request_for(plan, run=str(tmp_path), python=str(tmp_path / "python"))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SIGNAL": signal, "RUN_FOLDER": str(tmp_path)}
    script = batch_script([asked], SlurmFacts())
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert (tmp_path / "called").read_text().split() == wanted, done.stderr
    assert (tmp_path / "stop").exists() == (signal == "USR1")
    assert (done.returncode, (tmp_path / "asked").exists()) == ((75, True) if signal == "TERM" else (0, False))


def test_only_who_was_interrupted_wants_to_go_on(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    run.set_launch(began_at_step=10)
    assert conclude_run(run)[0] == 3
    for state, stop, saved, code in (
        ("done", None, 0, 0),
        ("failed", None, 0, 2),
        ("stopped", None, 0, 75),  # preempted
        ("stopped", "", 20, 0),  # a person made the file
        ("stopped", "requeue\n", 20, 75),  # the time limit
        ("stopped", "requeue\n", 10, 3),  # which is too short for a single checkpoint
    ):
        run.set_status(state, exit_code=2)
        run.stop_file.unlink(missing_ok=True)
        if stop is not None:
            run.stop_file.write_text(stop)
        for folder in (tmp_path / "checkpoints").glob("*/manifest.json"):
            folder.unlink()
        if saved:
            (tmp_path / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "checkpoints" / f"step-{saved:08d}" / "manifest.json").touch()
        assert conclude_run(run)[0] == code, (state, stop, saved)


def test_a_run_that_lost_a_host_without_a_spare_goes_on_elsewhere(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    run.set_launch(began_at_step=10)
    run.set_status("failed", exit_code=3, message="rank 1 failed")
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000020" / "manifest.json").touch()
    for kind, recovery, began, code in (
        ("HostLost", "auto", 10, 75),
        ("HostLost", "auto", 20, 3),  # nothing new was saved: it may come to nothing again and again
        ("HostLost", "stop", 10, 3),
        ("ValueError", "auto", 10, 3),
    ):
        (tmp_path / "plan.json").write_text(json.dumps({"job": {"fault": {"recovery": recovery}}}))
        run.set_launch(began_at_step=began)
        incident = {"v": 1, "event": "incident", "t": 1.0, "rank": 1, "epoch": 1, "host": "n2", "cause": {"kind": kind}}
        run.supervisor.write_text(json.dumps(incident) + "\n")
        found, said = conclude_run(run)
        assert found == code, (kind, recovery, began)
        assert (said == "lost host n2, and has no spare for it: goes on from step 20 elsewhere") == (code == 75)
