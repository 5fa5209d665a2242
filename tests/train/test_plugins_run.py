"""Plug-ins as a person uses them: `phalanx train` with real ranks, one of them killed, and data that goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_dataset import write_dataset

MINE = Path(__file__).parent / "plugin_files" / "mine.py"
JOB = """
name = "own"
[model]
layers = 1
hidden = 32
heads = 4
ffn = 32
vocab = 300
[data]
sequence = 16
tokens = 512
{data}
[batch]
global_sequences = 4
micro = 1
[precision]
compute = "fp32"
[parallel]
zero = {zero}
tensor = 1
context = 1
pipeline = 1
[train]
samples = 0
evaluate_every = 4
evaluate_sequences = 4
[checkpoint]
memory_every = 1
[comm]
init_timeout_s = 60
[cluster]
spec = "local-cpu:2"
[plugins]
"""


def phalanx(folder: Path, *arguments: str, code: int = 0) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    command = [sys.executable, "-m", "phalanx", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


def events_of(run: Path, kind: str, of: str = "events-00000") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / f"{of}.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_own_callback_loss_optimizer_and_metric_and_a_killed_rank(tmp_path: Path) -> None:
    shutil.copy(MINE, tmp_path)
    write_dataset(tmp_path, documents=300, heldout=0.01)
    diary = json.dumps({"path": str(tmp_path / "diary"), "kill_rank": 1, "kill_step": 5})
    plugins = f"""callbacks = ['mine.py:Diary {diary}']
loss = 'mine.py:smooth_loss {{"smoothing": 0.2}}'
optimizer = "mine.py:SignDescent"
metrics = ["mine.py:accuracy"]
"""
    (tmp_path / "job.toml").write_text(JOB.format(data='path = "data"', zero=3) + plugins)
    refused = phalanx(tmp_path, "train", "job.toml", "--no-probe", "--no-check", code=2)
    for key in ("callbacks", "loss", "optimizer", "metrics"):
        assert f"plugins.{key}: " in refused
    phalanx(
        tmp_path, "train", "job.toml", "--no-probe", "--no-check", "--allow-code", "--set", "checkpoint.interval_s=1e8"
    )
    (made,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / f"diary-{rank}").read_text().splitlines()]
        told = [line["moment"] for line in lines]
        assert (told[0], told[-1], lines[-1]["steps"]) == ("on_start", "on_end", 8)
        assert told.count("on_resume") == 1
        resumed = lines[told.index("on_resume")]
        assert 0 < resumed["step"] == resumed["steps"] <= 5  # the state that belongs to the step
        after = [line["moment"] for line in lines if line["step"] == 7 and line["moment"] != "on_step_end"]
        assert after[:4] == ["on_step_begin", "on_gradients_ready", "on_before_update", "on_after_update"]
        assert {"on_checkpoint_taken", "on_checkpoint_saved", "on_evaluate"} <= set(told)
        scores = {line["step"]: line["metrics"]["accuracy"] for line in lines if line["moment"] == "on_evaluate"}
        assert set(scores) == {4, 8}
        assert all(0 <= one <= 1 for one in scores.values())
    written = {one["step"]: one["metrics"]["accuracy"] for one in events_of(made, "evaluate") if "metrics" in one}
    assert written == scores
    assert "on_failure" in (tmp_path / "diary-0").read_text()


def test_an_iterable_goes_on_where_it_was_also_from_a_last_step_saved_elsewhere(tmp_path: Path) -> None:
    """The checkpoint folder is lost before the last save, and no copy is in memory: only the ranks hold that step."""
    shutil.copy(MINE, tmp_path)
    log = tmp_path / "log"
    data = json.dumps({"log": str(log)})
    plugins = f"data = 'mine.py:Stream {data}'\ncallbacks = ['mine.py:BlocksFolder {{\"step\": 3}}']\n"
    (tmp_path / "job.toml").write_text(JOB.format(data="", zero=0).replace("memory_every = 1", "") + plugins)
    common = ("--no-probe", "--no-check", "--allow-code", "--set", "checkpoint.memory_every=0")
    said = phalanx(tmp_path, "train", "job.toml", *common, "--steps", "3", code=3)
    (made,) = (tmp_path / "runs").iterdir()
    assert events_of(made, "incident", "supervisor")[0]["in_a_row"] == 1
    assert [event["step"] for event in events_of(made, "step")] == [0, 1, 2], "the steps are not done again"
    (saved,) = re.findall("the ranks held step 3, which is now saved: (.+)", said)
    assert Path(saved).parent.stat().st_mode & 0o777 == 0o700
    (made / "checkpoints").unlink()
    shutil.move(Path(saved).parent, made / "checkpoints")
    phalanx(tmp_path, "train", "--resume", str(made), *common[:3], "--steps", "5", "--cluster", "local-cpu:1")
    assert log.read_text() == "resumed 12\n"  # 3 steps of 4 sequences, whatever was read ahead
    assert [event["step"] for event in events_of(made, "step")] == [0, 1, 2, 3, 4]


def test_data_with_indices_needs_no_dataset_folder_and_a_broken_callback_is_named(tmp_path: Path) -> None:
    shutil.copy(MINE, tmp_path)
    plugins = 'data = "mine.py:counting"\ncallbacks = ["mine.py:Breaks"]\n'
    (tmp_path / "job.toml").write_text(JOB.format(data="", zero=0) + plugins)
    common = ("--no-probe", "--no-check", "--allow-code", "--set", "fault.recovery=stop")
    said = phalanx(tmp_path, "train", "job.toml", *common, code=3)
    assert "step 3: callback Breaks failed in on_step_end: ValueError: this lamp is broken" in said
    (made,) = (tmp_path / "runs").iterdir()
    assert [event["step"] for event in events_of(made, "step")] == [0, 1, 2]
