"""`phalanx evolve` as a person calls it: results, files, Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
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
    archive = tmp_path / "plans.jsonl"
    call = [sys.executable, "-m", "phalanx", "evolve", "plans", JOB, "--cluster", "8xH100:2", "--archive", str(archive)]
    process = subprocess.Popen([*call, "--evaluations", "100000"], stdout=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until_s:
        if archive.exists() and archive.read_bytes().count(b"\n") > 30:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted: nothing is lost; the same command goes on from the archive" in out
    assert json.loads(archive.read_text().splitlines()[-1])["genome"]
