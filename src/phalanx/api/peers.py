"""Peers on slow links: start a run that others join, invite them, join one, list its members, revoke one.

>>> run = phalanx.peers.start("job.toml", listen="0.0.0.0:29400")  # doctest: +SKIP
>>> phalanx.peers.invite("runs/job-20261117-120000", "berlin").path  # doctest: +SKIP
PosixPath('berlin.invitation.json')
>>> run = phalanx.peers.join("berlin.invitation.json")  # doctest: +SKIP
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.jobs import AnyJob
from phalanx.api.peer_processes import run_peer
from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.api.runs import AnyRun
from phalanx.api.runs import run as open_public_run
from phalanx.api.train_inputs import TrainCall, check_call, prepare_here, setting_texts
from phalanx.api.training import make_run_folder
from phalanx.errors import SystemFailure, UserError, mistake
from phalanx.io.files import load_json, replace_bytes
from phalanx.io.path_probes import resolve_path
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.units import format_count, plural

if TYPE_CHECKING:
    from phalanx.peers.facts import Address

__all__ = ["PeerTable", "SavedInvitation", "go_on_alone", "invite", "join", "members", "revoke", "start"]

WHERE = "phalanx peers"
ANY_PORT = "127.0.0.1:0"
MOST_INVITATION_BYTES = 16 * 2**20
# Seconds that a running peer may take to agree with the remaining members.
ANSWER_S = 60.0
# A running peer writes its status twice a second.
SILENT_S = 10.0
ALONE = "no majority is left, so rounds wait; if the lost peers are gone for good: phalanx peers go-on-alone {run}"
HEAD = ("name", "id", "address", "step", "samples", "latency", "Mbit/s", "state")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SavedInvitation(PublicResult):
    """An invitation file: anyone who has it can join as this peer.

    >>> phalanx.peers.invite("runs/job-20261117-120000", "berlin").name  # doctest: +SKIP
    'berlin'
    """

    path: Path
    name: str
    id: str
    addresses: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: invites {self.name} ({self.id}); send it over a channel you trust, then there:\n"
            f"  phalanx peers join {self.path.name}"
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PeerTable(PublicResult):
    """The members of a group as one peer of it last recorded them.

    >>> phalanx.peers.members("runs/job-20261117-120000").members  # doctest: +SKIP
    """

    run: str
    group: str
    mode: str
    step: int
    round: int
    age_s: float | None  # since this peer last wrote its status; None before it joined
    members: tuple[dict[str, Any], ...]
    has_majority: bool = True

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        if self.age_s is None:
            return f"{self.run}: this peer has not joined its group yet"
        rows = [HEAD, *(_member_cells(member) for member in self.members)]
        present = sum(member["state"] == "member" for member in self.members)
        head = f"{self.run}: {plural(present, 'member')}, {self.mode}, step {self.step:,}, round {self.round:,}"
        waits = [] if self.has_majority else [ALONE.format(run=self.run)]
        votes = [
            f"{member['name']} was excluded by a vote: {member['excluded_for']}"
            for member in self.members
            if "excluded_for" in member
        ]
        table = text_table(rows, right=(3, 4, 5, 6))
        return "\n".join([f"{head}, as of {self.age_s:,.0f} s ago", *table, *votes, *waits])


def _member_cells(one: dict[str, Any]) -> tuple[str, ...]:
    address = f"{one['address'][0]}:{one['address'][1]}" if one.get("address") else "–"
    # A client-only peer accepts no connections.
    address = "client-only" if one.get("client_only") else address
    step = "–" if one.get("step") is None else f"{one['step']:,}"
    latency = "–" if not one.get("latency_s") else f"{1000 * one['latency_s']:.0f} ms"
    speed = f"{one['up_mbps']:g}/{one['down_mbps']:g}" if one.get("up_mbps") and one.get("down_mbps") else "–"
    return one["name"], one["id"], address, step, format_count(one["samples"]), latency, speed, one["state"]


def start(
    job: AnyJob | None = None,
    *,
    listen: str = ANY_PORT,
    advertise: str | None = None,
    name: str = "owner",
    bandwidth: str | None = None,
    resume: AnyRun | None = None,
    cluster: str | None = None,
    steps: int | None = None,
    overrides: Overrides = (),
    runs: str | Path = "runs",
    check: bool = True,
    allow_code: bool = False,
    progress: bool | Tell = True,
) -> Run:
    """Start a run that other peers can join, as its owner, and train; or continue a peer's run (`resume`).

    `listen` is the address and port that others connect to, `advertise` another one that leads there (behind NAT with
    a forwarded port), `bandwidth` is "UP/DOWN" in Mbit/s. Ctrl-C saves a checkpoint and leaves the group.

    >>> run = phalanx.peers.start("job.toml", listen="0.0.0.0:29400", bandwidth="40/200")  # doctest: +SKIP
    """
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import PeerIdentity
    from phalanx.train.slow_links.peer_session import SessionFacts, write_session

    if resume is not None:
        if job is not None:
            raise mistake(f"{WHERE} start", "JOB and --resume exclude each other", fix="give one of them")
        return _resume_peer(resume, steps=steps, overrides=overrides, allow_code=allow_code, tell=teller(progress))
    if job is None:
        raise mistake(f"{WHERE} start", "no job file is named", fix="phalanx peers start JOB, or --resume RUN")
    up, down = parse_bandwidth(bandwidth)
    place, public = parse_address(listen), parse_address(advertise) if advertise else None
    identity = PeerIdentity.create(name)
    check_listen(place)
    call = _peer_call(job, cluster, steps, overrides, runs, check, allow_code, progress)
    run, plan = _prepare_run(call)
    group = run.run_id
    allowed = AllowList.create(identity, group)
    facts = SessionFacts(group=group, listen=place, advertise=public, up_mbps=up, down_mbps=down)
    write_session(run, identity, allowed, facts)
    call.tell(f"  others join with an invitation: phalanx peers invite {run.path} NAME")
    return run_peer(run, plan, allow_code=allow_code, tell=call.tell)


def join(
    invitation: str | Path,
    *,
    job: AnyJob | None = None,
    data: str | Path | None = None,
    listen: str = ANY_PORT,
    advertise: str | None = None,
    bandwidth: str | None = None,
    client_only: bool = False,
    cluster: str | None = None,
    overrides: Overrides = (),
    runs: str | Path = "runs",
    check: bool = True,
    allow_code: bool = False,
    progress: bool | Tell = True,
) -> Run:
    """Join a run with an invitation, take its newest state, and train until it ends or Ctrl-C.

    The invitation contains the job of the run; `job` replaces it, and must be the same except for its cluster, layout
    and paths. `data` is the dataset on this machine. `client_only` accepts no connections: for a peer behind NAT.

    >>> run = phalanx.peers.join("berlin.invitation.json", data="data/tokens", client_only=True)  # doctest: +SKIP
    """
    from phalanx.peers.invitation import Invitation
    from phalanx.train.slow_links.peer_session import SessionFacts, write_session

    path = Path(invitation)
    loaded = Invitation.load(path)
    up, down = parse_bandwidth(bandwidth)
    place, public = parse_address(listen), parse_address(advertise) if advertise else None
    if client_only and (listen != ANY_PORT or advertise):
        message = "--client-only excludes --listen and --advertise: such a peer accepts no connections"
        raise mistake(f"{WHERE} join", message, fix="leave one of them out")
    if not client_only:
        check_listen(place)
    texts = [
        *setting_texts(overrides, None),
        *([f"data.path={json.dumps(str(resolve_path(data)))}"] if data else []),
    ]
    source = job if job is not None else _job_of(path, Path(runs))
    call = _peer_call(source, cluster, None, texts, runs, check, allow_code, progress)
    run, plan = _prepare_run(call)
    facts = SessionFacts(
        group=loaded.run_id,
        addresses=tuple(loaded.addresses),
        listen=place,
        advertise=public,
        up_mbps=up,
        down_mbps=down,
        client_only=client_only,
    )
    write_session(run, loaded.identity, loaded.allowed, facts)
    return run_peer(run, plan, allow_code=allow_code, tell=call.tell)


def invite(run: AnyRun, name: str, *, out: str | Path | None = None, addresses: Sequence[str] = ()) -> SavedInvitation:
    """Write an invitation for a new peer, a file that only this user can read; the run may be in progress.

    Its addresses are those of the members that this peer knows, its own first, or the given `addresses`.

    >>> phalanx.peers.invite("runs/job-20261117-120000", "berlin", addresses=["203.0.113.7:29400"])  # doctest: +SKIP
    """
    from phalanx.peers.allowlist import locked_list
    from phalanx.peers.invitation import Invitation
    from phalanx.train.slow_links.peer_session import ALLOWED, peers_folder

    owned_run, identity, _ = _owned_group(run)
    places = [parse_address(address) for address in addresses] or _known_addresses(owned_run)
    if not places:
        raise mistake(
            str(owned_run.path),
            "nobody can be reached yet: the peer has never listened",
            fix="start it first, or give --address HOST:PORT",
        )
    path = Path(out) if out is not None else Path(f"{name}.invitation.json")
    with locked_list(peers_folder(owned_run) / ALLOWED):
        allowed = _owned_group(run)[2]
        if name in allowed.fingerprints().values():
            raise mistake(
                str(owned_run.path), f"a peer called {name[:60]} is invited already", fix="choose another name"
            )
        invitation = Invitation.create(identity, allowed, name, places)
        invitation.save(path)
        text = json.loads(path.read_text(encoding="utf-8")) | {
            "job_toml": owned_run.job_toml.read_text(encoding="utf-8")
        }
        replace_bytes(path, (json.dumps(text, indent=1) + "\n").encode(), mode=0o600)
        invitation.allowed.save(peers_folder(owned_run) / ALLOWED)
    return SavedInvitation(path=path, name=name, id=invitation.identity.id, addresses=tuple(places))


def members(run: AnyRun) -> PeerTable:
    """Return the members of a peer's group, their progress, and the samples that each contributed.

    >>> print(phalanx.peers.members("runs/job-20261117-120000"))  # doctest: +SKIP
    """
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import ID_DIGITS
    from phalanx.train.slow_links.peer_session import (
        ALLOWED,
        excluded_before,
        peers_folder,
        read_session,
        read_status,
    )

    peer_run = open_public_run(run)
    facts, status = read_session(peer_run), read_status(peer_run)
    allowed = AllowList.load(peers_folder(peer_run) / ALLOWED)
    credit = status.get("credit", {})
    names_by_fingerprint = {**allowed.fingerprints(), **dict(allowed.revoked_names)}
    names = {fingerprint[:ID_DIGITS]: name for fingerprint, name in names_by_fingerprint.items()}
    present = {member["id"]: member for member in status.get("members", ())}
    revoked = {fingerprint[:ID_DIGITS] for fingerprint in allowed.revoked}
    excluded = excluded_before(status)
    rows = []
    for peer in dict.fromkeys([*present, *names, *credit, *sorted(revoked), *excluded]):
        state = "revoked" if peer in revoked else "member" if peer in present else "away"
        state = "excluded" if peer in excluded else state
        row = {"id": peer, "name": names.get(peer, "–"), **present.get(peer, {})}
        reason = {"excluded_for": excluded[peer]} if peer in excluded else {}
        rows.append({**row, "samples": int(credit.get(peer, 0)), "state": state, **reason})
    age_s = max(0.0, time.time() - float(status["t"])) if "t" in status else None
    return PeerTable(
        run=str(peer_run.path),
        group=facts.group,
        mode=str(status.get("mode", "")),
        step=int(status.get("step", 0)),
        round=int(status.get("round", 0)),
        age_s=age_s,
        members=tuple(rows),
        has_majority=bool(status.get("has_majority", True)),
    )


def go_on_alone(run: AnyRun) -> PeerTable:
    """Let a running peer, and those it still reaches, continue although a majority of the members is lost.

    Only for lost peers that are gone: if they continue behind a broken network, both sides train on, and the progress
    of one side is lost when they meet again. Raises UserError if a majority is present, or the peer does not run.

    >>> phalanx.peers.go_on_alone("runs/job-20261117-120000")  # doctest: +SKIP
    """
    from phalanx.train.slow_links.peer_session import GO_ON, peers_folder, read_session, read_status

    peer_run = open_public_run(run)
    read_session(peer_run)
    path, ends = peers_folder(peer_run) / GO_ON, time.monotonic() + ANSWER_S
    if time.time() - float(read_status(peer_run).get("t", 0.0)) > SILENT_S:
        raise mistake(str(peer_run.path), "this peer does not run", fix=f"phalanx peers start --resume {peer_run.path}")
    replace_bytes(path, b"{}\n", mode=0o600)
    try:
        while "answer" not in (request_state := load_json(path, MOST_INVITATION_BYTES)):
            if time.monotonic() > ends:
                raise mistake(str(peer_run.path), f"the peer did not answer within {ANSWER_S:g} s")
            time.sleep(0.1)
    finally:
        path.unlink(missing_ok=True)
    if refusal := request_state["answer"].get("refusal"):
        raise mistake(str(peer_run.path), str(refusal).removeprefix("peers: ")[:400])
    return members(peer_run)


def revoke(run: AnyRun, name: str) -> PeerTable:
    """Revoke a peer permanently, by its name or id; a running group drops it immediately.

    >>> phalanx.peers.revoke("runs/job-20261117-120000", "berlin")  # doctest: +SKIP
    """
    from phalanx.peers.allowlist import locked_list
    from phalanx.peers.identity import ID_DIGITS
    from phalanx.train.slow_links.peer_session import ALLOWED, peers_folder

    owned_run, identity, _ = _owned_group(run)
    with locked_list(peers_folder(owned_run) / ALLOWED):
        allowed = _owned_group(run)[2]
        matches = [
            fingerprint
            for fingerprint, known_name in allowed.fingerprints().items()
            if name in (known_name, fingerprint, fingerprint[:ID_DIGITS])
        ]
        if not matches:
            names, present = dict(allowed.revoked_names), ", ".join(sorted(allowed.fingerprints().values()))
            is_revoked = any(
                name in (fingerprint, fingerprint[:ID_DIGITS], names.get(fingerprint))
                for fingerprint in allowed.revoked
            )
            message = f"{name[:60]} was revoked already" if is_revoked else f"there is no peer called {name[:60]}"
            raise mistake(str(owned_run.path), message, fix=f"the peers are {present}")
        allowed.revoke(identity, matches[0]).save(peers_folder(owned_run) / ALLOWED)
    return members(owned_run)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def parse_address(text: str) -> Address:
    """Parse a host and a port.

    >>> parse_address("0.0.0.0:29400"), parse_address("[::1]:0")
    (('0.0.0.0', 29400), ('::1', 0))
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise mistake(WHERE, f"{text[:80]!r} is not an address", fix="write HOST:PORT, as 0.0.0.0:29400")
    return host.strip("[]"), int(port)


