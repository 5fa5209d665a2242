"""A streak of skipped steps in a real run: what is saved meanwhile, where it goes back to, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_dataset import write_dataset
from train.test_plugins_run import JOB, events_of, phalanx

FIRST, MOST = 6, 5  # the first step that is skipped, and how many in a row end a membership
PLUGIN = """
from pathlib import Path

from phalanx import Callback


class Streak(Callback):
    def __init__(self, first: int, folder: str, stop_at: int = -1) -> None:
        self.first, self.stop_at, self.healed = first, stop_at, Path(folder) / "healed"

    def on_step_begin(self, training):
        training.save()

    def on_step_end(self, training, report):
        if training.step == self.stop_at:
            training.stop()

    def on_gradients_ready(self, training, gradients):
        if training.step >= self.first and not self.healed.exists():
            for shard in gradients:
                shard.fill_(float("nan"))

    def on_failure(self, training, error):
        self.healed.touch()
"""


def begin(folder: Path, stop_at: int) -> Path:
    (folder / "streak.py").write_text(PLUGIN)
    write_dataset(folder, documents=300, heldout=0.01)
    job = JOB.format(data='path = "data"', zero=3).replace("memory_every = 1", "memory_every = 0\nkeep = 3")
    job = job.replace("init_timeout_s = 60", "init_timeout_s = 300").replace("tokens = 512", "tokens = 1024")
    job = job.replace("samples = 0", f"samples = 0\nskipped_steps = {MOST}")
    arguments = f'{{"first": {FIRST}, "folder": "{folder}", "stop_at": {stop_at}}}'
    (folder / "job.toml").write_text(f"{job}callbacks = ['streak.py:Streak {arguments}']\n")
    code = 130 if stop_at >= 0 else 0
    phalanx(folder, "train", "job.toml", "--no-probe", "--no-check", "--allow-code", code=code)
    (run,) = (folder / "runs").iterdir()
    return run


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("stop_at", [-1, FIRST + 2])
def test_a_streak_costs_no_checkpoint(tmp_path: Path, stop_at: int) -> None:
    """With three kept and a save after each step; `stop_at`: the run is stopped in the streak, and resumed."""
    run = begin(tmp_path, stop_at)
    if stop_at >= 0:
        # The steps from before the streak are still there, beside the newest two of it.
        newest = max(int(name.removeprefix("step-")) for name in saved(run))
        assert newest > FIRST
        assert saved(run) == [f"step-{step:08d}" for step in (FIRST, newest - 1, newest)]
        phalanx(tmp_path, "train", "--resume", str(run), "--allow-code", "--no-check")
    (event,) = events_of(run, "rollback", of="supervisor")
    assert (event["step"], event["target"]) == (FIRST + MOST, FIRST), "a streak outlives a restart"
    assert event["set_aside"], "something of the streak was saved"
    restored = events_of(run, "restore", of="supervisor")[-1]
    assert (restored["step"], restored["source"]) == (FIRST, "disk")
    assert saved(run) == [f"step-{step:08d}" for step in (14, 15, 16)]
    (line,) = [one["text"] for one in events_of(run, "remark") if "given up by a roll-back" in one["text"]][-1:]
    assert "replaced and deleted" in line
