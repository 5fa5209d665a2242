"""`phalanx peers`: real processes that meet over TLS, one that is killed, one that joins late; and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_dataset import write_dataset

import phalanx
from phalanx.cli.main import main
from phalanx.peers.allowlist import AllowList
from phalanx.peers.identity import PeerIdentity
from phalanx.peers.invitation import Invitation
from phalanx.record.events import read_events
from phalanx.record.run import Run, list_runs

PATIENCE_S = 600.0  # on a machine that others use too; a bound for what never comes
JOB = """
name = "peers"
[model]
layers = 2
hidden = 16
heads = 2
head_dim = 8
ffn = 32
vocab = 300
[data]
path = "{data}"
sequence = 16
tokens = {tokens}
[batch]
global_sequences = 6
micro = 1
[optim]
lr = 3e-3
[precision]
compute = "fp32"
[parallel]
mode = "fixed"
[train]
samples = 0
evaluate_sequences = 16
[telemetry]
timeline_every = 0
[cluster]
spec = "local-cpu:1"
[sync]
mode = "target-batch"
heartbeat_s = 0.2
dead_after_s = 4.0
{sync}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("corpus"), documents=400)


def write_job(folder: Path, data: Path, *, steps: int, sync: str = "", name: str = "job.toml") -> Path:
    (folder / name).write_text(JOB.format(data=data, tokens=steps * 96, sync=sync))
    return folder / name


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that other processes bring about; how long it takes is not judged."""
    ticks = threading.Event()
    for _ in range(int(PATIENCE_S / 0.1)):
        if condition():
            return
        ticks.wait(0.1)
    raise AssertionError(f"never came: {what}")


def events(run: Run, kind: str) -> list[dict]:
    return [one for one in read_events(run.events(0))[0] if one["event"] == kind] if run.events(0).exists() else []


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "phalanx", "peers", *words, "--runs", str(folder / "runs"), "--no-check"]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def only_run(folder: Path) -> Run:
    wait_until(lambda: bool(list_runs(folder / "runs")), "a run folder")
    return list_runs(folder / "runs")[0]


def worker_of(run: Run) -> int:
    """The process that trains a peer: it holds the run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"phalanx.train.slow_links.peer_worker" in words and str(run.path).encode() in words:
                return int(entry.name)
    return 0


def test_a_kill_and_a_late_joiner_leave_the_loss_as_it_was(tmp_path: Path, data: Path) -> None:
    """Three peers that met with invitations: one is killed, a fourth joins late; nobody restarts.

    The others are held (SIGSTOP) while the fourth imports torch, so that the run does not end before.
    """
    steps = 40
    alone = phalanx.train(
        write_job(tmp_path, data, steps=steps, sync="peers = 1", name="alone.toml"),
        runs=tmp_path / "alone",
        check=False,
        progress=False,
    )
    job = write_job(tmp_path, data, steps=steps, sync="peers = 3")
    places = {name: tmp_path / name for name in ("owner", "second", "third", "late")}
    for place in places.values():
        place.mkdir()
    peers = {"owner": start(places["owner"], "start", str(job))}
    try:
        owner = only_run(places["owner"])
        wait_until(lambda: (owner.path / "peers" / "status.json").exists(), "the owner's address")
        for name in ("second", "third", "late"):
            made = phalanx.peers.invite(owner, name, out=tmp_path / f"{name}.invitation.json")
            assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
        for name in ("second", "third"):
            peers[name] = start(places[name], "join", str(tmp_path / f"{name}.invitation.json"))
        wait_until(lambda: len(events(owner, "step")) >= 5, "five steps")
        os.kill(worker_of(only_run(places["third"])), signal.SIGKILL)
        held = [worker_of(owner), worker_of(only_run(places["second"]))]
        for process in held:
            os.kill(process, signal.SIGSTOP)
        try:
            peers["late"] = start(places["late"], "join", str(tmp_path / "late.invitation.json"))
            late = only_run(places["late"])
            wait_until(lambda: bool(events(late, "communicators")), "a newcomer that is about to join")
        finally:
            for process in held:
                os.kill(process, signal.SIGCONT)
        said = {name: process.communicate(timeout=PATIENCE_S)[0] for name, process in peers.items()}
    finally:
        for process in peers.values():
            process.kill()
            process.communicate()
    assert peers["third"].returncode == 3, said["third"]
    for name in ("owner", "second", "late"):
        assert peers[name].returncode == 0, said[name]
    found = [only_run(places[name]) for name in ("owner", "second", "late")]
    wanted = events(alone, "evaluate")[-1]["loss"]
    for run in found:
        assert abs(events(run, "evaluate")[-1]["loss"] - wanted) < 0.02
        assert len(events(run, "run_start")) == 1  # nobody was restarted
    rounds = [one for one in events(owner, "exchange") if one["kind"] == "gradient"]
    assert sum(rounds[-1]["credit"].values()) == steps * 6  # every sample of every step, once
    assert any(one["kind"] in ("lost", "left") for one in events(owner, "peer"))
    table = phalanx.peers.members(owner)
    assert {one["name"] for one in table.members} == {"owner", "second", "third", "late"}
    assert "samples" in str(table)


