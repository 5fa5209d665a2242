"""Run folders: never overwritten, never outside their root, refused with a hint when they are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.errors import SystemFailure, UserError
from phalanx.record.run import Run, create_run, open_run


def make(root: Path, name: str = "first", **changes: object) -> Run:
    values: dict[str, object] = {"job_toml": "a = 1\n", "job": {"a": 1}, "plan_json": '{"x": 1}', "now_s": 0.0}
    return create_run(root, name, **(values | changes))  # type: ignore[arg-type]


def test_a_new_run(tmp_path: Path) -> None:
    run = make(tmp_path / "deep" / "runs")
    assert run.name == "first-19700101-000000"
    assert (run.job_toml.read_text(), run.plan()) == ("a = 1\n", {"x": 1})
    assert json.loads((run.path / "job.json").read_text()) == {"a": 1}
    assert run.status()["state"] == "created"
    assert (run.events(12).name, run.log(3).name) == ("events-00012.jsonl", "rank-00003.log")
    assert open_run(run.path) == run


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    names = [make(tmp_path).name for _ in range(3)]
    assert names == ["first-19700101-000000", "first-19700101-000000-2", "first-19700101-000000-3"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "-x", "a\0b", "a\nb", "x" * 101, "ä"])
def test_a_name_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path / "runs", name)
    assert "is not a name" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_root_that_cannot_hold_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFailure) as caught:
        make(tmp_path / "file" / "runs")
    assert "cannot be written: Not a directory\n  name a writable folder with --runs DIR" in str(caught.value)


def test_a_folder_that_is_no_run_names_those_that_are(tmp_path: Path) -> None:
    run = make(tmp_path / "runs")
    with pytest.raises(UserError) as caught:
        open_run(tmp_path / "runs")
    assert f"is not a run: it has no plan.json\n  name a run in it, such as {run.path}" in str(caught.value)
    with pytest.raises(UserError) as caught:
        open_run(tmp_path / "runs" / "first-19700101-00000")
    assert f"there is no such run\n  did you mean {run.path}?" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_damaged_files_are_the_runs_fault_not_a_traceback(tmp_path: Path, text: str) -> None:
    run = make(tmp_path)
    run.plan_json.write_text(text, encoding="latin-1")
    (run.path / "status.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        run.plan()
    assert "the run is damaged" in str(caught.value)
    assert run.status() == {}


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    run = make(tmp_path)
    for name in ("step-00000020", "step-00000100", ".tmp-step-00000200-a", "step-x", "step-7"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "manifest.json").touch()
    (run.checkpoints / "step-00000300").mkdir()
    assert run.saved_steps() == [20, 100]


def test_checkpoints_are_where_the_job_wants_them(tmp_path: Path) -> None:
    run = make(tmp_path, plan_json=json.dumps({"job": {"checkpoint": {"path": str(tmp_path / "elsewhere")}}}))
    assert run.checkpoints == tmp_path / "elsewhere"


def test_of_an_object_store_rank_0_tells_what_is_kept(tmp_path: Path) -> None:
    run = make(tmp_path, plan_json=json.dumps({"job": {"checkpoint": {"path": "s3://bucket/x", "keep": 2}}}))
    assert (run.checkpoints, run.saved_steps()) == (f"s3://bucket/x/{run.name}", [])
    commits = [{"t": 10.0 + step, "step": step, "path": "s3://…"} for step in (1, 2, 3)]
    damaged = [
        {"t": 5.0, "path": "x"},
        {"step": 7, "path": "x"},
        {"t": "x", "step": [8], "path": "x"},
        {"step": 9, "t": 1},
    ]
    lines = [json.dumps({"v": 1, "event": "checkpoint", **one}) for one in (*commits, *damaged)]
    run.events(0).write_text("\n".join([*lines, '{"event":"step","step":1}', '{"event":"checkpoint","st']))
    assert run.saved_steps() == [2, 3]
    assert (run.saved_at(3), run.saved_at(7)) == (13.0, 0.0)


def test_another_plan_keeps_the_one_before(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.replan(job_toml="b", job={}, plan_json='{"x": 1}')
    assert run.job_toml.read_text() == "a = 1\n", "the same plan changes nothing"
    run.replan(job_toml="b", job={}, plan_json='{"x": 2}')
    run.replan(job_toml="c", job={}, plan_json='{"x": 3}')
    assert [json.loads(path.read_text())["x"] for path in sorted(run.path.glob("plan*.json"))] == [1, 2, 3]
    assert run.job_toml.read_text() == "c"
