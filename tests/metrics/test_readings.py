"""The numbers of a run at one moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import TOKENS, write_run

from phalanx.metrics import names
from phalanx.metrics.readings import MetricPoint, Readings
from phalanx.record.events import read_events
from phalanx.record.run import Run


def values(points: list[MetricPoint], metric: names.Metric) -> dict[tuple[str, ...], float]:
    found = [one for one in points if one.metric is metric]
    assert len({one.labels for one in found}) == len(found), f"{metric.name}: a series twice"
    return {one.labels: one.value for one in found}


def test_numbers_are_those_of_the_record(finished: Run) -> None:
    points = Readings(finished).points()
    newest = [event for event in read_events(finished.events(0))[0] if event["event"] == "step"][-1]
    for metric in names.STEP:
        if newest[metric.field] is not None:
            assert values(points, metric) == {(): newest[metric.field]}, metric.name
    assert values(points, names.DONE) == {(): 120}
    assert values(points, names.TOKENS) == {(): 120 * TOKENS}
    assert values(points, names.INCIDENTS) == {(): 1}
    prediction = finished.plan()["prediction"]
    mfu = prediction["mfu"] * newest["tokens_per_s"] / prediction["tokens_per_s"]
    assert values(points, names.MFU) == {(): pytest.approx(mfu)}
    assert values(points, names.CHECKPOINT) == {("stage",): 1.6, ("commit",): 9.5}
    assert set(values(points, names.PEER_RTT)) >= {("0", "1", "tensor", "50"), ("3", "1", "data", "99")}
    assert set(values(points, names.COLLECTIVE)) == {("all_gather", "data"), ("reduce_scatter", "data")}
    assert values(points, names.GOODPUT)["run",] == pytest.approx(
        values(points, names.TIME)["productive",] / sum(values(points, names.TIME).values()), abs=0.01
    )
    assert values(points, names.COST)["so_far",] > 0


def test_only_what_a_cpu_run_lacks_is_missing(finished: Run) -> None:
    """Every metric of the table has a value in a complete GPU run, apart from those of CPUs and of experts."""
    there = {one.metric.name for one in Readings(finished).points()}
    assert {one.name for one in names.METRICS} - there == {one.name for one in names.CPU} | {"train.expert.imbalance"}


def test_ranks_have_series_of_their_own_up_to_a_limit(finished: Run) -> None:
    compute = names.RANK_STEP[0]
    each = values(Readings(finished).points(), compute)
    assert sorted(each) == [("0", "host-0"), ("1", "host-0"), ("2", "host-1"), ("3", "host-1")]
    few = Readings(finished, most_ranks=3).points()
    spread = values(few, compute)
    assert set(spread) == {("min", ""), ("median", ""), ("max", "")}
    assert spread["min", ""] == min(each.values())
    assert spread["max", ""] == max(each.values())
    assert {labels[:2] for labels in values(few, names.PEER_RTT)} == {("all", "all")}


def test_a_cpu_run_has_process_names(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=2, steps=10, incidents=0)
    plan = run.plan()
    plan["cluster"]["accelerator"]["family"] = "cpu"
    run.plan_json.write_text(json.dumps(plan))
    there = {one.metric.name for one in Readings(run).points()}
    assert {"process.memory.usage", "process.cpu.utilization"} <= there
    assert not any(name.startswith("hw.gpu.") for name in there)


def test_tokens_stand_still_while_undone_steps_are_made_up(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=1, steps=20, incidents=0, finished=False, hosts=1)
    readings = Readings(run)
    before = values(readings.points(), names.TOKENS)[()]
    last = [event for event in read_events(run.events(0))[0] if event["event"] == "step"][-1]
    with run.events(0).open("a") as file:
        file.write(json.dumps({**last, "t": last["t"] + 9, "step": 10, "epoch": 2}) + "\n")
    points = readings.points()
    assert values(points, names.DONE) == {(): 11}
    assert values(points, names.TOKENS) == {(): before}


def test_ranks_that_were_left_behind_are_gone(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=4, steps=10, incidents=0, finished=False)
    epoch = {"v": 1, "event": "epoch", "t": 2e9, "rank": -1, "epoch": 2, "world": 3, "layout": {}, "members": []}
    with run.supervisor.open("a") as file:
        file.write(json.dumps(epoch) + "\n")
    assert len(values(Readings(run).points(), names.RANK_STEP[0])) == 3


def test_the_story_is_asked_for_seldom(finished: Run) -> None:
    now = [0.0]
    readings = Readings(finished, clock=lambda: now[0])
    first = [one for one in readings.points() if one.metric is names.TIME]
    run_again = [one for one in readings.points() if one.metric is names.TIME]
    assert all(new is old for new, old in zip(run_again, first, strict=True))
    now[0] = 16.0
    assert all(new is not old for new, old in zip(readings.points()[-5:], first[-5:], strict=True))


def test_a_damaged_run_tells_what_it_can(damaged: Run) -> None:
    points = Readings(damaged).points()
    assert values(points, names.DAMAGE)[()] >= 2
    assert values(points, names.INFO) == {("", "", "", "unknown"): 1}
    assert all("\x1b" not in label for one in points for label in one.labels)
    assert all(one.value == one.value and abs(one.value) != float("inf") for one in points)
