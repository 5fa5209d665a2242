"""`phalanx drill`: what is refused before anything starts, and real drills from the command to the signed record."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_dataset import write_dataset

from phalanx.api.drill_records import keep_record
from phalanx.api.drills import DrillCall, _shrink_faults
from phalanx.cli.main import main
from phalanx.cli.output import note
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.record.run import Run
from phalanx.rules.gather import Request, gather_evidence
from phalanx.train.drill import perform
from phalanx.train.drill.faults import parse_faults

JOB = """\
name = "drilled"
[model]
layers = 1
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 320
[data]
path = "data"
sequence = 32
tokens = 20480
[batch]
global_tokens = 512
micro = 4
[precision]
compute = "fp32"
[parallel]
tensor = 1
context = 1
pipeline = 1
shard = 4
zero = 3
[train]
timeout_s = 60
samples = 0
[checkpoint]
interval_s = 1
[fault]
dead_after_s = 3
[cluster]
spec = "local-cpu:4"
"""
Drill = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drill")
    write_dataset(folder)
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture
def drill(folder: Path, tmp_path: Path) -> Drill:
    """The command in a process of its own; its exit code and what it printed."""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    environ["XDG_DATA_HOME"] = str(tmp_path / "data")

    def run(*words: str, limit_s: float = 600.0) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "phalanx", "drill", *words, "--json"]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit_s)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "phalanx drill: no job file is named\n"
            "  phalanx drill examples/drill.toml, or phalanx drill --read-record RECORD\n",
        ),
        (
            ["job.toml", "--read-record", "x"],
            "phalanx drill: JOB and --read-record exclude each other\n"
            "  phalanx drill examples/drill.toml, or phalanx drill --read-record RECORD\n",
        ),
        (
            ["job.toml", "--chaos", "--fault", "kill"],
            "phalanx drill: --chaos and --fault exclude each other\n  give one of them\n",
        ),
        (
            ["job.toml", "--chaos"],
            "phalanx drill: --chaos has no end\n  faults are drawn for so many minutes\n  add --minutes 2\n",
        ),
        (
            ["job.toml", "--rate", "7", "--seed", "0", "--fault", "kill"],
            "phalanx drill: --rate and --seed apply to random faults (--chaos) only\n"
            "  --fault names faults one by one\n"
            "  add --chaos --minutes 2, or leave it out\n",
        ),
        (
            ["--read-record", "x", "--fault", "kill", "--minutes", "2"],
            "phalanx drill: --fault and --minutes with --read-record\n  --read-record runs nothing\n  leave it out\n",
        ),
        (
            ["--read-record", "nofile"],
            "nofile: there is no such file\n  name the drill-record.json of a run that phalanx drill made\n",
        ),
        (
            ["job.toml", "--hosts", "0"],
            "phalanx drill: --hosts 0 is not between 1 and 64\n  use --hosts 1\n",
        ),
        (
            ["job.toml", "--suite", "--fault", "kill", "--hosts", "2"],
            "phalanx drill: --fault and --hosts with --suite\n"
            "  the suite chooses its own faults and times\n"
            "  leave it out; --cluster, --set and --runs go with it\n",
        ),
        (
            ["job.toml", "--suite", "--cluster", "local-cpu:1", "--set", "parallel.shard=1"],
            "job.toml: has one rank\n"
            "  a drill asks what the others do when one is lost\n"
            "  --cluster local-cpu:4 drills it on four ranks of this machine\n",
        ),
        (
            ["job.toml", "--fault", "kil"],
            "--fault kil: 'kil' is not a fault that can be injected\n  did you mean kill?\n",
        ),
        (
            ["job.toml", "--fault", "host"],
            "--fault host: hits a host, and there is only one\n"
            "  with its only host a run is gone, and so is its proof\n"
            "  add --hosts 2\n",
        ),
        (
            ["job.toml", "--fault", "kill:rank=9,step=4"],
            "--fault kill:rank=9,step=4: there is no rank 9: the job has 4 ranks\n  use rank=0 to rank=3\n",
        ),
        (
            ["job.toml", "--hosts", "2", "--fault", "host:host=2"],
            "--fault host:host=2: there is no host 2: the drill has 2 hosts\n"
            "  use host=0 to host=1, or add --hosts 3\n",
        ),
    ],
)
def test_wrong_calls(
    words: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["drill", *words]) == 2
    assert capsys.readouterr().err == said
    assert not (folder / "runs").exists()


def test_a_failing_schedule_is_made_small_and_printed_as_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 40 faults two are guilty together; each attempt lasts as long as its own faults, not the whole drill."""
    faults = [
        dataclasses.replace(fault, at_s=float(fault.id)) for fault in parse_faults(["kill"] * 38 + ["hang", "nan"])
    ]
    lengths: list[float] = []

    def fake(scene: Any, some: Any) -> Any:
        lengths.append(scene.minutes)
        return SimpleNamespace(broken={"hang", "nan"} <= {fault.kind for fault in some})

    monkeypatch.setattr(perform, "perform_drill", fake)
    scene = perform.DrillSettings(plan=None, runs=Path(), hosts=1, spares=0, environ={}, minutes=30.0)  # type: ignore[arg-type]
    call = DrillCall(job="job.toml", spares=2, tell=note)
    _shrink_faults(call, scene, faults, SimpleNamespace(numbers=SimpleNamespace(wall_s=60.0)))  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "looking for the smallest schedule that fails, for up to 120 s",
        "2 of 40 faults are enough:",
        "  phalanx drill job.toml --hosts 1 --spares 2 --minutes 0.9 --fault hang:at_s=38 --fault nan:at_s=39",
    ]
    assert max(lengths) < 1.0


