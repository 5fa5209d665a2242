"""Two real peers over a slow link: utilisation beside the planner's, bytes on the wire beside the codec's.

python benchmarks/slow_links.py [--links clean,latency,loss,reno] [--modes step,h20,h20-int8] [--pause 0.1]
    [--values 2000000] [--out FILE]

Each case starts `phalanx peers start` and `phalanx peers join` in two network namespaces (slow_network.py; root) with a
link of 20 Mbit/s, trains a model of 0.35M parameters, and reads both peers' records. Compute per step is what each peer
needed between two exchanges; the planner is asked with it. Waiting for the slower peer counts as waiting. "step" is
target-batch in fp32: gradients of every step. The corpus is fetched first: the namespaces reach no network.

"h20-int8-delay" goes on computing for five steps while an update travels; what is waited for beyond them counts.

With --pause the peers exchange as in training, but pause for so long instead of each step: the link alone is measured,
on a machine whose cores are busy. --values then sets the size of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from slow_network import SlowNetwork

from phalanx.job.sync_section import SyncSettings
from phalanx.network.slow_codecs import encoded_bytes
from phalanx.plan.slow_exchange import HEARTBEAT_BYTES, PeerLink
from phalanx.plan.slow_modes import SitePace, mode_exchange, predict_mode

MBIT_S = 20.0
PATIENCE_S = 240.0
ROUNDS = 8  # that are counted, after the first
AROUND_S = 0.15  # of an exchange: two samples of the counters, and the last acknowledgements
PORT = 7771
VALUES = "SLOW_LINKS_VALUES"
JOB = """\
name = "slow"
[model]
name = "slow-llama"
layers = 3
hidden = 96
heads = 4
kv_heads = 2
head_dim = 24
ffn = 256
vocab = 512
tied = true
[data]
corpus = "offline-english"
sequence = 64
tokens = {tokens}
[batch]
global_sequences = {sequences}
micro = 2
[optim]
lr = 3e-3
[precision]
compute = "fp32"
[train]
samples = 0
evaluate_sequences = 0
[checkpoint]
interval_s = 3600
[sync]
peers = 2
mode = "{mode}"
inner_steps = {inner_steps}
delay_steps = {delay_steps}
synchronous_steps = {warm_up}
codec = "{codec}"
dead_after_s = 60
[cluster]
spec = "local-cpu:1"
"""
LINKS: dict[str, dict[str, Any]] = {
    "clean": {},
    "latency": {"latency_s": 0.1, "congestion": "bbr"},
    "loss": {"latency_s": 0.1, "loss": 0.01, "congestion": "bbr"},
    "reno": {"latency_s": 0.1, "loss": 0.01, "congestion": "reno"},
}
MODES = {
    "step": SyncSettings(mode="target-batch"),
    "h20": SyncSettings(mode="diloco", inner_steps=20),
    "h20-int8": SyncSettings(mode="diloco", inner_steps=20, codec="int8"),
    "h20-int8-delay": SyncSettings(mode="diloco", inner_steps=20, codec="int8", delay_steps=5),
    "step-int8": SyncSettings(mode="target-batch", codec="int8"),
    "h20-sparse": SyncSettings(mode="diloco", inner_steps=20, codec="topk-2bit"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One case: seconds are means over rounds, of both peers."""

    link: str
    mode: str
    rounds: int
    step_s: float  # compute
    exchange_s: float
    utilisation: float  # without what is waited for
    planned_s: float  # of an exchange
    planned: float  # utilisation
    codec_bytes: float  # sent by one peer in the counted rounds, as the codec says
    wire_bytes: float  # by the counter of its interface
    planned_bytes: float  # of the wire: what the codec counts with headers, acknowledgements, messages and heartbeats
    bytes_per_step: float
    load: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What one peer recorded."""

    wall_s: float
    exchanges_s: list[float]
    waited_s: float  # for them
    steps: int
    step_s: float
    counted: int  # exchanges whose bytes are counted: the short one at the end of a run, too
    codec_bytes: float
    wire_bytes: float
    around_s: float  # that the counters were read for


def run_case(link: str, mode: str, folder: Path, *, sequences: int, pause_s: float) -> Measured:
    """Train with two peers, and read what they recorded."""
    sync = MODES[mode]
    steps = _steps_of_round(sync) * (ROUNDS + 1) + 1  # the last one is exchanged alone, as the run ends
    folder.mkdir(parents=True)
    job = folder / "job.toml"
    job.write_text(_job_text(mode, tokens=steps * sequences * 64, sequences=sequences), encoding="utf-8")
    with SlowNetwork(mbit_s=MBIT_S, **LINKS[link]) as net:
        counters = [ByteCounter(net, side) for side in range(2)]
        try:
            records = _pause(net, mode, folder, pause_s) if pause_s else _train(net, job, folder)
        finally:
            for counter in counters:
                counter.close()
    return _measure(link, mode, records, counters)


def _job_text(mode: str, *, tokens: int, sequences: int) -> str:
    sync = MODES[mode]
    text = JOB.format(tokens=tokens, sequences=sequences, mode=sync.mode, codec=sync.codec,
                      inner_steps=sync.inner_steps, delay_steps=sync.delay_steps, warm_up=0)  # fmt: skip
    if sync.mode == "target-batch":
        text = "\n".join(
            line for line in text.splitlines() if not line.startswith(("inner_steps", "delay", "synchronous"))
        )
    return text


def _train(net: SlowNetwork, job: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """Both peers to the end; the events of each."""
    phalanx = [sys.executable, "-m", "phalanx", "peers"]
    options = ["--no-check", "--bandwidth", f"{MBIT_S:g}/{MBIT_S:g}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{name}.log").open("w") for name in ("north", "south")]
    listen = [f"{address}:{PORT}" for address in net.addresses]
    runs = [folder / "north", folder / "south"]
    start = [*phalanx, "start", str(job), "--name", "north", "--listen", listen[0], "--runs", str(runs[0]), *options]
    processes = [net.start(0, start, stdout=logs[0], stderr=subprocess.STDOUT, env=env)]
    try:
        invitation = folder / "south.json"
        _until(lambda: _invite(net, [*phalanx, "invite"], runs[0], invitation), processes, folder)
        join = [*phalanx, "join", str(invitation), "--job", str(job), "--listen", listen[1], "--runs", str(runs[1])]
        processes.append(net.start(1, [*join, *options], stdout=logs[1], stderr=subprocess.STDOUT, env=env))
        ends = time.monotonic() + PATIENCE_S
        for process in processes:
            process.wait(timeout=max(1.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"stopped after {PATIENCE_S:g} s; what was finished is counted", file=sys.stderr)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
            if process.poll() is None:
                process.kill()
    return [list(_events(run)) for run in runs]


def _pause(net: SlowNetwork, mode: str, folder: Path, pause_s: float) -> list[list[dict[str, Any]]]:
    """Both peers as groups without training; the events that training would write."""
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import PeerIdentity

    identities = [PeerIdentity.create(name) for name in ("north", "south")]
    for identity in identities:
        identity.save(folder / identity.name)
    allowed = AllowList.create(identities[0], "slow", [one.certificate_pem for one in identities])
    allowed.save(folder / "allowed.json")
    sync = MODES[mode]
    spec = {"folder": str(folder), "addresses": net.addresses, "codec": sync.codec, "values": _model_values(),
            "pause_s": pause_s, "steps": _steps_of_round(sync), "delay": sync.delay_steps}  # fmt: skip
    processes = [
        net.start(
            side, [sys.executable, __file__, "--peer", json.dumps({**spec, "side": side})], stdout=subprocess.PIPE
        )
        for side in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


def _run_paused_peer(spec: dict[str, Any]) -> None:
    """One end of `_pause`: prints its exchanges."""
    import numpy as np

    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.facts import Bandwidth, RunFacts
    from phalanx.peers.group import PeerGroup
    from phalanx.peers.identity import PeerIdentity

    folder, side = Path(spec["folder"]), spec["side"]
    group = PeerGroup(
        PeerIdentity.load(folder / ("north", "south")[side]),
        RunFacts(run_id="slow", model_digest="none"),
        allowed=AllowList.load(folder / "allowed.json"),
        listen=(spec["addresses"][side], PORT),
        bandwidth=Bandwidth(up_mbps=MBIT_S, down_mbps=MBIT_S),
        dead_after_s=60.0,
    )
    ends = time.monotonic() + 60
    while side and time.monotonic() < ends:
        with suppress(Exception):  # the first may not listen yet
            group.join([(spec["addresses"][0], PORT)], timeout_s=10)
            break
        time.sleep(0.5)
    if not side:
        group.join()
    while len(group.view().members) < 2:
        time.sleep(0.05)
    vector = np.random.default_rng(side).standard_normal(spec["values"]).astype(np.float32)
    first, events, delay = group.view().next_round, [], spec["delay"]
    sender = ThreadPoolExecutor(1)
    for number in range(ROUNDS + 1):
        time.sleep(spec["pause_s"] * (spec["steps"] - (delay if number else 0)))
        began = time.time()
        sent = sender.submit(group.average, first + number, vector, 1.0, spec["codec"], timeout_s=PATIENCE_S)
        time.sleep(spec["pause_s"] * delay)
        waits = time.monotonic()
        result = sent.result()
        events.append({"event": "exchange", "kind": "weights", "t": time.time(), "began": began,
                       "step": (number + 1) * spec["steps"], "seconds": result.seconds,
                       "waited": time.monotonic() - waits, "bytes_sent": result.bytes_sent})  # fmt: skip
    print(json.dumps(events), flush=True)
    time.sleep(2.0)  # the other may still be in its last round
    os._exit(0)


def _invite(net: SlowNetwork, command: list[str], runs: Path, invitation: Path) -> bool:
    found = [path.parent for path in runs.glob("*/plan.json")]
    if not found:
        return False
    done = subprocess.run(
        ["ip", "netns", "exec", net.names[0], *command, str(found[0]), "south", "--out", str(invitation)],
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode == 0 and invitation.exists()


def _until(is_done: Any, processes: list[subprocess.Popen[str]], folder: Path) -> None:
    """Ask again until it is so; says why a peer ended meanwhile."""
    ends = time.monotonic() + 120
    while not is_done():
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > ends:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"a peer did not start:\n{logs}")
        time.sleep(0.5)


def _events(runs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(runs.glob("*/events-00000*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


# Reads the counter inside the namespace, without a process for each look: those are late on a busy machine.
WATCH = """
import sys, time
with open(sys.argv[1]) as file:
    while True:
        file.seek(0)
        value = file.read().strip()
        print(time.time(), value, flush=True)
        time.sleep(0.05)
