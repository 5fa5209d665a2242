"""The quick walk comes to the same as the plain one."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict

import pytest
from synthetic import write_run

from phalanx.record.account.ledger import LedgerStream, LedgerWalk, walk_ledger
from phalanx.record.account.time_accounts import LedgerBuilder
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.rules.log import stream
from phalanx.rules.log.stream import LogStream


def both(run: Run) -> tuple[LedgerWalk, LedgerWalk]:
    history = RunHistory.open(run)
    return walk_ledger(run, history, least_bytes=0), walk_ledger(run, history, least_bytes=2**60)


def assert_same(run: Run) -> LedgerWalk:
    quick, plain = both(run)
    assert asdict(quick.ledger.accounts) == pytest.approx(asdict(plain.ledger.accounts), abs=2e-4)
    for name in ("wall_s", "overlap_s"):
        assert getattr(quick.ledger, name) == pytest.approx(getattr(plain.ledger, name), abs=2e-4)
    for name in ("steps", "steps_lost", "incidents", "formations", "unreadable_lines", "clock_jumps"):
        assert getattr(quick.ledger, name) == getattr(plain.ledger, name), name
    assert len(quick.trail) == len(plain.trail)
    for one, other in zip(quick.trail, plain.trail, strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    assert quick.recoveries == plain.recoveries
    return quick


@pytest.mark.parametrize("incidents", [0, 1, 4])
@pytest.mark.parametrize("straggler", [None, 1])
def test_the_same_ledger(tmp_path, monkeypatch, incidents, straggler):
    taken = []
    real = LedgerBuilder.take_steps
    monkeypatch.setattr(LedgerBuilder, "take_steps", lambda *all_: taken.append(real(*all_)) or taken[-1])
    run = write_run(tmp_path, ranks=2, hosts=1, steps=300, incidents=incidents, straggler=straggler)
    found = assert_same(run)
    assert any(taken)
    assert found.ledger.closes


def test_steps_that_claim_more_than_there_is_copies_and_comparisons(tmp_path):
    run, rng = write_run(tmp_path, ranks=1, hosts=1, steps=200, incidents=1), random.Random(2)
    lines = []
    for line in run.events(0).read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            event |= {"hold_s": rng.choice([None, 0.5, 3.0]), "guard_s": rng.choice([None, 0.2, 9.0])}
            event |= {
                "data_s": rng.choice([None, 0.1, 20.0]),
                "duration_s": event["duration_s"] * rng.choice([1, 0.5, 2]),
            }
        lines.append(json.dumps(event, separators=(",", ":")))
    run.events(0).write_text("\n".join(lines) + "\n")
    assert assert_same(run).ledger.overlap_s > 0


@pytest.mark.parametrize("at", [60, 61])
def test_a_clock_that_jumps_and_lines_that_are_none(tmp_path, at):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=120, incidents=0)
    lines = run.events(0).read_text().splitlines()
    for place in range(at, len(lines)):
        event = json.loads(lines[place])
        lines[place] = json.dumps(event | {"t": event["t"] - 500.0}, separators=(",", ":"))
    lines[30] = lines[30].replace('"duration_s":', '"duration_s":-')
    lines.insert(20, "torn {")
    run.events(0).write_text("\n".join(lines) + "\n")
    assert assert_same(run).ledger.clock_jumps == 1


def test_one_damaged_step_does_not_lose_the_ledger(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=120, incidents=0)
    lines = run.events(0).read_text().splitlines()
    lines[40] = re.sub(r'"epoch":\d+', '"epoch":[]', lines[40])
    run.events(0).write_text("\n".join(lines) + "\n")
    assert assert_same(run).ledger.steps > 100


# ---- the ledger while events pass by ---------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch):
    """Whether what passed by was of use, for every account that was made; runs of any size are long enough."""
    found, make, fits = [], LedgerStream.of, LedgerStream.fits
    monkeypatch.setattr(stream.LedgerStream, "of", lambda *all_: make(*all_, least_bytes=0))
    monkeypatch.setattr(LedgerStream, "fits", lambda *all_: found.append(fits(*all_)) or found[-1])
    return found


@pytest.mark.parametrize("incidents", [0, 3])
def test_what_passes_by_comes_to_the_same(tmp_path, used, incidents):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=300, incidents=incidents)
    log = LogStream(run)
    log.refresh()
    found = log.facts()
    assert used == [True]
    assert found.ledger == walk_ledger(run, RunHistory.open(run), least_bytes=0).ledger


def test_a_formation_that_began_elsewhere_than_told_is_walked_again(tmp_path, used):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=200, incidents=1)
    lines = run.events(0).read_text().splitlines()
    place = max(place for place, line in enumerate(lines) if '"run_start"' in line)
    event = json.loads(lines[place])
    lines[place] = json.dumps(event | {"step": event["step"] - 5}, separators=(",", ":"))
    run.events(0).write_text("\n".join(lines) + "\n")
    log = LogStream(run)
    log.refresh()
    found = log.facts()
    assert used == [False]
    assert found.ledger == walk_ledger(run, RunHistory.open(run), least_bytes=0).ledger


def test_a_run_that_grew_meanwhile_is_walked_again(tmp_path, used):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=200, incidents=0)
    lines = run.events(0).read_text().splitlines(keepends=True)
    run.events(0).write_text("".join(lines[:-50]))
    log = LogStream(run)
    log.refresh()
    with run.events(0).open("a") as file:
        file.write("".join(lines[-50:]))
    found = log.facts()
    assert used == []
    assert found.ledger == walk_ledger(run, RunHistory.open(run), least_bytes=0).ledger


def test_a_run_read_bit_by_bit_is_walked_at_the_end(tmp_path, used):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=200, incidents=0)
    log = LogStream(run)
    while log.refresh(20_000):
        pass
    assert log.facts().ledger == walk_ledger(run, RunHistory.open(run), least_bytes=0).ledger
    assert used == []
