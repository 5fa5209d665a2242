"""Peak memory of a rank: planned, traced, and measured, for layouts of every schedule, context kind and recompute kind.

    python benchmarks/memory_agreement.py trace [--out FILE] [NAME ...]    the plan beside the traced step (no GPU)
    python benchmarks/memory_agreement.py cpu [--out FILE] [NAME ...]      small layouts on real gloo ranks
    python benchmarks/memory_agreement.py gpu [--out FILE] [NAME ...]      one rank at a time on the GPU of this machine
    python benchmarks/memory_agreement.py table FILE ...                   Markdown from what the others wrote

On the GPU every rank runs the trainer's own step with its own kernels, compiled as `phalanx train` compiles it, in a
process of its own. Its peers are a fake process group that carries nothing: what arrives is not right, but it takes the
memory it would take, so a rank of a job of any size can be measured on one GPU. Measured is
torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.prediction import predict_layout
from phalanx.plan.request import PlanRequest, request_from_job

ONE = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=1, accumulation=8, recompute="none", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
SP2 = {"tensor": 2, "sequence_parallel": True}
SP4 = {"tensor": 4, "sequence_parallel": True}
ZERO1 = {"data": 2, "shard": 2, "zero": 1}
V2 = {"virtual_pipeline": 2, "schedule": "interleaved"}
ZB = {"schedule": "zero-bubble"}
ZBV = {"virtual_pipeline": 2, "schedule": "zero-bubble"}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
EAGER = ("train.compile=false",)
CUT_8B = ("llama-3-8b", 8192, ("model.layers=8",))
CUT_70B = ("llama-3-70b", 8192, ("model.layers=8",))
CUT_MOE = ("mixtral-8x7b", 4096, ("model.layers=4",))
SMALL = ("llama-3-8b", 256, ("model.layers=8", "model.hidden=256", "model.heads=8", "model.kv_heads=4",
         "model.head_dim=32", "model.ffn=768", "model.vocab=2048", *EAGER))  # fmt: skip
WHOLE_70B = ("llama-3-70b", 8192, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model and a layout of it."""

    model: str
    sequence: int
    overrides: tuple[str, ...]
    layout: Layout

    @property
    def job(self) -> Job:
        sequences = self.layout.data * self.layout.micro_batch * self.layout.accumulation
        wishes = [f"model.preset={self.model}", f"data.sequence={self.sequence}"]
        wishes += [f"batch.global_sequences={sequences}", *self.overrides]
        return load(Path(__file__).parents[1] / "examples/llama-3-8b-64xH100.toml", overrides=wishes).job

    @property
    def request(self) -> PlanRequest:
        return request_from_job(self.job, resolve_cluster(f"8xH100:{max(-(-self.layout.devices // 8), 1)}"))[0]

    def planned_bytes(self, request: PlanRequest) -> float:
        """Of tensors: the planner's buffers are the communication library's and the allocator's."""
        memory = predict_layout(request, self.layout)[1]
        return memory.total_bytes - memory.parts_bytes.get("buffers", 0.0)


def _subject(of: tuple[str, int, tuple[str, ...]], *changes: dict[str, Any], sets: tuple[str, ...] = ()) -> Subject:
    merged: dict[str, Any] = {}
    for one in changes:
        merged |= one
    model, sequence, overrides = of
    return Subject(model=model, sequence=sequence, overrides=(*overrides, *sets), layout=replace(ONE, **merged))


def _pp(size: int, micro_batches: int) -> dict[str, int]:
    return {"pipeline": size, "accumulation": micro_batches}


