"""Steps of the compiled trainer on one GPU, one JSON line per configuration: what the profile `phalanx` is fitted on.

    python benchmarks/gpu_profile.py OUT.jsonl [--done EARLIER.jsonl] [--seconds 540] [--only NAME ...] [--list]

Every configuration is a job file, planned on one device of `--cluster` and trained by `train_rank`, the
function that `phalanx train` runs on every rank: the same loop, loader, engine and `torch.compile`, on tokens drawn by
Zipf's law. It is left by an exception once its steps are measured, before the last checkpoint; weights are drawn on the
GPU, because drawing 3 billion of them on the CPU takes longer than all the steps.

CONFIGURATIONS is the whole design, written before anything was measured: lines in pairs, the first of a pair is for
fitting, the second is held back for the report. The four of the issue (350M; 1B; 1B at 32k; 1B in fp8) are all held
back. Each line of the result has the step the planner predicted at that time, which is the comparison before the fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.io.toml import to_toml
from phalanx.job.dataset import BLOCK_BYTES, MANIFEST, TOKENIZER, DatasetManifest, Source
from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, create_run
from phalanx.train.data.shard_writer import ShardWriter
from phalanx.train.engine import Engine
from phalanx.train.rank_control import RankControl
from phalanx.train.rank_training import train_rank

WARM_UP = 3  # the first step compiles, the second may compile once more, the third settles the allocator
LEAST, MOST = 6, 14  # steps that are timed
TOKENS, VOCAB = 4_000_000, 8192  # of the dataset

SHAPES: dict[str, dict[str, Any]] = {
    "125m": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "ffn": 2048},
    "350m": {"layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2816},
    "760m": {"layers": 24, "hidden": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128, "ffn": 4096},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192},
    "1b-wide-heads": {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "ffn": 8192},
    "8b-slice": {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336},
    "moe-small": {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "ffn": 2816, "experts": 16,
                  "experts_per_token": 2, "expert_ffn": 1408},
    "moe-large": {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "ffn": 5632, "experts": 8,
                  "experts_per_token": 2, "expert_ffn": 2816},
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128},  # to try the script
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One job: a shape and how it is trained."""

    shape: str
    sequence: int
    micro: int
    accumulation: int = 1
    recompute: str = "none"
    compute: str = "bf16"
    vocab: int = 32000
    held_back: bool = False
    issue: str = ""  # which of the issue's four this is
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Names the configuration in the result."""
        batch = f"{self.micro}x{self.accumulation}"
        more = "".join(f" {key}={value}" for key, value in self.overrides.items())
        return f"{self.shape} s{self.sequence} {batch} {self.recompute} {self.compute} v{self.vocab}{more}"


def _pairs() -> Iterator[tuple[Configuration, Configuration]]:
    """(for fitting, held back): each pair explores one thing, at different values of everything else."""
    c = Configuration
    yield (c(shape="1b", sequence=2048, micro=16, accumulation=2),
           c(shape="1b", sequence=2048, micro=8, accumulation=4, issue="1B"))  # fmt: skip
    yield (c(shape="125m", sequence=1024, micro=64),
           c(shape="350m", sequence=2048, micro=16, accumulation=2, issue="350M"))  # fmt: skip
    long = c(shape="1b", sequence=32768, micro=1, accumulation=2, recompute="selective", issue="1B at 32k")
    yield c(shape="1b-wide-heads", sequence=8192, micro=4, accumulation=2), long
    yield (c(shape="1b", sequence=8192, micro=2, accumulation=2, compute="fp8", vocab=128256),
           c(shape="1b", sequence=2048, micro=8, accumulation=4, compute="fp8", issue="1B fp8"))  # fmt: skip
    yield (c(shape="3b", sequence=4096, micro=4, recompute="full", vocab=128256),
           c(shape="3b", sequence=4096, micro=2, accumulation=2))  # fmt: skip
    yield (c(shape="8b-slice", sequence=4096, micro=2, accumulation=2, vocab=128256),
           c(shape="8b-slice", sequence=8192, micro=2, recompute="selective"))  # fmt: skip
    yield (c(shape="125m", sequence=4096, micro=1, accumulation=4),
           c(shape="350m", sequence=1024, micro=2, accumulation=4))  # fmt: skip
    yield (c(shape="350m", sequence=16384, micro=1, accumulation=2, recompute="selective"),
           c(shape="125m", sequence=8192, micro=8))  # fmt: skip
    yield (c(shape="760m", sequence=2048, micro=8, accumulation=2, recompute="full"),
           c(shape="760m", sequence=4096, micro=8, recompute="selective"))  # fmt: skip
    yield (c(shape="1b", sequence=4096, micro=4, accumulation=2, compute="fp8", recompute="full"),
           c(shape="760m", sequence=2048, micro=16, compute="fp8"))  # fmt: skip
    yield (c(shape="350m", sequence=2048, micro=8, accumulation=2, vocab=128256),
           c(shape="1b", sequence=1024, micro=16, vocab=128256))  # fmt: skip
    yield (c(shape="1b-wide-heads", sequence=32768, micro=1, recompute="full"),
           c(shape="3b", sequence=16384, micro=1, recompute="selective"))  # fmt: skip
    yield (c(shape="8b-slice", sequence=2048, micro=4, accumulation=2, compute="fp8"),
           c(shape="3b", sequence=2048, micro=8, compute="fp8", recompute="full", vocab=128256))  # fmt: skip
    yield (c(shape="1b", sequence=2048, micro=1, accumulation=8),
           c(shape="125m", sequence=2048, micro=32, accumulation=2, recompute="full"))  # fmt: skip
    yield (c(shape="1b", sequence=2048, micro=8, accumulation=2, overrides={"optim.name": "muon"}),
           c(shape="350m", sequence=2048, micro=8, accumulation=2, overrides={"optim.name": "muon"}))  # fmt: skip
    yield (c(shape="760m", sequence=4096, micro=4, overrides={"precision.optimizer_state": "bf16"}),
           c(shape="1b", sequence=2048, micro=4, overrides={"optim.name": "adafactor"}))  # fmt: skip
    yield (c(shape="moe-small", sequence=2048, micro=8), c(shape="moe-large", sequence=4096, micro=4))
    # Added on 17 November, when a 100M model in fp8 took 2.8 times its prediction: the host issues too much for it.
    yield (c(shape="125m", sequence=1024, micro=16, compute="fp8", vocab=8192),
           c(shape="350m", sequence=1024, micro=2, accumulation=4, compute="fp8"))  # fmt: skip
    yield (c(shape="350m", sequence=512, micro=8, vocab=8192),
           c(shape="125m", sequence=1024, micro=16, vocab=8192))  # fmt: skip


CONFIGURATIONS = tuple(
    one for fitted, held in _pairs() for one in (fitted, replace(held, held_back=True))
)  # fmt: skip
TINY = (
    Configuration(shape="tiny", sequence=64, micro=2, accumulation=2, vocab=8192, compute="fp32"),
    Configuration(shape="tiny", sequence=32, micro=4, recompute="full", vocab=8192, compute="fp32", held_back=True),
)


class Measured(Exception):
    """Enough steps were timed: the training is left here."""


class StepLog:
    """Takes the place of the run's event file: remembers the steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def write(self, kind: str, **values: Any) -> None:
        """Keep what a step said of itself."""
        if kind == "step":
            self.steps.append(values)

    def flush(self) -> None:
        """Nothing is on its way to a disk."""


