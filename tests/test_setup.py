"""`.ci/venv` makes the environment with the Python that is asked for, also where another made it before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / ".ci" / "venv"


def stand_in(path: Path, version: str, log: Path) -> str:
    """A Python that says it is another version, and writes down what it is asked to make."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *base_prefix*) echo "{version} /there" ;; "-m venv"*) echo "$*" >> {log} ;;\n'
        f'"-m pip"*) exit 0 ;; *) exec {sys.executable} "$@" ;; esac\n'
    )
    path.chmod(0o755)
    return str(path)


def make(venv: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = ["bash", str(SCRIPT), str(venv)]
    return subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, check=False)


def test_an_environment_of_another_python_is_made_anew(tmp_path: Path) -> None:
    log, venv = tmp_path / "log", tmp_path / "venv"
    stand_in(venv / "bin" / "python", "3.11.7", log)
    other = stand_in(tmp_path / "python", "3.11.2", log)
    assert make(venv).returncode == 0
    assert not log.exists()  # nobody asked for another
    done = make(venv, PYTHON=other)
    assert (done.returncode, log.read_text()) == (0, f"-m venv --clear {venv}\n")
    assert f"venv is Python 3.11.7; making it anew with {other}\n" in done.stderr
    stand_in(venv / "bin" / "python", "3.11.2", log)
    make(venv, PYTHON=other)
    assert log.read_text().count("\n") == 1  # it fits now


def test_a_python_that_is_none_is_refused_and_not_replaced(tmp_path: Path) -> None:
    done = make(tmp_path / "venv", PYTHON=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"PYTHON={tmp_path}/nothing is not Python 3.11 or newer")
    assert not (tmp_path / "venv").exists()
