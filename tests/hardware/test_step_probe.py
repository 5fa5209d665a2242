"""The measurement before the first local plan: when it is made, what is kept, and that nothing is left behind."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from phalanx.cli.main import main
from phalanx.hardware import machine_load, step_probe
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.cpu_steps import CpuStep
from phalanx.hardware.discover import discover
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values, json_text
from phalanx.job.load import load
from phalanx.plan.make import make_plan, plan_here
from phalanx.plan.plan import Plan

STEP = CpuStep(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, gated=1, vocab=512, seq=256, tokens=512, count=4,
    parameters=8.5e5,
)  # fmt: skip
FIRST_RUN = Path(__file__).parents[2] / "examples" / "first-run.toml"
pytestmark = pytest.mark.skipif(bool(discover().gpus), reason="measures the cores of a machine without GPUs")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An environment whose worker is a file of our own; returns (environment, what was told, write the worker)."""
    pytest.importorskip("torch")
    monkeypatch.setattr(step_probe, "WORKER", "stand_in_worker")
    monkeypatch.setattr(step_probe, "_share_of_others", lambda: 0.0)  # whatever else this machine does now
    environ = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "PYTHONPATH": str(tmp_path), "PHALANX_PROBE": "1"}

    def write(text: str) -> None:
        (tmp_path / "stand_in_worker.py").write_text(text, encoding="utf-8")

    write(f"print({json.dumps(json.dumps({'step': asdict(STEP), 'seconds': 0.5}))})")
    return environ, [], write


def measure(target: str, environ: dict[str, str], told: list[str]) -> list[str]:
    told.clear()
    step_probe.measure_first(target, environ=environ, tell=told.append)
    return told


def test_it_is_measured_once_and_kept(worker) -> None:
    environ, told, _ = worker
    assert any("measuring this machine's" in line for line in measure("local-cpu:2", environ, told))
    assert step_probe.read_steps(discover(), environ).seconds == (0.5,)
    assert measure("local-cpu:4", environ, told) == []
    # Another version of torch or Phalanx, or a damaged file: measured again.
    path = step_probe.steps_path(discover(), environ)
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    assert measure("local", environ, told)
    path.write_text("{")
    assert measure("local", environ, told)


