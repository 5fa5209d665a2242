"""Peers that are killed, paused and sent away for minutes: does every round end the same way for everybody?

python benchmarks/slow_links_churn.py [--minutes 3] [--peers 8] [--seed 0] [--out FILE]

Every peer is a process of its own with real connections over TLS on the loopback, without training: in each round it
adds a known vector, and its state is a chain of digests of all results so far, which newcomers fetch from others as
training fetches weights. Every few seconds one peer is killed and started again (its state is lost), paused for longer
or shorter than `dead_after_s`, or leaves and joins again; a majority is always there. At the end:

- no round has two results, on any peer, before or after a restart (no split);
- no round is missing, and each peer's chain is the one that the results make (nothing committed is lost);
- after the last change all peers meet in one view again and commit rounds together.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import PhalanxError, SystemFailure
from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import PeerState, RunFacts
from phalanx.peers.group import PeerGroup
from phalanx.peers.identity import PeerIdentity

RUN = RunFacts(run_id="churn", model_digest="m", tokenizer_digest="t", code_digest="c")
VALUES = 40_000
HEARTBEAT_S, DEAD_AFTER_S = 0.5, 3.0
ROUND_S = 0.2  # of "training" between two rounds
EVERY_S = (2.0, 6.0)  # between two faults
SETTLE_S = 120.0  # that all may take to meet again at the end


# ---- one peer --------------------------------------------------------------------------------------------------------


class ChurnPeer:
    """Joins, fetches the chain where the group has one, and takes part in rounds until it is told to stop."""

    def __init__(self, folder: Path, name: str, *, founds: bool) -> None:
        self.folder, self.name, self.founds = folder, name, founds
        self.round, self.chain = 0, "0" * 64
        self.log = (folder / f"{name}.jsonl").open("a", buffering=1, encoding="utf-8")
        identity = PeerIdentity.load(folder / name)
        allowed = AllowList.load(folder / "allowed.json")
        self.group = PeerGroup(
            identity, RUN, allowed=allowed, heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S, events=self._on_event
        )
        self.is_stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self.is_stopping = True

    def _on_event(self, event: Any) -> None:
        if event.kind in ("no-majority", "evicted", "rejoined", "refused"):
            self.write(event=event.kind, text=event.text)

    def write(self, **facts: Any) -> None:
        """A line of the log; whole lines survive a kill."""
        self.log.write(json.dumps({"t": time.time(), **facts}) + "\n")

    def run(self) -> None:
        """Until SIGTERM; then leave politely."""
        address = self.folder / f"{self.name}.address"
        self.group.serve_state(self._state)
        if self.founds:
            self.group.join(())
        else:
            self._join_others()
        address.write_text(json.dumps(self.group.address))
        if self.group.view().next_round:
            self._fetch()
        self.write(event="started", round=self.round)
        while not self.is_stopping:
            self._take_round()
        address.unlink(missing_ok=True)
        self.group.leave()

    def _join_others(self) -> None:
        while True:
            places = [path for path in self.folder.glob("*.address") if path.stem != self.name]
            found = [tuple(json.loads(path.read_text())) for path in places]
            with suppress(SystemFailure):
                self.group.join(found, timeout_s=10.0)
                return

    def _fetch(self) -> None:
        while True:
            found: dict[str, bytes] = {}
            with suppress(SystemFailure):
                number = self.group.fetch_state(found.__setitem__, timeout_s=30.0)
                self.round, self.chain = number + 1, found["chain"].decode()
                return

    def _state(self) -> PeerState:
        return PeerState(round_number=self.round - 1, tensors={"chain": self.chain.encode()})

    def _take_round(self) -> None:
        time.sleep(ROUND_S)
        vector = vector_of(self.group.id, self.round)
        result = self.group.average(self.round, vector, 1.0, "fp64", timeout_s=30.0)
        if result.committed and result.vector is not None:
            digest = hashlib.sha256(result.vector.tobytes()).hexdigest()
            self.chain = next_chain(self.chain, digest)
            self.write(
                round=self.round,
                digest=digest,
                chain=self.chain,
                counted=len(result.members_counted),
                seconds=result.seconds,
                members=len(self.group.view().members),
            )
            self.round += 1
        elif result.behind:
            self._fetch()
            self.write(event="behind", round=self.round)


def vector_of(peer: str, number: int) -> np.ndarray:
    """What a peer adds to a round."""
    seed = int(hashlib.sha256(f"{peer} {number}".encode()).hexdigest()[:8], 16)
    return np.random.default_rng(seed).standard_normal(VALUES)


def next_chain(chain: str, digest: str) -> str:
    """The state after one more result."""
    return hashlib.sha256((chain + digest).encode()).hexdigest()


# ---- all of them -----------------------------------------------------------------------------------------------------


class Churn:
    """Starts the peers, and disturbs them."""

    def __init__(self, folder: Path, count: int, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.names = [f"peer-{place}" for place in range(count)]
        identities = [PeerIdentity.create(name) for name in self.names]
        for identity in identities:
            identity.save(folder / identity.name)
        allowed = AllowList.create(identities[0], RUN.run_id, [one.certificate_pem for one in identities])
        allowed.save(folder / "allowed.json")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.faults: dict[str, int] = {"kill": 0, "short pause": 0, "long pause": 0, "leave": 0}
        self.returns: list[tuple[float, str]] = []  # when to wake or start whom again

    def start(self, name: str, *, founds: bool = False) -> None:
        """A process of a peer, new or again."""
        spec = json.dumps({"folder": str(self.folder), "name": name, "founds": founds})
        with (self.folder / f"{name}.err").open("ab") as errors:
            self.processes[name] = subprocess.Popen(
                [sys.executable, __file__, "--peer", spec],
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def disturb(self) -> None:
        """One fault, to a peer that is up; more than a third are never away at once."""
        away = {name for _, name in self.returns}
        able = [name for name in self.names if name not in away]
        if len(away) >= (len(self.names) - 1) // 3:
            return
        name, kind = self.random.choice(able), self.random.choice(list(self.faults))
        self.faults[kind] += 1
        process, now = self.processes[name], time.monotonic()
        if kind == "kill":
            process.kill()
            process.wait()
            self.returns.append((now + self.random.uniform(0.0, 5.0), name))
        elif kind == "leave":
            process.terminate()
            self.returns.append((now + self.random.uniform(3.0, 8.0), name))
        else:
            process.send_signal(signal.SIGSTOP)
            longest = 0.5 * DEAD_AFTER_S if kind == "short pause" else 3 * DEAD_AFTER_S
            self.returns.append((now + self.random.uniform(0.3, 1.0) * longest, name))

    def restore(self, *, everybody: bool = False) -> None:
        """Wake whoever slept long enough; start again whoever is gone."""
        now = time.monotonic()
        for due, name in list(self.returns):
            if due > now and not everybody:
                continue
            process = self.processes[name]
            process.send_signal(signal.SIGCONT)
            if process.poll() is None and (self.folder / f"{name}.address").exists():
                self.returns.remove((due, name))  # it slept
            elif process.poll() is not None:
                self.returns.remove((due, name))
                (self.folder / f"{name}.address").unlink(missing_ok=True)
                self.start(name)

    def rounds(self) -> list[dict[str, Any]]:
        """Every round that any peer has logged."""
        return [line for name in self.names for line in self.lines(name) if "digest" in line]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a peer has logged."""
        path, found = self.folder / f"{name}.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End every process that was started here."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def run_churn(folder: Path, *, minutes: float, count: int, seed: int) -> str:
    """Disturb for so long, let all meet again, and judge the logs; the report."""
    churn = Churn(folder, count, seed)
    try:
        churn.start(churn.names[0], founds=True)
        _until(lambda: (folder / f"{churn.names[0]}.address").exists(), 60.0, "the first peer")
        for name in churn.names[1:]:
            churn.start(name)
        _until(lambda: any(line["counted"] == count for line in churn.rounds()), 120.0, "a round with everybody")
        began, ends = time.time(), time.monotonic() + 60.0 * minutes
        following = time.monotonic()
        while time.monotonic() < ends:
            churn.restore()
            if time.monotonic() > following:
                churn.disturb()
                following = time.monotonic() + churn.random.uniform(*EVERY_S)
            time.sleep(0.1)
        stopped = time.time()
        _until(lambda: _restored(churn), 30.0, "everybody awake again")
        quiet = time.time()
        everybody = lambda line: line["counted"] == count and line["t"] > quiet  # noqa: E731
        _until(lambda: any(map(everybody, churn.rounds())), SETTLE_S, "a round with everybody at the end")
        met = min(line["t"] for line in churn.rounds() if everybody(line))
    finally:
        churn.close()
    return judge_rounds(churn, began=began, stopped=stopped, met_s=met - quiet, load=os.getloadavg()[0])