KERNELS = (  # kind of work, what the names of its kernels hold; the first match counts
    ("attention", ("fmha", "flash", "sdpa", "attention", "mha_")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "matmul", "wgrad", "splitk")),
    ("optimizer", ("multi_tensor", "foreach", "fused_adam", "lpnorm")),
    ("fused", ("triton",)),
    ("copy", ("memcpy", "memset")),
)


class Watch:
    """Called after every step: decides when enough are timed, and then looks into one more."""

    def __init__(self, log: StepLog, device: torch.device) -> None:
        self.timed_steps = 0  # index of the first step that does not count
        self.memory: dict[str, int] = {}
        self.kernels: dict[str, Any] = {}
        self._log, self._device, self._end_s = log, device, float("inf")
        self._profile: torch.profiler.profile | None = None

    def after_step(self, step: int, phase: object) -> None:
        """Raises Measured once everything is known."""
        timed = len(self._log.steps) - WARM_UP
        if self._profile is not None:
            self._close()
            raise Measured
        if timed == 1:
            self._end_s = time.perf_counter() + 5.0
        if timed < LEAST or (timed < MOST and time.perf_counter() < self._end_s):
            return
        self.timed_steps = len(self._log.steps)
        if self._device.type != "cuda":
            raise Measured
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.memory = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total - free,
        }
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def _close(self) -> None:
        """Seconds of the profiled step by kind of kernel, and its longest kernels."""
        assert self._profile is not None
        torch.cuda.synchronize()
        try:
            self._profile.stop()
        except RuntimeError:  # the trainer's own timeline of its tenth step ended the profiler: go without kernels
            return
        seconds: dict[str, float] = {}
        longest: list[tuple[float, int, str]] = []
        for one in self._profile.key_averages():
            spent_s = one.self_device_time_total / 1e6
            low = one.key.lower()
            kind = next((kind for kind, parts in KERNELS if any(part in low for part in parts)), "other")
            seconds[kind] = seconds.get(kind, 0.0) + spent_s
            longest.append((spent_s, one.count, one.key[:120]))
        self.kernels = {"kernels_s": seconds, "longest": sorted(longest, reverse=True)[:16]}