def test_a_store_that_cannot_be_written_loses_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    result = SimpleNamespace(run=Run(path=tmp_path), ok=True, state="done", outcomes=(), verdicts=(), numbers=None)
    call = DrillCall(job="job.toml", tell=note)
    path = keep_record(call, (), result, make_plan(load(job), resolve_cluster("local-cpu:4")), part="x")  # type: ignore[arg-type]
    assert json.loads(path.read_text())["part"] == "x"
    assert "cannot be written: " in capsys.readouterr().err


def failed(result: dict[str, Any]) -> list[str]:
    return [f"{one['name']}: {one['evidence']}" for one in result["verdicts"] if not one["ok"]]


@pytest.mark.slow
def test_kills_hangs_and_poison_leave_no_trace_in_the_bits(drill: Drill, folder: Path, tmp_path: Path) -> None:
    """At init, in a step, in a collective, in a save, two at once, during recovery; a hang; NaN; then the replay."""
    faults = (
        "kill:rank=3,point=init",
        "kill:rank=1+2,step=4",
        "kill:rank=0,point=restore",
        "nan:rank=2,step=9",
        "hang:rank=1,step=12",
        "kill:rank=0,point=save-manifest,step=16",
        "raise:rank=2,step=24",
        "kill:rank=3,point=collective,step=30",
    )
    words = [word for text in faults for word in ("--fault", text)]
    copy = tmp_path / "copy.json"
    code, told = drill("job.toml", *words, "--spares", "1", "--runs", str(tmp_path / "runs"), "--out", str(copy))
    result = told["result"]
    assert (code, failed(result)) == (0, [])
    assert {one["kind"] for one in result["outcomes"]} == {"kill", "nan", "hang", "raise"}
    assert len(result["outcomes"]) == 9
    recovered = [one for one in result["outcomes"] if one["kind"] != "nan"]
    assert all(one["recovered_s"] > 0 and one["steps_lost"] == 0 for one in recovered)
    assert result["numbers"]["steps"] == 40

    record = Path(told["record"])
    assert json.loads(copy.read_text()) == json.loads(record.read_text())
    assert drill("--read-record", str(record))[0] == 0
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}
    request = Request(drills=(record.parent,), look=False)
    facts = gather_evidence(str(folder / "job.toml"), request, today=date(2026, 11, 16), environ=environ).drills
    assert [Path(one.path).name.startswith("cpu-gloo-other-drilled-") for one in facts] == [True, False], (
        "a copy, newer"
    )
    assert all(one.signed and one.clean and one.bitwise and one.profile == "cpu-gloo" for one in facts)
    assert [(one.job, one.other) for one in facts] == [("drilled", "")] * 2
    another = Request(drills=(record.parent,), look=False, overrides=("name=another",))
    elsewhere = gather_evidence(str(folder / "job.toml"), another, today=date(2026, 11, 16), environ=environ).drills
    assert {one.other for one in elsewhere} == {"job drilled, not another"}
    assert {"kill", "save-kill", "hang"} <= set(facts[0].fired)
    with (record.parent / "events-00000.jsonl").open("a") as file:
        file.write('{"event":"step"}\n')
    code, told = drill("--read-record", str(record))
    assert (code, told["wrong"]) == (1, ["events-00000.jsonl has changed"])


@pytest.mark.slow
def test_a_fault_that_the_end_of_the_run_hid_is_not_judged(drill: Drill, tmp_path: Path) -> None:
    """A rank stops saying that it lives two steps before the end: nobody has to notice it for 10 min."""
    words = ("--steps", "6", "--fault", "mute:rank=1,step=4", "--no-replay", "--runs", str(tmp_path / "runs"))
    code, told = drill("job.toml", *words, "--set", "fault.dead_after_s=600")
    open_verdicts = [one for one in told["result"]["verdicts"] if not one["judged"]]
    assert (code, [one["name"] for one in open_verdicts]) == (1, ["every fault was noticed"])
    assert [one["judged"] for one in told["result"]["outcomes"]] == [False]
    assert not (tmp_path / "data" / "phalanx" / "drills").exists(), "what was not judged is kept as no proof"


