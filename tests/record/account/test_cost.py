"""What a run costs: so far, at its end, and where each number comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record.account import cost as cost_module
from phalanx.record.account.cost import run_cost, used_energy
from phalanx.record.account.ledger import read_ledger
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run


def monitors(run: Run, rank: int, values: list[object], source: str = "nvml") -> None:
    """A rank's counter, one reading after each of its steps."""
    lines = []
    for step, value in enumerate(values):
        t = 1000.0 + step
        fields = {"v": 1, "t": t, "rank": rank}
        lines.append(json.dumps({"event": "step", "step": step, "duration_s": 1.0, "epoch": 1, **fields}))
        lines.append(json.dumps({"event": "monitor", "energy_j": value, "energy_source": source, **fields}))
    run.events(rank).write_text("\n".join(lines) + "\n")


def test_a_run_that_is_done(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60)
    found, wall_s = run_cost(run), read_ledger(run).wall_s
    assert found.usd == pytest.approx(4 * wall_s / 3600 * 3.25)
    assert found.energy_j == pytest.approx(4 * 650 * wall_s, rel=0.05)  # the counters are read every 10 s
    assert found.kgco2e == pytest.approx(found.energy_j / 3.6e6 * 1.1 * 0.3327, rel=0.01)
    assert found.projected == found.so_far
    assert found.energy_source == "nvml"
    assert found.sources["energy_j"] == "nvml, summed over ranks and restarts"
    assert found.sources["usd"].startswith("4 devices × hours × $3.25; ")


def test_a_run_that_is_half_way_costs_twice_as_much_at_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60, incidents=0, finished=False)
    found = run_cost(run)
    once_s = read_ledger(run).accounts.init + read_ledger(run).accounts.compile
    assert found.projected_wall_s == pytest.approx(2 * found.wall_s - once_s, rel=1e-3)
    ahead = found.projected_wall_s / found.wall_s
    assert found.projected.usd == pytest.approx(found.so_far.usd * ahead)
    assert found.projected.kgco2e == pytest.approx(found.so_far.kgco2e * ahead)


def test_counters_begin_again_with_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(path=tmp_path)
    monitors(run, 0, [10.0, 50.0, None, "x", 5.0, 20.0])
    monitors(run, 1, [10.0, 20.0, 30.0, 40.0, -7.0, 1e300], source="rapl")
    found = used_energy(RunHistory.open(run))
    assert found is not None
    assert (found.energy_j, found.ranks) == (50.0 + 20.0, 1)  # rank 1's newest reading is none
    monitors(run, 1, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], source="rapl\x1b[2J")
    found = used_energy(RunHistory.open(run))
    assert found is not None
    assert (found.energy_j, found.ranks, found.source) == (130.0, 2, "nvml, rapl [2J")
    monkeypatch.setattr(cost_module, "MOST_READ_BYTES", 10)  # as of a run too large to be read
    coarse = used_energy(RunHistory.open(run))
    assert coarse is not None
    assert (coarse.energy_j, coarse.ranks) == (pytest.approx(130.0), 2)


def test_a_counter_that_begins_anew_above_its_last_value(tmp_path: Path) -> None:
    """The first sample of a membership holds what was used since the last one: 150 J after 100 J is 150 J more."""
    run = Run(path=tmp_path)
    readings = [(1, 40.0), (1, 100.0), (2, None), (2, 150.0), (2, 209.0), (None, 210.0), (4, 5.0)]
    fields = {"v": 1, "event": "monitor", "rank": 0, "energy_source": "nvml"}
    lines = [
        json.dumps({**fields, "t": 1000.0 + number, "energy_j": value} | ({} if epoch is None else {"epoch": epoch}))
        for number, (epoch, value) in enumerate(readings)
    ]
    run.events(0).write_text("\n".join(lines) + "\n")
    found = used_energy(RunHistory.open(run))
    assert found is not None
    assert found.energy_j == 100.0 + 210.0 + 5.0


def test_ranks_without_a_counter_count_like_the_others(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=30, incidents=0)
    with_all = run_cost(run).energy_j
    lines = [line for line in run.events(3).read_text().splitlines() if '"monitor"' not in line]
    run.events(3).write_text("\n".join(lines) + "\n")
    found = run_cost(run)
    assert found.energy_j == pytest.approx(with_all)
    assert found.sources["energy_j"].endswith("; 1 of 4 ranks have no counter and count like the others")


def test_without_any_counter_the_plan_is_asked_and_it_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=30, incidents=0, monitor=False)
    found, plan = run_cost(run), run.plan()
    assert found.energy_j == pytest.approx(plan["bill"]["watts_per_device"] * 4 * found.wall_s)
    assert found.energy_source == "plan"
    assert found.sources["energy_j"].startswith("no counter: the plan's ")


@pytest.mark.parametrize("ranks", [0, 1])
def test_nothing_is_said_of_energy_until_the_counters_can_have_spoken(tmp_path: Path, ranks: int) -> None:
    """The plan's power first and a counter then made what was used fall; so did each rank that read its own later."""
    run = write_run(tmp_path, steps=30, incidents=0, finished=False, monitor=False)
    for rank in range(ranks):
        reading = {"v": 1, "event": "monitor", "t": 2e9, "rank": rank, "energy_j": 5.0, "energy_source": "rapl"}
        with run.events(rank).open("a") as file:
            file.write(json.dumps(reading) + "\n")
    plan = run.plan()
    said = run_cost(run)
    assert said.energy_source == ("rapl" if ranks else "plan"), "it is old enough to know that no more will come"
    plan["job"]["telemetry"] = {"interval_s": said.wall_s}
    run.plan_json.write_text(json.dumps(plan))
    found = run_cost(run)
    assert (found.energy_j, found.kgco2e, found.projected.energy_j, found.energy_source) == (None, None, None, "")
    assert found.sources["energy_j"] == "not known yet: the ranks have not read their counters"
    assert found.usd == said.usd
    run.set_status("stopped")
    assert run_cost(run).energy_j == said.energy_j


@pytest.mark.parametrize("bill", [{}, {"usd_per_device_hour": "x", "pue": [], "watts_per_device": None}, 3, None])
def test_a_bill_that_says_nothing(tmp_path: Path, bill: object) -> None:
    run = write_run(tmp_path, steps=10, incidents=0, monitor=False)
    run.plan_json.write_text(json.dumps(run.plan() | {"bill": bill}))
    found = run_cost(run)
    assert (found.usd, found.energy_j, found.kgco2e, found.energy_source) == (None, None, None, "")
    assert found.sources["energy_j"] == "not known: no counter, and no power in the plan"


def test_an_empty_folder(tmp_path: Path) -> None:
    found = run_cost(Run(path=tmp_path))
    assert (found.usd, found.projected_wall_s, found.device_hours) == (None, None, 0.0)


def test_more_ranks_than_the_plan_has_devices_are_not_paid_for(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60)
    before = run_cost(run)
    run.set_launch(**{**run.launch(), "world": 10**9})
    assert run_cost(run) == before