RING, ULYSSES, GATHER = ((f"parallel.context_kind={kind}",) for kind in ("ring", "ulysses", "allgather"))
CP2 = {"context": 2, "shard": 2, "zero": 1}
LAYOUTS = {
    "8b pp2 gpipe": _subject(CUT_8B, _pp(2, 4), {"schedule": "gpipe"}),
    "8b pp2 gpipe full": _subject(CUT_8B, _pp(2, 4), {"schedule": "gpipe"}, FULL),
    "8b pp2 1f1b": _subject(CUT_8B, _pp(2, 4)),
    "8b pp4 1f1b": _subject(CUT_8B, _pp(4, 8)),
    "8b pp4 1f1b zero1": _subject(CUT_8B, _pp(4, 8), ZERO1),
    "8b pp4 1f1b zero2": _subject(CUT_8B, _pp(4, 8), ZERO1, {"zero": 2}),
    "8b pp4 1f1b 3 micro-batches": _subject(CUT_8B, _pp(4, 3)),
    "8b pp4 1f1b full": _subject(CUT_8B, _pp(4, 8), FULL),
    "8b pp4 1f1b selective": _subject(CUT_8B, _pp(4, 8), SELECTIVE),
    "8b pp2 tp2 1f1b zero1": _subject(CUT_8B, _pp(2, 4), SP2, ZERO1),
    "8b pp2 tp2 1f1b no sp": _subject(CUT_8B, _pp(2, 4), {"tensor": 2}),
    "8b pp4 tp2 full": _subject(CUT_8B, _pp(4, 8), SP2, FULL),
    "8b pp4 tp2 selective": _subject(CUT_8B, _pp(4, 8), SP2, SELECTIVE),
    "8b pp2 v2": _subject(CUT_8B, _pp(2, 8), V2),
    "8b pp4 v2": _subject(CUT_8B, _pp(4, 8), V2),
    "8b pp2 v4 tp2": _subject(CUT_8B, _pp(2, 8), V2, {"virtual_pipeline": 4}, SP2),
    "8b pp2 v3 full": _subject(CUT_8B, _pp(2, 8), V2, {"virtual_pipeline": 3}, FULL),
    "8b pp2 v2 selective": _subject(CUT_8B, _pp(2, 8), V2, SELECTIVE),
    "8b pp2 v2 tp2 cp2": _subject(CUT_8B, _pp(2, 8), V2, SP2, CP2),
    "8b pp2 v2 micro 2": _subject(CUT_8B, _pp(2, 4), V2, {"micro_batch": 2}),
    "8b pp2 zero-bubble": _subject(CUT_8B, _pp(2, 4), ZB),
    "8b pp4 zero-bubble": _subject(CUT_8B, _pp(4, 8), ZB),
    "8b pp4 zero-bubble full": _subject(CUT_8B, _pp(4, 8), ZB, FULL),
    "8b pp4 zero-bubble tp2": _subject(CUT_8B, _pp(4, 8), ZB, SP2, ZERO1),
    "8b pp2 zero-bubble v": _subject(CUT_8B, _pp(2, 4), ZBV),
    "8b pp4 zero-bubble v": _subject(CUT_8B, _pp(4, 8), ZBV),
    "8b pp2 zero-bubble v full": _subject(CUT_8B, _pp(2, 4), ZBV, FULL),
    "8b pp2 cp2 ring": _subject(CUT_8B, _pp(2, 4), CP2, sets=RING),
    "8b pp2 cp2 ulysses": _subject(CUT_8B, _pp(2, 4), CP2, sets=ULYSSES),
    "8b pp2 cp2 allgather": _subject(CUT_8B, _pp(2, 4), CP2, sets=GATHER),
    "8b pp2 cp4 allgather full": _subject(CUT_8B, _pp(2, 4), CP2, {"context": 4, "shard": 4}, FULL, sets=GATHER),
    "70b pp4 tp4 cp2 1f1b": _subject(CUT_70B, _pp(4, 8), SP4, CP2),
    "70b pp4 tp4 cp2 v2": _subject(CUT_70B, _pp(4, 8), V2, SP4, CP2),
    "70b pp4 tp4 cp2 zero-bubble": _subject(CUT_70B, _pp(4, 8), ZB, SP4, CP2),
    "70b pp2 tp8 v4 selective": _subject(CUT_70B, _pp(2, 8), V2, SP4, {"virtual_pipeline": 4, "tensor": 8}, SELECTIVE),
    "moe pp2 ep2": _subject(CUT_MOE, _pp(2, 4), {"data": 2, "shard": 2, "zero": 1, "expert": 2}),
    "8b pp2 1f1b eager": _subject(CUT_8B, _pp(2, 4), sets=EAGER),
    "8b pp2 gpipe eager": _subject(CUT_8B, _pp(2, 4), {"schedule": "gpipe"}, sets=EAGER),
    "8b pp2 v2 tp2 cp2 eager": _subject(CUT_8B, _pp(2, 8), V2, SP2, CP2, sets=EAGER),
    "8b pp4 zero-bubble eager": _subject(CUT_8B, _pp(4, 8), ZB, sets=EAGER),
    "8b one rank": _subject(CUT_8B, {"accumulation": 2}),
    "8b one rank selective": _subject(CUT_8B, {"accumulation": 2}, SELECTIVE),
    "8b one rank full": _subject(CUT_8B, {"accumulation": 2}, FULL),
    "8b zero3": _subject(CUT_8B, {"accumulation": 2, "data": 8, "shard": 8, "zero": 3}),
    "8b tp4 zero1": _subject(CUT_8B, {"accumulation": 2, "data": 2, "shard": 2, "zero": 1}, SP4),
    "8b cp4 ring": _subject(CUT_8B, {"accumulation": 2, "context": 4, "shard": 4, "zero": 3}, sets=RING),
}  # fmt: skip
# What fits two cores and several processes.
ON_CPU = {
    "pp2 gpipe": _subject(SMALL, _pp(2, 4), {"schedule": "gpipe"}),
    "pp2 1f1b": _subject(SMALL, _pp(2, 4)),
    "pp4 1f1b full": _subject(SMALL, _pp(4, 8), FULL),
    "pp2 1f1b selective": _subject(SMALL, _pp(2, 4), SELECTIVE),
    "pp2 v2": _subject(SMALL, _pp(2, 8), V2),
    "pp2 v2 32 micro-batches": _subject(SMALL, _pp(2, 32), V2),
    "pp2 zero-bubble": _subject(SMALL, _pp(2, 4), ZB),
    "pp2 zero-bubble v": _subject(SMALL, _pp(2, 4), ZBV),
    "pp2 tp2 zero1": _subject(SMALL, _pp(2, 4), SP2, ZERO1),
    "pp2 cp2 ring": _subject(SMALL, _pp(2, 4), CP2, sets=RING),
    "pp2 cp2 ulysses": _subject(SMALL, _pp(2, 4), CP2, sets=ULYSSES),
    "pp2 cp2 allgather": _subject(SMALL, _pp(2, 4), CP2, sets=GATHER),
}  # fmt: skip


