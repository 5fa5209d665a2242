"""How quickly the dashboard answers over ten runs of 100,000 steps: `python benchmarks/web_speed.py FOLDER`.

The runs are written by the trainer's own EventWriter (one rank, the others are links to its bytes) and served by
`phalanx web` in a process of its own. Four clients ask every address of every run in turn; "first" is the first answer
of each run by a new server, "then" all later ones. The last run grows meanwhile, by ten steps a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import make_plan  # tests/synthetic.py

from phalanx.record.events import EventWriter
from phalanx.record.run import Run

CURVES = "loss,tokens_per_s,mfu,noise_scale,memory_bytes,grad_norm"
TOKENS = 64 * 4096
ADDRESSES = {
    "runs": "/api/runs",
    "run": "/api/runs/{run}",
    "curves (6)": f"/api/runs/{{run}}/curves?names={CURVES}",
    "curves, zoomed": f"/api/runs/{{run}}/curves?names={CURVES}&first=40000&last=45000",
    "marks": "/api/runs/{run}/marks",
    "mesh": "/api/runs/{run}/mesh?name=compute_s",
    "rank": "/api/runs/{run}/ranks/3",
    "step": "/api/runs/{run}/step",
    "ledger": "/api/runs/{run}/ledger",
    "plan": "/api/runs/{run}/plan",
    "cost": "/api/runs/{run}/cost",
    "compare (10)": "/api/compare?runs={all}",
    "page": "/",
}


def main() -> None:
    """Make the runs, serve them, ask, remove them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    root = args.folder / "web-speed"
    runs = [Run(path=root / f"run-{number}") for number in range(args.runs)]
    try:
        for run in runs:
            _make(run, first=runs[0], ranks=args.ranks, steps=args.steps)
        size = runs[0].events(0).stat().st_size / 1e6
        print(f"{args.runs} runs of {args.ranks} ranks x {args.steps:,} steps, {size:.0f} MB a rank")
        _serve(root, lambda port: _ask(port, runs, rounds=args.rounds))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _make(run: Run, *, first: Run, ranks: int, steps: int) -> None:
    run.path.mkdir(parents=True)
    run.plan_json.write_text(json.dumps(make_plan(ranks=ranks, steps=2 * steps, hosts=1)))
    run.set_launch(world=ranks, layout="TP2·CP1·PP1·DP4", started=time.time() - 0.5 * steps)
    run.set_status("running")
    if run == first:
        _write_rank(run, steps)
    for rank in range(run == first, ranks):
        # The rank that grows must not grow in the other runs.
        (shutil.copyfile if rank == 0 else os.link)(first.events(0), run.events(rank))
        index = first.events(0).with_suffix(".index")
        if index.is_file():
            shutil.copyfile(index, run.events(rank).with_suffix(".index"))


def _write_rank(run: Run, steps: int) -> None:
    now = [time.time() - 0.5 * steps]
    writer = EventWriter(run.events(0), rank=0, clock=lambda: now[0])
    writer.write("run_start", step=0, steps=2 * steps, world=8, epoch=1)
    for step in range(steps):
        now[0] += 0.5
        writer.write("step", **_step(step))
        if step % 20 == 0:
            writer.write("monitor", utilization=0.9, utilization_source="gpm-sm", memory_bytes=64_000_000_000,
                         memory_pressure=0.8, power_w=650.0, energy_j=325.0 * step, energy_source="nvml")  # fmt: skip
        if step % 200 == 199:
            spans = [["forward", f"layers.{layer}", 0.01 * layer, 0.01, None, None] for layer in range(64)]
            writer.write("timeline", step=step, seconds=0.5, spans=spans, collectives=[], dropped=0)
        if step % 1000 == 999:
            writer.write("checkpoint", step=step + 1, epoch=1, phase="commit", seconds=4.0, bytes=14_000_000_000)
    writer.close()


def _step(step: int) -> dict[str, object]:
    wave = (step * 7919 % 1000) / 1000
    return {
        "step": step, "epoch": 1, "loss": 2 + 9 / (1 + step / 500) + 0.03 * wave, "tokens": TOKENS, "duration_s": 0.5,
        "grad_norm": 1 + wave, "lr": 3e-4, "tokens_per_s": TOKENS / 0.5, "memory_bytes": 65_000_000_000,
        "compute_s": 0.4 + 0.01 * wave, "wait_s": 0.1 - 0.01 * wave, "data_s": 0.001, "skipped": False,
        "bytes_sent": 388140892160, "held": step, "noise_scale": 800 + 50 * wave,
    }  # fmt: skip