def check_listen(place: Address) -> None:
    """Raise UserError if this address cannot be listened on.

    Called before anything is created; the peer itself listens later.
    """
    from phalanx.io.listen import Address as ListenAddress
    from phalanx.io.listen import open_socket

    try:
        open_socket(ListenAddress(host=place[0], port=place[1]), guarded=True).close()
    except SystemFailure as error:
        raise UserError(error.problems) from error


def parse_bandwidth(text: str | None) -> tuple[float | None, float | None]:
    """Parse Mbit/s up and down from "40/200" or "100".

    >>> parse_bandwidth("40/200"), parse_bandwidth("100"), parse_bandwidth(None)
    ((40.0, 200.0), (100.0, 100.0), (None, None))
    """
    if text is None:
        return None, None
    up, slash, down = text.partition("/")
    try:
        speeds = float(up), float(down if slash else up)
    except ValueError:
        message, fix = f"--bandwidth {text[:40]} is not a speed", "write UP/DOWN in Mbit/s, as 40/200"
        raise mistake(WHERE, message, fix=fix) from None
    if not all(0.0 < speed < 1e9 for speed in speeds):
        raise mistake(
            WHERE,
            f"--bandwidth {text[:40]} is not a speed",
            why="both directions must be above 0, or nothing can be sent",
            fix="write UP/DOWN in Mbit/s, as 40/200",
        )
    return speeds


