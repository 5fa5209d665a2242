"""The view of peers on slow links: their identity, links, contributions, and rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.io.values import at, integer, number, printable, seconds, text
from phalanx.record.events import Event
from phalanx.record.run_files import read_json
from phalanx.web.answer import AnswerParts, Json
from phalanx.web.run_store import RunStore
from phalanx.web.run_views import plan_of

MOST_ROUNDS = 400  # newest rounds in one answer
MOST_PEERS = 200
MOST_HAPPENED = 200
LINK = ("latency_s", "up_mbps", "down_mbps", "sent_bytes", "received_bytes")


def peers_view(store: RunStore, name: str) -> Json:
    """Return this peer's record about all peers. Each peer keeps a separate record."""
    parts, run = AnswerParts(), store.run(name)
    plan = plan_of(run)
    sync = at(plan, "job", "sync")
    with store.history(name) as history:
        rounds = parts.read("exchange", lambda: history.events("exchange"), [])
        happened = parts.read("peer", lambda: history.events("peer"), [])
        parts.note(parts.read("events", history.damage, ()))
    status_file = run.path / "peers" / "status.json"
    status = parts.read("peers/status.json", lambda: read_json(status_file), {}) if status_file.exists() else {}
    round_rows = [_round_row(event) for event in rounds]
    peers = _known_peers(rounds, happened, status if isinstance(status, dict) else {})
    return {
        "mode": text(sync, "mode"),
        "codec": text(sync, "codec"),
        "inner_steps": integer(sync, "inner_steps") if text(sync, "mode") in ("diloco", "quorum") else None,
        "planned_utilisation": _planned_utilisation(plan),
        # With a delay, training continues during an exchange, so its seconds are not waiting time.
        "utilisation": None if integer(sync, "delay_steps") else _utilisation(round_rows),
        "bytes_sent": sum(row["bytes_sent"] or 0 for row in round_rows),
        "bytes_received": sum(row["bytes_received"] or 0 for row in round_rows),
        "rounds_in_all": len(round_rows),
        "peers": peers[:MOST_PEERS],
        "rounds": round_rows[-MOST_ROUNDS:],
        "happened": [_happened_row(event) for event in happened if text(event, "text")][-MOST_HAPPENED:],
        "damage": parts.damage,
    }


def _planned_utilisation(plan: Json) -> float | None:
    """Return the utilisation in the plan of a cluster of sites; None for other plans."""
    sites = at(plan, "sites")
    rows, chosen = sites.get("rows"), integer(sites, "chosen")
    if not isinstance(rows, list) or chosen is None or not 0 <= chosen < len(rows):
        return None
    return number(at(rows[chosen], "prediction"), "utilisation")


def _utilisation(rounds: Sequence[Json]) -> float | None:
    """Return the share of the time between the first and the last exchange without waiting for an exchange."""
    timed = [row for row in rounds if row["t"] is not None and row["kind"] != "meet"]
    if len(timed) < 2:
        return None
    wall_s = timed[-1]["t"] - timed[0]["t"]
    waited_s = sum(row["seconds"] or 0.0 for row in timed[1:])
    return max(0.0, 1.0 - waited_s / wall_s) if wall_s > 0 else None


def _round_row(event: Event) -> Json:
    return {
        "t": number(event, "t"),
        "round": integer(event, "round"),
        "step": integer(event, "step"),
        "kind": text(event, "kind"),
        "fragment": integer(event, "fragment"),
        "seconds": seconds(event, "seconds"),
        "bytes_sent": number(event, "bytes_sent"),
        "bytes_received": number(event, "bytes_received"),
        "members": [printable(str(member))[:64] for member in _listed(event.get("members"))][:MOST_PEERS],
        "dropped": {
            printable(key)[:64]: printable(str(reason))[:200] for key, reason in _table(event, "dropped").items()
        },
    }


def _known_peers(rounds: Sequence[Event], happened: Sequence[Event], status: Json) -> list[Json]:
    """Return every recorded peer, those of the last round first; `status` is the present state of the group."""
    newest = rounds[-1] if rounds else {}
    present = {str(member) for member in _listed(newest.get("members"))}
    credit = _table(newest, "credit")
    rows_by_peer: dict[str, Json] = {}

    def entry(peer: str) -> Json:
        blank = {"id": printable(peer)[:64], "name": "", "is_self": False, "client_only": False, "share": None}
        return rows_by_peer.setdefault(peer, {**blank, **dict.fromkeys(LINK), "rounds": 0, "dropped": 0})

    for event_shares in rounds:
        for peer in _listed(event_shares.get("members")):
            entry(str(peer))["rounds"] += 1
        for peer in _table(event_shares, "dropped"):
            entry(peer)["dropped"] += 1
    for event_shares in happened:
        if peer := text(event_shares, "peer"):
            _take_link(entry(peer), event_shares)
    for event_shares in _listed(status.get("members")):
        if isinstance(event_shares, dict) and (peer := text(event_shares, "id")):
            _take_link(entry(peer), event_shares)
            rows_by_peer[peer]["is_self"] = peer == text(status, "id")
    shares = next((event_shares for event in reversed(rounds) if (event_shares := _table(event, "shares"))), {})
    for peer in present if shares else ():
        # A peer that averages nothing is not in the shares.
        rows_by_peer[peer]["share"] = number(shares, peer) or 0.0
    total_credit = sum(number(credit, peer) or 0.0 for peer in credit)
    rows = []
    for peer, row in rows_by_peer.items():
        peer_credit = number(credit, peer) or 0.0
        rows.append(
            {
                **row,
                "present": peer in present,
                "credit": peer_credit,
                "credit_share": peer_credit / total_credit if total_credit else None,
            }
        )
    return sorted(rows, key=lambda row: (not row["present"], row["name"] or row["id"]))


def _take_link(row: Json, said: Mapping[str, Any]) -> None:
    """Update a peer's row with newer facts about it."""
    if name := text(said, "name"):
        row["name"] = printable(name)[:64]
    for key in LINK:
        if (value := number(said, key)) is not None:
            row[key] = value
    if isinstance(said.get("client_only"), bool):
        row["client_only"] = said["client_only"]


def _happened_row(event: Event) -> Json:
    return {
        "t": number(event, "t"),
        "step": integer(event, "step"),
        "kind": text(event, "kind"),
        "peer": printable(text(event, "peer") or "")[:64],
        "text": printable(text(event, "text") or "")[:400],
    }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _table(event: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = event.get(key)
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}
