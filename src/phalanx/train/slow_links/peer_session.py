"""A peer's files in a run folder, and its open group: identity, allowlist, addresses of the others and group status.

    peers/                     mode 0700: a reader of the key can take the peer's place
    peers/peer-key.pem, peer-certificate.pem
    peers/allowlist.json       of the run's owner; a running peer takes over newer ones, and stores those it receives
    peers/session.json         settings of this peer's participation: `SessionFacts`
    peers/status.json          state of the group, written while the peer runs
    peers/go-on-alone.json     requests that the running peer continue without lost members; its answer is added

This module imports no torch: the command line reads it, and a process opens its group before it imports torch.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import SystemFailure, UserError, mistake
from phalanx.io.codec import from_json_values, json_text, json_values
from phalanx.io.files import load_json, replace_text
from phalanx.io.packages import installed_version
from phalanx.io.values import printable
from phalanx.job.dataset import read_manifest
from phalanx.job.key_rules import AUTO
from phalanx.job.schema import Job
from phalanx.peers.allowlist import AllowList, locked_list
from phalanx.peers.facts import Address, Bandwidth, PeerEvent, RunFacts
from phalanx.peers.harm_votes import ABSTAINED, Judgement, RoundTrial
from phalanx.peers.identity import ID_DIGITS, PeerIdentity
from phalanx.record.run import Run

if TYPE_CHECKING:
    from phalanx.peers.facts import Vector
    from phalanx.peers.group import PeerGroup

FOLDER, ALLOWED, SESSION, STATUS = "peers", "allowlist.json", "session.json", "status.json"
GO_ON = "go-on-alone.json"
LOOK_S = 0.5  # between reads of the allowlist, and writes of the status
# Keys of [sync] that may differ between peers; all other keys must agree, as `run_facts` states.
SHARED_SYNC = ("peers", "heartbeat_s", "dead_after_s", "screening")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFacts:
    """Settings of a peer's participation; without `addresses` it founds the group if no known member answers."""

    group: str  # id of the run that all peers share
    addresses: tuple[tuple[str, int], ...] = ()
    listen: tuple[str, int] = ("127.0.0.1", 0)
    advertise: tuple[str, int] | None = None
    up_mbps: float | None = None
    down_mbps: float | None = None
    client_only: bool = False
    # Id, host, port: addresses that replace the advertised ones.
    routes: tuple[tuple[str, str, int], ...] = ()

    @property
    def bandwidth(self) -> Bandwidth | None:
        """The bandwidth that the peer's owner stated, or None."""
        if self.up_mbps is None or self.down_mbps is None:
            return None
        return Bandwidth(up_mbps=self.up_mbps, down_mbps=self.down_mbps)


def peers_folder(run: Run) -> Path:
    """Return the folder of a run that holds the files of its peer."""
    return run.path / FOLDER


def write_session(run: Run, identity: PeerIdentity, allowed: AllowList, facts: SessionFacts) -> None:
    """Turn a run folder into that of a peer: write identity, allowlist and session."""
    folder = peers_folder(run)
    identity.save(folder)
    allowed.save(folder / ALLOWED)
    replace_text(folder / SESSION, json_text(facts, indent=1) + "\n")


def read_session(run: Run) -> SessionFacts:
    """Read the session of a run folder; raises UserError if the run is not a peer's."""
    path = peers_folder(run) / SESSION
    try:
        return from_json_values(SessionFacts, load_json(path), str(path), noun="peer session")
    except FileNotFoundError as error:
        raise mistake(
            str(run.path), "is not the run of a peer", fix="phalanx peers start JOB makes one, or phalanx peers join"
        ) from error
    except (OSError, ValueError) as error:
        raise mistake(str(path), f"cannot be read: {error}") from error


def read_status(run: Run) -> dict[str, Any]:
    """Return the last status that this peer wrote; {} before it joined."""
    try:
        status = load_json(peers_folder(run) / STATUS)
        return status if isinstance(status, dict) else {}
    except (OSError, ValueError):
        return {}


