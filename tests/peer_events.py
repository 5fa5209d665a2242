"""Events of a peer on slow links for a synthetic run: three peers, one of which is dropped once and then lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROUND_S, EXCHANGE_S = 10.0, 2.0
NORTH, SOUTH, WEST = "a1b2c3d4e5f60718", "b1b2c3d4e5f60718", "c1b2c3d4e5f60718"


def write_peer_events(run: Path, *, rounds: int = 10) -> None:
    """Append what a peer's loop records to the events of rank 0."""
    path = run / "events-00000.jsonl"
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    began = float(last["t"])
    events: list[dict[str, Any]] = [
        _peer(began, "joined", NORTH, "north", text="north is a member since view 1"),
        _peer(began, "joined", SOUTH, "south", text="south is a member since view 2"),
        _peer(began, "joined", WEST, "west", text="west is a member since view 3"),
        _exchange(began, 0, "meet", [NORTH, SOUTH, WEST], seconds=0.1),
    ]
    for number in range(1, rounds + 1):
        gone = number > rounds // 2
        members = [NORTH, SOUTH] if gone else [NORTH, SOUTH, WEST]
        dropped = {WEST: "its update is not finite"} if number == rounds // 2 else {}
        now = began + number * ROUND_S
        events.append(_exchange(now, number, "weights", members, dropped=dropped, credit=number * 8))
        if number == rounds // 2:
            events.append(_peer(now + 1, "lost", WEST, "west", text="west has been silent for 5 s"))
    members = [
        {"id": NORTH, "name": "north", "client_only": False, "up_mbps": 20.0, "down_mbps": 100.0, "step": 10},
        {"id": SOUTH, "name": "south", "client_only": False, "up_mbps": 20.0, "down_mbps": 50.0, "latency_s": 0.04},
    ]
    (run / "peers").mkdir()
    status = {"t": began, "id": NORTH, "view": 4, "round": rounds, "members": members, "mode": "diloco"}
    (run / "peers" / "status.json").write_text(json.dumps(status), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _peer(t: float, kind: str, peer: str, name: str, **more: Any) -> dict[str, Any]:
    return {"v": 1, "event": "peer", "rank": 0, "t": t, "kind": kind, "peer": peer, "name": name, **more}


def _exchange(
    t: float,
    number: int,
    kind: str,
    members: list[str],
    *,
    seconds: float = EXCHANGE_S,
    dropped: dict[str, str] | None = None,
    credit: int = 0,
) -> dict[str, Any]:
    return {
        "v": 1, "event": "exchange", "rank": 0, "t": t, "step": number, "round": number, "kind": kind,
        "members": members, "weights": dict.fromkeys(members, 2048.0), "dropped": dropped or {}, "fragment": 0,
        "seconds": seconds, "bytes_sent": 1000, "bytes_received": 1000,
        "shares": {members[0]: 0.75, members[1]: 0.25} if kind == "weights" else {},
        "credit": {NORTH: credit, SOUTH: credit} if credit else {},
    }  # fmt: skip