def write_dataset(folder: Path) -> Path:
    """A dataset of tokens whose frequencies fall as 1 / rank, as those of words do."""
    folder.mkdir()
    weights = 1.0 / np.arange(1, VOCAB)
    drawn = np.random.default_rng(0).choice(np.arange(1, VOCAB), size=TOKENS, p=weights / weights.sum())
    writer = ShardWriter(folder, "zipf", "train", "uint16")
    writer.write([(part.tolist(), 4 * len(part)) for part in np.split(drawn, 400)], end_of_text=0)
    (folder / TOKENIZER).write_text("{}", encoding="utf-8")
    source = Source(name="zipf", path="drawn", weight=1.0, shards=(writer.close(),))
    manifest = DatasetManifest(
        phalanx="0", vocab=VOCAB, dtype="uint16", end_of_text=0, tokenizer_sha256="0", heldout=0.0, split_on="document",
        sources=(source,), block_bytes=BLOCK_BYTES,
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.dump(), encoding="utf-8")
    return folder


def plan_of(c: Configuration, cluster: str, dataset: str, folder: Path) -> Plan:
    """What `phalanx train` would run for this configuration."""
    batch = c.micro * c.accumulation * c.sequence
    job = {
        "spec": "2026.1",
        "name": "profile",
        "model": {"name": c.shape, "vocab": c.vocab, **SHAPES[c.shape]},
        "data": {"path": dataset, "sequence": c.sequence, "tokens": 1000 * batch},
        "batch": {"global_tokens": batch, "micro": c.micro},
        "parallel": {"recompute": c.recompute},
        "precision": {"compute": c.compute},
        "train": {"evaluate_every": 0, "evaluate_sequences": 0, "samples": 0},
        "cluster": {"spec": cluster},
    }
    path = folder / "job.toml"
    path.write_text(to_toml(job), encoding="utf-8")
    return make_plan(load(path, overrides=[f"{key}={json.dumps(value)}" for key, value in c.overrides.items()]))


def run_of(plan: Plan, dataset: Path, folder: Path) -> tuple[Run, Plan]:
    """A run folder, as `phalanx train` makes one."""
    from phalanx.job.load import job_to_dict

    data = replace(plan.job.data, paths=(str(dataset),))
    plan = replace(plan, job=replace(plan.job, data=data))
    job = job_to_dict(plan.job)
    run = create_run(folder / "runs", "profile", job_toml=to_toml(job), job=job, plan_json=plan.to_json())
    run.set_launch(v=1, world=1, layout=plan.layout.name, started=time.time(), earlier=[], allow_code=False)
    return run, plan


@torch.no_grad()
def draw_on_device(engine: Engine) -> None:
    """First values without the CPU's draw, which is the same in every layout and slow."""
    for shard in engine.shards:
        if shard.tensor.ndim == 1:
            shard.tensor.fill_(1.0)
        else:
            shard.tensor.normal_(0.0, 0.02)
    for part in engine.parts:
        for buffer in part.model.buffers():
            buffer.zero_()
    engine.publish()