def _restored(churn: Churn) -> bool:
    churn.restore(everybody=True)
    return not churn.returns


def judge_rounds(churn: Churn, *, began: float, stopped: float, met_s: float, load: float) -> str:
    """What the logs say; raises SystemExit where they contradict each other."""
    digests: dict[int, set[str]] = {}
    chains: dict[int, set[str]] = {}
    for line in churn.rounds():
        digests.setdefault(line["round"], set()).add(line["digest"])
        chains.setdefault(line["round"], set()).add(line["chain"])
    last = max(digests)
    split = [number for number in digests if len(digests[number]) > 1 or len(chains[number]) > 1]
    missing = [number for number in range(last + 1) if number not in digests]
    chain = "0" * 64
    for number in range(last + 1 if not split and not missing else 0):
        chain = next_chain(chain, next(iter(digests[number])))
        if chains[number] != {chain}:
            split.append(number)
    during = sorted({line["round"]: line["t"] for line in churn.rounds() if began <= line["t"] <= stopped}.values())
    gaps = sorted(after - before for before, after in itertools.pairwise(during))
    counts = [line["counted"] for line in churn.rounds() if began <= line["t"] <= stopped]
    waits = sum(line.get("event") == "no-majority" for name in churn.names for line in churn.lines(name))
    behind = sum(line.get("event") == "behind" for name in churn.names for line in churn.lines(name))
    lines = [
        f"{len(churn.names)} peers, {(stopped - began) / 60:.1f} minutes, load {load:.0f}",
        "faults: " + ", ".join(f"{count} × {kind}" for kind, count in churn.faults.items()),
        f"rounds committed: {last + 1}, of them {len(during)} while peers were disturbed, by "
        f"{statistics.mean(counts):.1f} peers on average",
        f"time between two rounds: median {statistics.median(gaps):.2f} s, 99 % below "
        f"{gaps[int(0.99 * (len(gaps) - 1))]:.2f} s, longest {gaps[-1]:.2f} s",
        f"peers that saw no majority: {waits} times; that had to fetch the state again: {behind} times",
        f"rounds with two results: {len(split)}; rounds missing: {len(missing)}",
        f"all peers in one round again {met_s:.1f} s after the last was awake or started",
    ]
    text = "\n".join(lines)
    if split or missing:
        raise SystemExit(f"{text}\nsplit: {split[:10]}, missing: {missing[:10]}")
    return text


def _until(is_so: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"never came: {what}")
        time.sleep(0.2)


def main() -> None:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the logs of all peers here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        spec = json.loads(args.peer)
        try:
            ChurnPeer(Path(spec["folder"]), spec["name"], founds=spec["founds"]).run()
        except PhalanxError as error:
            raise SystemExit(str(error)) from error
        return
    folder = args.keep or Path(tempfile.mkdtemp(prefix="churn-"))
    folder.mkdir(parents=True, exist_ok=True)
    text = run_churn(folder, minutes=args.minutes, count=args.peers, seed=args.seed)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if not args.keep:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
