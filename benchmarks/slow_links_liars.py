"""A third of liars among peers, one kind of lie after the other: the final loss over that of honest training.

python benchmarks/slow_links_liars.py [--peers 4] [--liars 1] [--kinds reversed,flipped] [--step 40] [--folder DIR]

Every run is that of `phalanx drill JOB --peers N --fault lie:peer=…,kind=…,step=…`: processes of their own that meet
over TLS on the loopback. The drill trains its run without lies again for each kind; here kinds that were excluded
in the same exchange share it. Two more runs are compared: all peers honest to the end, and the honest ones alone.

A model of one layer (107,000 weights) on the text of docs/, 160 steps of 96 sequences of 64 tokens: 32 synchronous
ones, then an exchange every 8 steps. Liars lie in every exchange of weights from `--step` on. Losses are of 512
held-out sequences; the error is that of the paired difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.api.drills import DrillCall, drill_plan
from phalanx.train.drill.faults import PEER_FAULTS, parse_faults
from phalanx.train.drill.peer_drill import PeerDrillSettings, honest_departures, train_drilled_peers
from phalanx.train.drill.peer_judge import PeerRecord

KINDS = ("reversed", "scaled", "random", "copied", "stale", "flipped")
DOCS = Path(__file__).parents[1] / "docs"
JOB = """\
name = "liars"
[model]
layers = 1
hidden = 64
heads = 2
head_dim = 32
ffn = 128
vocab = 512
[data]
path = "data"
sequence = 64
tokens = 983_040
[batch]
global_sequences = 96
micro = 8
[optim]
lr = 3e-3
warmup_tokens = 61_440
decay = 0.7
final_lr = 0.0
[precision]
compute = "fp32"
[train]
samples = 0
evaluate_sequences = 512
[telemetry]
timeline_every = 0
[cluster]
spec = "local-cpu:1"
[sync]
mode = "diloco"
inner_steps = 8
heartbeat_s = 0.5
dead_after_s = 10.0
"""


def train(folder: Path, peers: int, faults: Sequence[str]) -> dict[str, Any]:
    """One run: its final losses by sequence, and when peers were excluded."""
    call = DrillCall(job=str(folder / "job.toml"), runs=folder / "runs", peers=peers)
    plan = drill_plan(replace(call, overrides=(f"sync.peers={peers}",)))
    scene = PeerDrillSettings(plan=plan, runs=call.runs, peers=peers, has_liars=True, compares_loss=True)
    began_s, load = time.monotonic(), os.getloadavg()[0]
    result, records = train_drilled_peers(scene, parse_faults(faults, kinds=PEER_FAULTS))
    lying = {number for fault in parse_faults(faults, kinds=PEER_FAULTS) for number in fault.peer}
    losses = next(
        event["sequence_losses"]
        for record in records
        if record.number not in lying
        for event in record.of("evaluate")[-1:]
    )
    return {
        "losses": losses,
        "excluded": exclusions(records, lying),
        "departures": [one.text for one in honest_departures(records, lying, inner_steps=plan.job.sync.inner_steps)],
        "wrong": [f"{one.name}: {one.evidence}" for one in result.verdicts if not one.ok],
        "seconds": round(time.monotonic() - began_s, 1),
        "load": round(load),
    }


def exclusions(records: Sequence[PeerRecord], lying: set[int]) -> dict[int, dict[str, Any]]:
    """By number of the excluded peer, as an honest peer recorded it: the step, exchanges with its lies, the reason."""
    numbers = {record.id: record.number for record in records}
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        for event in record.of("peer") if record.number not in lying else ():
            if event["kind"] == "excluded":
                liar = numbers[event["peer"]]
                found.setdefault(liar, {"step": event["step"], "round": event.get("round"), "text": event["text"]})
    return found


def compare(one: Sequence[float], other: Sequence[float]) -> str:
    """The mean difference with the standard error of the paired differences."""
    difference = np.array(one) - np.array(other)
    return f"{difference.mean():+.4f} ± {difference.std(ddof=1) / len(difference) ** 0.5:.4f}"


def main() -> None:
    """Each kind of lie, and the runs without lies that it is compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--step", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="keep runs here, and take those of an earlier call")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="liars-"))
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    if not (folder / "data").exists():
        words = ["data", "build", str(folder / "data"), str(DOCS), "--vocab", "512", "--heldout", "0.1"]
        subprocess.run([sys.executable, "-m", "phalanx", *words], check=True, capture_output=True)
    liars = set(range(2, 2 + args.liars))
    for kind in args.kinds.split(","):
        kept = folder / f"{kind}-{args.peers}-{args.liars}.json"
        if not kept.exists():
            fault = f"lie:peer={'+'.join(map(str, sorted(liars)))},kind={kind},step={args.step}"
            kept.write_text(json.dumps(train(folder, args.peers, (fault,))), encoding="utf-8")
        row = json.loads(kept.read_text(encoding="utf-8"))
        compared = {
            "without lies": honest(folder, args.peers, tuple(row["departures"])),
            f"{args.peers} honest": honest(folder, args.peers, ()),
            f"{args.peers - args.liars} honest": honest(folder, args.peers - args.liars, ()),
        }
        against = ", ".join(f"{compare(row['losses'], one)} over {name}" for name, one in compared.items() if one)
        print(f"{kind}: {np.mean(row['losses']):.4f} nats, {against}; {row['excluded']}", flush=True)
        print(f"  {row['seconds']} s, load {row['load']}; {row['wrong']}", flush=True)


def honest(folder: Path, peers: int, departures: tuple[str, ...]) -> list[float]:
    """Final losses by sequence of the run without lies; trained once, and kept in the folder."""
    kept = folder / f"honest-{peers}{''.join(f'-{text}' for text in departures)}.json"
    if not kept.exists():
        kept.write_text(json.dumps(train(folder, peers, departures)), encoding="utf-8")
        print(f"{kept.stem}: {np.mean(json.loads(kept.read_text())['losses']):.4f} nats", flush=True)
    losses: list[float] = json.loads(kept.read_text(encoding="utf-8"))["losses"]
    return losses


if __name__ == "__main__":
    main()
