"""What telemetry takes of a step: on against off, blocks of steps in turn by the same processes.

    python benchmarks/telemetry_cost.py [--layout mixed] [--parts all] [--rounds 12] [--steps 20] [--faster 5]

The model and batch of examples/first-run.toml on random tokens. On: gradient noise, the monitor, pings of peers. To
see anything in short blocks the monitor and the pings run `--faster` times as often as by default; what is measured is
therefore more than a run pays. A recorded timeline is one step in 200: it is measured by itself and divided by 200.
Blocks alternate, so that a busy neighbour hurts both alike, and the order within a pair changes; the median of the
paired ratios is what counts. Processor seconds of all threads of a rank are given too: they hardly notice a neighbour.

On a busy machine both drown in noise. So the processor time inside telemetry's own functions and threads is counted as
well, and given as a share of all the rank's processor time: "counted" is that at the default rates, timelines included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.job.model import ModelShape
from phalanx.job.run_sections import Telemetry
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.record.events import EventWriter
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings
from phalanx.train.step_result import StepResult
from phalanx.train.telemetry.monitor import PeerRendezvous, meet_peers, monitored_rank
from phalanx.train.telemetry.noise import LocalNorms, NoiseScale
from phalanx.train.telemetry.sensors import sensors_of
from phalanx.train.telemetry.sharing import Sharers
from phalanx.train.telemetry.timeline import TimelineSampler
from phalanx.train.verify.ranks import run_ranks

SHAPE = ModelShape(
    name="first-llama", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=512, tied=True
)
SEQUENCE, BATCH, MICRO, WARM_UP, FLOOR = 256, 16, 4, 5, 0.01
EVERY = Telemetry().timeline_every
PAIRS = 2  # of a step with and one without a timeline, in every round
POWER_W = 6.25  # of a core, in the catalogue; only multiplied


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """So many steps, by one rank."""

    wall_s: float
    cpu_s: float
    inside_s: float = 0.0  # processor time of telemetry's functions in the step
    beside_s: float = 0.0  # and of its threads


@dataclass(kw_only=True, slots=True)
class Found:
    """What one rank measured: blocks by whether telemetry was on, single steps by whether they were recorded."""

    blocks: dict[bool, list[Block]] = field(default_factory=lambda: {False: [], True: []})
    steps: dict[bool, list[Block]] = field(default_factory=lambda: {False: [], True: []})


def layouts() -> dict[str, Layout]:
    """That of the example on four ranks, and plain data ranks."""
    data = Layout(
        data=2, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0,
        sequence_parallel=False, micro_batch=MICRO, accumulation=BATCH // 2 // MICRO, recompute="none",
        precision="fp32", schedule="1f1b", offload="none", compression="none",
    )  # fmt: skip
    return {
        "data": data,
        "sharded": replace(data, shard=2, zero=3),
        "mixed": replace(data, pipeline=2, shard=2, zero=2),
    }


@contextmanager
def switched_on(
    engine: Engine, events: EventWriter, meeting: PeerRendezvous | None, telemetry: Telemetry, parts: str
) -> Iterator[None]:
    """Telemetry for the length of the block: what is inside the step, what is beside it, or all."""
    layout, rank = engine.settings.layout, dist.get_rank()
    _listen(engine, on=parts != "beside")
    beside = (
        nullcontext()
        if parts == "inside"
        else monitored_rank(
            events,
            lambda: sensors_of(torch.device("cpu"), power_w=POWER_W),
            meeting,
            telemetry=telemetry,
            layout=layout,
            rank=rank,
            epoch=1,
            sharers=Sharers(host=layout.devices),
        )
    )
    with beside:
        time.sleep(0.0 if parts == "inside" else 0.2)  # neighbours find each other
        yield
    _listen(engine, on=False)


class Counted:
    """Processor seconds inside a few functions, which it wraps for the life of this process."""

    def __init__(self, *places: tuple[type, str]) -> None:
        self.seconds = 0.0
        for owner, name in places:
            setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began_s

        return run


def thread_seconds() -> float:
    """Processor seconds of the threads beside the training, so far."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name in ("monitor", "peers")]
    texts = [Path(f"/proc/self/task/{number}/schedstat").read_text() for number in ids]
    return sum(int(text.split()[0]) for text in texts) / 1e9


def _listen(engine: Engine, *, on: bool) -> None:
    if engine.listener is not None:
        engine.listener.norms.enabled = on


