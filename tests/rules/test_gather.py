"""From a path to evidence: what is found, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import shutil
from datetime import date
from pathlib import Path

import pytest
from rules.kit import JOB
from synthetic import write_run

from phalanx.errors import PhalanxError, UserError
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict, load
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.rules.gather import Request, gather_evidence
from phalanx.rules.specification import base_of, check_plan

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
    made.job_toml.write_text(to_toml(job_to_dict(Plan.from_dict(made.plan()).job)))  # as phalanx train writes it
    return made


def gathered(target, **request):
    nowhere = {"HOME": "/dev/null"}  # neither drills nor kept plans of whoever runs the test
    return gather_evidence(str(target), Request(look=False, **request), today=TODAY, environ=nowhere)


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


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("prediction.step_s", float("nan"), "prediction.step_s is not a number"),
        ("prediction.step_s", -1.0, "prediction.step_s is -1"),
        ("prediction.step_s", 1.0, "prediction.tokens_per_s × step_s"),
        ("memory.total_bytes", 1e12, "parts of the memory add up to"),
        ("memory.usable_bytes", 0.0, "memory.usable_bytes is 0"),
        ("reliability.effective_time", 5, "a share is between 0 and 1"),
        ("reliability.effective_time", 0.5, "its own parts give"),
        ("reliability.interval_s", 1e308, "and the optimum"),
        ("reliability.mtbf_s", 0, "reliability.mtbf_s is 0 s"),
        ("job.checkpoint.interval_s", 99999, "job.checkpoint.interval_s 1e\\+05 s"),
        ("layout.tensor", 2, "= 256 devices, and the cluster has 128"),
        ("layout.data", 8, "8 devices on 1 host, "),
        ("layout.pipeline", 0, "layout.pipeline is 0"),
        ("duration.wall_s", 1.0, "shorter than its training_s"),
    ],
)
def test_a_plan_whose_parts_contradict_each_other_is_refused(plan_text, tmp_path, key, value, told) -> None:
    document = json.loads(plan_text)
    *sections, name = key.split(".")
    part = document
    for section in sections:
        part = part[section]
    part[name] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"is not consistent: .*{told}"):
        gathered(path)


@pytest.mark.parametrize(("name", "letter"), [("plan.json", "P"), ("job.toml", "J")])
def test_a_damaged_file_of_a_run_is_named_and_a_missing_one_is_not(run, tmp_path, name, letter) -> None:
    path = tmp_path / "r"
    shutil.copytree(run.path, path)
    (path / name).write_text("= = =")
    assert gathered(path).damaged[letter].where.startswith(name)
    (path / name).unlink()
    assert not gathered(path).damaged


def test_an_unplannable_job_has_the_devices_of_its_cluster(job) -> None:
    found = gathered(job, overrides=("parallel.tensor=8", "parallel.data=128"))
    assert (found.plan, found.devices, found.scaling.name) == (None, 128, "S2")


WAIVERS = """\
[[waiver]]
rule = "CKP001"
reason = "later"
expires = 2027-01-01

[[waiver]]
rule = "CKP999"
reason = "a rule that is none"
expires = 2027-01-01
"""


def test_waivers_from_a_file_are_for_any_target(job, plan_text, tmp_path) -> None:
    (tmp_path / "p.json").write_text(plan_text)
    (tmp_path / "w.toml").write_text(WAIVERS)
    for target in (job, tmp_path / "p.json"):
        found = gathered(target, waivers=tmp_path / "w.toml")
        assert [one.rule for one in found.all_waivers] == ["CKP001", "CKP999"]
        assert found.place("waiver.1.rule") == (str(tmp_path / "w.toml"), 7)
    job.write_text(JOB + '\n[[waiver]]\nrule = "TOP003"\nreason = "own"\nexpires = 2027-01-01\n')
    found = gathered(job, waivers=tmp_path / "w.toml")
    assert [one.rule for one in found.all_waivers] == ["TOP003", "CKP001", "CKP999"]
    assert found.place("waiver.2.rule") == (str(tmp_path / "w.toml"), 7)
    assert found.place("waiver.0.rule")[0] == str(job)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = 1\n", "has no key"),
        ("waiver = 3\n", "not a list of tables"),
        ('[[waiver]]\nrule = "x"\n', "x"),
        ("[", "is not TOML"),
    ],
)
def test_a_file_of_waivers_holds_nothing_else(job, tmp_path, text, told) -> None:
    (tmp_path / "w.toml").write_text(text)
    with pytest.raises(UserError, match=told) as error:
        gathered(job, waivers=tmp_path / "w.toml")
    assert "w.toml" in str(error.value)


def test_a_default_of_another_trainers_file_has_no_line(tmp_path) -> None:
    path = tmp_path / "tt.toml"
    path.write_text(TORCHTITAN)
    found = gathered(path, cluster="8xH100:2")
    assert found.practice.trainer == "torchtitan"
    assert [one.why for one in found.unmapped if "waiver" in one.key] == [
        "is not read here: give it with --waivers FILE"
    ]
    assert found.place("comm.init_timeout_s")[1] == 1 + TORCHTITAN.splitlines().index("init_timeout_seconds = 900")
    assert found.place("comm.bucket_mib") == (str(path), 0)


TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
[comm]
init_timeout_seconds = 900
[[waiver]]  # of no meaning to torchtitan, and no sign of a job file
rule = "CKP001"
"""


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
    with pytest.raises(UserError, match=r"there is no such file or folder|is not a possible path"):
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
    found = gather_evidence(str(job), Request(cluster="8xH100:2", look=False), today=date(2026, 11, 15))
    assert found.practice.trainer == "phalanx"