def trace(subject: Subject) -> dict[str, Any]:
    """Every pipeline place in turn; the fullest counts."""
    from phalanx.train.tracing.traced_ranks import TracedStep, trace_ranks

    began_s = time.perf_counter()
    step, layout = TracedStep.of(subject.job, subject.layout, on_gpu=True), subject.layout
    inside = layout.devices // layout.pipeline
    traces = [trace_ranks(step, [place * inside])[0] for place in range(layout.pipeline)]
    fullest = max(range(len(traces)), key=lambda place: traces[place].peak.nbytes)
    return {
        "traced": traces[fullest].peak.nbytes,
        "place": fullest,
        "parts": dict(traces[fullest].peak.parts_bytes),
        "places": [one.peak.nbytes for one in traces],
        "seconds": round(time.perf_counter() - began_s),
    }


def cpu(subject: Subject) -> dict[str, Any]:
    """Dry, and on real ranks of this machine heard by the same recorder."""
    from phalanx.train.tracing.traced_ranks import TracedStep
    from phalanx.train.tracing.traced_step import record_ranks

    measured = max(one.peak.nbytes for one in record_ranks(TracedStep.of(subject.job, subject.layout), limit_s=900.0))
    return trace(subject) | {"measured": measured}


def gpu(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """First and last pipeline place of every layout, each in a process of its own, as many at a time as fit."""
    tasks = [(name, place) for name in names for place in sorted({0, LAYOUTS[name].layout.pipeline - 1})]

    def measure(task: tuple[str, int]) -> dict[str, Any]:
        command = [sys.executable, __file__, "one", task[0], "--place", str(task[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return {"place": task[1]} | (json.loads(lines[-1]) if lines else {"error": done.stderr[-1500:]})

    with ThreadPoolExecutor(3) as pool:  # three share the GPU; each counts its own bytes
        for (name, _), found in zip(tasks, pool.map(measure, tasks), strict=True):
            yield name, {"measured": found.get("measured", 0), "places": [found]}


def one_rank(subject: Subject, place: int) -> dict[str, Any]:
    """One rank's steps on the GPU, its peers fake."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from phalanx.train.engine import Engine
    from phalanx.train.parallel.expert import balance_routing
    from phalanx.train.parallel.pipeline import assume_static
    from phalanx.train.rank_settings import Settings
    from phalanx.train.tracing.traced_step import constant_values

    warnings.simplefilter("ignore")
    layout, job, device = subject.layout, subject.job, torch.device("cuda")
    rank = place * (layout.devices // layout.pipeline)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.devices)
    torch.manual_seed(0)
    settings = Settings.of(job, layout, on_gpu=True)

    def read(numbers: torch.Tensor) -> list[float]:
        torch.cuda.synchronize()  # as reading the numbers would: the clock of the step counts on it
        return constant_values(numbers)

    engine = Engine(job.model, settings, job.optim, device=device, read=read)
    engine.initialise()
    for part in engine.parts:
        balance_routing(part.model)
    rows = layout.micro_batch * layout.accumulation
    tokens = torch.randint(0, job.model.vocab, (rows, subject.sequence), device=device)
    if layout.pipeline > 1:
        schedule, stages = engine.micro_batches.schedule(layout.accumulation)
        assume_static(schedule)
        for stage in stages:  # torch 2.11 checks shapes that a split output has not
            if hasattr(stage, "_validate_fwd_outputs"):
                stage._validate_fwd_outputs = lambda *_: None
                stage._validate_fwd_input = lambda *_: None
    for _ in range(2):  # the second has every buffer; the first also holds what compiling takes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.step(tokens, tokens, lr=1e-4)
    torch.cuda.synchronize()
    found = {
        "measured": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "between_steps": torch.cuda.memory_allocated(),
        "compiled": settings.compile,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    dist.destroy_process_group()
    return found


def table(paths: list[str]) -> None:
    """The newest line of every layout, plan worked out anew."""
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            if line.startswith("{"):
                value = json.loads(line)
                row = rows.setdefault(value["name"], {})
                row.update(value | {"measured": max(value.get("measured", 0), row.get("measured", 0))})
    print("| layout | ranks | plan GB | trace GB | trace − plan | measured GB | measured − plan |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        subject = LAYOUTS.get(name) or ON_CPU[name]
        plan = subject.planned_bytes(subject.request)
        cells = [name, str(subject.layout.devices), f"{plan / 1e9:.3g}"]
        for key in ("traced", "measured"):
            size = row.get(key, 0)
            cells += [f"{size / 1e9:.3g}", f"{size / plan - 1:+.1%}"] if size else ["", ""]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trace", "cpu", "gpu", "one", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    parser.add_argument("--place", type=int, default=0)
    args = parser.parse_intermixed_args()
    if args.what == "table":
        table(args.names)
        return
    if args.what == "one":
        print(json.dumps(one_rank(LAYOUTS[args.names[0]], args.place)))
        return
    grid = ON_CPU if args.what == "cpu" else LAYOUTS
    names = args.names or list(grid)
    work = cpu if args.what == "cpu" else trace
    for name, found in gpu(names) if args.what == "gpu" else ((name, work(grid[name])) for name in names):
        subject = grid[name]
        line = {"name": name, "planned": subject.planned_bytes(subject.request)} | found
        size = line.get("measured") or line.get("traced") or 0
        print(
            f"{name:<32}{line['planned'] / 1e9:>8.2f}{size / 1e9:>8.2f}{size / line['planned'] - 1:>+8.1%}", flush=True
        )
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