def _serve(root: Path, work: Callable[[int], None]) -> None:
    call = [sys.executable, "-m", "phalanx", "web", str(root), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            work(urlsplit(server.stdout.readline().strip()).port or 0)
            status = Path(f"/proc/{server.pid}/status").read_text()
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            print(f"most memory of the server: {int(peak.split()[1]) / 1e3:.0f} MB")
        finally:
            began = time.monotonic()
            server.send_signal(signal.SIGINT)
            server.wait(20)
            print(f"Ctrl-C to its end: {time.monotonic() - began:.2f} s")


def _ask(port: int, runs: list[Run], *, rounds: int) -> None:
    every = ",".join(run.name for run in runs)
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    size: dict[str, int] = {}

    def ask(name: str, run: Run, when: str) -> None:
        seconds, size[name] = _time(port, ADDRESSES[name].format(run=run.name, all=every))
        spent[name, when].append(seconds)

    for name in ADDRESSES:
        for run in runs if "{run}" in ADDRESSES[name] else runs[:1]:
            ask(name, run, "first")
    delays = _while_growing(port, runs[-1], lambda: _rounds(ask, runs, rounds))
    print(f"{'':<16}{'first: p50':>12}{'worst':>9}{'then: p50':>12}{'p99':>9}{'worst':>9}{'size':>9}")
    for name in ADDRESSES:
        first, then = sorted(spent[name, "first"]), sorted(spent[name, "then"])
        p99 = then[min(len(then) - 1, int(0.99 * len(then)))]
        times = (statistics.median(first), first[-1], statistics.median(then), p99, then[-1])
        ms = [f"{1e3 * one:,.0f} ms" for one in times]
        print(f"{name:<16}{ms[0]:>12}{ms[1]:>9}{ms[2]:>12}{ms[3]:>9}{ms[4]:>9}{size[name] / 1e3:>6.0f} kB")
    print(
        f"stream: {len(delays)} steps told, written to received: median {1e3 * statistics.median(delays):.0f} ms, "
        f"worst {1e3 * max(delays):.0f} ms"
    )


def _rounds(ask: Callable[[str, Run, str], None], runs: list[Run], rounds: int) -> None:
    with ThreadPoolExecutor(4) as clients:
        for _ in range(rounds):
            for run in runs:
                list(clients.map(lambda name, run=run: ask(name, run, "then"), ADDRESSES))


def _time(port: int, path: str) -> tuple[float, int]:
    began = time.perf_counter()
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    caller.request("GET", path)
    answer = caller.getresponse()
    body = answer.read()
    caller.close()
    assert answer.status == 200, (path, answer.status, body[:300])
    return time.perf_counter() - began, len(body)


def _while_growing(port: int, run: Run, work: Callable[[], None]) -> list[float]:
    """Append steps to a run and listen to its stream; seconds between the two, of the steps that were told."""
    written: dict[int, float] = {}
    delays: list[float] = []
    done = threading.Event()

    def grow() -> None:
        last = json.loads(run.events(0).read_bytes().rstrip().rpartition(b"\n")[2]).get("step", 0)
        writer = EventWriter(run.events(0), rank=0)
        while not done.wait(0.1):
            last += 1
            writer.write("step", **_step(last))
            writer.flush()
            written[last + 1] = time.perf_counter()
        writer.close()

    def listen() -> None:
        caller = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        caller.request("GET", f"/api/runs/{run.name}/stream")
        answer, event = caller.getresponse(), ""
        while not done.is_set() and (line := answer.readline().decode()):
            name, _, value = line.strip().partition(": ")
            event = value if name == "event" else event
            if name == "data" and event == "progress" and (step := json.loads(value)["step"]) in written:
                delays.append(time.perf_counter() - written[step])
        caller.close()

    threads = [threading.Thread(target=one, daemon=True) for one in (grow, listen)]
    for thread in threads:
        thread.start()
        time.sleep(2)
    work()
    time.sleep(3)
    done.set()
    for thread in threads:
        thread.join(20)
    return delays


if __name__ == "__main__":
    main()