def test_a_revoked_peer_of_two_ends_and_the_owner_trains_on(tmp_path: Path, data: Path) -> None:
    job = write_job(tmp_path, data, steps=20_000, sync="peers = 2")
    places = [tmp_path / name for name in ("north", "south")]
    for place in places:
        place.mkdir()
    sites = [start(places[0], "start", str(job))]
    try:
        north = only_run(places[0])
        wait_until(lambda: (north.path / "peers" / "status.json").exists(), "the owner's address")
        made = phalanx.peers.invite(north, "south", out=tmp_path / "south.invitation.json")
        sites.append(start(places[1], "join", str(made.path)))
        wait_until(lambda: any(len(one["members"]) == 2 for one in events(north, "exchange")), "a round of two")
        phalanx.peers.revoke(north, "south")
        said = sites[1].communicate(timeout=PATIENCE_S)[0]
        assert sites[1].returncode == 2, said
        assert "this key was revoked by the run's owner" in said
        steps = len(events(north, "step"))
        wait_until(lambda: len(events(north, "step")) >= steps + 3, "steps of the owner alone")
        sites[0].send_signal(signal.SIGINT)
        said = sites[0].communicate(timeout=PATIENCE_S)[0]
        assert sites[0].returncode == 0, said
    finally:
        for site in sites:
            site.kill()
            site.communicate()
    assert not [one for one in events(north, "peer") if one["kind"] == "no-majority"]
    assert [(one["name"], one["state"]) for one in phalanx.peers.members(north).members][1] == ("south", "revoked")
    south = only_run(places[1])
    states = {one["name"]: one["state"] for one in phalanx.peers.members(south).members}
    assert states["south"] == "revoked"  # it has kept the list that says so
    back = start(places[1], "start", "--resume", str(south.path))
    said = back.communicate(timeout=PATIENCE_S)[0]
    assert back.returncode == 2, said
    assert "revoked by the run's owner" in said


