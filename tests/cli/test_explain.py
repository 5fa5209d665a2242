"""`phalanx explain`: the page of a rule, and the same with a job's numbers."""

from __future__ import annotations

import json

from rules.kit import JOB

from phalanx.cli.main import main
from phalanx.rules.rule_page import SECTIONS


def test_the_page(capsys) -> None:
    assert main(["explain", "CKP001"]) == 0
    by_id = capsys.readouterr().out
    assert by_id.startswith("# CKP001 interval-daly\n")
    assert [line[3:] for line in by_id.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert main(["explain", "interval-daly"]) == 0
    assert capsys.readouterr().out == by_id


def test_with_the_numbers_of_a_job(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["explain", "ckp001", "job.toml", "--set", "checkpoint.interval_s=864000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# CKP001 on job.toml\n\n**fail** (error), job.toml: interval 864,000 s is ")
    assert "    M = 86400 / (16 hosts × " in out
    assert "Limits for nvidia-h100, 128 devices, class S2:" in out
    assert "\n# CKP001 interval-daly\n" in out


def test_json(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["explain", "CKP001", "job.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"]["warn_ratio"] == 2.0
    assert found["findings"][0]["verdict"] == "pass"
    assert list(found["sections"]) == list(SECTIONS)


def test_a_rule_that_is_none(capsys) -> None:
    assert main(["explain", "CKP01"]) == 2
    assert "did you mean CKP001 (interval-daly)?" in capsys.readouterr().err
    assert main(["explain", "CKP001", "nothing.toml"]) == 2
