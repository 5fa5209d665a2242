"""`phalanx show` prints every value with its origin, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[model]\npreset = "gpt2"\n[parallel]\ntensor = 1\nsequence_parallel = true\n')
    return "job.toml"


def test_text(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", job, "--set", "optim.lr=0.001"]) == 0
    captured = capsys.readouterr()
    rows = [line.split(maxsplit=2) for line in captured.out.splitlines() if line]
    assert ["model.layers", "12", "preset gpt2"] in rows
    assert ["parallel.tensor", "1", "job.toml:4"] in rows
    assert ["optim.lr", "0.001", "--set optim.lr=0.001"] in rows
    assert ["optim.clip", "1.0", "default"] in rows
    assert captured.err == "warning: job.toml:5: parallel.sequence_parallel has no effect with parallel.tensor = 1\n"


def test_json_holds_the_same(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", job, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["job"]["model"]["layers"] == 12
    assert result["job"]["checkpoint"]["async"] is True
    assert result["origins"]["model.layers"] == "preset gpt2"
    assert result["origins"]["checkpoint.async"] == "default"


def test_mistakes_go_to_stderr_with_exit_2(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", job, "--set", "parallel.tensor=5"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("--set parallel.tensor=5: parallel.tensor = 5 does not divide the model's 12")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_sound(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_automatic_tokens_are_worked_out(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """20 per parameter of GPT-2's 124,439,808."""
    assert main(["show", job]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line]
    assert ["data.tokens", '"auto"', "default; 20 per parameter: 2_488_796_160"] in rows
    assert main(["show", job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"] == {"data.tokens": 2_488_796_160}
    assert main(["show", job, "--json", "--set", "data.tokens=1B"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"] == {}
