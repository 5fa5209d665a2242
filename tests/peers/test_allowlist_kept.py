"""The owner's list on disk: what a peer hears of is there after a restart, and two commands at once lose nothing."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from crew import Crew, together

import phalanx
from phalanx.errors import UserError
from phalanx.peers.allowlist import AllowList
from phalanx.peers.identity import PeerIdentity
from phalanx.record.run import Run, create_run
from phalanx.train.slow_links.peer_session import (
    ALLOWED,
    STATUS,
    PeerSession,
    SessionFacts,
    peers_folder,
    write_session,
)


def owned_run(folder: Path) -> tuple[Run, PeerIdentity, AllowList]:
    """Of an owner and two more peers, `south` and `west`."""
    run = create_run(folder, "owned", job_toml="", job={}, plan_json="{}")
    owner = PeerIdentity.create("owner")
    others = [PeerIdentity.create(name).certificate_pem for name in ("south", "west")]
    allowed = AllowList.create(owner, run.run_id, others)
    write_session(run, owner, allowed, SessionFacts(group=run.run_id))
    return run, owner, allowed


def test_a_list_that_came_over_the_network_is_handed_out_to_be_kept() -> None:
    kept: list[AllowList] = []
    with Crew(4) as crew:
        groups = crew.join_all(3, [{}, {"keep_allowed": kept.append}, {}])
        newer = crew.allowed.revoke(crew.people[0], crew.people[2].id)
        groups[0].set_allowed(newer)
        crew.wait_for(lambda: "revoked" in [event.kind for event in crew.events[1]])
        groups[1].close()
    assert kept == [newer]


def test_a_session_keeps_a_newer_list_and_never_an_older_one(tmp_path: Path) -> None:
    run, owner, allowed = owned_run(tmp_path)
    path = peers_folder(run) / ALLOWED
    before = path.stat().st_mode
    session = SimpleNamespace(_allowed=allowed, _folder=peers_folder(run))
    south = next(one for one, name in allowed.fingerprints().items() if name == "south")
    newer = allowed.revoke(owner, south)
    PeerSession._keep_allowed(session, newer)  # type: ignore[arg-type]
    assert session._allowed == newer
    assert AllowList.load(path) == newer
    assert path.stat().st_mode == before
    PeerSession._keep_allowed(session, allowed)  # type: ignore[arg-type]
    assert session._allowed == AllowList.load(path) == newer


def test_commands_at_the_same_time_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to have read the list waits for the other, which may not read before the first has written."""
    run, _, allowed = owned_run(tmp_path)
    path, met, save = peers_folder(run) / ALLOWED, threading.Barrier(2), AllowList.save

    def save_last(self: AllowList, where: Path) -> None:
        with suppress(threading.BrokenBarrierError):
            met.wait(1.0)  # both have read: nobody was kept out
        save(self, where)

    monkeypatch.setattr(AllowList, "save", save_last)
    together(
        [
            lambda: phalanx.peers.revoke(run, "south"),
            lambda: phalanx.peers.invite(run, "new", out=tmp_path / "new.json", addresses=["127.0.0.1:1"]),
        ]
    )
    found = AllowList.load(path)
    assert found.version == allowed.version + 2
    assert set(found.fingerprints().values()) == {"owner", "west", "new"}
    assert "south" in dict(found.revoked_names).values()


def test_a_revoked_peer_keeps_its_name_and_is_revoked_once(tmp_path: Path) -> None:
    run, _, _ = owned_run(tmp_path)
    table = phalanx.peers.revoke(run, "south")
    gone = next(one for one in table.members if one["state"] == "revoked")
    assert gone["name"] == "south"
    for name in ("south", gone["id"]):
        with pytest.raises(UserError, match=f"{name} was revoked already"):
            phalanx.peers.revoke(run, name)
    with pytest.raises(UserError, match="there is no peer called north"):
        phalanx.peers.revoke(run, "north")
    phalanx.peers.invite(run, "south", out=tmp_path / "again.json", addresses=["127.0.0.1:1"])  # a new key
    states = [one["state"] for one in phalanx.peers.revoke(run, "south").members if one["name"] == "south"]
    assert states == ["revoked", "revoked"]


def test_a_refusal_of_going_on_alone_has_one_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = owned_run(tmp_path)
    (peers_folder(run) / STATUS).write_text('{"t": 9e15}')  # it runs
    answer = {"answer": {"refusal": "peers: a majority of the peers is here: nobody has to be given up"}}
    monkeypatch.setattr("phalanx.api.peers.load_json", lambda path, most: answer)
    with pytest.raises(UserError) as caught:
        phalanx.peers.go_on_alone(run)
    assert str(caught.value) == f"{run.path}: a majority of the peers is here: nobody has to be given up"