def _peer_call(
    job: AnyJob | None,
    cluster: str | None,
    steps: int | None,
    overrides: Overrides,
    runs: str | Path,
    check: bool,
    allow_code: bool,
    progress: bool | Tell,
) -> TrainCall:
    from phalanx.train.prepare import need_torch

    call = TrainCall(
        job=job,
        cluster=cluster,
        steps=steps,
        overrides=setting_texts(overrides, None),
        runs=Path(runs),
        check=check,
        allow_code=allow_code,
        tell=teller(progress),
    )
    check_call(call)
    need_torch()
    return call


def _prepare_run(call: TrainCall) -> tuple[Run, Plan]:
    """Return the plan with its data, and the new run folder."""
    started = time.time()
    plan, old, data_s = prepare_here(call)
    if not plan.job.sync.has_peers:
        raise mistake(
            WHERE,
            'sync.mode = "every-step" exchanges nothing with peers',
            fix='use "target-batch", "diloco" or "quorum" under [sync], or phalanx train',
        )
    return make_run_folder(plan, call, old, started=started, data_s=data_s), plan


def _resume_peer(run: AnyRun, *, steps: int | None, overrides: Overrides, allow_code: bool, tell: Tell) -> Run:
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import PeerIdentity
    from phalanx.train.slow_links.peer_session import ALLOWED, peers_folder, read_session

    peer_run = open_public_run(run)
    facts, folder = read_session(peer_run), peers_folder(peer_run)
    if PeerIdentity.load(folder).fingerprint in AllowList.load(folder / ALLOWED).revoked:
        raise mistake(str(peer_run.path), "this key was revoked by the run's owner", fix="ask for a new invitation")
    if not facts.client_only:
        check_listen(facts.listen)
    call = TrainCall(
        resume=peer_run, steps=steps, overrides=setting_texts(overrides, None), allow_code=allow_code, tell=tell
    )
    plan, old, data_s = prepare_here(call)
    resumed_run = make_run_folder(plan, call, old, started=time.time(), data_s=data_s)
    return run_peer(resumed_run, plan, allow_code=allow_code, tell=tell)


