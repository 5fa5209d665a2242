"""Runs that are damaged: every address still answers with what there is, and says what is missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dashboard import Dashboard, dashboard
from synthetic import write_run

from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.web.run_store import open_run_store
from phalanx.web.run_views import _run_standing, run_progress

pytest.importorskip("uvicorn")

PATHS = (
    "",
    "/curves?names=loss,tokens_per_s,mfu,utilization,noise_scale",
    "/marks",
    "/mesh?name=compute_s",
    "/ranks/0",
    "/ranks/1",
    "/step",
    "/ledger",
    "/plan",
    "/findings",
    "/verdicts",
    "/cost",
)
ODD = ["x", "", None, True, -1, 2**70, 1e308, [], {}, [[1]], {"a": []}, "\x1b[2J<script>alert(1)</script>", "\ud800"]


def torn(run: Run) -> None:
    for path in run.event_files():
        path.write_bytes(path.read_bytes()[:-37])
    run.supervisor.write_bytes(run.supervisor.read_bytes()[:-20])


def binary(run: Run) -> None:
    for path in (*run.event_files(), run.supervisor):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + os.urandom(5000) + b"\n" + data[len(data) // 2 :])


def no_plan(run: Run) -> None:
    run.plan_json.write_text("{")


def odd_plan(run: Run) -> None:
    run.plan_json.write_text(json.dumps({key: ["<b>", None] for key in run.plan()}))


def wrong_jsons(run: Run) -> None:
    for name in ("launch.json", "status.json", "job.json"):
        (run.path / name).write_text("[1, 2")


def no_events(run: Run) -> None:
    for path in (*run.event_files(), run.supervisor, run.path / "launch.json", run.path / "status.json"):
        path.unlink()


def missing_rank(run: Run) -> None:
    run.events(0).unlink()


def folders_for_files(run: Run) -> None:
    for path in (run.events(1), run.supervisor, run.path / "status.json"):
        path.unlink()
        path.mkdir()


def pipes_for_files(run: Run) -> None:
    """Opening one would wait for somebody to write into it."""
    for path in (run.events(1), run.supervisor, run.path / "status.json", run.path / "launch.json"):
        path.unlink()
        os.mkfifo(path)


def clock_jumps(run: Run) -> None:
    lines = run.events(0).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for number, event in enumerate(events):
        event["t"] += (-1e9, 1e9, 0.0)[number % 3]
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in events))


def wrong_types(run: Run) -> None:
    """Every field of every kind of event, in turn, as something it is not."""
    for path in (*run.event_files(), run.supervisor):
        lines = path.read_text().splitlines()
        changed = []
        for number, line in enumerate(lines):
            event = json.loads(line)
            fields = [name for name in event if name != "event"]
            event[fields[number % len(fields)]] = ODD[number % len(ODD)]
            changed.append(json.dumps(event))
        path.write_text("\n".join(changed) + "\n")


def odd_supervisor(run: Run) -> None:
    """Every field of every event as everything it is not."""
    lines = run.supervisor.read_text().splitlines()
    changed = [
        json.dumps({**event, name: odd})
        for event in map(json.loads, lines)
        for name in event
        if name != "event"
        for odd in ODD
    ]
    run.supervisor.write_text("\n".join(changed) + "\n")


def huge_numbers(run: Run) -> None:
    event = {"v": 1, "event": "step", "t": 1e300, "rank": 0, "tokens": 1e308, "duration_s": 1e-300, "loss": 1e308}
    with run.events(0).open("a") as file:
        for step in range(60, 80):
            file.write(json.dumps({**event, "step": step}) + "\n")


def unknown_kinds(run: Run) -> None:
    with run.events(0).open("a") as file:
        for number in range(3000):
            file.write(json.dumps({"v": 9, "event": f"kind-{number % 7}", "t": 1.0, "step": "no"}) + "\n")


def everything_gone(run: Run) -> None:
    shutil.rmtree(run.path / "checkpoints")
    for path in run.path.iterdir():
        if path.is_file():
            path.write_bytes(b"")


HARMS: list[Callable[[Run], None]] = [
    torn, binary, no_plan, odd_plan, wrong_jsons, no_events, missing_rank, folders_for_files,
    pipes_for_files, clock_jumps, wrong_types,
    odd_supervisor, huge_numbers, unknown_kinds, everything_gone,
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    root = tmp_path_factory.mktemp("runs")
    good = write_run(root, name="good", ranks=2, steps=60)
    for harm in HARMS:
        run = Run(path=root / harm.__name__)
        shutil.copytree(good.path, run.path)
        harm(run)
    with dashboard(root) as found:
        yield found
        assert found.complaints == []


@pytest.mark.parametrize("name", [harm.__name__ for harm in HARMS])
def test_every_address_answers(page: Dashboard, name: str) -> None:
    for path in PATHS:
        found = page.get(f"/api/runs/{name}{path}")
        assert found.status == 200, (path, found.status, found.body)
        found.json()
        assert b"Traceback" not in found.body
    stream = page.raw(
        f"GET /api/runs/{name}/stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(), least=900
    )
    assert b"event: progress" in stream


def test_the_list_shows_all_of_them(page: Dashboard) -> None:
    rows = {row["name"]: row for row in page.json("/api/runs")["runs"]}
    assert set(rows) == {"good", *(harm.__name__ for harm in HARMS)}


@pytest.mark.parametrize("name", ["torn", "binary", "no_plan", "folders_for_files"])
def test_damage_is_said(page: Dashboard, name: str) -> None:
    found = page.json(f"/api/runs/{name}")["damage"]
    assert found
    assert all(set(one) == {"where", "what", "count"} for one in found)
    assert len({(one["where"], one["what"]) for one in found}) == len(found)  # each once


def test_what_is_left_is_shown(page: Dashboard) -> None:
    good = page.json("/api/runs/good/curves?names=loss")["curves"]["loss"]
    found = page.json("/api/runs/binary/curves?names=loss")["curves"]["loss"]
    assert len(found["step"]) >= len(good["step"]) - 5
    assert page.json("/api/runs/good")["damage"] == []


def test_a_run_deleted_while_looked_at_is_not_found(page: Dashboard, tmp_path: Path) -> None:
    root = page.store.root
    shutil.copytree(root / "good", root / "brief")
    assert page.get("/api/runs/brief").status == 200
    shutil.rmtree(root / "brief")
    assert page.get("/api/runs/brief").status == 404
    assert page.get("/api/runs").status == 200


def test_the_list_tells_of_other_ranks_and_of_no_time_below_zero(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="one", ranks=2, steps=60)
    assert _run_standing(open_run_store(tmp_path), run)["damage"] == 0
    rate = run_progress(run, run.plan(), RunHistory.open(run))["tokens_per_s"]
    data = run.events(1).read_bytes()
    run.events(1).write_bytes(data[: len(data) // 2] + b"\x00\xff\n" + data[len(data) // 2 :])
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    for event in events:
        if event.get("step") == 59 and event["event"] == "step":
            event["duration_s"] = -1000.0
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert _run_standing(open_run_store(tmp_path), run)["damage"] == 1
    assert run_progress(run, run.plan(), RunHistory.open(run))["tokens_per_s"] == pytest.approx(rate, rel=0.1)