"""


class ByteCounter:
    """What one end has sent, by the counter of its interface, over time."""

    def __init__(self, net: SlowNetwork, side: int) -> None:
        path = f"/sys/class/net/{net.devices[side]}/statistics/tx_bytes"
        self._process = net.start(side, [sys.executable, "-c", WATCH, path], stdout=subprocess.PIPE)
        self.rows: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            t, value = line.split()
            self.rows.append((float(t), int(value)))

    def close(self) -> None:
        """Stop looking."""
        self._process.kill()
        self._thread.join(timeout=5)

    def between(self, start: float, end: float) -> float:
        """The counter's growth, read between its samples."""
        times = [row[0] for row in self.rows]

        def at(t: float) -> float:
            place = min(max(1, bisect_left(times, t)), len(times) - 1)
            (t0, low), (t1, high) = self.rows[place - 1], self.rows[place]
            return low + min(1.0, max(0.0, (t - t0) / (t1 - t0))) * (high - low)

        return at(end) - at(start)


def _measure(link: str, mode: str, records: list[list[dict[str, Any]]], counters: list[ByteCounter]) -> Measured:
    """Rounds after the first, which also waits for the other peer to start."""
    sync = MODES[mode]
    sides = [_read_rounds(events, counters[side], sync, f"{link}, {mode}") for side, events in enumerate(records)]
    paces = [
        SitePace(
            name=str(number),
            devices=1,
            step_s=side.step_s,
            tokens_per_step=1.0,
            link=PeerLink(name=str(number), bytes_per_s=MBIT_S * 1e6 / 8, **_known_link(link)),
        )
        for number, side in enumerate(sides)
    ]
    predicted = predict_mode(paces, _model_values(), sync)
    planned_wire = statistics.mean(mode_exchange(paces, _model_values(), sync).wire_bytes)
    # Whoever comes first also waits for the other: what the exchange itself takes is the shorter of both.
    pairs = zip(*(side.exchanges_s for side in sides), strict=False)
    return Measured(
        link=link,
        mode=mode,
        rounds=len(sides[0].exchanges_s),
        step_s=statistics.mean(side.step_s for side in sides),
        exchange_s=statistics.mean(min(pair) for pair in pairs),
        utilisation=statistics.mean(1 - side.waited_s / side.wall_s for side in sides),
        planned_s=predicted.exchange_s,
        planned=statistics.mean(use.utilisation for use in predicted.sites),
        codec_bytes=statistics.mean(side.codec_bytes for side in sides),
        wire_bytes=statistics.mean(side.wire_bytes for side in sides),
        planned_bytes=statistics.mean(
            side.counted * planned_wire + side.around_s / sync.heartbeat_s * HEARTBEAT_BYTES for side in sides
        ),
        bytes_per_step=statistics.mean(
            side.codec_bytes / side.counted * len(side.exchanges_s) / side.steps for side in sides
        ),
        load=os.getloadavg()[0],
    )


