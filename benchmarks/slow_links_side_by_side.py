"""Phalanx, hivemind and torchft in the same network: bytes on the wire, time of an exchange, stall after a kill.

    sudo python benchmarks/slow_links_side_by_side.py [--hivemind VENV/bin/python] [--torchft VENV/bin/python]
        [--values 2000000] [--json FILE] [--cases bytes,kill]

Every peer is a process in a network namespace of its own at 20 Mbit/s each way (tbf, one bridge, no latency). Each
averages a vector of so many values, and pauses in place of the steps between two averages. hivemind is asked as its
optimizer asks: `DecentralizedAverager.step` with the group size known, so that a group that is complete begins at once.
torchft is asked as its DiLoCo asks: a quorum, `Manager.allreduce` over gloo, `should_commit`; a round that is not
committed is tried again at once. Its lighthouse runs beside the first peer. It has no 8 bits without a GPU.

`--hivemind` and `--torchft` name the Python of an environment with `pip install hivemind==1.1.12 'torch>=2.11,<2.14'`
and `pip install torchft-nightly numpy 'torch>=2.11,<2.14'`; without them only Phalanx is measured. Bytes are the
counter of a peer's interface over whole rounds, pauses and all that is said in them included. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MBIT_S, PORT, PAUSE_S = 20.0, 7500, 0.56
# name, codec, steps between two averages, rounds that are counted
CASES = (("fp32 every step", "fp32", 1, 5), ("16 bits, H = 20", "bf16", 20, 4), ("8 bits, H = 20", "int8", 20, 4))
KILL_CODEC = "bf16"


def sent_bytes() -> int:
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


def phalanx_average(setup: dict[str, Any], place: int) -> Any:
    """Join the group; returns what averages once, and says whether it did."""
    import numpy as np

    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.facts import RunFacts
    from phalanx.peers.group import PeerGroup
    from phalanx.peers.identity import PeerIdentity

    group = PeerGroup(
        PeerIdentity.from_pem(*setup["people"][place], where="benchmark"),
        RunFacts(run_id="side", model_digest="benchmark"),
        allowed=AllowList.from_json(setup["allowed"], where="benchmark"),
        listen=(f"10.77.0.{place + 1}", PORT),
    )
    group.join([("10.77.0.1", PORT)] if place else (), timeout_s=60.0)
    while len(group.view().members) < setup["peers"]:
        time.sleep(0.05)
    vector = np.random.default_rng(place).standard_normal(setup["values"]).astype(np.float32)
    first = group.view().next_round

    def average(number: int) -> bool:
        return group.average(first + number, vector, 1.0, setup["codec"], timeout_s=120.0).committed

    return average


def hivemind_average(setup: dict[str, Any], place: int) -> Any:
    """The same of a hivemind averager."""
    import hivemind
    import torch
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

    known = Path(setup["folder"]) / f"{setup['tag']}.maddr"
    while place and not known.exists():
        time.sleep(0.1)
    listen = [f"/ip4/10.77.0.{place + 1}/tcp/{PORT}"]
    dht = hivemind.DHT(host_maddrs=listen, initial_peers=[known.read_text()] if place else None, start=True)
    if not place:
        whole = str(next(one for one in dht.get_visible_maddrs() if "10.77.0.1" in str(one)))
        known.with_suffix(".part").write_text(whole)
        known.with_suffix(".part").rename(known)
    compressions = {"fp32": NoCompression, "bf16": Float16Compression, "int8": Uniform8BitQuantization}
    compression = compressions[setup["codec"]]()
    torch.manual_seed(place)
    averager = DecentralizedAverager(
        [torch.randn(setup["values"])],
        dht,
        prefix="side",
        target_group_size=setup["peers"],
        compression=compression,
        start=True,
    )

    def average(number: int) -> bool:
        with averager.get_tensors() as tensors:
            tensors[0].normal_()
        found = averager.step(timeout=120.0)
        with averager.get_tensors() as tensors:  # it counts a step in which nothing was averaged as one
            spread = float(tensors[0].std())
        return found is not None and spread < 0.85  # of a mean of two 0.71, of three 0.58

    return average


def torchft_average(setup: dict[str, Any], place: int) -> Any:
    """The same of a torchft manager; quorum, allreduce and commit are what its DiLoCo does between inner steps."""
    import socket
    from datetime import timedelta

    os.environ["GLOO_SOCKET_IFNAME"] = "link0"
    me, lighthouse = f"10.77.0.{place + 1}", "http://10.77.0.1:7600"
    socket.gethostname = lambda: me  # a namespace has no name server, and its process groups meet at this name

    import torch
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    if not place:
        # As its README starts it, but for the replicas of a quorum: all that begin, less the one that is killed.
        fewest = setup["peers"] if setup["peers"] == 2 else setup["peers"] - 1
        setup["lighthouse"] = LighthouseServer(
            bind="0.0.0.0:7600", min_replicas=fewest, join_timeout_ms=10_000, quorum_tick_ms=100
        )
    store = TCPStore(me, 7601, is_master=True, wait_for_workers=False)
    torch.manual_seed(place)
    values = torch.randn(setup["values"], dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[setup["codec"]])
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=me,
        store_port=7601,
        lighthouse_addr=lighthouse,
        replica_id=f"peer{place}",
        hostname=me,
        init_sync=False,
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=120),
    )
    manager.kept = store  # type: ignore[attr-defined]  # a store that is collected closes

    def average(number: int) -> bool:
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            values.normal_()
            manager.start_quorum()
            manager.allreduce(values).wait()
            if manager.should_commit():
                return float(values.float().std()) < 0.85  # of a mean of two 0.71, of three 0.58
        return False

    return average


AVERAGES = {"phalanx": phalanx_average, "hivemind": hivemind_average, "torchft": torchft_average}


def run_worker(setup: dict[str, Any], place: int) -> None:
    """One peer: pause and average, and a line for each round."""
    average = AVERAGES[setup["system"]](setup, place)
    for number in range(setup["rounds"] + 1):
        time.sleep(setup["pause_s"])
        began = time.monotonic()
        try:
            ok = average(number)
        except Exception as error:
            ok = False
            print(repr(error), file=sys.stderr)
        now = time.monotonic()
        print(json.dumps({"seconds": now - began, "ended": now, "ok": ok, "sent": sent_bytes()}), flush=True)
    sys.stdin.readline()
    os._exit(0)


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def build_network(hub: str, names: list[str]) -> None:
    """One bridge, and for each peer a namespace behind a slow link."""
    sh("ip", "netns", "add", hub)
    sh("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
    sh("ip", "-n", hub, "link", "set", "bridge0", "up")
    shape = ("root", "tbf", "rate", f"{MBIT_S:g}mbit", "burst", "16kb", "latency", "400ms")
    for place, name in enumerate(names):
        sh("ip", "netns", "add", name)
        sh("ip", "-n", hub, "link", "add", f"port{place}", "type", "veth", "peer", "name", "link0", "netns", name)
        sh("ip", "-n", hub, "link", "set", f"port{place}", "master", "bridge0", "up")
        sh("ip", "-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", "link0")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", name, "link", "set", "link0", "up")
        sh("tc", "-n", name, "qdisc", "add", "dev", "link0", *shape)
        sh("tc", "-n", hub, "qdisc", "add", "dev", f"port{place}", *shape)


def run_session(setup: dict[str, Any], names: list[str], python: str, *, kill_after: int = 0) -> list[list[Any]]:
    """All peers to the end; the lines of each. The last is killed in its exchange after `kill_after` of them."""
    path = Path(setup["folder"]) / f"{setup['tag']}.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(setup))
    running = []
    for place in range(setup["peers"]):
        words = ["ip", "netns", "exec", names[place], python, __file__, "--worker", str(place), "--setup", str(path)]
        running.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
    lines: list[list[Any]] = [[] for _ in running]
    try:
        for number in range(setup["rounds"] + 1):
            for place, process in enumerate(running):
                if kill_after and place == len(running) - 1 and number > kill_after:
                    continue
                assert process.stdout is not None
                lines[place].append(json.loads(process.stdout.readline()))
            if kill_after and number == kill_after:
                time.sleep(setup["pause_s"] + 0.4)  # an exchange takes more than a second
                os.killpg(running[-1].pid, signal.SIGKILL)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return lines


def counted(lines: list[list[Any]], setup: dict[str, Any], steps: int) -> dict[str, Any]:
    """Rounds after the first, of all peers."""
    if not all(line["ok"] for peer in lines for line in peer[1:]):
        return {"ok": [[line["ok"] for line in peer] for peer in lines]}
    spent = [statistics.mean(line["seconds"] for line in peer[1:]) for peer in lines]
    wall = [(peer[-1]["ended"] - peer[0]["ended"]) / setup["rounds"] for peer in lines]
    sent = [(peer[-1]["sent"] - peer[0]["sent"]) / setup["rounds"] for peer in lines]
    return {
        "exchange_s": round(statistics.mean(spent), 3),
        "utilisation": round(statistics.mean(1 - a / b for a, b in zip(spent, wall, strict=True)), 4),
        "wire_bytes_a_round": round(statistics.mean(sent)),
        "wire_over_fp32_values": round(statistics.mean(sent) / (4 * setup["values"]), 4),
        "wire_bytes_a_step": round(statistics.mean(sent) / steps),
    }


def main() -> None:
    """Every case of every system, printed as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind", metavar="PYTHON")
    parser.add_argument("--torchft", metavar="PYTHON")
    parser.add_argument("--values", type=int, default=2_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default="bytes,kill")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setup", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return run_worker(json.loads(args.setup.read_text()), args.worker)
    from phalanx.peers.allowlist import AllowList
    from phalanx.peers.identity import PeerIdentity

    people = sorted((PeerIdentity.create(f"peer-{place}") for place in range(3)), key=lambda one: one.id)
    allowed = AllowList.create(people[0], "side", [one.certificate_pem for one in people])
    hub, names = f"phx{os.getpid()}h", [f"phx{os.getpid()}p{place}" for place in range(3)]
    others = {"hivemind": args.hivemind, "torchft": args.torchft}
    systems = {"phalanx": sys.executable} | {system: python for system, python in others.items() if python}
    found: dict[str, Any] = {"values": args.values, "mbit_s": MBIT_S, "pause_s": PAUSE_S}
    try:
        build_network(hub, names)
        with tempfile.TemporaryDirectory() as folder:
            for system, python in systems.items():
                base = {
                    "system": system,
                    "folder": folder,
                    "values": args.values,
                    "people": [(one.key_pem, one.certificate_pem) for one in people],
                    "allowed": allowed.to_json(),
                }
                for place, (name, codec, steps, rounds) in enumerate(CASES if "bytes" in args.cases else ()):
                    if system == "torchft" and codec == "int8":
                        continue
                    setup = {**base, "peers": 2, "codec": codec, "rounds": rounds, "pause_s": steps * PAUSE_S}
                    setup["tag"] = f"{system}{place}"
                    found[f"{system}, {name}"] = counted(run_session(setup, names, python), setup, steps)
                    print(json.dumps({f"{system}, {name}": found[f"{system}, {name}"]}), flush=True)
                if "kill" not in args.cases:
                    continue
                setup = {**base, "peers": 3, "codec": KILL_CODEC, "rounds": 5, "pause_s": 2.0, "tag": f"{system}-kill"}
                lines = run_session(setup, names, python, kill_after=2)
                rounds_s = [[round(line["seconds"], 2) for line in peer] for peer in lines[:2]]
                usual = statistics.median(line["seconds"] for peer in lines[:2] for line in peer[4:])  # of two
                stall = max(peer[3]["seconds"] for peer in lines[:2]) - usual
                late = {"rounds_s": rounds_s, "usual_s": round(usual, 2), "stall_s": round(stall, 2)}
                late["ok"] = [[line["ok"] for line in peer] for peer in lines[:2]]
                found[f"{system}, a kill among three"] = late
                print(json.dumps(late), flush=True)
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    found["load_average"] = list(os.getloadavg())
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