def measure(c: Configuration, cluster: str, dataset: Path, device: torch.device) -> dict[str, Any]:
    """One line of the result."""
    log, began_s = StepLog(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(c, cluster, str(dataset), Path(name))
        found: dict[str, Any] = {
            "name": c.name, **asdict(c), "layout": plan.layout.name, "predicted_s": plan.prediction.step_s,
            "predicted_low_s": plan.prediction.step_s_low, "predicted_high_s": plan.prediction.step_s_high,
            "predicted_bytes": plan.memory.total_bytes,
        }  # fmt: skip
        run, plan = run_of(plan, dataset, Path(name))
        watch = Watch(log, device)
        try:
            train_rank(run, plan, device, log, RankControl(stop=lambda: False, progress=watch.after_step))  # type: ignore[arg-type]
        except Measured:
            found["status"] = "ok"
        except torch.OutOfMemoryError:
            return {**found, "status": "out of memory"}
        except Exception as error:  # the others are to be measured all the same
            return {**found, "status": f"{type(error).__name__}: {error}"[:600]}
    times = [one["duration_s"] for one in log.steps[WARM_UP : watch.timed_steps]]
    found |= {
        "step_s": statistics.median(times), "steps": len(times), "fastest_s": min(times), "slowest_s": max(times),
        "tokens_per_s": c.micro * c.accumulation * c.sequence / statistics.median(times), "loss": log.steps[-1]["loss"],
        "whole_s": time.perf_counter() - began_s,
    }  # fmt: skip
    return found | watch.memory | watch.kernels


def done_in(paths: Sequence[Path | None]) -> set[str]:
    """Names of the configurations that need no second try."""
    lines = [line for path in paths if path is not None and path.exists() for line in path.read_text().splitlines()]
    return {one["name"] for one in map(json.loads, lines) if one["status"] in ("ok", "out of memory")}


def main() -> None:
    """Measure what the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("gpu_profile.jsonl"))
    parser.add_argument("--done", type=Path, help="results of an earlier call: their configurations are skipped")
    parser.add_argument("--cluster", default="1xH200")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no configuration after this")
    parser.add_argument("--only", nargs="+", help="only configurations whose name holds one of these")
    parser.add_argument("--one", metavar="NAME", help="measure this configuration in this process")
    parser.add_argument("--tiny", action="store_true", help="two tiny shapes, to try the script on a CPU")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    wanted = TINY if args.tiny else CONFIGURATIONS
    if args.list:
        for c in wanted:
            print("held back " if c.held_back else "fit       ", c.name, f"(issue: {c.issue})" if c.issue else "")
        return
    if args.one:
        measure_here(next(c for c in wanted if c.name == args.one), args.cluster, args.out)
        return
    end_s, done = time.perf_counter() + args.seconds, done_in([args.out, args.done])
    print(f"{len(done)} done before", flush=True)
    for c in wanted:
        if c.name in done or (args.only and not any(part in c.name for part in args.only)):
            continue
        if time.perf_counter() > end_s:
            print("out of time before", c.name, flush=True)
            break
        # A process each: the compiler, the profiler and an exception's frames keep tensors of the one before alive.
        command = [sys.executable, __file__, str(args.out), "--cluster", args.cluster, "--one", c.name]
        try:
            subprocess.run([*command, *(["--tiny"] if args.tiny else [])], check=False, timeout=90)
        except subprocess.TimeoutExpired:
            print(f"{c.name}: took longer than 90 s", flush=True)


def measure_here(c: Configuration, cluster: str, out: Path) -> None:
    """Measure one configuration and add its line to the result."""
    Engine.initialise = draw_on_device  # type: ignore[method-assign]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "dataset")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        found = measure(c, cluster, dataset, device) | {"device": card, "torch": torch.__version__}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        step = f"{found['step_s'] * 1e3:.1f} ms" if "step_s" in found else found["status"]
        print(
            f"{c.name}: {step}, predicted {found['predicted_s'] * 1e3:.1f} ms, "
            f"{found.get('peak_allocated_bytes', 0) / 1e9:.1f} GB, predicted {found['predicted_bytes'] / 1e9:.1f} GB, "
            f"in all {found.get('whole_s', 0.0):.1f} s",
            flush=True,
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