def excluded_before(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the peers that a vote excluded before this process started, from its status file, with the reasons."""
    excluded = status.get("excluded")
    if not isinstance(excluded, dict):
        return {}
    return {peer: printable(str(reason), most=400) for peer, reason in excluded.items() if len(peer) == ID_DIGITS}


def run_facts(job: Job, base: Path, group: str) -> RunFacts:
    """Return the facts that must agree between two peers; relative data paths start at `base`.

    Layout, machine and output paths are not in them: they may differ between peers.
    """
    sync = {name: value for name, value in asdict(job.sync).items() if name not in SHARED_SYNC}
    model = {
        "model": json_values(job.model),
        "optim": json_values(job.optim),
        "batch": [job.batch.global_tokens, json_values(job.batch.ramp)],
        "data": [job.data.sequence, job.data.tokens, job.data.seed],
        "scale": json_values(job.scale),
        "sync": sync,
    }
    folders = [base / path for path in job.data.paths]
    manifests = [read_manifest(folder) for folder in folders]
    text = "+".join(f"{manifest.tokenizer_sha256} {manifest.digest}" for manifest in manifests)
    return RunFacts(
        run_id=group,
        model_digest=hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest(),
        tokenizer_digest=hashlib.sha256(text.encode()).hexdigest(),
        code_digest=f"phalanx-{installed_version('phalanx') or 'unknown'}",
    )


class PeerSession:
    """The open group of this process, and a thread that follows the allowlist and writes the status."""

    def __init__(self, run: Run, job: Job) -> None:
        from phalanx.peers.group import PeerGroup

        self.run, self._folder = run, peers_folder(run)
        self.facts = read_session(run)
        self._allowed = AllowList.load(self._folder / ALLOWED)
        identity = PeerIdentity.load(self._folder)
        sync = job.sync
        has_gate = bool(sync.gate_sequences) and sync.mode in ("diloco", "quorum")
        self._tell: Callable[[PeerEvent], None] | None = None
        self._early: list[PeerEvent] = []
        self._before = read_status(run)
        self._routes: dict[str, Address] = {peer: (host, port) for peer, host, port in self.facts.routes}
        self.screen: Callable[[str, Vector], str | None] = lambda peer, vector: None
        launch = run.launch()
        in_trial, has_liars = launch.get("is_trial") is True, launch.get("drills_liars") is True
        aggregation = sync.aggregation_among(invited=has_liars or not in_trial)
        if aggregation != "mean":
            reason = "sync.aggregation"
            if sync.aggregation == AUTO:
                reason = "a drill of liars, as where members were invited" if has_liars else "members were invited"
            text = f'updates are aggregated by "{aggregation}" ({reason})'
            self._on_event(PeerEvent(kind="aggregation", text=text, peer=identity.id, name=identity.name))
        self.judge: Callable[[RoundTrial], Judgement] = lambda trial: ABSTAINED
        self.group: PeerGroup = PeerGroup(
            identity,
            run_facts(job, run.path, self.facts.group),
            allowed=self._allowed,
            listen=self.facts.listen,
            advertise=self.facts.advertise,
            bandwidth=self.facts.bandwidth,
            client_only=self.facts.client_only,
            events=self._on_event,
            heartbeat_s=sync.heartbeat_s,
            dead_after_s=sync.dead_after_s,
            routes=self._routes,
            aggregation=aggregation,
            screen=(lambda peer, vector: self.screen(peer, vector)) if sync.screening == "loss" else None,
            keep_allowed=self._keep_allowed,
            judge=(lambda trial: self.judge(trial)) if has_gate else None,
            excluded=excluded_before(self._before),
        )
        self.more_status: Callable[[], dict[str, Any]] = dict
        self._ended = threading.Event()
        self._write_status()
        self._thread = threading.Thread(target=self._look, name="peer-session", daemon=True)
        self._thread.start()

    def addresses(self) -> tuple[Address, ...]:
        """Return the configured addresses and those of members that it knew before it was restarted."""
        members = self._before.get("members", [])
        own = self.group.id
        member_addresses = [
            self._routes.get(str(member.get("id")), tuple(member["address"]))
            for member in members
            if member.get("id") != own and not member.get("client_only") and self.is_allowed(str(member.get("id")))
        ]
        return tuple(
            dict.fromkeys([*self.facts.addresses, *((str(host), int(port)) for host, port in member_addresses)])
        )

    def is_allowed(self, peer: str) -> bool:
        """Return True if the owner's list contains a peer: it was invited, and not revoked."""
        return any(fingerprint.startswith(peer) for fingerprint in self._allowed.fingerprints())

    def _keep_allowed(self, newer: AllowList) -> None:
        """Store a newer list that the group has taken over, so that revocations hold after a restart too."""
        if newer.replaces(self._allowed):
            self._allowed = newer
        path = self._folder / ALLOWED
        # If this fails, `_look` tries again.
        with suppress(UserError, OSError, SystemFailure), locked_list(path):
            if newer.replaces(AllowList.load(path)):
                newer.save(path)

    def tell_events(self, tell: Callable[[PeerEvent], None]) -> None:
        """Pass events of the group to `tell` from now on, and those that came before at once."""
        early, self._early, self._tell = self._early, [], tell
        for event in early:
            tell(event)

    def _on_event(self, event: PeerEvent) -> None:
        # Training records rounds itself, with more facts.
        if event.kind not in ("committed", "view"):
            if self._tell is None:
                self._early.append(event)
            else:
                self._tell(event)

    def _look(self) -> None:
        """Follow the allowlist file, answer requests and write the status, every `LOOK_S` seconds until closed."""
        while not self._ended.wait(LOOK_S):
            try:
                stored = AllowList.load(self._folder / ALLOWED, owner=self._allowed.owner_fingerprint)
                if stored.replaces(self._allowed):
                    self.group.set_allowed(stored)
                elif self._allowed.replaces(stored):
                    # It could not be stored when it arrived: the disk was full.
                    self._keep_allowed(self._allowed)
                self._answer_request()
                self._write_status()
            except (UserError, OSError, ValueError):  # a file that is being written, or a group that is being closed
                continue

    def _answer_request(self) -> None:
        """Continue without lost members if the request file exists, and write the outcome into it."""
        path = self._folder / GO_ON
        if not path.exists() or "answer" in (request := load_json(path)):
            return
        try:
            view = self.group.go_on_without_lost()
            answer: dict[str, object] = {"members": list(view.ids)}
        except UserError as error:
            answer = {"refusal": str(error)}
        replace_text(path, json_text({**request, "answer": answer}) + "\n")

    def _write_status(self) -> None:
        """Write the state of the group to the status file."""
        view, links, progress = self.group.view(), self.group.links(), self.group.progress()
        members = [
            {
                "id": member.id,
                "name": member.name,
                "address": list(member.address),
                "client_only": member.client_only,
                "up_mbps": member.bandwidth.up_mbps if member.bandwidth else None,
                "down_mbps": member.bandwidth.down_mbps if member.bandwidth else None,
                "step": progress[member.id].step if member.id in progress else None,
                **links.get(member.id, {}),
            }
            for member in view.members
        ]
        status = {
            "t": round(time.time(), 3),
            "id": self.group.id,
            "address": list(self.group.address),
            "view": view.number,
            "round": view.next_round,
            "has_majority": self.group.has_majority,
            "excluded": self.group.excluded,
            "members": members if view.number else self._before.get("members", []),
            **self.more_status(),
        }
        replace_text(self._folder / STATUS, json_text(status) + "\n")

    def close(self) -> None:
        """Stop the thread, and close the group if it is still open."""
        self._ended.set()
        self._thread.join()
        self.group.close()