def measure(rank: int, layout: Layout, rounds: int, steps: int, telemetry: Telemetry, folder: str, parts: str) -> Found:
    """All blocks of one rank."""
    engine = Engine(SHAPE, Settings(layout=layout, sequence=SEQUENCE), Optim(), device=torch.device("cpu"))
    engine.initialise()
    drawn = torch.Generator().manual_seed(engine.meshes.index("data"))
    rows_BS = torch.randint(0, SHAPE.vocab, (BATCH // layout.data, SEQUENCE + 1), generator=drawn)
    tokens_BS, targets_BS = rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()
    events = EventWriter(Path(folder) / f"events-{rank:05d}.jsonl", rank=rank)
    store = dist.distributed_c10d._get_default_store()
    found = Found()
    inside = Counted((LocalNorms, "hear"), (Engine, "_heard"), (Engine, "_noise"), (NoiseScale, "take"))

    def timed(work: Callable[[], object]) -> Block:
        """From all ranks at its beginning to all ranks at its end."""
        dist.barrier()
        inside.seconds = 0.0
        began_s, before_s, threads_s = time.perf_counter(), time.process_time(), thread_seconds()
        work()
        beside_s, cpu_s = thread_seconds() - threads_s, time.process_time() - before_s
        dist.barrier()
        return Block(wall_s=time.perf_counter() - began_s, cpu_s=cpu_s, inside_s=inside.seconds, beside_s=beside_s)

    def step() -> StepResult:
        return engine.step(tokens_BS, targets_BS, lr=1e-3)

    _listen(engine, on=False)
    timed(lambda: [step() for _ in range(WARM_UP)])
    for turn in range(rounds):
        for on in (turn % 2 == 0, turn % 2 == 1):
            if on:
                with switched_on(
                    engine, events, meet_peers(store, os.environ, engine.device, events)[0], telemetry, parts
                ):
                    found.blocks[True].append(timed(lambda: [step() for _ in range(steps)]))
            else:
                found.blocks[False].append(timed(lambda: [step() for _ in range(steps)]))
        for _ in range(0 if parts == "inside" else PAIRS):
            found.steps[False].append(timed(step))
            found.steps[True].append(timed(lambda: recorded(engine, events, step)))
    events.close()
    return found


def recorded(engine: Engine, events: EventWriter, step: Callable[[], StepResult]) -> None:
    """A step with its timeline, written down."""
    sampler = TimelineSampler(engine.meshes, engine.device, every=1, compiled=False, tell=print)
    with sampler.step(1) as samples:
        result = step()
    events.write("timeline", step=1, **samples[0].fields(result.phases, data_s=0.0, before_s=0.0))


def main() -> None:
    """Print what telemetry adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=layouts(), default="mixed")
    parser.add_argument("--parts", choices=("all", "inside", "beside"), default="all", help="of the step, or all (all)")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of blocks (12)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (20)")
    parser.add_argument("--faster", type=float, default=5.0, help="samples and pings so many times as often (5)")
    args = parser.parse_args()
    usual = Telemetry()
    telemetry = replace(
        usual, interval_s=usual.interval_s / args.faster, peers_every_s=usual.peers_every_s / args.faster
    )
    layout = layouts()[args.layout]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            measure, layout.devices, layout, args.rounds, args.steps, telemetry, folder, args.parts, limit_s=1200.0
        )
        written = sum(path.stat().st_size for path in Path(folder).glob("*.jsonl"))
    show(f"{args.layout}, {args.parts}", layout, found, args.steps, written)
    show_counted(found, args.faster)


def show(name: str, layout: Layout, found: list[Found], steps: int, written_bytes: int) -> None:
    """The slowest rank is the step; processor seconds are summed over the ranks."""
    print(f"{name}: {layout.devices} ranks, {len(found[0].blocks[True])} pairs of blocks of {steps} steps")
    blocks, singles = [one.blocks for one in found], [one.steps for one in found]
    off_s = statistics.median(_walls(blocks, False)) / steps
    print(f"  step off             {off_s * 1e3:8.2f} ms")
    print(f"  step on              {statistics.median(_walls(blocks, True)) / steps * 1e3:8.2f} ms")
    singly = _ratios(_walls(singles, True), _walls(singles, False))
    rare = statistics.median(singly) / EVERY if singly else 0.0
    total = _line("wall clock", _ratios(_walls(blocks, True), _walls(blocks, False)))
    _line("processor time", _ratios(_processors(blocks, True), _processors(blocks, False)))
    best = {on: min(_processors(blocks, on)) for on in (False, True)}
    print(f"  of the best blocks   {best[True] / best[False] - 1:+8.2%}   processor time, least disturbed")
    print(f"  timelines            {rare:+8.3%}   of the run: {rare * EVERY:+.1%} of one step in {EVERY}")
    verdict = "under" if total + rare < FLOOR else "OVER"
    print(f"  all of it            {total + rare:+8.2%}   {verdict} {FLOOR:.0%}, by {abs(FLOOR - total - rare):.2%}")
    print(f"  events written       {written_bytes:,} bytes")


def show_counted(found: list[Found], faster: float) -> None:
    """Telemetry's own processor time over all of a rank's, the mean of all ranks and blocks."""
    blocks = [block for one in found for block in one.blocks[True]]
    total_s = sum(block.cpu_s for block in blocks)
    inside, beside = sum(b.inside_s for b in blocks) / total_s, sum(b.beside_s for b in blocks) / total_s / faster
    plain, taken = ([block.cpu_s for one in found for block in one.steps[on]] for on in (False, True))
    rare = max(0.0, min(taken) / min(plain) - 1) / EVERY if plain else 0.0
    print(f"  counted, inside      {inside:8.3%}   gradient noise")
    print(f"  counted, beside      {beside:8.3%}   monitor and pings, at the default rates")
    print(f"  counted, timelines   {rare:8.3%}   one step in {EVERY}, the least disturbed of each kind")
    print(f"  counted, all of it   {inside + beside + rare:8.3%}   the floor is {FLOOR:.0%}")


def _walls(found: list[dict[bool, list[Block]]], on: bool) -> list[float]:
    return [max(one.wall_s for one in turn) for turn in zip(*(rank[on] for rank in found), strict=True)]


def _processors(found: list[dict[bool, list[Block]]], on: bool) -> list[float]:
    return [sum(one.cpu_s for one in turn) for turn in zip(*(rank[on] for rank in found), strict=True)]


def _ratios(on: list[float], off: list[float]) -> list[float]:
    return sorted(more / less - 1 for more, less in zip(on, off, strict=True))


def _line(label: str, ratios: list[float]) -> float:
    middle, quarter = statistics.median(ratios), len(ratios) // 4
    print(f"  {label:<20} {middle:+8.2%}   quartiles {ratios[quarter]:+.2%} to {ratios[-1 - quarter]:+.2%}")
    return middle


if __name__ == "__main__":
    main()