def _read_rounds(events: list[dict[str, Any]], counter: ByteCounter, sync: SyncSettings, what: str) -> Rounds:
    """Exchanges of one peer, from the end of its first to the end of its last."""
    found = [one for one in events if one.get("event") == "exchange" and one.get("kind") != "meet"]
    if len(found) < 3:
        raise SystemExit(f"{what}: {len(found)} exchanges are recorded")
    rounds = found
    while rounds[-1]["step"] - rounds[-2]["step"] < rounds[1]["step"] - rounds[0]["step"]:
        rounds = rounds[:-1]  # the end of the run is no whole round
    wall_s = rounds[-1]["t"] - rounds[0]["t"]
    spent = [float(one["seconds"]) for one in rounds[1:]]
    first, last = rounds[0]["step"], rounds[-1]["step"]
    waited_s = sum(spent)
    if sync.delay_steps:  # what does not compute: a step says how long it took
        computed = [one for one in events if one.get("event") == "step" and first <= one["step"] < last]
        waited_s = wall_s - sum(float(one["duration_s"]) for one in computed)
        if "waited" in rounds[0]:
            waited_s = sum(float(one["waited"]) for one in rounds[1:])
    # Bytes also of the short round at the end: it may begin before the last of the one before it are acknowledged.
    ended = {one["step"]: one["t"] for one in events if one.get("event") == "step"}
    spans = _spans_around(found[1:], ended, sync.delay_steps, not_before=found[0]["t"])
    return Rounds(
        wall_s=wall_s,
        exchanges_s=spent,
        waited_s=waited_s,
        steps=last - first,
        step_s=(wall_s - waited_s) / (last - first),
        counted=len(found) - 1,
        codec_bytes=sum(float(one["bytes_sent"]) for one in found[1:]),
        wire_bytes=sum(counter.between(start, end) for start, end in spans),
        around_s=sum(end - start for start, end in spans),
    )