def test_a_trial_is_stopped_and_resumed(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`phalanx train` starts the peers of [sync]; Ctrl-C saves and leaves, and --resume goes on with all of them."""
    sync = 'peers = 2\ninner_steps = 4\ncodec = "int8"'
    job = write_job(tmp_path, data, steps=300, sync=sync)
    job.write_text(job.read_text().replace("target-batch", "diloco"))
    command = [sys.executable, "-m", "phalanx", "train", str(job), "--runs", str(tmp_path / "runs"), "--no-check"]
    trial = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:

        def owners() -> list[Run]:
            made = [run for run in list_runs(tmp_path / "runs") if (run.path / "launch.json").exists()]
            return [run for run in made if "trial" in run.launch()]

        wait_until(lambda: bool(owners()), "the run of the trial")
        first = owners()[0]
        wait_until(lambda: len(events(first, "step")) >= 3, "three steps")
        trial.send_signal(signal.SIGINT)
        said = trial.communicate(timeout=PATIENCE_S)[0]
    finally:
        trial.kill()
        trial.communicate()
    assert trial.returncode == 0, said
    assert "leaving after this step" in said
    done = [run.status()["step"] for run in list_runs(tmp_path / "runs")]
    assert all(0 < step < 300 for step in done)
    steps = max(done) + 8
    resumed = phalanx.train(resume=first, steps=steps, progress=False, check=False)
    assert resumed.status()["state"] == "done"
    assert resumed.status()["step"] == steps
    kinds = {one["kind"] for one in events(resumed, "exchange")}
    assert {"meet", "gradient"} <= kinds
    launches = [run.launch() for run in list_runs(tmp_path / "runs")]
    assert [launch.get("is_trial") for launch in launches] == [True, True]  # else they differ in sync.aggregation
    assert main(["peers", "list", str(first.path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["members"]) == 2


def test_two_sites_of_two_fsdp_ranks_each_hold_the_same_weights(tmp_path: Path, data: Path) -> None:
    """Rank 0 of each site speaks for its mesh: every round has one digest, and both score alike at the end."""
    job = write_job(tmp_path, data, steps=6, sync='peers = 2\ninner_steps = 2\nsynchronous_steps = 2\ncodec = "int8"')
    text = job.read_text().replace("target-batch", "diloco").replace("global_sequences = 6", "global_sequences = 8")
    text = text.replace("local-cpu:1", "local-cpu:2").replace("tokens = 576", "tokens = 768")
    job.write_text(text.replace('mode = "fixed"', 'mode = "fixed"\nshard = 2\nzero = 3'))
    places = [tmp_path / name for name in ("north", "south")]
    for place in places:
        place.mkdir()
    sites = [start(places[0], "start", str(job))]
    try:
        north = only_run(places[0])
        wait_until(lambda: (north.path / "peers" / "status.json").exists(), "the owner's address")
        made = phalanx.peers.invite(north, "south", out=tmp_path / "south.invitation.json")
        sites.append(start(places[1], "join", str(made.path)))
        said = [site.communicate(timeout=2 * PATIENCE_S)[0] for site in sites]
    finally:
        for site in sites:
            site.kill()
            site.communicate()
    assert [site.returncode for site in sites] == [0, 0], said
    runs = [north, only_run(places[1])]
    assert [run.world() for run in runs] == [2, 2]
    rounds = [{one["round"]: one["digest"] for one in events(run, "exchange")} for run in runs]
    assert rounds[0] == rounds[1]
    kinds = [one["kind"] for one in events(north, "exchange")]
    assert kinds == ["meet", "gradient", "gradient", "weights", "weights"]
    assert all(len(one["members"]) == 2 for one in events(north, "exchange"))
    losses = [events(run, "evaluate")[-1]["loss"] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["start", "JOB", "--bandwidth", "0/10"], "--bandwidth 0/10 is not a speed"),
        (["start", "JOB", "--bandwidth", "abc"], "--bandwidth abc is not a speed\n  write UP/DOWN in Mbit/s"),
        (["start"], "phalanx peers start: no job file is named"),
        (["start", "JOB", "--listen", "here"], "'here' is not an address"),
        (
            ["start", "JOB", "--listen", "no-such-host.invalid:1"],
            "--listen no-such-host.invalid:1: the host is not known",
        ),
        (["start", "JOB", "--listen", "127.0.0.1:USED"], "cannot listen there: address already in use"),
        (["join", "INVITATION", "--listen", "127.0.0.1:USED"], "cannot listen there: address already in use"),
        (["join", "INVITATION", "--client-only", "--listen", "127.0.0.1:1"], "--client-only excludes --listen"),
        (
            ["join", "INVITATION", "--client-only", "--advertise", "a:1"],
            "--client-only excludes --listen and --advertise",
        ),
        (["start", "JOB", "--set", "sync.inner_steps=0"], "sync.inner_steps = 0 is below 1"),
        (["start", "JOB", "--set", "sync.mode=quorum", "--set", "sync.quorum=9"], "sync.quorum = 9 is more than"),
        (["start", "JOB", "--set", "sync.mode=every-step"], "exchanges nothing with peers"),
        (["train", "JOB", "--dry-run", "--set", "sync.peers=0"], 'sync.mode = "target-batch" with sync.peers = 0'),
        (["train", "JOB", "--dry-run", "--set", "cluster.spec=local-cpu:2"], "sync.peers = 3 with 2 ranks each"),
        (["join", "nobody.json"], "there is no such invitation"),
        (["list", "alone"], "is not the run of a peer"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words, what
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path, data, steps=2, sync="peers = 3")
    from phalanx.record.run import create_run

    run = create_run(tmp_path / "runs", "alone", job_toml="", job={}, plan_json="{}")
    owner = PeerIdentity.create("owner")
    invitation = tmp_path / "an.invitation.json"
    Invitation.create(owner, AllowList.create(owner, "run"), "new", [("127.0.0.1", 1)]).save(invitation)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        places = {"JOB": job, "alone": run.path, "INVITATION": invitation}
        port = str(busy.getsockname()[1])
        named = [str(places.get(word, word.replace("USED", port))) for word in words]
        assert main(named if named[0] == "train" else ["peers", *named]) == 2
    said = capsys.readouterr()
    assert what in said.err
    assert "others join with an invitation" not in said.out + said.err
    assert len(list_runs(tmp_path / "runs")) == 1  # nothing was made


def test_a_peer_that_accepts_no_connections_is_listed_without_an_address() -> None:
    one = {
        "name": "south",
        "id": "0" * 16,
        "address": ["0.0.0.0", 1],
        "client_only": True,
        "samples": 0,
        "state": "away",
    }
    table = phalanx.api.peers.PeerTable(run="r", group="g", mode="m", step=0, round=0, age_s=0.0, members=(one,))
    assert "client-only" in str(table)
    assert "0.0.0.0" not in str(table)
