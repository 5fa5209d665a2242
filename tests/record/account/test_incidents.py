"""What befell a run, in a line: a cause where one is on record, and never a made-up one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record.account.incidents import incident_text, read_incidents, supervisor_events
from phalanx.record.run import Run


def run_with(tmp_path: Path, cause: object) -> Run:
    run = write_run(tmp_path, ranks=2, hosts=1, steps=30, incidents=1)
    lines = [json.loads(line) for line in run.supervisor.read_text().splitlines()]
    for line in lines:
        if line["event"] == "incident":
            line["cause"] = cause
    run.supervisor.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ({}, ""),
        ({"kind": "", "message": " \n"}, ""),
        ({"signal": 0, "message": ""}, ""),
        ("killed", ""),
        ({"signal": 9}, "killed by signal 9"),
        ({"kind": "Silence", "message": "rank 1 was silent"}, "rank 1 was silent"),
        ({"kind": "OSError", "message": ""}, "OSError: "),
        ({"message": "exit code 7"}, "failed: exit code 7"),
    ],
)
def test_the_cause(tmp_path: Path, cause: object, told: str) -> None:
    run = run_with(tmp_path, cause)
    (one,) = read_incidents(run)
    assert one.what == told
    (line,) = (incident_text(event) for event in supervisor_events(run) if event["event"] == "incident")
    assert line.endswith(f": {told or 'no cause on record'}")