def _spans_around(
    rounds: list[dict[str, Any]], ended: dict[int, float], delay: int, *, not_before: float
) -> list[tuple[float, float]]:
    """Times around exchanges, each counted once: heartbeats of the long steps between two are left out.

    `not_before` is the end of the exchange before them: with steps shorter than AROUND_S its bytes are near.
    """
    spans: list[tuple[float, float]] = []
    for one in rounds:
        took_from = one["t"] - float(one["seconds"])
        start = min(took_from, one.get("began") or (delay and ended.get(one["step"] - delay - 1)) or took_from)
        span = (max(not_before, start - AROUND_S), one["t"] + AROUND_S)
        if spans and span[0] <= spans[-1][1]:
            span = (spans.pop()[0], span[1])
        spans.append(span)
    return spans


def _steps_of_round(sync: SyncSettings) -> int:
    return 1 if sync.mode == "target-batch" else sync.inner_steps


def _known_link(link: str) -> dict[str, Any]:
    known = dict(LINKS[link])
    if known.get("congestion") == "reno":
        known["congestion"] = "cubic"
    return known


def _model_values() -> int:
    if values := os.environ.get(VALUES):
        return int(values)
    from phalanx.job.load import load
    from phalanx.job.parameter_counts import count_parameters

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(_job_text("h20", tokens=4096, sequences=8), encoding="utf-8")
        return count_parameters(load(path).job.model).total


def _fetch_corpus() -> None:
    from phalanx.job.load import load
    from phalanx.train.data.corpus import ensure_dataset

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(_job_text("h20", tokens=4096, sequences=8), encoding="utf-8")
        job = load(path).job
        ensure_dataset(job.data, path.parent, vocab=job.model.vocab)


def table(rows: list[Measured]) -> str:
    """As Markdown."""
    first = next((row for row in rows if row.mode == "step" and row.link == "clean"), rows[0])
    plain = encoded_bytes("fp32", _model_values())
    head = ("link", "mode", "rounds", "compute a step", "exchange", "planned", "utilisation", "planned", "points",
            "wire / codec", "wire / planned", "fewer bytes a step")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        lines.append(
            f"| {row.link} | {row.mode} | {row.rounds} | {row.step_s:.3f} s | {row.exchange_s:.3f} s | "
            f"{row.planned_s:.3f} s | {row.utilisation:.1%} | {row.planned:.1%} | "
            f"{100 * (row.planned - row.utilisation):+.1f} | {row.wire_bytes / row.codec_bytes:.3f} | "
            f"{row.wire_bytes / row.planned_bytes:.3f} | "
            f"{plain / row.bytes_per_step:.1f}x |"
        )
    return "\n".join([*lines, "", f"Load of the machine (1 minute): {first.load:.1f} to {rows[-1].load:.1f}."])


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sequences", type=int, default=4, help="of a global batch, half for each peer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="pause so long instead of each step")
    parser.add_argument("--values", type=int, help="of the model, with --pause")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return _run_paused_peer(json.loads(args.peer))
    if args.values:
        if not args.pause:
            parser.error("--values is for --pause: trained models have their own size")
        os.environ[VALUES] = str(args.values)
    if not args.pause:
        _fetch_corpus()
    root = args.keep or Path(tempfile.mkdtemp(prefix="slow-links-"))
    rows: list[Measured] = []
    for link in args.links.split(","):
        for mode in args.modes.split(","):
            rows.append(run_case(link, mode, root / f"{link}-{mode}", sequences=args.sequences, pause_s=args.pause))
            print(table(rows[-1:]).splitlines()[2], flush=True)
    text = table(rows)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if not args.keep:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
