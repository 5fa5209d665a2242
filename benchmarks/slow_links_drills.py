"""Training processes of peers that are killed and paused: how long do the others stand still, what do they say?

python benchmarks/slow_links_drills.py [--drills kill-first,kill-last,hang,alone] [--out FILE]

Each drill starts `phalanx peers start` and `join` on this machine (target-batch, heartbeat 0.5 s, dead_after 3 s),
waits for some steps, and disturbs one peer's process:

    kill-first, kill-last   SIGKILL to one of three, the lowest and the highest id; the others must go on
    hang                    SIGSTOP to one of three for 10 s; the others go on, and it comes back
    alone                   SIGKILL to the lower of two: the other says that it waits, and goes on alone when it is told

The stall is the time from the signal to the next exchange that a survivor records as committed; the floor is one
heartbeat and a second after a kill, `dead_after_s` and a second after a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HEARTBEAT_S, DEAD_AFTER_S, HANG_S = 0.5, 3.0, 10.0
PATIENCE_S = 300.0
JOB = """\
name = "drill"
[model]
layers = 2
hidden = 32
heads = 2
head_dim = 16
ffn = 64
vocab = 512
[data]
corpus = "offline-english"
sequence = 32
tokens = 20_000_000
[batch]
global_sequences = 6
micro = 1
[precision]
compute = "fp32"
[parallel]
mode = "fixed"
[train]
samples = 0
evaluate_sequences = 0
[telemetry]
timeline_every = 0
[checkpoint]
interval_s = 3600
[cluster]
spec = "local-cpu:1"
[sync]
mode = "target-batch"
peers = {peers}
heartbeat_s = {heartbeat_s}
dead_after_s = {dead_after_s}
"""


class DrillPeers:
    """Some peers of one run, in processes of their own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.job = folder / "job.toml"
        text = JOB.format(peers=count, heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S)
        self.job.write_text(text, encoding="utf-8")
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("start", str(self.job))
        wait_until(lambda: self.status(0).get("address"), "the first peer")
        for place in range(1, count):
            invitation = self.folder / f"peer-{place}.json"
            self.call("invite", str(self.run(0)), f"peer-{place}", "--out", str(invitation))
            self._start("join", str(invitation), "--job", str(self.job))
        wait_until(lambda: all(len(self.rounds(place)) > 10 for place in range(count)), "ten steps of everybody")
        self.places = sorted(range(count), key=lambda place: str(self.status(place)["id"]))  # in order of their ids

    def _start(self, *words: str) -> None:
        place = len(self.processes)
        runs = ["--runs", str(self.folder / f"runs-{place}"), "--no-check"]
        with (self.folder / f"{place}.log").open("ab") as log:
            command = [sys.executable, "-m", "phalanx", "peers", *words, *runs]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))

    def call(self, *words: str) -> str:
        """A verb of `phalanx peers`; what it printed."""
        done = subprocess.run([sys.executable, "-m", "phalanx", "peers", *words], capture_output=True, text=True)
        return done.stdout + done.stderr

    def run(self, place: int) -> Path:
        """The run folder of a peer."""
        return next(iter((self.folder / f"runs-{place}").glob("drill*")))

    def status(self, place: int) -> dict[str, Any]:
        """How a peer last saw the group."""
        with suppress(OSError, ValueError, StopIteration):
            return dict(json.loads((self.run(place) / "peers" / "status.json").read_text(encoding="utf-8")))
        return {}

    def events(self, place: int) -> list[dict[str, Any]]:
        """All that a peer has recorded."""
        found = []
        with suppress(OSError, StopIteration):
            for line in (self.run(place) / "events-00000.jsonl").read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def rounds(self, place: int) -> list[float]:
        """When each exchange of a peer was over."""
        return [one["t"] for one in self.events(place) if one.get("event") == "exchange" and one["kind"] != "meet"]

    def told(self, place: int, kind: str) -> dict[str, Any] | None:
        """The first event of a kind in the group."""
        return next((one for one in self.events(place) if one.get("event") == "peer" and one["kind"] == kind), None)

    def worker(self, place: int) -> int:
        """The process that trains: a child of the command."""
        children = Path(f"/proc/{self.processes[place].pid}/task/{self.processes[place].pid}/children").read_text()
        for child in children.split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"phalanx.train.slow_links.peer_worker" in words:
                return int(child)
        raise SystemExit(f"peer {place} has no worker")

    def stall_s(self, places: list[int], since: float) -> float:
        """The longest of some peers' times to their next exchange."""
        wait_until(lambda: all(self.rounds(one)[-1] > since + 0.05 for one in places), "an exchange without it")
        return max(min(t for t in self.rounds(one) if t > since + 0.05) - since for one in places)

    def close(self) -> None:
        """End every process that was started here."""
        for process in self.processes:
            with suppress(SystemExit, OSError):
                os.kill(self.worker(self.processes.index(process)), signal.SIGKILL)
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """For what other processes bring about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"never came: {what}")
        time.sleep(0.05)


def drill_kill(folder: Path, which: int) -> str:
    """SIGKILL to one of three, by the order of their ids."""
    peers = DrillPeers(folder, 3)
    try:
        victim = peers.places[which]
        rest = [place for place in range(3) if place != victim]
        usual = _usual_s(peers, rest[0])
        since = time.time()
        os.kill(peers.worker(victim), signal.SIGKILL)
        stall_s = peers.stall_s(rest, since)
        wait_until(lambda: all(peers.rounds(one)[-1] > since + 5.0 for one in rest), "five seconds more")
        starts = max(sum(one.get("event") == "run_start" for one in peers.events(place)) for place in rest)
    finally:
        peers.close()
    floor = HEARTBEAT_S + 1.0
    return f"{stall_s:.2f} s (floor {floor:g} s; a step takes {usual:.2f} s), starts of each survivor: {starts}"


def drill_hang(folder: Path) -> str:
    """SIGSTOP to the last of three, then SIGCONT."""
    peers = DrillPeers(folder, 3)
    try:
        victim = peers.places[-1]
        rest = [place for place in range(3) if place != victim]
        worker, since = peers.worker(victim), time.time()
        os.kill(worker, signal.SIGSTOP)
        stall_s = peers.stall_s(rest, since)
        wait_until(lambda: time.time() > since + HANG_S, "the end of the pause")
        woken = time.time()
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: peers.rounds(victim)[-1] > woken + 1.0, "rounds of the one that slept")
        back_s = min(t for t in peers.rounds(victim) if t > woken) - woken
    finally:
        peers.close()
    return f"{stall_s:.2f} s (floor {DEAD_AFTER_S + 1.0:g} s), and takes part {back_s:.2f} s after it wakes"


def drill_alone(folder: Path) -> str:
    """SIGKILL to the lower of two; then `phalanx peers go-on-alone`."""
    peers = DrillPeers(folder, 2)
    try:
        lower, higher = peers.places
        since = time.time()
        os.kill(peers.worker(lower), signal.SIGKILL)
        wait_until(lambda: peers.told(higher, "no-majority"), "that it waits")
        told_s = (peers.told(higher, "no-majority") or {})["t"] - since
        done = len(peers.rounds(higher))
        listed = peers.call("list", str(peers.run(higher)))
        time.sleep(3.0)  # long enough for rounds, if it made any
        waits = len(peers.rounds(higher)) == done
        asked = time.time()
        answer = peers.call("go-on-alone", str(peers.run(higher)))
        wait_until(lambda: len(peers.rounds(higher)) > done + 5, "rounds of one peer")
        first_s = min(t for t in peers.rounds(higher) if t > asked) - asked
    finally:
        peers.close()
    says = "phalanx peers go-on-alone" in listed
    return (
        f"says so {told_s:.2f} s after the kill, in `phalanx peers list`: {says}, waits: {waits}; goes on "
        f"{first_s:.2f} s after the command was started ({len(answer.splitlines())} lines of answer)"
    )


def _usual_s(peers: DrillPeers, place: int) -> float:
    times = peers.rounds(place)[-10:]
    return (times[-1] - times[0]) / (len(times) - 1)


DRILLS: dict[str, Callable[[Path], str]] = {
    "kill-first": lambda folder: drill_kill(folder, 0),
    "kill-last": lambda folder: drill_kill(folder, -1),
    "hang": drill_hang,
    "alone": drill_alone,
}


def main() -> None:
    """Every drill, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drills", default=",".join(DRILLS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root, lines = Path(tempfile.mkdtemp(prefix="slow-drills-")), []
    for name in args.drills.split(","):
        lines.append(f"{name}: {DRILLS[name](root / name)}; load {os.getloadavg()[0]:.0f}")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
