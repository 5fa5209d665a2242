"""Results: `print(result)` is what the command prints, `repr` is a line, notebooks get HTML and frames."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import write_run

import phalanx
from phalanx.api.jobs import job_as_file
from phalanx.cli.main import main
from phalanx.io import notebook

JOB = str(Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml")
FABRIC = "clos2:64x400G/2p/16"

CASES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "plan": (["plan", JOB, "--cluster", "8xH100:4"], lambda: phalanx.plan(JOB, "8xH100:4")),
    "check": (["check", JOB], lambda: phalanx.check(JOB)),
    "rules": (["rules", "--select", "CKP"], lambda: phalanx.rules("CKP")),
    "explain": (["explain", "CKP001"], lambda: phalanx.explain("CKP001")),
    "show": (["show", JOB], lambda: phalanx.show(JOB)),
    "load": (["show", JOB], lambda: phalanx.load(JOB)),
    "cluster": (["cluster", "8xH100:16"], lambda: phalanx.describe_cluster("8xH100:16")),
    "sim": (["sim", JOB, "--days", "30", "--runs", "2"], lambda: phalanx.simulate(JOB, days=30, runs=2)),
    "design": (["fabric", "design", "--gpus", "512"], lambda: phalanx.fabric.design(512)),
    "fabric": (["fabric", "show", FABRIC], lambda: phalanx.fabric.show(FABRIC)),
    "traffic": (["fabric", "simulate", FABRIC], lambda: phalanx.fabric.simulate(FABRIC)),
    "collective": (["fabric", "collective", "8xH100:2"], lambda: phalanx.fabric.collective("8xH100:2")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_prints_what_the_verb_prints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    arguments, call = CASES[name]
    main(arguments)
    printed, result = capsys.readouterr().out, call()
    assert _timeless(f"{result}\n") == _timeless(printed)
    assert repr(result).startswith("<")
    assert "\n" not in repr(result)
    assert "<" in result._repr_html_()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: phalanx.load(JOB), f"<ResolvedJob llama-3-8b: llama-3-8b, 1.00T tokens, from {JOB}>"),
        (lambda: phalanx.load(JOB).job, "<Job llama-3-8b: llama-3-8b, 1.00T tokens>"),
        (lambda: phalanx.cluster("8xH100:4"), "<Cluster 8xH100-80GB-SXM:4: 32 devices>"),
        (
            lambda: phalanx.check(JOB, select="TOP002").findings[0],
            "<Finding TOP002 pass: no tensor parallelism>",
        ),
        (lambda: phalanx.rules("CKP001").rules[0], "<Rule CKP001 interval-daly (error)>"),
        (lambda: phalanx.show(JOB), f"<JobTable of <ResolvedJob llama-3-8b: llama-3-8b, 1.00T tokens, from {JOB}>>"),
        (lambda: phalanx.diff(JOB, JOB), f"<RunComparison: {JOB} and {JOB}, no difference>"),
    ],
    ids=["load", "job", "cluster", "finding", "rule", "show", "diff"],
)
def test_a_value_is_a_line(make: Callable[[], Any], line: str) -> None:
    assert repr(make()) == line


def test_lists_and_parts_of_a_plan_are_a_line() -> None:
    plan = phalanx.plan(JOB, "8xH100:4")
    compared = phalanx.compare_plans([plan, phalanx.plan(JOB, "8xH100:8")], ["four", "eight"])
    for value, pattern in (
        (plan.layout, r"<Layout .*DP32 .*: 32 devices>"),
        (plan.prediction, r"<Prediction [\d.]+ s/step, .* tokens/s, [\d.]+ % MFU>"),
        (plan.memory, r"<MemoryReport .*B of .*B usable>"),
        (compared, r"<PlanComparison: four, eight>"),
        (phalanx.job_schema(), r"<JobSchema: \d\d keys>"),
        (phalanx.accelerators(), r"<AcceleratorList: \d+ accelerators>"),
        (phalanx.list_outside_drills(), r"<OutsideList: \d+ drills>"),
    ):
        assert re.fullmatch(pattern, repr(value)), repr(value)


def test_a_long_name_is_cut_and_stays_in_its_line() -> None:
    resolved = phalanx.load(JOB)
    model = dataclasses.replace(resolved.job.model, name="a\nb" * 100)
    named = dataclasses.replace(resolved.job, model=model)
    assert repr(named) == f"<Job llama-3-8b: {('a' + chr(92) + 'nb') * 10}…, 1.00T tokens>"
    found = phalanx.check(JOB, select="TOP002").findings[0]
    long = dataclasses.replace(found, outcome=dataclasses.replace(found.outcome, what="x\n" * 100))
    assert len(repr(long)) < 150
    assert "\n" not in repr(long)


def test_a_job_without_a_file_is_shown() -> None:
    bare = phalanx.load(JOB).job
    assert "llama-3-8b" in str(phalanx.show(bare))


def test_objects_are_taken_where_paths_are(tmp_path: Path) -> None:
    job, cluster = phalanx.load(JOB), phalanx.cluster("8xH100:4")
    plan = phalanx.plan(job, cluster)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert phalanx.diff(JOB, job).differences == phalanx.diff(job.job, job).differences == ()
    assert phalanx.diff(plan, tmp_path / "plan.json").differences == ()
    assert phalanx.diff(plan, phalanx.plan(job, "8xH100:8")).exit_code == 1
    for target in (JOB, job, job.job):
        for given in ({"plan": plan}, {"cluster": cluster}):
            report = phalanx.check(target, select="TOP", **given)  # type: ignore[arg-type]
            assert report.devices == 32
    other = phalanx.load(JOB, overrides={"optim.lr": 1e-3})
    with pytest.raises(phalanx.UserError, match="is the plan of another job: optim differ"):
        phalanx.check(other, plan=plan)
    with pytest.raises(phalanx.UserError, match="overrides need a job file"):
        phalanx.check(job, overrides={"optim.lr": 1e-3})
    with pytest.raises(phalanx.UserError, match="does not change a plan"):
        phalanx.check(plan, cluster=cluster)
    written = job_as_file(other, tmp_path / "runs")
    assert phalanx.diff(written, other).differences == (), "a drill of a job in memory is of that job"


def _timeless(page: str) -> list[str]:
    """Without the seconds that a search took."""
    return [line for line in page.splitlines() if "valid layouts" not in line and "layouts in" not in line]


def test_json_is_to_dict(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rules", "show", "cluster", "fabric", "collective"):
        arguments, call = CASES[name]
        assert main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(call().to_dict()))


def test_findings_of_a_plan_as_objects_text_and_frame() -> None:
    report = phalanx.check(phalanx.plan(JOB, "8xH100:4"), select="CKP")
    assert {one.rule.group for one in report.findings} <= {"CKP", "SPC"}
    assert str(report).splitlines()[-1]
    frame = report.frame()
    assert len(frame["rule"]) == len(report.findings)
    assert report._repr_html_().startswith('<div class="phalanx-check">')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> phalanx.Run:
    return write_run(folder, ranks=2, hosts=1, steps=30, incidents=0)


def test_a_run_is_its_report(run: phalanx.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run}\n"
    assert repr(run) == f"<Run: {run.path}, done>"
    assert "<svg" in run._repr_html_().replace("&lt;", "<")
    report = phalanx.report(run)
    assert report.summary.steps == 30
    assert report.to_html().startswith("<!DOCTYPE html>")
    assert str(report).startswith("# ")


def test_numbers_by_step_without_pandas(run: phalanx.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    columns = phalanx.run(run.path).frame("loss", "tokens_per_s")
    assert list(columns) == ["step", "loss", "tokens_per_s"]
    assert columns["step"].tolist() == list(range(30))
    assert isinstance(columns["loss"], np.ndarray)
    assert np.isfinite(columns["loss"]).all()
    assert run.frame("loss", first=10, last=12)["step"].tolist() == [10, 11, 12]
    assert set(run.frame()) >= {"step", "loss", "duration_s"}


def test_numbers_by_step_with_pandas(run: phalanx.Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = run.frame("loss")
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "step"
    assert len(frame) == 30


def test_a_series_nobody_recorded_is_named(run: phalanx.Run) -> None:
    with pytest.raises(phalanx.UserError, match="los"):
        run.frame("los")


def test_runs_of_a_folder(folder: Path, run: phalanx.Run) -> None:
    found = phalanx.runs(folder)
    assert [one.name for one in found] == [run.name]
    assert found[0] == run
    assert repr(found) == "<RunList: 1 run>"
    assert run.name in str(found)
    assert "\ninterrupted: " not in str(found)
    status = run.status()
    run.set_status("running")  # and no process holds it
    assert str(found).endswith(
        "\ninterrupted: its processes ended without an error message; phalanx train --resume RUN continues it"
    )
    run.set_status(status.pop("state"), **status)
    assert "<table>" in found._repr_html_()
    assert list(found.frame()["name"]) == [run.name]
    with pytest.raises(phalanx.UserError, match="there is no such folder"):
        phalanx.runs(folder / "none")


def test_a_run_is_watched_to_its_end(run: phalanx.Run) -> None:
    looks = list(phalanx.watch(run))
    assert looks[-1].is_last
    assert looks[-1].check.is_last
    assert looks[-1].to_dict()["state"] == "done"


def test_a_column_keeps_its_kind() -> None:
    made = notebook._dtype
    assert (made([1, 2]), made([1.0, None]), made(["a"]), made([True])) == ("int64", float, object, bool)


def test_progress_goes_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.api.results import teller

    said: list[str] = []
    teller(said.append)("a")
    teller(False)("b")
    teller(True)("c\x1b")
    assert said == ["a"]
    assert capsys.readouterr().err == "c\\x1b\n"
    assert sys.stdout is not None
