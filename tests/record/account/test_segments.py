"""A run that changed its layout: every number beside the prediction for the layout that it was measured in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import UserError
from phalanx.io.values import at
from phalanx.metrics.readings import Readings
from phalanx.plan.layout import Layout
from phalanx.record.account.cost import run_cost
from phalanx.record.account.memberships import layout_name, layout_spans, plan_at_step, read_launches
from phalanx.record.account.stragglers import straggler_scores
from phalanx.record.account.summary import summarize_run
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import EventWriter
from phalanx.record.report import html, render
from phalanx.record.report.diff import compare_sides, of_runs
from phalanx.record.report.render import render_text
from phalanx.record.report.run_report import read_run_report
from phalanx.record.run import Run, create_run
from phalanx.rules.log.stream import read_log
from phalanx.validate.calibration_report import _newest_layout

FOUR = {
    "data": 2, "shard": 2, "tensor": 1, "context": 1, "pipeline": 2, "virtual_pipeline": 1, "expert": 1, "zero": 2,
    "sequence_parallel": False, "micro_batch": 2, "accumulation": 4, "recompute": "none", "precision": "fp32",
    "schedule": "1f1b", "offload": "none", "compression": "none",
}  # fmt: skip
TWO = {**FOUR, "pipeline": 1}
FIRST, SECOND = 40, 60  # steps that the two layouts did


def plan(layout: dict[str, Any], *, step_s: float, memory: float, usd: float = 2.0) -> dict[str, Any]:
    rate = 1000 / step_s
    return {
        "job": {"model": {"name": "m"}, "telemetry": {"interval_s": 10.0}},
        "cluster": {"name": "local", "host_devices": 4},
        "layout": layout,
        "prediction": {
            "step_s": step_s, "step_s_low": 0.9 * step_s, "step_s_high": 1.1 * step_s, "tokens_per_s": rate, "mfu": 0.4,
            "parameters": 10**6,
        },
        "memory": {"total_bytes": memory},
        "duration": {"steps": FIRST + SECOND, "training_s": step_s * (FIRST + SECOND)},
        "bill": {"usd_per_device_hour": [1.0, usd, 3.0], "watts_per_device": 100.0},
        "reliability": {"spares": 0},
    }  # fmt: skip


class Script:
    """Writes what ranks and supervisor would."""

    def __init__(self, run: Run) -> None:
        self.run, self.now_s, self.epoch = run, 1000.0, 0

    def launch(
        self, world: int, layout: dict[str, Any], *, first: int, plan_number: int | None, reason: str = "start"
    ) -> None:
        self.epoch += 1
        number = {} if plan_number is None else {"plan": plan_number}
        self._tell("epoch", epoch=self.epoch, reason=reason, world=world, layout=layout, members=[], **number)
        self._tell("restore", epoch=self.epoch, step=first, source="disk" if first else "start")
        for rank in range(world):
            self._write(rank, [("run_start", {"step": first, "world": world, "epoch": self.epoch})])

    def steps(self, world: int, steps: range, *, step_s: float, memory: float, wait_s: float = 0.0) -> None:
        began_s = self.now_s
        for rank in range(world):
            events = [
                (
                    "step",
                    {
                        "step": step, "epoch": self.epoch, "loss": 5.0, "tokens": 1000, "duration_s": step_s,
                        "tokens_per_s": 1000 / step_s, "compute_s": step_s - wait_s, "wait_s": wait_s,
                        "memory_bytes": memory,
                    },
                )
                for step in steps
            ]  # fmt: skip
            self.now_s = began_s
            self._write(rank, events, gap_s=step_s)

    def end(self, state: str) -> None:
        self._tell("end", epoch=self.epoch, state=state, message="")
        self.run.set_status(state)

    def _write(self, rank: int, events: list[tuple[str, dict[str, Any]]], *, gap_s: float = 0.0) -> None:
        writer = EventWriter(self.run.events(rank), rank=rank, clock=lambda: self.now_s)
        for kind, values in events:
            self.now_s += gap_s
            writer.write(kind, **values)
        writer.close()

    def _tell(self, kind: str, **values: Any) -> None:
        writer = EventWriter(self.run.supervisor, rank=-1, clock=lambda: self.now_s)
        writer.write(kind, **values)
        writer.close()


def resumed(tmp_path: Path, *, numbered: bool, name: str = "x") -> Run:
    """40 steps of 0.4 s on four ranks, a pause, then 60 steps of 1 s on two."""
    first, second = plan(FOUR, step_s=0.2, memory=1e9), plan(TWO, step_s=0.8, memory=3e9)
    run = create_run(tmp_path, name, job_toml="", job={}, plan_json=json.dumps(first))
    run.set_launch(world=4, layout=layout_name(FOUR), started=1000.0, launched=1000.0)
    script = Script(run)
    script.launch(4, FOUR, first=0, plan_number=1 if numbered else None)
    script.steps(4, range(FIRST), step_s=0.4, memory=8e9, wait_s=0.3)
    script.end("stopped")
    script.now_s += 500.0
    run.replan(job_toml="", job={}, plan_json=json.dumps(second))
    run.set_launch(world=2, layout=layout_name(TWO), started=script.now_s, launched=script.now_s, earlier=[1000.0])
    script.launch(2, TWO, first=FIRST, plan_number=2 if numbered else None)
    script.steps(2, range(FIRST, FIRST + SECOND), step_s=1.0, memory=2e9, wait_s=0.1)
    script.end("done")
    return run


@pytest.mark.parametrize("numbered", [True, False])
def test_each_layout_beside_its_own_prediction(tmp_path: Path, numbered: bool) -> None:
    """Records of before `epoch` named its plan are told by their layouts."""
    found = summarize_run(resumed(tmp_path, numbered=numbered))
    old, new = found.layouts
    assert [(one.world, one.first_step, one.last_step) for one in (old, new)] == [(4, 0, 39), (2, 40, 99)]
    assert (old.step_s.predicted, old.step_s.measured) == (0.2, pytest.approx(0.4))
    assert (new.step_s.predicted, new.step_s.measured) == (0.8, pytest.approx(1.0))
    assert (old.memory_bytes.predicted, old.memory_bytes.measured) == (1e9, 8e9)
    assert (new.memory_bytes.predicted, new.memory_bytes.measured) == (3e9, 2e9)
    assert (old.mfu.measured, new.mfu.measured) == (pytest.approx(0.2), pytest.approx(0.32))
    # The page's own numbers are those of the newest, and so are its ranks.
    assert (found.step_s, found.memory_bytes, found.mfu) == (new.step_s, new.memory_bytes, new.mfu)
    assert [(one.rank, one.place, one.memory_bytes) for one in found.ranks] == [(0, "data 0", 2e9), (1, "data 1", 2e9)]
    assert (found.training_s.predicted, found.training_s.measured) == (
        pytest.approx(FIRST * 0.2 + SECOND * 0.8),
        pytest.approx(FIRST * 0.4 + SECOND * 1.0),
    )


def test_every_page_says_the_same_of_both(tmp_path: Path) -> None:
    run = resumed(tmp_path, numbered=True)
    story = read_run_report(run)
    text, page, web = render_text(story.summary), render.render_markdown(story), html.render_html(story, made="")
    for shown in (text, page, web):
        assert "1 to 40" in shown
        assert "200 ms → 400 ms" in shown
        assert "800 ms → 1.00 s" in shown
        assert "3.00 GB → 2.00 GB" in shown
    mfu = RunHistory.open(run).curve("mfu", points=100).mean
    assert (mfu[0], mfu[-1]) == (pytest.approx(0.2), pytest.approx(0.32))
    points = {one.metric.name: one.value for one in Readings(run).points()}
    assert points["train.mfu"] == pytest.approx(0.32)
    facts = read_log(run)
    assert (facts.world, facts.steps.duration_s.p50) == (2, pytest.approx(1.0, rel=0.02))
    assert facts.steps.drift == pytest.approx(0.0, abs=0.02)
    assert facts.mfu == pytest.approx(0.32, rel=0.02)
    assert facts.monitor is None or facts.monitor.memory_peak_bytes in (None, 2e9)


def test_a_difference_is_between_the_newest_layouts(tmp_path: Path) -> None:
    one, other = resumed(tmp_path, numbered=True), resumed(tmp_path, numbered=False, name="y")
    assert [found.key for found in compare_sides(*of_runs(one, other)) if found.section == "results"] == []


def test_each_launch_is_paid_for_its_own_devices(tmp_path: Path) -> None:
    run = resumed(tmp_path, numbered=True)
    history = RunHistory.open(run)
    assert [(round(one.seconds), one.world) for one in read_launches(run, history)] == [(16, 4), (60, 2)]
    paid = run_cost(run, history)
    assert paid.device_hours == pytest.approx((4 * 16 + 2 * 60) / 3600, rel=0.02)
    assert paid.usd == pytest.approx(2.0 * paid.device_hours, rel=1e-6)
    assert paid.energy_j == pytest.approx(100.0 * 3600 * paid.device_hours, rel=1e-6)


def test_ranks_of_another_layout_are_nobodys_peers(tmp_path: Path) -> None:
    """Two ranks that are gone did other work: neither scores nor lost time may come of comparing with them."""
    run = resumed(tmp_path, numbered=True)
    found = straggler_scores(RunHistory.open(run))
    assert sorted(found.score) == [0, 1]
    assert found.named == ()
    summary = summarize_run(run)
    assert summary.ledger is not None
    assert summary.ledger.accounts.stragglers == pytest.approx(0.0, abs=1e-6)


def test_a_layout_that_nobody_planned_has_no_prediction(tmp_path: Path) -> None:
    """A rank is lost and three go on: what they do is not held against the plan of four."""
    four, three = {**TWO, "data": 4, "shard": 4}, {**TWO, "data": 3, "shard": 3}
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json=json.dumps(plan(four, step_s=0.3, memory=1e9)))
    run.set_launch(world=4, layout="", started=1000.0, launched=1000.0)
    script = Script(run)
    script.launch(4, four, first=0, plan_number=1)
    script.steps(4, range(30), step_s=0.3, memory=1e9)
    script.launch(3, three, first=28, plan_number=1, reason="rank 3 fell")
    script.steps(3, range(28, 60), step_s=0.4, memory=1e9)
    found = summarize_run(run)
    old, new = found.layouts
    assert (old.last_step, new.first_step, new.planned) == (27, 28, False)
    assert (new.step_s.predicted, new.step_s.measured) == (None, pytest.approx(0.4))
    assert new.mfu.measured == pytest.approx(0.4 * (0.3 / 0.4) * 4 / 3)  # against the peak of three devices
    assert "not planned" in render_text(found)
    assert [one.world for one in read_launches(run, RunHistory.open(run))] == [4], "what was lost is rented on"


def test_a_run_of_one_layout_has_one_segment(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json=json.dumps(plan(FOUR, step_s=0.3, memory=1e9)))
    script = Script(run)
    script.launch(4, FOUR, first=0, plan_number=1)
    script.steps(4, range(10), step_s=0.3, memory=1e9)
    script.launch(4, FOUR, first=8, plan_number=1, reason="rank 1 fell")
    script.steps(4, range(8, 20), step_s=0.3, memory=1e9)
    [found] = layout_spans(run, RunHistory.open(run))
    assert (found.first, found.last, found.generations) == (0, 19, (1, 2))
    assert "LAYOUTS" not in render_text(summarize_run(run))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero": 1, "shard": 1},
        {"virtual_pipeline": 2, "tensor": 4, "context": 2, "expert": 2},
        {"schedule": "zero-bubble", "recompute": "full", "offload": "optimizer", "compression": "int8"},
    ],
)
def test_a_layout_is_named_as_the_plan_names_it(changes: dict[str, Any]) -> None:
    layout = {**FOUR, **changes}
    assert layout_name(layout) == Layout(**layout).name


def test_who_asks_for_the_plan_of_a_step_gets_that_of_its_layout(tmp_path: Path) -> None:
    run = resumed(tmp_path, numbered=True)
    history = RunHistory.open(run)
    asked = [at(plan_at_step(run, history, step), "prediction")["step_s"] for step in (0, 39, 40, 99, None)]
    assert asked == [0.2, 0.2, 0.8, 0.8, 0.8]


def test_a_calibration_takes_the_steps_of_the_plans_own_layout(tmp_path: Path) -> None:
    run = resumed(tmp_path, numbered=True)
    assert _newest_layout(run.path) == [1.0] * SECOND
    run.plan_json.write_text(json.dumps(plan({**TWO, "tensor": 2}, step_s=0.1, memory=1e9)))
    with pytest.raises(UserError, match=r"has no step in the layout of its plan\.json"):
        _newest_layout(run.path)
