"""No secret of the environment enters a run folder, not even through an exception that repeats one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from phalanx.record.run import create_run
from phalanx.train.prepare import load_job, plan_for_run

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "examples" / "drill.toml"
TOKEN = "hf_0123456789abcdef-secret"
OTHER = "an-innocent-value-of-the-environment"


def test_a_run_folder_holds_nothing_of_the_environment(tmp_path: Path) -> None:
    plan = plan_for_run(load_job(str(JOB), overrides=['fault.recovery="stop"'], cluster=None, steps=0))
    run = create_run(tmp_path, "fake", job_toml="", job={}, plan_json=plan.to_json())
    run.set_launch(v=1)
    environ = {**os.environ, "PHALANX_TEST_TOKEN": TOKEN, "PHALANX_TEST_OTHER": OTHER}
    command = [sys.executable, str(HERE / "fake_cli.py"), "leak", str(run.path), "4"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 3, done.stderr
    assert "ValueError: 401 for [PHALANX_TEST_TOKEN]" in done.stdout
    cause = json.loads(run.error(2).read_text())
    assert cause["message"] == "401 for [PHALANX_TEST_TOKEN]"
    assert "raise ValueError" in run.log(2).read_text(), "the traceback is there"
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {"launch.json", "status.json", "supervisor.jsonl", "events-00002.jsonl"} <= {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        assert TOKEN.encode() not in data, path
        assert OTHER.encode() not in data, path
