"""`phalanx diff`: kinds told apart, exit codes like those of diff."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.cli.main import main

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diff")
    write_run(root, name="a", steps=20, ranks=2, hosts=1)
    write_run(root, name="b", steps=20, ranks=2, hosts=1, incidents=0)
    return root


def test_two_runs(root: Path, capsys: Output) -> None:
    assert main(["diff", str(root / "a"), str(root / "b")]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"A  run {root / 'a'}\nB  run {root / 'b'}\n\nRESULTS\n")
    assert re.search(r"^  incidents +1 +0 +-100\.0%$", told, re.MULTILINE)
    assert main(["diff", str(root / "a"), str(root / "a")]) == 0
    assert capsys.readouterr().out.endswith("\nno difference\n")


def test_json(root: Path, capsys: Output) -> None:
    assert main(["diff", str(root / "a"), str(root / "b"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["a"]["kind"], told["same"]) == ("run", False)
    assert {"section": "results", "key": "incidents", "a": 1, "b": 0, "change": -1.0} in told["differences"]


def test_a_job_and_the_plan_of_a_run(root: Path, capsys: Output) -> None:
    assert main(["diff", str(JOB), str(root / "a" / "plan.json")]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"A  job {JOB}\nB  plan {root / 'a' / 'plan.json'}\n\nSETTINGS\n")
    assert "LAYOUT" not in told
    assert main(["diff", str(JOB), str(JOB)]) == 0


def test_wrong_calls(root: Path, capsys: Output) -> None:
    assert main(["diff", str(root / "a"), str(root / "nothing")]) == 2
    assert "there is no such run, plan or job" in capsys.readouterr().err
    assert main(["diff", str(root / "a"), str(root / "a" / "status.json")]) == 2
    assert 'is no plan: it has no "schema"' in capsys.readouterr().err
    assert main(["diff", str(root / "a"), str(root / "a" / "events-00000.jsonl")]) == 2
    assert "is no plan: it is not a JSON object" in capsys.readouterr().err
    assert main(["diff", str(root), str(root / "a")]) == 2
    assert "is not a run" in capsys.readouterr().err
    assert main(["diff", str(JOB), str(JOB), "--within", "-1"]) == 2
    assert "--within -1.0 is not a share" in capsys.readouterr().err
