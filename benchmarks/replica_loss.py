"""What a lost rank costs when all ranks rebuild, and when its model replica is left out: measured beside predicted.

    python benchmarks/replica_loss.py [--trials 3] [--passes 2] [--keep FOLDER]
    python benchmarks/replica_loss.py --replay RUN

Three replicas of two ranks (HSDP, ZeRO-2) on the cores of this machine. In a run for each value of `fault.on_loss` a
rank is killed again and again, each time when the run is whole and steady; the runs take turns (`--passes`). Counted
are the tokens that the run has learnt from one moment to another, in the end: what is done again counts once. What was
lost is what the steady pace around the loss would have learnt in the same time, less that.

`--replay` learns the tokens of a recorded run in one process, without those of replicas that were left out, and prints
the loss of every step beside the recorded one: the proof that steps without a replica are weighted by tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPLICAS, SHARD = 3, 2
RANKS, VICTIM = REPLICAS * SHARD, 3
STEADY = 12  # steps of all ranks before a loss, and after it
PATIENCE_S = 240.0
NOTICE_S = 0.02  # a process that ends is noticed by its agent (docs/recovery.md)
JOB = """\
name = "replica-loss"
[model]
layers = 4
hidden = 128
heads = 4
kv_heads = 2
ffn = 384
vocab = 320
[data]
path = "data"
sequence = 128
tokens = 100_000_000
[batch]
global_sequences = 12
micro = 2
[precision]
compute = "fp32"
[parallel]
tensor = 1
context = 1
pipeline = 1
shard = 2
zero = 2
[train]
samples = 0
[checkpoint]
interval_s = 3600
[comm]
init_timeout_s = 60
[fault]
dead_after_s = 20
restarts = 10
[cluster]
spec = "local-cpu:6"
"""
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One lost rank and what came of it."""

    lost_s: float  # of the steady pace
    lost_tokens: float
    stall_s: float  # from the loss to the end of the next step on the ranks that are left
    step_s: float  # before the loss
    regroup_s: float | None = None  # the others waited to hear who is present, and to connect; the longest of them
    rejoin_s: float | None = None  # the same when the replica is back and takes the state
    absent_s: float | None = None  # from leaving it out to taking it in


# ---- records ---------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[Event]:
    """Every whole line of a file that is still being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def supervisor(run: Path) -> list[Event]:
    """What the coordinator wrote."""
    return lines(run / "supervisor.jsonl")


def steps(run: Path, rank: int) -> list[Event]:
    """The steps of a rank, those done again twice."""
    return [one for one in lines(run / f"events-{rank:05d}.jsonl") if one["event"] == "step"]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], what: str) -> Any:
    """The first true value of a condition."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if found := condition():
            return found
        if process.poll() is not None:
            raise RuntimeError(f"ended with exit code {process.returncode} instead of {what}")
        time.sleep(0.02)
    raise RuntimeError(f"no {what} within {PATIENCE_S:g} s")


def learnt_tokens(record: Sequence[Event], at_s: float) -> float:
    """Tokens of all steps that are done at a time, each as it was done last in the end."""
    newest = max(one["step"] for one in record if one["t"] <= at_s and one["epoch"] == _epoch_at(record, at_s))
    kept = {one["step"]: one["tokens"] for one in record}
    return float(sum(tokens for step, tokens in kept.items() if step <= newest))


