"""A repository of configurations: what is looked at, what its project file says, what is known, and what CI sees."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

import phalanx
from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.job.json_schema import SHIPPED, job_json_schema, schema_text
from phalanx.rules.project import find_config, find_files, read_config

ROOT = Path(__file__).parents[2]
DEEPSPEED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,  # 1 × 2 × 128 = 256: not 512
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
JOB = (ROOT / "examples" / "llama-3-8b-64xH100.toml").read_text(encoding="utf-8")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files that can be judged among others, with a project file."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text(json.dumps(DEEPSPEED, indent=1), encoding="utf-8")
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    (tmp_path / "package.json").write_text('{"name": "x", "version": "1"}', encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.a]\nb = 1\n', encoding="utf-8")
    venv = tmp_path / "tools" / "py"
    venv.mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "ds.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    for name in ("events-00000.jsonl", "events-host-node-7.jsonl"):  # runs: of a rank's file, of a host's
        run = tmp_path / "runs" / name.removesuffix(".jsonl")
        run.mkdir(parents=True)
        (run / name).touch()
        (run / "ds.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    (tmp_path / ".phalanx.toml").write_text(
        '[check]\ncluster = "8xH100:16"\nselect = ["TOP", "BAT"]\n'
        '[[check.path]]\nmatch = "conf/*"\nset = ["model.preset=llama-3-8b", "data.sequence=8192"]\n',
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_searched_and_the_worst_file_decides(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "."]) == 1
    told = capsys.readouterr().out
    assert "conf/ds.json:2: E TOP005" in told
    assert re.search(r"^job\.toml +0 +0 +0 +\d+  ok$", told, re.MULTILINE)
    assert re.search(r"^conf/ds\.json +[1-9]\d* .*FAIL$", told, re.MULTILINE)
    assert "2 files judged of 4 looked at" in told
    found = find_files(repository, find_config(repository))
    assert [one.name for one in found.files] == ["job.toml", "ds.json"]


def test_pieces_of_scripts_and_notes_are_passed_over_and_many_files_are_told_in_brief(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of arguments that others source, and a log that names arguments, are no trainings."""
    piece = repository / "conf" / "model_args.sh"
    piece.write_text('ARGS="--num-layers 32 --hidden-size 4096 --micro-batch-size 1"\n', encoding="utf-8")
    (repository / "conf" / "again.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    (repository / "notes.txt").write_text("use (--num-layers 4 and --hidden-size 8\n", encoding="utf-8")
    assert main(["check", "."]) == 1
    told = capsys.readouterr()
    assert "model_args" not in told.out + told.err
    assert "notes.txt" not in told.out + told.err
    assert "cannot be judged: phalanx check conf/ds.json says why" in told.out
    assert "no counterpart in the job schema" not in told.out
    assert main(["check", "conf/ds.json"]) == 1
    assert "cannot be judged: phalanx check" not in capsys.readouterr().out
    assert main(["check", str(piece)]) == 2, "named by the caller"
    assert "no command that could be read and starts a training program" in capsys.readouterr().err


def test_known_findings_are_counted_and_new_ones_fail(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", ".", "--baseline", "known.json", "--write-baseline"]) == 0
    assert main(["check", ".", "--baseline", "known.json"]) == 0
    capsys.readouterr()
    ds = repository / "conf" / "ds.json"
    ds.write_text("\n\n" + json.dumps({**DEEPSPEED, "train_batch_size": 1024}, indent=2), encoding="utf-8")
    assert main(["check", ".", "--baseline", "known.json"]) == 0, "a moved line and another value are the same finding"
    ds.write_text(json.dumps({**DEEPSPEED, "fp16": {"enabled": True}}, indent=1), encoding="utf-8")
    assert main(["check", ".", "--baseline", "known.json"]) == 1
    found = phalanx.check_project(".", baseline="known.json")
    new = [one.outcome.what for report in found.reports for one in report.problems]
    assert new == ["fp16 and bf16 are both on: a trainer computes in one of them"]
    assert found.known >= 1
    with pytest.raises(UserError, match="is not a baseline"):
        phalanx.check_project(".", baseline="package.json")


def test_files_that_cannot_be_read_are_told_in_every_format(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "conf" / "ds.json").write_text('{\n "zero_optimization": {\n', encoding="utf-8")
    assert main(["check", ".", "--format", "github"]) == 2
    assert "::error file=conf/ds.json,line=3,title=phalanx check cannot read this::" in capsys.readouterr().out
    assert main(["check", "conf/ds.json", "--format", "sarif"]) == 2
    run = json.loads(capsys.readouterr().out)["runs"][0]
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert told["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "conf/ds.json"
    assert main(["check", "conf/ds.json", "--format", "junit"]) == 2
    assert ElementTree.fromstring(capsys.readouterr().out).find(".//error") is not None


def test_notes_about_a_trainer_are_in_no_result_of_a_scanner(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "conf/ds.json", "--select", "FLT,SEC,TOP", "--json"])
    report = json.loads(capsys.readouterr().out)
    habits = {one["rule"] for one in report["trainer_notes"]}
    assert {"FLT001", "SEC001"} <= habits
    assert not habits & {one["rule"] for one in report["findings"] if one["verdict"] == "fail"}
    main(["check", "conf/ds.json", "--select", "FLT,SEC,TOP", "--format", "sarif"])
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert {one["ruleId"] for one in results if one["kind"] == "fail"} == {"TOP005"}
    main(["check", "conf/ds.json", "--select", "FLT,SEC,TOP", "--format", "github"])
    assert "title=FLT001" not in capsys.readouterr().out


def test_rules_of_a_project_file_need_consent(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "acme.py").write_text(
        "from phalanx.rules.specification import failed, own_rule\n"
        '@own_rule("ACME001", "No job passes.")\n'
        "def none(evidence, limits):\n"
        '    return failed("no job passes", fix="none")\n',
        encoding="utf-8",
    )
    (repository / ".phalanx.toml").write_text('[check]\nrules = ["acme.py"]\n', encoding="utf-8")
    assert main(["check", "job.toml", "--select", "BAT"]) == 0
    assert "give --allow-code" in capsys.readouterr().err
    assert main(["check", "job.toml", "--select", "BAT,ACME", "--allow-code"]) == 1
    assert "ACME001" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[check]\nclutser = 1\n", r"\.phalanx\.toml:2: check\.clutser is an unknown key"),
        ("[check]\ncluster = 8\n", r"\.phalanx\.toml:2: check\.cluster is not a text"),
        ('cluster = "8xH100:4"\n', r"\.phalanx\.toml:1: cluster is an unknown key\n.*below a line \[check\]"),
        ("[[check.path]]\nskip = true\n", "says no match"),
        ('[[check.path]]\nmatch = "a"\nskip = 1\n', "is not true or false"),
    ],
)
def test_a_project_file_is_read_strictly(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / ".phalanx.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told):
        read_config(path)


def test_the_shipped_schema_is_current_and_fits_every_example() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == schema_text(), "phalanx schema --out src/phalanx/job/job.schema.json"
    schema = job_json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for path in sorted((ROOT / "examples").glob("*.toml")):
        table = json.loads(json.dumps(tomllib.loads(path.read_text(encoding="utf-8")), default=str))
        assert [one.message for one in validator.iter_errors(table)] == [], path
    wrong = {"name": "a", "checkpoint": {"intervall_s": 1}, "optim": {"lr": -1}, "parallel": {"schedule": "2f2b"}}
    assert len(list(validator.iter_errors(wrong))) == 3


def test_a_new_job_names_a_schema_that_is_there(tmp_path: Path) -> None:
    phalanx.init(tmp_path / "job.toml")
    first = (tmp_path / "job.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "#:schema ./job.schema.json"
    schema = json.loads((tmp_path / "job.schema.json").read_text(encoding="utf-8"))
    table = tomllib.loads((tmp_path / "job.toml").read_text(encoding="utf-8"))
    assert not list(jsonschema.Draft7Validator(schema).iter_errors(table))
    (tmp_path / "job.schema.json").write_text('{"title": "mine"}', encoding="utf-8")
    phalanx.init(tmp_path / "job.toml", force=True)
    assert json.loads((tmp_path / "job.schema.json").read_text(encoding="utf-8")) == {"title": "mine"}


def test_a_hook_hands_over_files_that_are_no_configuration(tmp_path: Path) -> None:
    """pre-commit names every changed file of a folder: those of nobody are left out, damaged ones are told."""
    for name, text in (("a.sh", "echo hello\n"), ("b.yaml", "a: 1\n"), ("c.py", "import os\n"), ("d.toml", "a = 1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    named = sorted(tmp_path.iterdir())
    assert phalanx.check_project(*named, skip_others=True).exit_code == 0
    assert phalanx.check_project(*named).exit_code == 2
    broken = tmp_path / "e.json"
    broken.write_text('{"zero_optimization": {"stage": 3},\n "train_batch_size": }', encoding="utf-8")
    assert phalanx.check_project(*named, broken, skip_others=True).exit_code == 2


def test_the_examples_of_the_ci_page_parse(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / ".phalanx.toml"
    path.write_text(project, encoding="utf-8")
    config = read_config(path)
    held = config.settings_for(tmp_path / "configs" / "deepspeed" / "a.json", foreign=True)
    assert (held.cluster, held.ignore) == ("8xA100:4", ("TEL", "CKP001"))
    assert config.settings_for(tmp_path / "third_party" / "b" / "c.json", foreign=True).skip
    assert config.settings_for(tmp_path / "job.toml", foreign=False).cluster == ""
    hook, action = (yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    shipped = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["repos"][0]["hooks"][0]["id"] == shipped[0]["id"]
    assert shipped[0]["entry"] == "phalanx check --skip-others"
    steps = action["jobs"]["check"]["steps"]
    assert any("--format sarif --out phalanx.sarif" in one.get("run", "") for one in steps)
    assert steps[-1]["with"]["sarif_file"] == "phalanx.sarif"
