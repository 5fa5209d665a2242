"""`phalanx report`: two files in the run folder, or what was asked for, where it was asked for."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.cli.main import main
from phalanx.io.packages import installed_version

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report"), steps=30, ranks=2, hosts=1).path


def test_both_files_into_the_run(folder: Path, capsys: Output) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "report.html"), str(folder / "report.md")]
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert (folder / "report.md").read_text(encoding="utf-8").startswith("# run\n")


def test_only_what_was_asked_for(folder: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["report", str(folder), "--html", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    assert main(["report", str(folder), "--markdown", str(tmp_path / "x.md")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.md'}\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "x.md"]


def test_from_a_source_tree_that_was_never_installed(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("phalanx.io.packages.version_on_path", lambda name: "")
    installed_version.cache_clear()
    assert main(["report", str(folder), "--html", "-"]) == 0
    assert "phalanx unknown, report of " in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "phalanx unknown\n"
    installed_version.cache_clear()


def test_json(folder: Path, capsys: Output) -> None:
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["steps"] == 30
    assert told["ledger"]["closes"] is True
    assert set(told["scores"]) == {"0", "1"}
    assert told["curves"]["loss"]["unit"] == "nats/token"
    assert len(told["effective"]["t"]) == len(told["effective"]["cumulative"])


def test_wrong_calls(folder: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["report", str(folder), "--html", "-", "--json"]) == 2
    assert "two results for one stdout\n  give one of them a file" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "there is no such run" in capsys.readouterr().err
    assert main(["report", str(folder), "--html", str(tmp_path / "none" / "x.html")]) == 3
    assert "name another file with --html, or - for stdout" in capsys.readouterr().err


def test_a_run_that_was_left_behind(tmp_path: Path, capsys: Output) -> None:
    run = write_run(tmp_path, steps=10, ranks=2, hosts=1, incidents=0, finished=False)
    assert main(["report", str(run.path), "--markdown", "-"]) == 0
    told = capsys.readouterr().out
    assert "**interrupted**, 10 of 20 steps" in told
    assert "> its processes ended without an error message; phalanx train --resume continues the run" in told
