"""Runs for the exporters' tests, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record.run import Run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four ranks, 120 steps, one incident; nobody changes it."""
    return write_run(tmp_path_factory.mktemp("finished"), name="first", ranks=4, steps=120)


@pytest.fixture
def damaged(tmp_path: Path) -> Run:
    """Everything that can be wrong in a folder, at once."""
    run = write_run(tmp_path, name="broken", ranks=3, steps=20, incidents=0)
    with run.events(0).open("ab") as file:
        file.write(b'{"v":1,"event":"step","t":"soon","rank":0,"step":20,"loss":"<b>","tokens":1e999}\n')
        file.write(b'{"v":1,"event":"step","t":1794700500.0,"rank":0,"step":20,"loss":1e308,"tokens":1e308}\n')
        file.write(b'{"v":1,"event":"step","t":1794700501.0,"rank":0,"step":900,"loss":-1e308,"tokens":1e308}\n')
        file.write(b'{"v":1,"event":"peers","t":1,"rank":0,"pairs":[7,{"peer":"x"},{"peer":1,"axis":"\\u001b[2J"}]}\n')
        file.write(b'{"v":1,"event":"timeline","t":1,"rank":0,"collectives":{"op":1}}\n')
        file.write(b"\x00\xff garbage\n" + b'{"torn')
    run.events(1).unlink()
    run.events(2).write_bytes(b"\xff" * 1000)
    (run.path / "status.json").write_text("[]")
    run.plan_json.write_text('{"prediction": 3, "cluster": {"accelerator": []}, "job": null}')
    return run
