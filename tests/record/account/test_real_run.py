"""A real run that loses a rank and has a slow one: its ledger closes, and the slow rank is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tiny_dataset import write_dataset

from phalanx.record.account.ledger import read_ledger
from phalanx.record.account.stragglers import straggler_scores
from phalanx.record.account.summary import summarize_run
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run, open_run

JOB = Path(__file__).parents[3] / "examples" / "drill.toml"
STEPS, SLOW_FROM, SLOW_S = 40, 12, 0.5  # longer than a busy machine holds up the others

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 2 is killed in step 5; from step 12 on rank 1 sleeps in every step."""
    folder = tmp_path_factory.mktemp("story")
    write_dataset(folder, documents=2500)
    text = JOB.read_text(encoding="utf-8")
    corpus = next(line for line in text.splitlines() if line.startswith("corpus ="))
    (folder / "job.toml").write_text(text.replace(corpus, 'path = "data"'))
    faults = ["--fault", "kill:rank=2,step=5", "--fault", f"slow:rank=1,step={SLOW_FROM},sleep_s={SLOW_S},for_s=600"]
    words = ["drill", "job.toml", "--runs", "runs", "--steps", str(STEPS), "--no-replay", *faults]
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "runs").iterdir()
    return open_run(made)


def test_the_ledger_closes(run: Run) -> None:
    found = read_ledger(run)
    assert found.closes, str(found)
    assert (found.steps, found.incidents, found.formations) == (STEPS, 1, 2)
    assert found.accounts.detect + found.accounts.restore > 0.0
    assert found.accounts.stragglers > 0.5 * (STEPS - SLOW_FROM) * SLOW_S  # columns of steps begin before it is slow


def test_the_slow_rank_is_named_within_a_hundred_steps(run: Run) -> None:
    history = RunHistory.open(run)
    found, before = straggler_scores(history), straggler_scores(history, last=SLOW_FROM - 1)
    # On a busy machine others are held up too, by less, and nobody may stand out of the noise.
    assert [one.rank for one in found.named[:1]] in ([1], [])
    assert found.score[1] == max(found.score.values())
    assert found.score[1] > before.score[1]


def test_the_summary_tells_of_both(run: Run) -> None:
    found = summarize_run(run)
    (incident,) = found.incidents
    assert (incident.rank, incident.what, incident.source) == (2, "killed by signal 9", "memory")
    assert incident.recovery_s is not None
    assert [one.rank for one in found.stragglers[:1]] in ([1], [])
    assert found.effective_time.measured == pytest.approx(read_ledger(run).effective)
