"""`phalanx evolve` as a person calls it: results, files, Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.cli.main import main

JOB = str(Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml")


def test_schedules_write_an_order_and_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, out, picture = (str(tmp_path / name) for name in ("s.jsonl", "order.toml", "s.svg"))
    call = ["evolve", "schedules", "--stages", "2", "--micro-batches", "4", "--archive", archive, "--json"]
    assert main([*call, "--evaluations", "30", "--out", out, "--picture", picture]) == 0
    found = json.loads(capsys.readouterr().out)
    parallel = tomllib.loads(Path(out).read_text())["parallel"]
    best = next(row for row in found["schedules"] if row["name"] == "found")
    assert (parallel["order"], parallel["pipeline"]) == (best["orders"], 2)
    assert Path(picture).read_text().startswith("<svg")
    assert main([*call, "--evaluations", "40"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluated_now"] == 10
    examples = str(tmp_path / "examples.jsonl")
    assert main(["evolve", "export", archive, "--out", examples]) == 0
    assert "40 examples of schedules" in capsys.readouterr().out
    assert main(["evolve", "export", archive, "--out", archive]) == 2
    assert main(["evolve", "plans", JOB, "--archive", archive]) == 2
    assert "is the archive of another problem" in capsys.readouterr().err


def test_the_fastest_kernel_has_passed_the_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["evolve", "kernels", "--device", "cpu", "--tokens", "64", "--width", "64", "--evaluations", "2", "--json"]
    assert main([*call, "--archive", str(tmp_path / "k.jsonl"), "--out", str(tmp_path / "fastest.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["guard"].startswith("passed, ")
    assert (tmp_path / "fastest.py").read_text() == found["source"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["schedules", "--forward", "1,x"], '"1,x" is not a list of numbers'),
        (["schedules", "--stages", "1"], "1 is not between 2 and 256"),
        (["schedules", JOB, "--set", "parallel.pipeline=1"], "the plan has no pipeline"),
        (["plans", JOB, "--evaluations", "0"], "0 is not between 1 and 1,000,000"),
        (["plans", JOB, "--proposer", " "], "names no command"),
        (["kernels", "softmax"], 'there are no templates of "softmax"'),
        (["kernels", "--device", "tpu"], '"tpu" is not known'),
        (["export", "nothing.jsonl", "--out", "x.jsonl"], "there is no such archive"),
    ],
)
def test_mistakes_are_one_sentence(call: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evolve", *call]) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_keeps_the_archive(tmp_path: Path) -> None:
    """The proposer that the search waits for sends it, so that it comes in the middle of a batch."""
    archive, proposer = tmp_path / "plans.jsonl", tmp_path / "proposer.py"
    proposer.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nsignal.pause()\n")
    call = [sys.executable, "-m", "phalanx", "evolve", "plans", JOB, "--cluster", "8xH100:2", "--archive", str(archive)]
    call += ["--evaluations", "300", "--proposer", f"{sys.executable} {proposer}"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 130, done.stderr
    assert "interrupted: nothing is lost; the same command goes on from the archive" in done.stdout
    assert json.loads(archive.read_text().splitlines()[-1])["genome"]
