"""Worker of the automatic measurement: times a few small training jobs on this machine's cores, as JSON on stdout.

Run as `python -m phalanx.train.probe_steps CORES`; the planner never imports it. The jobs use the trainer itself, on
random tokens: one rank per core, one rank with all threads, and two ranks per core, which then share it. With `--plan
COUNT CORES` it times one job instead: the plan on standard input, with COUNT micro-batches in a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from phalanx.hardware.cpu_steps import CpuStep
from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.ranks import run_ranks

MOST_RANKS = 8  # with one rank per core; more only take longer to start
BUDGET_S = 0.35  # seconds of steps per job, but at least LEAST_STEPS steps
PLAN_BUDGET_S = 5.0  # seconds of steps of a plan
LEAST_STEPS, MOST_STEPS = 4, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceJob:
    """The sizes and degrees of parallelism of one timed job."""

    hidden: int
    layers: int
    sequence: int
    micro: int
    count: int = 1
    vocab: int = 256
    head_dim: int = 32
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline

    def shape(self) -> ModelShape:
        """Return a small Llama of these sizes."""
        heads = max(2, self.hidden // self.head_dim)
        return ModelShape(
            name="reference", layers=self.layers, hidden=self.hidden, heads=heads, kv_heads=2, head_dim=self.head_dim,
            ffn=3 * self.hidden, vocab=self.vocab,
        )  # fmt: skip

    def layout(self) -> Layout:
        """Return the layout; everything that the job does not name is 1 or off."""
        return Layout(
            data=self.data, shard=self.data if self.zero else 1, tensor=self.tensor, context=1, pipeline=self.pipeline,
            virtual_pipeline=1, expert=1, zero=self.zero, sequence_parallel=self.tensor > 1, micro_batch=self.micro,
            accumulation=self.count, recompute="none", precision="fp32", schedule="1f1b", offload="none",
            compression="none",
        )  # fmt: skip

    def step(self, parameters: int) -> CpuStep:
        """Return the step as the cost model's formula takes it.

        `parameters` are those of the busiest rank, before sharding.
        """
        shape = self.shape()
        return CpuStep(
            layers=self.layers, hidden=self.hidden, heads=shape.heads, kv_heads=2, head_dim=self.head_dim,
            ffn=3 * self.hidden, gated=1, vocab=self.vocab, seq=self.sequence, tokens=self.micro * self.sequence,
            count=self.count, tp=self.tensor, pp=self.pipeline, dp=self.data, shard=self.data if self.zero else 1,
            zero=self.zero, sp=float(self.tensor > 1), parameters=parameters,
        )  # fmt: skip


def reference_jobs(cores: int) -> list[list[ReferenceJob]]:
    """Return the timed jobs, in groups with the same number of ranks."""
    n = max(1, min(cores, MOST_RANKS))
    job = ReferenceJob
    # One rank per core. In this order the cost of: issuing operations, matrix products, attention, logits, layers and
    # micro-batches.
    alone = [
        job(hidden=64, layers=2, sequence=64, micro=2, data=n),
        job(hidden=256, layers=2, sequence=256, micro=2, head_dim=64, vocab=512, data=n),
        job(hidden=128, layers=1, sequence=1024, micro=1, data=n),
        job(hidden=64, layers=1, sequence=128, micro=8, vocab=8192, data=n),
        job(hidden=128, layers=3, sequence=128, micro=2, count=3, data=n),
    ]
    shared = [  # two ranks per core: sharded layers, then a pipeline
        job(hidden=128, layers=2, sequence=128, micro=2, data=2 * n, zero=3),
        job(hidden=128, layers=4, sequence=128, micro=2, count=4, pipeline=2, data=n, zero=2 if n > 1 else 0),
    ]
    groups = [alone, shared]
    if n > 1:  # one rank with all threads, then tensor parallelism
        groups.append([job(hidden=256, layers=2, sequence=256, micro=4, head_dim=64, vocab=512)])
        groups.append([job(hidden=128, layers=2, sequence=128, micro=4, tensor=2)])
    return groups


def time_jobs(rank: int, jobs: list[ReferenceJob], threads: int) -> list[tuple[float, int]]:
    """Return (seconds of a step, parameters of this rank) for every job; called on every rank of a group."""
    torch.set_num_threads(threads)
    measurements = []
    for job in jobs:
        settings = Settings(layout=job.layout(), sequence=job.sequence)
        engine = Engine(job.shape(), settings, Optim(), device=torch.device("cpu"))
        engine.initialise()
        times = _time_steps(engine, job.vocab, job.micro * job.count, budget_s=BUDGET_S)
        parameters = sum(shard.tensor.numel() for shard in engine.shards) * (job.data if job.zero else 1)
        measurements.append((statistics.median(times), parameters))
    return measurements


def time_plan(rank: int, text: str, count: int, threads: int) -> float:
    """Return the seconds of a step of a plan with `count` micro-batches; called on every rank of the plan."""
    torch.set_num_threads(threads)
    plan = Plan.from_json(text)
    layout = replace(plan.layout, accumulation=count)
    settings = Settings.of(plan.job, layout, on_gpu=False)
    engine = Engine(plan.job.model, settings, plan.job.optim, device=torch.device("cpu"))
    engine.initialise()
    rows = layout.micro_batch * count
    times = _time_steps(engine, plan.job.model.vocab, rows, budget_s=PLAN_BUDGET_S)
    # The median, as in a run's report. The lower quartile was 10 % below it on a machine of varying speed.
    return statistics.median(times)


def _time_steps(engine: Engine, vocab: int, rows: int, *, budget_s: float) -> list[float]:
    """Return the seconds of every step except the first, which sets things up.

    Rank 0's clock decides for all ranks how many steps there are.
    """
    tokens = torch.randint(0, vocab, (rows, engine.settings.sequence + 1))
    times: list[float] = []
    spent = torch.zeros(1)
    while len(times) <= LEAST_STEPS or (float(spent) < budget_s and len(times) <= MOST_STEPS):
        began_s = time.perf_counter()
        engine.step(tokens[:, :-1], tokens[:, 1:], lr=1e-5)
        times.append(time.perf_counter() - began_s)
        spent[0] = sum(times[1:])
        if torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(spent, src=0)
    return times[1:]


def main() -> int:
    """Time every job, or the plan, and print a JSON line for each."""
    if sys.argv[1] == "--plan":
        count, cores = map(int, sys.argv[2:4])
        text = sys.stdin.read()
        world = Plan.from_json(text).layout.devices
        times = run_ranks(time_plan, world, text, count, max(1, cores // world), debug=False)
        print(json.dumps({"seconds": statistics.median(times)}), flush=True)
        return 0
    cores = int(sys.argv[1])
    for jobs in reference_jobs(cores):
        world = jobs[0].world
        ranks = run_ranks(time_jobs, world, jobs, max(1, cores // world), debug=False)
        for index, job in enumerate(jobs):
            seconds = statistics.median(rank[index][0] for rank in ranks)
            step = job.step(max(rank[index][1] for rank in ranks))
            line: dict[str, Any] = {"step": {f.name: float(getattr(step, f.name)) for f in fields(step)}}
            print(json.dumps({**line, "seconds": seconds, "job": asdict(job)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
