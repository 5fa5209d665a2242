"""What the page of peers is told, of records that are whole and of records that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peer_events import write_peer_events
from synthetic import write_run

from phalanx.web.peer_views import peers_view
from phalanx.web.run_store import open_run_store


def test_peers_rounds_and_utilisation(tmp_path: Path) -> None:
    write_run(tmp_path, name="slow", ranks=1, steps=40, incidents=0)
    write_peer_events(tmp_path / "slow")
    found = peers_view(open_run_store(tmp_path), "slow")
    peers = {peer["name"]: peer for peer in found["peers"]}
    assert list(peers) == ["north", "south", "west"]  # who takes part comes first
    assert (peers["north"]["is_self"], peers["west"]["present"]) == (True, False)
    assert (peers["south"]["latency_s"], peers["south"]["up_mbps"]) == (0.04, 20.0)
    assert [peer["share"] for peer in peers.values()] == [0.75, 0.25, None]
    assert peers["north"]["credit_share"] == pytest.approx(0.5)
    assert peers["west"]["dropped"] == 1
    assert found["utilisation"] == pytest.approx(0.8)  # 2 s of every 10
    assert found["rounds"][-1]["bytes_sent"] == 1000
    assert found["rounds_in_all"] == 11
    assert any("lost" in one["kind"] for one in found["happened"])


def test_a_run_without_peers_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, name="plain", ranks=1, steps=20, incidents=0)
    found = peers_view(open_run_store(tmp_path), "plain")
    assert (found["peers"], found["rounds"], found["utilisation"]) == ([], [], None)


def test_damaged_events_are_no_reason_to_fail(tmp_path: Path) -> None:
    write_run(tmp_path, name="odd", ranks=1, steps=20, incidents=0)
    lines = [
        {"members": "all", "weights": 3, "dropped": [], "credit": None, "seconds": -1, "t": None},
        {"members": [1, None, {}], "dropped": {"x": {"y": 1}}, "credit": {"x": "many"}, "seconds": "long"},
    ]
    with (tmp_path / "odd" / "events-00000.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"v": 1, "event": "exchange", "rank": 0, "t": 1.0, **line}) + "\n")
        file.write(json.dumps({"v": 1, "event": "peer", "rank": 0, "t": 1.0, "latency_s": {}, "peer": 4}) + "\n")
    (tmp_path / "odd" / "peers").mkdir()
    (tmp_path / "odd" / "peers" / "status.json").write_text(
        '{"members": [3, {"id": 5}, {"id": "x", "up_mbps": "fast"}]}'
    )
    found = peers_view(open_run_store(tmp_path), "odd")
    assert len(found["rounds"]) == 2
