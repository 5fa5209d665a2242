"""From a path to evidence: what is found, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import shutil
from datetime import date
from pathlib import Path

import pytest
from spec.kit import JOB
from synthetic import write_run

from phalanx.errors import PhalanxError, UserError
from phalanx.job.dump import to_dict
from phalanx.job.load import load
from phalanx.plan.make import plan as make_plan
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.record.toml import to_toml
from phalanx.spec.api import base_of, check_plan
from phalanx.spec.gather import Request, gather

TODAY = date(2026, 11, 15)


@pytest.fixture
def job(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("plan") / "job.toml"
    path.write_text(JOB)
    return make_plan(load(path)).to_json()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    made = write_run(tmp_path_factory.mktemp("runs"), ranks=2, steps=20, incidents=0)
    made.job_toml.write_text(to_toml(to_dict(Plan.from_dict(made.plan()).job)))  # as phalanx train writes it
    return made


def gathered(target, **request):
    nowhere = {"HOME": "/dev/null"}  # neither drills nor kept plans of whoever runs the test
    return gather(str(target), Request(look=False, **request), today=TODAY, environ=nowhere)


def test_a_job_is_planned_and_every_key_has_its_line(job) -> None:
    found = gathered(job)
    assert "".join(letter for letter in "JPLHD" if found.has(letter)) == "JP"
    assert (found.devices, found.profile.name, found.scaling.name) == (128, "nvidia-h100", "S2")
    assert found.place("batch.micro") == (str(job), JOB.splitlines().index("micro = 1") + 1)


def test_a_job_that_cannot_be_planned_keeps_the_planners_reasons(job) -> None:
    found = gathered(job, overrides=("parallel.tensor=8", "parallel.data=128"))
    assert found.plan is None
    assert found.refusals
    assert found.scaling.name == "S2"


def test_cluster_profile_and_set_change_what_is_checked(job) -> None:
    found = gathered(job, cluster="8xA100:4", profile="custom", overrides=("checkpoint.keep=7",))
    assert (found.devices, found.profile.name, found.the_job.checkpoint.keep) == (32, "custom", 7)


def test_a_plan_is_checked_without_its_job_file(plan_text, tmp_path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(dict(sorted(json.loads(plan_text).items()))))  # as jq -S writes it
    found = gathered(path)
    assert (found.plan_file, found.job_file, found.devices) == (str(path), "", 128)


def test_a_plan_given_with_its_job_is_used_as_it_is(job, plan_text, tmp_path) -> None:
    path = tmp_path / "p.json"
    path.write_text(plan_text)
    found = gathered(job, plan=path)
    assert found.plan == Plan.from_json(plan_text)
    job.write_text(JOB.replace("global_sequences = 512", "global_sequences = 256"))
    with pytest.raises(UserError, match="is the plan of another job: batch differ"):
        gathered(job, plan=path)
    job.write_text(JOB + '\n[[waiver]]\nrule = "CKP001"\nreason = "later"\nexpires = 2027-01-01\n')
    assert gathered(job, plan=path).the_job.waiver


def test_a_run_gives_job_plan_and_log(run) -> None:
    found = gathered(run.path)
    assert found.has("J")
    assert found.has("P")
    assert found.has("L")
    assert found.job_file == str(run.job_toml)


def test_a_run_that_lost_everything_but_its_events_is_still_read(run, tmp_path) -> None:
    (tmp_path / "r").mkdir()
    shutil.copy(run.events(0), tmp_path / "r")
    found = gathered(tmp_path / "r")
    assert (found.job, found.plan, found.profile.name) == (None, None, "custom")
    assert found.has("L")


def test_without_its_events_a_run_is_gathered_once(run) -> None:
    assert base_of(run, request=Request(look=False), today=TODAY).log is None


@pytest.mark.parametrize(
    "extra", [{"overrides": ("a.b=1",)}, {"cluster": "8xH100:2"}, {"plan": Path("p")}, {"source": "megatron"}]
)
def test_what_is_settled_cannot_be_changed(run, extra) -> None:
    with pytest.raises(UserError, match="does not change a run"):
        gathered(run.path, **extra)


@pytest.mark.parametrize("name", ["missing.toml", "a\0b", "x" * 5000, "job.toml/inner"])
def test_what_is_not_there_is_said_so(job, name) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        gathered(job.parent / name)


@pytest.mark.parametrize(
    "content",
    [b"\0\1\2", b"\xff\xfe", b"[", b"{}", b'{"schema": "phalanx.plan/1"}', b"a" * 2_000_000, b"[" * 100_000, b""],
)
@pytest.mark.parametrize("ending", ["toml", "json"])
def test_files_that_are_no_jobs_get_a_clear_error(tmp_path, content, ending) -> None:
    path = tmp_path / f"x.{ending}"
    path.write_bytes(content)
    with pytest.raises(PhalanxError) as error:
        gathered(path)
    assert str(path) in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(PhalanxError):
        gathered(tmp_path / "x.json")


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        gathered(tmp_path)


def test_before_a_run_only_job_and_plan_are_asked(job) -> None:
    resolved = load(job)
    report = check_plan(resolved, make_plan(resolved), today=TODAY)
    asked = {one.rule.id: set(one.rule.requires) for one in report.findings}
    assert all(letters <= set("JP") for letters in asked.values())
    assert asked["CKP001"]


def test_whose_efficiency_predicts_a_step_does_not_say_who_trains(tmp_path: Path) -> None:
    """`parallel.framework` is a profile of speed; a job file is trained by Phalanx."""
    job = tmp_path / "job.toml"
    job.write_text(
        JOB.replace("[parallel]", '[parallel]\nframework = "torchtitan"'),
        encoding="utf-8",
    )
    found = gather(str(job), Request(cluster="8xH100:2", look=False), today=date(2026, 11, 15))
    assert found.practice.trainer == "phalanx"
