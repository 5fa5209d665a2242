"""`phalanx agent`: when a host may join, and at which address the others find it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.elastic.handshake import make_secret
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
Agent = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    plan = plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))
    made = create_run(tmp_path, "joined", job_toml="", job={}, plan_json=plan.to_json())
    make_secret(made.path / "secret")
    made.set_launch(world=4, join=2, addresses=["127.0.0.1"])
    return made


@pytest.fixture
def agent(run: Run, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The words of the command that becomes the agent."""
    words: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, given: words.extend(given))

    def call(*arguments: str) -> list[str]:
        main(["agent", str(run.path), *arguments])
        return words[-4:]

    return call


def test_beside_a_first_host_on_the_loopback_no_address_is_needed(agent: Agent) -> None:
    assert agent("--host", "b") == ["b", "2", "127.0.0.1", "0"]


def test_an_address_that_is_given_counts(agent: Agent) -> None:
    assert agent("--host", "b", "--address", "10.0.0.2", "--slots", "3") == ["b", "3", "10.0.0.2", "0"]


def test_beside_a_first_host_elsewhere_an_address_is_needed(
    run: Run, agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    run.set_launch(**{**run.launch(), "addresses": ["10.0.0.1"]})
    assert agent() == []
    assert capsys.readouterr().err == (
        "phalanx agent: no --address is given\n"
        "  the first host is at 10.0.0.1, and would look for this one at 127.0.0.1\n"
        "  --address with an address of this host that the others reach; ip address lists them\n"
    )


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("done", "is complete: all steps are done\n  phalanx train --report {run} shows what came of it\n"),
        ("failed", "is over: failed\n  phalanx train --resume {run} --join N continues it, on the first host\n"),
    ],
)
def test_a_run_that_is_over(
    run: Run, agent: Agent, capsys: pytest.CaptureFixture[str], state: str, advice: str
) -> None:
    run.set_status(state, exit_code=0, message="")
    assert agent() == []
    assert capsys.readouterr().err == f"{run.path}: {advice.format(run=run.path)}"


def test_ctrl_c_twice_before_it_has_joined(run: Run) -> None:
    """While Python and torch start, which would answer with a traceback. The coordinator it started goes too."""
    command = [sys.executable, "-m", "phalanx", "agent", str(run.path), "--host", "b"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"host b joins {run.path} with 2 slots\n"
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=240)
            assert told in (("", ""), ("", "stopped by Ctrl-C\n")), "before or after the agent counts signals itself"
            assert process.returncode == 130
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_code_that_the_job_names_needs_the_word_of_the_caller(
    tmp_path: Path, agent: Agent, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the folder says of consent is no consent: whoever wrote the code may have written that."""
    mark = tmp_path / "ran"
    code = tmp_path / "net.py"
    code.write_text(f"open({str(mark)!r}, 'w').close()\n")
    job = [f"model.module={code}:build", f"plugins.loss={code}:loss"]
    plan = plan_for_run(load_job(str(JOB), overrides=job, cluster=None, steps=0))
    run.replan(job_toml="", job={}, plan_json=plan.to_json())
    run.set_launch(**{**run.launch(), "allow_code": True})
    assert agent() == []
    why = "  a job file from a stranger could do anything with your account\n"
    why += "  read it, then give --allow-code (allow_code=True in Python)\n"
    assert capsys.readouterr().err == (
        f"model.module: '{code}:build' is code that this job wants to run\n{why}"
        f"plugins.loss: '{code}:loss' is code that this job wants to run\n{why}"
    )
    words = [sys.executable, "-m", "phalanx.train.agent", str(run.path), "b", "2", "127.0.0.1", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "give --allow-code" in done.stderr
    assert not mark.exists()
    assert agent("--host", "b", "--allow-code") == ["b", "2", "127.0.0.1", "0"]


def test_a_run_that_nobody_launched(run: Run, agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "secret").unlink()
    assert agent() == []
    assert "has no secret: nobody has launched it yet" in capsys.readouterr().err
