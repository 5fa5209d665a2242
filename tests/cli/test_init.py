"""`phalanx init` writes files that load, and never over another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.job.load import load
from phalanx.job.presets import presets


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_is_a_tiny_model_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "job.toml\n"
    assert captured.err == "next: phalanx plan job.toml\n"
    resolved = load("job.toml")
    assert (resolved.job.model.name, resolved.job.cluster.target) == ("phalanx-tiny", "local")
    assert resolved.job.precision.compute == "fp32"
    assert len(Path("job.toml").read_text().splitlines()) < 66  # one page
    assert not resolved.warnings


@pytest.mark.parametrize("model", presets())
def test_every_preset_makes_a_file_that_loads(model: str) -> None:
    assert main(["init", "Big Run.toml", "--model", model, "--cluster", "8xH100:16"]) == 0
    job = load("Big Run.toml").job
    assert (job.name, job.model.name, job.cluster.spec) == ("big-run", model, "8xH100:16")


def test_never_overwrites_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("precious")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == (
        "job.toml: exists already\n  init never overwrites on its own\n  name another file, or add --force\n"
    )
    assert Path("job.toml").read_text() == "precious"
    assert main(["init", "--force"]) == 0
    assert load("job.toml").job.name == "job"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "job.toml", "model": "phalanx-tiny", "cluster": "local"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-3-8b"], '--model: "lama-3-8b" is not a known model\n  did you mean llama-3-8b?\n'),
        (["--cluster", "8xH900:1"], "cluster '8xH900:1': unknown accelerator 'H900'"),
        (["no/such/folder.toml"], "no/such/folder.toml: cannot be written: No such file or directory"),
        (["."], ".: "),
    ],
)
def test_mistakes_write_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["init", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(Path().iterdir()) == []


def test_a_hostile_file_name_cannot_break_the_page() -> None:
    assert main(["init", "a\nb.toml"]) == 0
    assert load("a\nb.toml").job.name == "a-b"