def _epoch_at(record: Sequence[Event], at_s: float) -> int:
    return max(one["epoch"] for one in record if one["t"] <= at_s)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(folder: Path, way: str, trials: int, *, name: str) -> tuple[Path, list[Trial]]:
    """A run in which a rank is lost so many times."""
    command = [sys.executable, "-m", "phalanx", "train", "job.toml", "--runs", name, "--no-check"]
    with open(folder / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            [*command, "--set", f"fault.on_loss={way}"],
            cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        run = wait_for(lambda: next((folder / name).glob("*/supervisor.jsonl"), None), process, "a run").parent
        found = [_lose_rank(run, process) for _ in range(trials)]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return run, found


def _lose_rank(run: Path, process: subprocess.Popen[bytes]) -> Trial:
    began_s = time.time()
    wait_for(lambda: _are_steady(run, began_s), process, "a steady run")
    members = [one for event in supervisor(run) for one in event.get("members") or ()]
    killed_s = time.time()
    os.kill([one["pid"] for one in members if one["rank"] == VICTIM][-1], signal.SIGKILL)
    wait_for(lambda: _are_steady(run, killed_s), process, "a steady run after the loss")
    record = steps(run, 0)
    before = [one for one in record if began_s < one["t"] <= killed_s]
    back_s = [one["t"] for one in steps(run, VICTIM) if one["t"] > killed_s]
    after = [one for one in record if one["t"] > back_s[0]]
    # Other work on the machine comes and goes: the pace is that around the loss.
    gaps = [late["t"] - early["t"] for some in (before, after) for early, late in itertools.pairwise(some)]
    step_s = statistics.median(gaps)
    pace = before[-1]["tokens"] / step_s
    ended_s = back_s[2]  # the third step of the process that took the lost one's place
    last_s = before[-1]["t"]  # measured from the end of a step to the end of a step
    gained = learnt_tokens(record, ended_s) - learnt_tokens(record, last_s)
    lost_tokens = (ended_s - last_s) * pace - gained
    stall_s = min(one["t"] for one in record if one["t"] > killed_s) - killed_s
    return Trial(
        lost_s=lost_tokens / pace,
        lost_tokens=lost_tokens,
        stall_s=stall_s,
        step_s=step_s,
        **_rounds(run, killed_s),
    )


def _are_steady(run: Path, since_s: float) -> bool:
    """Whether every rank has done enough whole steps since a time, the newest of them the same for all."""
    newest = []
    for rank in range(RANKS):
        done = [one for one in steps(run, rank) if one["t"] > since_s]
        if not done:
            return False
        whole = max(one["tokens"] for one in steps(run, rank))
        if len(done) < STEADY or any(one["tokens"] < whole for one in done[-STEADY:]):
            return False
        newest.append(done[-1]["step"])
    return max(newest) - min(newest) <= 2


def _rounds(run: Path, since_s: float) -> dict[str, float | None]:
    """How long ranks waited to be connected without the replica and with it; nothing where all rebuild."""
    told = {one["state"]: one for one in supervisor(run) if one["event"] == "replica" and one["t"] > since_s}
    if "left out" not in told:
        return {}
    return {
        "regroup_s": max(_waits(run, told["left out"])),
        "rejoin_s": max(_waits(run, told["rejoined"], but=VICTIM // SHARD)),
        "absent_s": told["rejoined"]["t"] - told["left out"]["t"],
    }


def _waits(run: Path, told: Event, but: int = -1) -> list[float]:
    """Seconds that ranks waited to be connected in a round; those of one replica not counted."""
    return [
        one["seconds"]
        for rank in range(RANKS)
        if rank // SHARD != but
        for one in lines(run / f"events-{rank:05d}.jsonl")
        if one["event"] == "regroup" and (one["epoch"], one["round"]) == (told["epoch"], told["round"])
    ]


def predict(run: Path, trials: dict[str, list[Trial]]) -> Any:
    """Both ways as the planner prices them, from the pace of all runs and the restart measured with "rebuild"."""
    from phalanx.plan.model_replicas import price_loss
    from phalanx.plan.plan import Plan

    plan = Plan.from_json((run / "plan.json").read_text())
    step_s = statistics.median(one.step_s for found in trials.values() for one in found)
    restart_s = max(0.0, statistics.median(one.stall_s - one.step_s for one in trials["rebuild"]) - NOTICE_S)
    return price_loss(
        plan.layout,
        plan.cluster,
        replace(plan.job.fault, detect_s=NOTICE_S, restart_s=restart_s),
        step_s=step_s,
        tokens_per_s=plan.job.batch.global_sequences * plan.job.data.sequence / step_s,
        state_bytes=plan.reliability.checkpoint_bytes,
        gradient_bytes=plan.prediction.parameters * 4.0,
        redone_s=plan.reliability.memory_every * step_s / 2,
    )


# ---- the same tokens in one process ----------------------------------------------------------------------------------


def replay(path: Path) -> dict[str, dict[int, float]]:
    """The losses of a run, recorded and learnt again without the sequences of replicas that were left out."""
    import torch
    import torch.distributed as dist

    from phalanx.plan.model_replicas import ModelReplicas
    from phalanx.plan.plan import Plan
    from phalanx.train.data.batches import IGNORED, BatchPlan
    from phalanx.train.data.sources import open_batches
    from phalanx.train.engine import Engine
    from phalanx.train.rank_settings import Settings

    plan = Plan.from_json((path / "plan.json").read_text())
    job, layout = plan.job, plan.layout
    present, rates, recorded = _presence(path, ModelReplicas.of(layout).count)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    alone = replace(layout, data=1, shard=1, zero=0, accumulation=layout.accumulation * layout.data)
    engine = Engine(
        job.model,
        Settings.of(job, alone, on_gpu=False),
        job.optim,
        device=torch.device("cpu"),
        state_dtype=job.precision.optimizer_state,
    )
    engine.initialise()
    batches = BatchPlan.of(job.batch, sequence=job.data.sequence, tokens=plan.duration.tokens)
    parts = []
    for rank in range(layout.data):
        asks: Any = SimpleNamespace(settings=SimpleNamespace(layout=layout, reproducible=False), data_ranks=layout.data)
        asks.data_rank = rank
        parts.append(open_batches(path, job, batches, asks, None)[0])
    losses = {}
    each = layout.data // ModelReplicas.of(layout).count
    for step in sorted(recorded):
        rows = [part.get(step) for part in parts]
        tokens = torch.cat([torch.from_numpy(one[0].copy()) for one in rows])
        targets = [torch.from_numpy(one[1].copy()) for one in rows]
        for rank, one in enumerate(targets):
            if rank // each not in present[step]:
                one.fill_(IGNORED)
        losses[step] = engine.step(tokens, torch.cat(targets), lr=rates[step]).loss
    for part in parts:
        part.close()
    return {"recorded": recorded, "replayed": losses}


def _presence(path: Path, count: int) -> tuple[dict[int, set[int]], dict[int, float], dict[int, float]]:
    """By step, as rank 0 did it last: the replicas that took part, the learning rate, and the loss."""
    present: dict[int, set[int]] = {}
    rates: dict[int, float] = {}
    recorded: dict[int, float] = {}
    rounds: dict[int, set[int]] = {}  # by generation, the newest
    for event in lines(path / "events-00000.jsonl"):
        if event["event"] == "regroup":
            rounds[event["epoch"]] = set(event["present"])
        elif event["event"] == "step":
            present[event["step"]] = rounds.get(event["epoch"], set(range(count)))
            rates[event["step"]], recorded[event["step"]] = event["lr"], event["loss"]
    return present, rates, recorded


# ---- the table -------------------------------------------------------------------------------------------------------


def report(run: Path, trials: dict[str, list[Trial]]) -> None:
    """Both ways, measured beside predicted."""
    priced = predict(run, trials)
    print("| fault.on_loss | trials | step before | next step after | lost, measured (least to most) | predicted |")
    print("|---|---|---|---|---|---|")
    for way, found in trials.items():
        cost = priced.rebuild if way == "rebuild" else priced.leave_out
        seconds = sorted(one.lost_s for one in found)
        tokens = statistics.median(one.lost_tokens for one in found)
        print(
            f"| {way} | {len(found)} | {statistics.median(one.step_s for one in found):.3f} s "
            f"| {statistics.median(one.stall_s for one in found):.2f} s "
            f"| {statistics.median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), {tokens:,.0f} tokens "
            f"| {cost.lost_s:.2f} s, {cost.lost_tokens:,.0f} tokens |"
        )
    for field, name in (
        ("regroup_s", "connected without the replica"),
        ("rejoin_s", "connected with it again, its state copied"),
        ("absent_s", "from left out to taken in"),
    ):
        values = sorted(value for one in trials["leave-out"] if (value := getattr(one, field)) is not None)
        if values:
            listed = ", ".join(f"{one:.2f}" for one in values)
            print(f"{name}: median {statistics.median(values):.2f} s of {listed}")
    print(f"sum between replicas, predicted: at most {priced.exchange_s:.4f} s a step")
    print(json.dumps({way: [_as_dict(one) for one in found] for way, found in trials.items()}), file=sys.stderr)


def _as_dict(trial: Trial) -> dict[str, float | None]:
    return {name: getattr(trial, name) for name in trial.__dataclass_fields__}


def prepare(folder: Path) -> None:
    """A job and its data."""
    from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
    from phalanx.train.data.documents import Reading
    from phalanx.train.data.progress import BuildProgress

    text = "\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(4000))
    (folder / "text.txt").write_text(text)
    origin = TextOrigin(path=folder / "text.txt")
    recipe = Recipe(origins=(origin,), vocab=300, heldout=0.1, reading=Reading(split_on="blank"))
    build_dataset(recipe, folder / "data", lambda size: BuildProgress(sys.stderr, size))
    (folder / "job.toml").write_text(JOB)


def main() -> None:
    """Measure both ways, or replay one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="losses in each run")
    parser.add_argument("--passes", type=int, default=2, help="runs of each way, in turns")
    parser.add_argument("--keep", type=Path, help="write records here, and leave them")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="learn a recorded run again in one process")
    args = parser.parse_args()
    if args.replay:
        print(json.dumps(replay(args.replay)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        trials: dict[str, list[Trial]] = {"rebuild": [], "leave-out": []}
        for number in range(args.passes):
            for way, found in trials.items():
                run, more = measure(folder, way, args.trials, name=f"{way}-{number}")
                found += more
        report(run, trials)


if __name__ == "__main__":
    main()