def _owned_group(run: AnyRun) -> tuple[Run, Any, Any]:
    """Return the run, its owner's identity and its allowlist; raise UserError if this peer is not the owner."""
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import PeerIdentity
    from phalanx.train.slow_links.peer_session import ALLOWED, peers_folder, read_session

    owned_run = open_public_run(run)
    read_session(owned_run)
    folder = peers_folder(owned_run)
    identity, allowed = PeerIdentity.load(folder), AllowList.load(folder / ALLOWED)
    if identity.fingerprint != allowed.owner_fingerprint:
        raise mistake(
            str(owned_run.path),
            "only the owner of a run invites and revokes",
            fix="ask whoever ran phalanx peers start",
        )
    return owned_run, identity, allowed


def _known_addresses(run: Run) -> list[Address]:
    from phalanx.train.slow_links.peer_session import read_status

    status = read_status(run)
    own = [status["address"]] if status.get("address") else []
    members_addresses = [member["address"] for member in status.get("members", ()) if not member.get("client_only")]
    return list(dict.fromkeys((str(host), int(port)) for host, port in [*own, *members_addresses]))


def _job_of(path: Path, runs: Path) -> Path:
    """Write the job that an invitation contains to a file in the folder of runs, and return its path."""
    text = load_json(path, MOST_INVITATION_BYTES).get("job_toml")
    if not isinstance(text, str):
        raise mistake(str(path), "names no job", fix="give --job with the job file of the run")
    runs.mkdir(parents=True, exist_ok=True)
    job_path = runs / f"{path.name.split('.')[0]}.job.toml"
    replace_bytes(job_path, text.encode(), mode=0o600)
    return job_path
