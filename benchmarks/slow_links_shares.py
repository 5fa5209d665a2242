"""Four peers at 80, 10, 10 and 10 Mbit/s: equal shares against water-filling, and wire bytes against the codec's.

Water-filling goes by speeds that the peers measure (nobody states any), and for comparison by the true ones.

    sudo python benchmarks/slow_links_shares.py [--values 1500000] [--rounds 3] [--codec fp32] [--json FILE]

Each peer is a process in a network namespace of its own, behind a veth pair with a token bucket (tbf) each way, on one
bridge. Needs root, `ip` and `tc`; ends with status 2 and says so where they are missing. Time of a round is from the
last peer's end of one to the last peer's end of the next. Bytes are the interfaces' own counters, heartbeats and TCP/IP
headers with them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.network.slow_codecs import encoded_bytes
from phalanx.network.slow_shares import round_seconds, water_filling
from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import Bandwidth, RunFacts
from phalanx.peers.group import PeerGroup
from phalanx.peers.identity import PeerIdentity

SPEEDS_MBPS = (80.0, 10.0, 10.0, 10.0)
PORT = 7400
RUN = RunFacts(run_id="shares", model_digest="benchmark")


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def build_network(hub: str, names: list[str]) -> None:
    """One bridge, and for each peer a namespace whose link is as fast as it says, both ways."""
    sh("ip", "netns", "add", hub)
    sh("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
    sh("ip", "-n", hub, "link", "set", "bridge0", "up")
    for place, name in enumerate(names):
        sh("ip", "netns", "add", name)
        sh("ip", "-n", hub, "link", "add", f"port{place}", "type", "veth", "peer", "name", "link0", "netns", name)
        sh("ip", "-n", hub, "link", "set", f"port{place}", "master", "bridge0", "up")
        sh("ip", "-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", "link0")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", name, "link", "set", "link0", "up")
        shape = ("root", "tbf", "rate", f"{SPEEDS_MBPS[place]:g}mbit", "burst", "32kb", "latency", "400ms")
        sh("tc", "-n", name, "qdisc", "add", "dev", "link0", *shape)
        sh("tc", "-n", hub, "qdisc", "add", "dev", f"port{place}", *shape)


def run_plain(setup: dict[str, Any], place: int) -> None:
    """The bytes of a water-filling round over plain TCP, without TLS, codec or sums: what machine and tbf allow now.

    Each slow peer sends the fast one a vector and gets one back at the same time.
    """
    size, piece = encoded_bytes(setup["codec"], setup["values"]), b"x" * 65536

    def exchange(sock: socket.socket) -> None:
        def push() -> None:
            for at in range(0, size, len(piece)):
                sock.sendall(piece[: size - at])

        thread = threading.Thread(target=push)
        thread.start()
        left = size
        while left:
            left -= len(sock.recv(min(left, 65536)))
        thread.join()

    if place:
        with connect_until("10.77.0.1", PORT + 1) as sock:
            sock.recv(1)  # all are there
            for number in range(setup["rounds"] + 1):
                exchange(sock)
                print(json.dumps({"round": number, "ended": time.monotonic()}), flush=True)
        return
    with socket.create_server(("10.77.0.1", PORT + 1)) as listener:
        socks = [listener.accept()[0] for _ in SPEEDS_MBPS[1:]]
        for sock in socks:
            sock.sendall(b"g")
        for number in range(setup["rounds"] + 1):
            threads = [threading.Thread(target=exchange, args=(sock,)) for sock in socks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(json.dumps({"round": number, "ended": time.monotonic()}), flush=True)
        for sock in socks:
            sock.close()


def connect_until(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=300.0)
        except ConnectionRefusedError:
            time.sleep(0.1)


def run_peer(setup: dict[str, Any], place: int) -> None:
    """One peer: joins, averages, and says how long each round took."""
    person = PeerIdentity.from_pem(*setup["people"][place], where="benchmark")
    allowed = AllowList.from_json(setup["allowed"], where="benchmark")
    speed = SPEEDS_MBPS[place]
    stated = {"equal": 10.0, "stated": speed, "water-filling": None}[setup["shares"]]
    link = Bandwidth(up_mbps=stated, down_mbps=stated) if stated else None
    vector = np.random.default_rng(place).standard_normal(setup["values"]).astype(np.float32)

    def counters() -> tuple[int, int]:
        folder = Path("/sys/class/net/link0/statistics")
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())

    listen = (f"10.77.0.{place + 1}", PORT)
    with PeerGroup(person, RUN, allowed=allowed, listen=listen, bandwidth=link) as group:
        group.join([("10.77.0.1", PORT)] if place else (), timeout_s=60.0)
        while len(group.view().members) < len(SPEEDS_MBPS):
            time.sleep(0.05)
        for number in range(setup["rounds"] + 1):
            before = counters()
            result = group.average(number, vector, 1.0, setup["codec"], timeout_s=300.0)
            after = counters()
            facts = {
                "round": number,
                "committed": result.committed,
                "reason": result.reason,
                "ended": time.monotonic(),  # one clock for all of a machine
                "share": result.shares.get(group.id, 0.0),
                "known_mbps": [m.bandwidth.slower_mbps if m.bandwidth else None for m in group.view().members],
                "codec_sent": result.bytes_sent,
                "codec_received": result.bytes_received,
                "wire_sent": after[0] - before[0],
                "wire_received": after[1] - before[1],
            }
            print(json.dumps(facts), flush=True)
        sys.stdin.readline()  # until all are done: nobody waits for one that has left


def run_session(setup: dict[str, Any], names: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """All four, from join to the last round; lines of each peer."""
    path = folder / "setup.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(setup))
    running = []
    for place, name in enumerate(names):
        words = ["ip", "netns", "exec", name, sys.executable, __file__, "--peer", str(place), "--setup", str(path)]
        running.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        if place == 0:
            time.sleep(3.0)  # others ask again anyway; this only keeps their log quiet
    lines: list[list[dict[str, Any]]] = []
    try:
        for process in running:
            assert process.stdout is not None
            lines.append([json.loads(process.stdout.readline()) for _ in range(setup["rounds"] + 1)])
        for process in running:
            process.communicate("\n", timeout=60.0)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return lines


def round_times(peers: list[list[dict[str, Any]]]) -> list[float]:
    """From the last peer's end of one round to the last peer's end of the next."""
    ends = [max(peer[number]["ended"] for peer in peers) for number in range(len(peers[0]))]
    return [after - before for before, after in itertools.pairwise(ends)]


def report(lines: dict[str, list[list[dict[str, Any]]]], values: int, codec: str) -> dict[str, Any]:
    """What was measured beside what the formula says; the first round, which warms up TCP, is left out."""
    size = encoded_bytes(codec, values)
    speeds = [one * 1e6 / 8 for one in SPEEDS_MBPS]
    ideal = {
        "equal": round_seconds(size, speeds, [0.25] * 4),
        "water-filling": round_seconds(size, speeds, water_filling(speeds)),
        "stated": round_seconds(size, speeds, water_filling(speeds)),
    }
    found: dict[str, Any] = {"values": values, "codec": codec, "encoded_bytes": size}
    plain = round_times(lines["plain"])
    found["plain_tcp"] = {"seconds": [round(one, 3) for one in plain], "median_s": round(statistics.median(plain), 3)}
    for kind, peers in [(kind, peers) for kind, peers in lines.items() if kind != "plain"]:
        every = [line for peer in peers for line in peer]
        assert all(line["committed"] for line in every), [line["reason"] for line in every]
        rounds = round_times(peers)
        counted = [line for peer in peers for line in peer[1:]]
        wire = sum(line["wire_sent"] + line["wire_received"] for line in counted)
        own = sum(line["codec_sent"] + line["codec_received"] for line in counted)
        found[kind] = {
            "shares": [round(peer[1]["share"], 4) for peer in peers],
            "speeds_mbps": peers[0][1]["known_mbps"],
            "seconds": [round(one, 3) for one in rounds],
            "median_s": round(statistics.median(rounds), 3),
            "formula_s": round(ideal[kind], 3),
            "over_formula": round(statistics.median(rounds) / ideal[kind], 3),
            "codec_bytes": own,
            "wire_bytes": wire,
            "wire_over_codec": round(wire / own, 4),
        }
    found["gain"] = round(found["equal"]["median_s"] / found["water-filling"]["median_s"], 3)
    found["over_plain_tcp"] = round(found["water-filling"]["median_s"] / found["plain_tcp"]["median_s"], 3)
    found["formula_gain"] = round(ideal["equal"] / ideal["water-filling"], 3)
    found["load_average"] = list(os.getloadavg())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1_500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setup", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peer is not None:
        setup = json.loads(chosen.setup.read_text())
        (run_plain if setup["shares"] == "plain" else run_peer)(setup, chosen.peer)
        return 0
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        why = f"{' and '.join(missing)} not installed" if missing else "not run as root"
        print(f"slow_links_shares: cannot build network namespaces with shaped links: {why}", file=sys.stderr)
        return 2
    people = sorted((PeerIdentity.create(f"peer-{place}") for place in range(4)), key=lambda one: one.id)
    allowed = AllowList.create(people[0], RUN.run_id, [one.certificate_pem for one in people])
    hub, names = f"phx{os.getpid()}h", [f"phx{os.getpid()}p{place}" for place in range(4)]
    lines = {}
    try:
        build_network(hub, names)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("plain", "equal", "stated", "water-filling"):
                setup = {
                    "people": [(one.key_pem, one.certificate_pem) for one in people],
                    "allowed": allowed.to_json(),
                    "values": chosen.values,
                    "rounds": chosen.rounds,
                    "codec": chosen.codec,
                    "shares": kind,
                }
                lines[kind] = run_session(setup, names, Path(folder))
    except subprocess.CalledProcessError as error:
        print(f"slow_links_shares: {' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    found = report(lines, chosen.values, chosen.codec)
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
