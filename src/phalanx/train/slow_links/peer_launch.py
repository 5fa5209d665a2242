"""Starting the process of a one-rank peer, and run folders for several peers on one machine: a trial, or a drill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.io.codec import json_text
from phalanx.io.files import replace_text
from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import Address
from phalanx.peers.identity import PeerIdentity
from phalanx.record.run import Run
from phalanx.train.slow_links.peer_session import SESSION, SessionFacts, peers_folder, read_session, write_session

WORKER = ("-m", "phalanx.train.slow_links.peer_worker")


def start_process(run: Run, *, allow_code: bool, sharers: int = 1) -> subprocess.Popen[bytes]:
    """Start the process of a one-rank peer; it logs to the run's log of rank 0.

    `sharers` is the number of processes that share this machine's processors.
    """
    consent = ["--allow-code"] if allow_code else []
    log = run.rank_log(0)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *WORKER, str(run.path), str(os.getpid()), *consent],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches it once, through this process
            env=_environ(os.environ, sharers),
        )


def _environ(environ: Mapping[str, str], sharers: int) -> dict[str, str]:
    """Return the environment of a peer's process, in which `sharers` processes divide the processors."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // sharers))
    return {**dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads), **environ}


def set_addresses(run: Run, addresses: Sequence[Address], routes: Mapping[str, Address] | None = None) -> None:
    """Set the addresses at which a peer finds the others when it starts; `routes` replaces its routes if given."""
    facts = read_session(run)
    ways = facts.routes if routes is None else tuple((peer, *address) for peer, address in sorted(routes.items()))
    replaced = replace(facts, addresses=tuple(addresses), routes=ways)
    replace_text(peers_folder(run) / SESSION, json_text(replaced, indent=1) + "\n")


def make_trial(first: Run, others: list[Run], *, mbps: float | None = None, known: Sequence[PeerIdentity] = ()) -> None:
    """Write identities and sessions of a new trial; the owner's launch record lists its members.

    With `mbps` every peer states that bandwidth, so that all average equal shares; otherwise it is measured.
    Identities `known` from another trial are reused, because samples are dealt in the order of their ids.
    """
    names = [f"peer-{place}" for place in range(1, 2 + len(others))]
    owner, *identities = known or [PeerIdentity.create(name) for name in names]
    allowed = AllowList.create(owner, first.run_id, [identity.certificate_pem for identity in identities])
    write_session(first, owner, allowed, SessionFacts(group=first.run_id, up_mbps=mbps, down_mbps=mbps))
    for run, identity in zip(others, identities, strict=True):
        # The address is replaced once the first one listens.
        facts = SessionFacts(group=first.run_id, addresses=(("127.0.0.1", 1),), up_mbps=mbps, down_mbps=mbps)
        write_session(run, identity, allowed, facts)
    mark_trial(first, others)


def mark_trial(first: Run, others: list[Run]) -> None:
    """Mark every launch record of a trial, and list the other runs in the owner's.

    Peers resolve `sync.aggregation = "auto"` from the mark: without it on all, they refuse each other's round plans.
    """
    for run in others:
        run.set_launch(**{**run.launch(), "is_trial": True})
    first.set_launch(**{**first.launch(), "is_trial": True, "trial": [run.path.name for run in others]})