@pytest.mark.slow
def test_a_job_that_shrinks_computes_what_its_replay_computes(drill: Drill, tmp_path: Path) -> None:
    code, told = drill(
        "job.toml", "--set", "fault.recovery=shrink", "--runs", str(tmp_path / "runs"), "--steps", "16",
        "--fault", "kill:rank=0,step=4", "--fault", "kill:rank=1,step=9,point=collective",
    )  # fmt: skip
    result = told["result"]
    assert (code, failed(result)) == (0, [])
    assert [one["world"] for one in result["outcomes"]] == [3, 2]


@pytest.mark.slow
def test_a_replica_that_is_left_out_computes_what_its_replay_computes(drill: Drill, tmp_path: Path) -> None:
    """Three replicas, one of them out for some steps: two numbers have one sum, so every bit is compared."""
    replicas = {
        "batch.global_tokens": "384",
        "cluster.spec": '"local-cpu:3"',
        "parallel.shard": "1",
        "parallel.zero": "0",
        "fault.on_loss": '"leave-out"',
    }
    settings = [word for key, value in replicas.items() for word in ("--set", f"{key}={value}")]
    code, told = drill(
        "job.toml", *settings, "--runs", str(tmp_path / "runs"), "--steps", "30", "--fault", "kill:rank=2,step=4",
    )  # fmt: skip
    result = told["result"]
    assert (code, failed(result)) == (0, [])
    [outcome] = result["outcomes"]
    assert (outcome["rank"], outcome["source"], outcome["world"]) == (2, "left out", 2)
    [replay] = [one for one in result["verdicts"] if one["name"] == "equal to a fault-free replay"]
    assert "digests compared" in replay["evidence"]


@pytest.mark.slow
def test_a_lost_host_with_the_coordinator_on_it(drill: Drill, tmp_path: Path) -> None:
    code, told = drill(
        "job.toml", "--hosts", "2", "--fault", "host:host=0,step=5", "--steps", "16", "--runs", str(tmp_path / "runs"),
        "--set", "fault.dead_after_s=8",  # a busy machine lets a sound host be silent for three
    )  # fmt: skip
    result = told["result"]
    assert (code, failed(result)) == (0, [])
    [outcome] = result["outcomes"]
    assert (outcome["source"], outcome["steps_lost"]) == ("memory", 0)


@pytest.mark.slow
def test_a_crash_loop_ends_with_a_reason(drill: Drill, tmp_path: Path) -> None:
    code, told = drill("job.toml", "--no-replay", "--fault", "crash-loop", "--runs", str(tmp_path / "runs"))
    assert (code, failed(told["result"])) == (0, [])
    assert told["result"]["state"] == "failed"
    assert "given up: " in told["result"]["message"]
    # fault.restarts = 3 without a step between, and one more; then the same without its slot, unless a busy
    # machine lets a rank of another slot fail between them, so that no single slot is to blame.
    assert len(told["result"]["outcomes"]) >= 4


@pytest.mark.slow
def test_chaos_for_fifteen_seconds(drill: Drill, tmp_path: Path) -> None:
    code, told = drill(
        "job.toml", "--chaos", "--rate", "24", "--minutes", "0.25", "--seed", "1", "--spares", "1", "--no-shrink",
        "--runs", str(tmp_path / "runs"), limit_s=600,
    )  # fmt: skip
    assert (code, failed(told["result"])) == (0, [])
    assert len(told["result"]["outcomes"]) > 2


@pytest.mark.nightly
@pytest.mark.slow
def test_the_suite(drill: Drill, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "nightly" not in str(request.config.getoption("markexpr")):
        pytest.skip("takes a minute: pytest -m nightly")
    code, told = drill("job.toml", "--suite", "--runs", str(tmp_path / "runs"), limit_s=600)
    assert (code, [failed(part["result"]) for part in told["parts"]]) == (0, [[], []])


@pytest.mark.nightly
@pytest.mark.slow
def test_two_hundred_faults_in_half_an_hour(drill: Drill, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "nightly" not in str(request.config.getoption("markexpr")):
        pytest.skip("takes an hour: pytest -m nightly")
    code, told = drill(
        "job.toml", "--chaos", "--rate", "7", "--minutes", "30", "--seed", "1", "--hosts", "2", "--spares", "1",
        "--no-shrink", "--runs", str(tmp_path / "runs"), limit_s=6000,
    )  # fmt: skip
    assert (code, failed(told["result"])) == (0, [])
    assert len(told["result"]["outcomes"]) >= 180