def test_a_missing_file_is_said_before_anything_is_measured(worker, tmp_path, monkeypatch, capsys) -> None:
    """Measuring takes 20 s: `train` refuses without it, `plan` warns first."""
    environ, _, _ = worker
    for name in ("XDG_DATA_HOME", "PYTHONPATH", "PHALANX_PROBE"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.chdir(tmp_path)
    assert main(["init", "job.toml"]) == 0
    for more in (["--set", "data.path=nowhere"], ["--set", "train.weights=nowhere"], ["--runs", "job.toml"]):
        capsys.readouterr()
        assert main(["train", "job.toml", "--dry-run", *more]) == 2
        assert "measuring this machine" not in capsys.readouterr().err, more
    assert main(["plan", "job.toml", "--set", "data.path=nowhere"]) == 0
    said = capsys.readouterr().err
    assert said.index("nowhere") < said.index("measuring this machine")


def test_named_clusters_and_those_who_say_no_are_not_measured(worker) -> None:
    environ, told, write = worker
    write("raise SystemExit('must not run')")
    assert measure("8xH100:2", environ, told) == []
    assert measure("clusters/mine.toml", environ, told) == []
    assert measure("local-cpu:2", {**environ, "PHALANX_PROBE": "0"}, told) == []


def test_what_was_measured_beside_busy_neighbours_is_measured_again(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, told, _ = worker
    monkeypatch.setattr(step_probe, "busy_processes", lambda cores: 8.0)
    monkeypatch.setattr(step_probe, "_share_of_others", lambda: 0.8)
    assert "busy (others take 80% of its cores)" in measure("local", environ, told)[0]
    assert measure("local", environ, told) == []
    monkeypatch.setattr(step_probe, "_share_of_others", lambda: 0.0)
    monkeypatch.setattr(step_probe, "busy_processes", lambda cores: 0.5)
    assert "measuring this machine" in measure("local", environ, told)[0]
    assert measure("local", environ, told) == []


def test_so_is_what_others_took_the_cores_of(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load average of the last minute does not know of neighbours that have just begun, or just ended."""
    environ, told, _ = worker
    monkeypatch.setattr(step_probe, "busy_processes", lambda cores: 0.1)
    for share, measured in ((0.6, True), (0.5, False), (0.2, True), (0.05, True), (0.0, False)):
        monkeypatch.setattr(step_probe, "_share_of_others", lambda share=share: share)
        assert bool(measure("local", environ, told)) is measured, share


def test_the_share_of_others_is_read_off_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 100.0 + step_probe.LOOK_S])  # one core was busy all the time, or a little less of more time
    monkeypatch.setattr(step_probe, "_busy_seconds", lambda: next(seconds))
    assert 0.0 < step_probe._share_of_others() <= 1.0 / (os.cpu_count() or 1)
    monkeypatch.undo()
    assert step_probe._busy_seconds() >= 0.0


def test_a_measurement_that_fails_is_told_and_leaves_nothing(worker, tmp_path: Path) -> None:
    environ, told, write = worker
    for text in ("raise SystemExit(3)", "print('no JSON', flush=True); import time; time.sleep(600)"):
        write(f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{text}")
        assert "not measured: " in measure("local", environ, told)[-1]
        assert step_probe.read_steps(discover(), environ) is None
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_busy_machine_has_longer(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, told, _ = worker
    monkeypatch.setattr(step_probe, "LIMIT_S", 1e-3)
    monkeypatch.setattr(step_probe, "_is_quieter", lambda known, busy: True)
    monkeypatch.setattr(machine_load, "busy_processes", lambda cores: 0.0)
    assert "not measured: TimeoutExpired" in measure("local", environ, told)[-1]
    monkeypatch.setattr(machine_load, "busy_processes", lambda cores: 1e6)
    assert measure("local", environ, told)[-1].startswith("measured in ")


def test_ctrl_c_ends_the_worker(worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, told, write = worker
    remember = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    write(f"{remember}; print('{{}}', flush=True); time.sleep(600)")

    def interrupted(one):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_probe, "_read_sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure("local", environ, told)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_plan_uses_what_was_measured(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, told, _ = worker
    measure("local", environ, told)
    cluster = resolve_cluster("local-cpu:4", environ=environ)
    assert cluster.cpu is not None
    assert cluster.cpu.cores == discover().usable_cores
    assert "steps measured on 20" in cluster.source
    assert from_json_values(Cluster, json.loads(json_text(cluster))) == cluster
    made = make_plan(load(FIRST_RUN), cluster)
    assert Plan.from_json(made.to_json()).cluster == cluster
    other = make_plan(
        load(FIRST_RUN), resolve_cluster("local-cpu:4", environ={**environ, "XDG_DATA_HOME": "/nonexistent"})
    )
    assert other.cluster.cpu is None
    assert made.prediction.step_s != other.prediction.step_s
    assert made.prediction.step_s_low < made.prediction.step_s < made.prediction.step_s_high
    assert sum(made.prediction.breakdown_s.values()) == pytest.approx(made.prediction.step_s)


def test_the_fit_is_kept_and_made_again_when_it_no_longer_belongs_to_the_measurement(worker, monkeypatch) -> None:
    environ, told, _ = worker
    measure("local", environ, told)
    fits, fit = [], step_probe.fit_rates
    monkeypatch.setattr(step_probe, "fit_rates", lambda *given, **more: fits.append(given) or fit(*given, **more))

    def rates():
        return step_probe.measured_rates(discover(), environ)[0]

    first = rates()
    assert rates() == first  # to the last bit
    assert len(fits) == 1
    steps = step_probe.steps_path(discover(), environ)
    kept = steps.with_name(steps.name.replace(".steps.", ".rates."))
    for damaged in ("{", "[]", kept.read_text().replace('"cores"', '"cars"')):
        kept.write_text(damaged)
        assert rates() == first
    assert len(fits) == 4
    steps.write_text(steps.read_text().replace('"seconds": 0.5', '"seconds": 0.7'))
    second = rates()
    assert second != first
    assert rates() == second
    assert len(fits) == 5


def test_the_chosen_layout_is_timed_once_and_the_prediction_passes_through_it(worker) -> None:
    """The worker says how long the plan's own step took; another layout that then looks better is timed as well."""
    environ, told, write = worker
    write(
        f"import sys, json\n"
        f"sample = json.loads({json.dumps(json.dumps({'step': asdict(STEP), 'seconds': 0.5}))})\n"
        f"if sys.argv[1] == '--plan':\n"
        f"    layout = json.load(sys.stdin)['layout']\n"
        f"    sample = {{'seconds': 0.9 * int(sys.argv[2]) / layout['accumulation']}}\n"
        f"print(json.dumps(sample))"
    )

    def make() -> Plan:
        return make_plan(load(FIRST_RUN), resolve_cluster("local-cpu:4", environ=environ))

    made = plan_here(make, "local-cpu:4", environ=environ, tell=told.append)
    assert [line for line in told if line.startswith("timing ")] == [
        f"timing {made.layout.name} on this machine for a few seconds, once (--no-probe plans without)"
    ]
    (timed,) = step_probe.read_steps(discover(), environ).timed
    assert (timed.step.pp, timed.step.hidden) == (2, 128)
    assert made.prediction.step_s == pytest.approx(0.9, rel=0.04)
    told.clear()
    assert plan_here(make, "local-cpu:4", environ=environ, tell=told.append) == replace(made, search=ANY)
    assert told == []
    # A worker that fails is told, and the plan stands.
    write("raise SystemExit(3)")
    other = ["model.hidden=64", "model.head_dim=16"]
    cluster = "local-cpu:4"
    small = plan_here(
        lambda: make_plan(load(FIRST_RUN, overrides=other), resolve_cluster(cluster, environ=environ)),
        cluster, environ=environ, tell=told.append,
    )  # fmt: skip
    assert told[-1].startswith("not timed: ValueError: ")
    assert small.prediction.step_s > 0


def test_the_worker_times_a_plan_with_fewer_micro_batches() -> None:
    """The real worker, two ranks: what the planner's process reads."""
    pytest.importorskip("torch")
    sets = ["parallel.pipeline=1", "parallel.shard=2", "model.hidden=32", "model.heads=2", "model.head_dim=16"]
    sets += ["model.ffn=64", "data.sequence=32", "batch.global_tokens=1024"]
    made = make_plan(load(FIRST_RUN, overrides=sets), resolve_cluster("local-cpu:2"))
    assert made.layout.accumulation > 2
    (found,) = step_probe._run_worker(["--plan", "2", "2"], step_probe._read_seconds, os.environ, made.to_json())
    assert found["seconds"] > 0
