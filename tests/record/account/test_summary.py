"""The report of a run: from its folder alone, also when it is unfinished, resumed or damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.record.account import summary
from phalanx.record.account.rank_places import rank_place
from phalanx.record.account.summary import summarize_briefly, summarize_run
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import EventWriter
from phalanx.record.report.render import render_text
from phalanx.record.run import Run, create_run

PLAN = {
    "job": {"model": {"name": "tiny"}},
    "cluster": {"name": "local:2"},
    "layout": {"pipeline": 1, "data": 2, "context": 1, "tensor": 1},
    "prediction": {
        "step_s": 0.1, "step_s_low": 0.09, "step_s_high": 0.12, "tokens_per_s": 1e4, "mfu": 0.4, "parameters": 10**6,
    },
    "memory": {"total_bytes": 1e9},
    "duration": {"steps": 10, "training_s": 1.0},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = create_run(tmp_path, "x", job_toml="", job={}, plan_json=json.dumps(PLAN))
    made.set_launch(world=2, layout="DP2", started=999.0, baselines={"unigram_bits_per_byte": 5.0})
    return made


def steps(run: Run, rank: int, numbers: range, *, start_s: float, compute_s: float = 0.05, **fields: object) -> None:
    now = [start_s]
    writer = EventWriter(run.events(rank), rank=rank, clock=lambda: now[0])
    writer.write("run_start")
    for step in numbers:
        now[0] += 0.2
        values = {"loss": 5.0 - step / 10, "tokens": 1000, "duration_s": 0.2, "memory_bytes": 2e9, **fields}
        writer.write("step", step=step, compute_s=compute_s, wait_s=max(0.0, 0.2 - compute_s), **values)
    writer.close()


def test_prediction_beside_measurement(run: Run) -> None:
    steps(run, 0, range(10), start_s=1000.0)
    steps(run, 1, range(10), start_s=1000.0, compute_s=0.1)
    found = summarize_run(run)
    assert (found.steps, found.planned_steps, found.tokens) == (10, 10, 10_000)
    assert (found.step_s.measured, found.step_s.error) == (pytest.approx(0.2), pytest.approx(1.0))
    assert found.tokens_per_s.measured == pytest.approx(5000)
    assert found.mfu.measured == pytest.approx(0.2)
    assert found.memory_bytes.error == pytest.approx(1.0)
    assert found.training_s.measured == pytest.approx(2.0)
    assert found.first_step_s == pytest.approx(1.2)
    assert (found.first_loss, found.last_loss) == (5.0, 4.1)
    assert (found.straggler, found.ranks[1].place) == (1, "data 1")
    text = render_text(found)
    assert re.search(r"\n  step +100 ms \(90\.0 ms to 120 ms\) +200 ms \(p90 200 ms\) +\+100\.0%\n", text)
    told = (
        "straggler: rank 1 (data 1) is at work 100% longer than its peers: it computes longer; the others wait for it"
    )
    assert told in " ".join(text.split())
    assert "LAYOUTS" not in text


def test_a_step_done_again_after_a_restart_counts_once(run: Run) -> None:
    steps(run, 0, range(6), start_s=1000.0)
    steps(run, 0, range(4, 10), start_s=2000.0, duration_s=0.4, loss=1.0)
    found = summarize_run(run)
    assert (found.steps, found.starts, found.last_loss, found.first_loss) == (10, 2, 1.0, 5.0)
    assert found.training_s.measured == pytest.approx(4 * 0.2 + 6 * 0.4)
    assert ", 2 starts" in render_text(found)


def test_evaluation_samples_and_checkpoints(run: Run) -> None:
    steps(run, 0, range(10), start_s=1000.0, skipped=True)
    writer = EventWriter(run.events(0), rank=0)
    writer.write("sample", step=5, text="earlier")
    writer.write("evaluate", step=10, loss=2.5, bits_per_byte=1.9, bigram_bits_per_byte=3.0)
    writer.write("sample", step=10, text="one\x1b[2J\n\rtwo")
    writer.write("sample", step=10, text="three")
    writer.write("checkpoint", step=10, path="x", seconds=0.5, bytes=3e6)
    writer.close()
    (run.checkpoints / "step-00000010").mkdir()
    (run.checkpoints / "step-00000010" / "manifest.json").touch()
    run.set_status("stopped")
    text = render_text(summarize_run(run))
    assert "held-out text 2.5000 nats per token, 1.900 bits per byte at step 10" in text
    assert "baselines unigram 5.000, bigram 3.000 bits per byte on the same text" in text
    assert "│ one [2J  two" in text
    assert "earlier" not in text
    assert "\x1b" not in text
    assert "skipped 10 steps whose gradient was not finite" in text
    assert "on disk: step 10; each 3.00 MB of rank 0, written in 500 ms" in text
    assert f"resume with: phalanx train --resume {run.path}" in text


def test_stages_and_experts(tmp_path: Path) -> None:
    plan = {**PLAN, "layout": {"pipeline": 2, "data": 1, "context": 1, "tensor": 2}}
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json=json.dumps(plan))
    for rank in range(4):
        steps(run, rank, range(10), start_s=1000.0, compute_s=0.1 if rank < 2 else 0.3, expert_imbalance=1.5)
    found = summarize_run(run)
    assert (found.stage_compute_s, found.expert_imbalance) == ((pytest.approx(0.1), pytest.approx(0.3)), 1.5)
    text = render_text(found)
    assert "stages: the slowest, 1, computes 50% longer than the mean of all" in text
    assert "experts: the busiest gets 1.50 times the mean" in text


def test_a_brief_summary_reads_no_record_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(run, 0, range(10), start_s=1000.0)
    whole = summarize_run(run)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("read whole")

    for name in ("walk_ledger", "run_cost", "skipped_steps"):
        monkeypatch.setattr(summary, name, refused)
    brief = summarize_briefly(run, RunHistory.open(run))
    assert (brief.ledger, brief.cost, brief.skipped_steps, brief.effective_time.measured) == (None, None, None, None)
    assert (brief.steps, brief.step_s, brief.last_loss) == (whole.steps, whole.step_s, whole.last_loss)
    assert whole.skipped_steps == 0
    assert whole.cost is not None


def test_a_run_that_never_took_a_step(run: Run) -> None:
    text = render_text(summarize_run(run))
    assert "created, 0 of 10 steps" in text
    assert "No step was finished." in text


def test_hostile_values_are_ignored(run: Run) -> None:
    lines = ['{"event":"step","step":0,"duration_s":"x","loss":null,"tokens":true}', '{"event":"step","step":"1"}', "{"]
    run.events(0).write_text("\n".join(lines))
    (run.path / "launch.json").write_text("[]")
    found = summarize_run(run)
    assert (found.steps, found.step_s.measured, found.unreadable_lines) == (1, None, 1)
    assert "1 line of events could not be read" in render_text(found)


def test_places() -> None:
    layout = {"pipeline": 2, "data": 3, "context": 1, "tensor": 2}
    assert [rank_place(rank, layout) for rank in (0, 3, 11)] == [
        "pipeline 0, data 0, tensor 0",
        "pipeline 0, data 1, tensor 1",
        "pipeline 1, data 2, tensor 1",
    ]
