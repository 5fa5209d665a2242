"""A peer's place in a run folder: what peers must agree on, invitations, revocation, and screening by loss."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_group import LocalGroup, LocalHub
from peer_trials import join_all
from tiny_dataset import write_dataset

import phalanx
from phalanx.api.peer_processes import run_processes
from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.job.sync_section import SyncSettings
from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import MemberView, PeerEvent
from phalanx.peers.identity import PeerIdentity
from phalanx.record.report.render import resume_command
from phalanx.record.run import Run, create_run
from phalanx.train.slow_links import peer_launch
from phalanx.train.slow_links.peer_session import (
    PeerSession,
    SessionFacts,
    read_session,
    run_facts,
    write_session,
)
from phalanx.train.slow_links.training_entry import TrainingEntry


@pytest.fixture
def owner(trials, tmp_path: Path) -> Run:
    """The run folder of an owner that has never trained."""
    plan = trials.plan('mode = "target-batch"')
    job = job_to_dict(plan.job)
    run = create_run(tmp_path / "runs", "owner", job_toml=to_toml(job), job=job, plan_json=plan.to_json())
    identity = PeerIdentity.create("owner")
    write_session(run, identity, AllowList.create(identity, run.run_id), SessionFacts(group=run.run_id))
    return run


def test_peers_agree_on_model_data_and_code(trials, tmp_path: Path) -> None:
    job = trials.plan('mode = "diloco"\npeers = 2').job
    same = run_facts(replace(job, sync=replace(job.sync, peers=5, dead_after_s=9.0)), tmp_path, "run")
    assert same == run_facts(job, tmp_path, "run")  # how many the plan assumes is each peer's own
    faster = replace(job, optim=replace(job.optim, lr=1.0))
    assert run_facts(faster, tmp_path, "run").model_digest != same.model_digest
    (tmp_path / "other").mkdir()
    other = write_dataset(tmp_path / "other", documents=300)
    elsewhere = run_facts(replace(job, data=replace(job.data, paths=(str(other),))), tmp_path, "run")
    assert elsewhere.tokenizer_digest != same.tokenizer_digest
    assert elsewhere.model_digest == same.model_digest


def test_a_report_says_how_one_peer_is_resumed(owner: Run) -> None:
    assert resume_command(owner.path) == f"phalanx peers start --resume {owner.path}"
    owner.set_launch(is_trial=True)
    assert resume_command(owner.path) == f"phalanx train --resume {owner.path}"


@pytest.mark.parametrize(
    ("launch", "setting", "text"),
    [
        ({"is_trial": True}, "", ""),
        ({"is_trial": True, "drills_liars": False}, "", ""),
        ({}, "", 'updates are aggregated by "clipped-mean" (members were invited)'),
        (
            {"is_trial": True, "drills_liars": True},
            "",
            'updates are aggregated by "clipped-mean" (a drill of liars, as where members were invited)',
        ),
        ({"is_trial": True, "drills_liars": True}, 'aggregation = "mean"', ""),
        (
            {"is_trial": True, "drills_liars": True},
            'aggregation = "median"',
            'updates are aggregated by "median" (sync.aggregation)',
        ),
    ],
)
def test_a_drill_of_liars_aggregates_as_among_invited_members(
    owner: Run, trials, launch: dict[str, Any], setting: str, text: str
) -> None:
    owner.set_launch(**launch)
    session = PeerSession(owner, trials.plan(f'mode = "target-batch"\n{setting}').job)
    events: list[PeerEvent] = []
    session.tell_events(events.append)
    session.close()
    assert [event.text for event in events if event.kind == "aggregation"] == ([text] if text else [])


def test_an_invitation_is_private_and_carries_the_job(owner: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the peer has never listened"):
        phalanx.peers.invite(owner, "berlin")
    made = phalanx.peers.invite(owner, "berlin", out=tmp_path / "berlin.json", addresses=["127.0.0.1:29400"])
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert "[sync]" in json.loads(made.path.read_text())["job_toml"]
    assert "phalanx peers join berlin.json" in str(made)
    with pytest.raises(UserError, match="a peer called berlin is invited already"):
        phalanx.peers.invite(owner, "berlin", out=tmp_path / "again.json", addresses=["127.0.0.1:29400"])
    assert {one["name"]: one["state"] for one in phalanx.peers.members(owner).members} == {
        "owner": "away",
        "berlin": "away",
    }


def test_only_the_owner_revokes_and_only_whom_it_knows(owner: Run, tmp_path: Path) -> None:
    phalanx.peers.invite(owner, "berlin", out=tmp_path / "berlin.json", addresses=["127.0.0.1:29400"])
    with pytest.raises(UserError, match="there is no peer called paris"):
        phalanx.peers.revoke(owner, "paris")
    table = phalanx.peers.revoke(owner, "berlin")
    assert "revoked" in {one["state"] for one in table.members}
    guest = create_run(tmp_path / "runs", "guest", job_toml="", job={}, plan_json="{}")
    allowed = AllowList.load(owner.path / "peers" / "allowlist.json")
    write_session(guest, PeerIdentity.create("guest"), allowed, replace(read_session(owner), addresses=(("h", 1),)))
    with pytest.raises(UserError, match="only the owner of a run invites and revokes"):
        phalanx.peers.revoke(guest, "berlin")


def test_going_on_alone_is_asked_of_a_running_peer(owner: Run, trials) -> None:
    with pytest.raises(UserError, match="this peer does not run"):
        phalanx.peers.go_on_alone(owner)
    owner.set_launch()
    session = PeerSession(owner, trials.plan('mode = "target-batch"').job)
    try:
        session.group.join()
        with pytest.raises(UserError, match="a majority of the peers is here: nobody has to be given up"):
            phalanx.peers.go_on_alone(owner)
        assert phalanx.peers.members(owner).has_majority
    finally:
        session.close()


def test_a_peer_that_a_vote_excluded_stays_so_and_is_listed(owner: Run, trials) -> None:
    job, liar = trials.plan('mode = "diloco"').job, "ab" * 8
    owner.set_launch()
    session = PeerSession(owner, job)
    session.group.join()
    session.group._node.excluded[liar] = "held-out loss 3.0 with its update"
    session._write_status()
    session.close()
    table = phalanx.peers.members(owner)
    assert {one["id"]: one["state"] for one in table.members}[liar] == "excluded"
    assert "was excluded by a vote: held-out loss 3.0 with its update" in str(table)
    again = PeerSession(owner, job)
    try:
        assert again.group.excluded == {liar: "held-out loss 3.0 with its update"}
        assert liar in again.group._node.revoked
    finally:
        again.close()


def test_an_update_that_raises_the_loss_is_left_out(trials) -> None:
    sync = 'mode = "diloco"\npeers = 2\nsynchronous_steps = 0\ninner_steps = 4\nscreening = "loss"'
    plan, hub = trials.plan(sync, steps=8), LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(2)]
    honest, poisoned = [], []

    def noise(length: int) -> np.ndarray:
        return np.random.default_rng(0).normal(size=length).astype(np.float32)

    def look(number, vector):
        if len(vector) > 1:
            honest.append(groups[0].training.score_update("peer-1", vector))
            poisoned.append(groups[0].training.score_update("peer-1", noise(len(vector))))
        return vector

    groups[0].poison = look
    peers = join_all([lambda group=group: trials.start(plan, group) for group in groups])
    assert peers[0].state == "done"
    assert honest == [None] * len(honest)
    assert len(poisoned) == 2
    assert all("raises the loss on held-out text" in str(one) for one in poisoned)


def test_a_peer_that_finds_nobody_leaves_when_it_is_asked_to() -> None:
    """It used to wait for as long as an answer may take, five minutes."""
    is_asked, is_closed = threading.Event(), threading.Event()

    class Unanswered:
        def join(self, addresses: object, *, timeout_s: float) -> MemberView:
            is_asked.set()
            is_closed.wait(timeout=20)  # as long as it takes a mistake to show
            raise SystemFailure(Problem(where="join", what=f"nobody within {timeout_s:g} s"))

    entry = TrainingEntry(
        Unanswered(),
        SyncSettings(mode="target-batch"),
        addresses=[("192.0.2.1", 7)],
        founds=True,
        is_allowed=lambda peer: True,
        stop=is_asked.is_set,
        patience_s=300.0,
    )
    try:
        with pytest.raises(SystemFailure, match=r"was stopped before a peer of the run had answered at 192\.0\.2\.1:7"):
            entry.join_group(0)
    finally:
        is_closed.set()


def test_a_trial_that_is_resumed_at_once_waits_for_the_new_address(
    owner: Run, trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of the process that has just ended names a port that no process listens on any more."""
    other = create_run(tmp_path / "runs", "other", job_toml="", job={}, plan_json="{}")
    allowed = AllowList.load(owner.path / "peers" / "allowlist.json")
    write_session(other, PeerIdentity.create("other"), allowed, replace(read_session(owner), addresses=(("h", 1),)))
    status = owner.path / "peers" / "status.json"
    status.write_text(json.dumps({"t": time.time() - 0.1, "address": ["127.0.0.1", 1]}))
    program = "import json, sys, time\n"
    program += "text = json.dumps({'t': time.time(), 'address': ['127.0.0.1', 2]})\n"
    program += "open(sys.argv[1] + '.new', 'w').write(text)\n"
    program += "import os; os.replace(sys.argv[1] + '.new', sys.argv[1])"
    addresses = {}

    def start_process(run: Run, *, allow_code: bool, sharers: int) -> subprocess.Popen[bytes]:
        addresses[run.path.name] = read_session(run).addresses
        command = ["-c", program, str(status)] if run.path == owner.path else ["-c", ""]
        return subprocess.Popen([sys.executable, *command])

    monkeypatch.setattr(peer_launch, "start_process", start_process)
    run_processes([owner, other], trials.plan('mode = "target-batch"'), allow_code=False, tell=lambda text: None)
    assert addresses[other.path.name] == (("127.0.0.1", 2),)
