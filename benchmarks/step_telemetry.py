"""What looking inside the step costs: the noise estimate on against off, a sampled step against a plain one.

    python benchmarks/step_telemetry.py [--device cuda] [--steps 20] [--compile]

One process, steps with and without the estimate in turn, medians; then sampled steps, with their timeline's collectives
and what the clock says of computing and waiting. With --device cuda the shape is a 1.1B Llama, else one of 4 layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings
from phalanx.train.telemetry import timeline

LARGE = ModelShape(
    name="llama-1.1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=32000,
)  # fmt: skip
SMALL = ModelShape(name="small", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=512)


def build(device: torch.device, *, compiled: bool, micro: int, count: int, sequence: int) -> Engine:
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=micro, accumulation=count, recompute="none", precision="bf16", schedule="1f1b", offload="none",
        compression="none",
    )  # fmt: skip
    compute = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(layout=layout, sequence=sequence, compute=compute, compile=compiled)
    shape = LARGE if device.type == "cuda" else SMALL
    engine = Engine(shape, settings, Optim(), device=device)
    engine.initialise()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        measure(device, steps=args.steps, compiled=args.compile)
        dist.destroy_process_group()


def measure(device: torch.device, *, steps: int, compiled: bool) -> None:
    micro, count, sequence = (8, 2, 2048) if device.type == "cuda" else (4, 2, 256)
    engine = build(device, compiled=compiled, micro=micro, count=count, sequence=sequence)
    tokens = torch.randint(0, engine.shape.vocab, (micro * count, sequence))
    timeline.SHARE = 1e9
    told: list[str] = []
    sampler = timeline.TimelineSampler(engine.meshes, device, every=1, compiled=compiled, tell=told.append)

    def step(hearing: bool, sampled: int = 0) -> tuple[float, object, list[object]]:
        engine.listener.norms.enabled = hearing
        began_s, samples = time.perf_counter(), []
        if sampled:
            with sampler.step(sampled) as samples:
                result = engine.step(tokens, tokens, lr=1e-4)
                if device.type == "cuda":
                    dist.all_reduce(torch.ones(2**20, device=device))
        else:
            result = engine.step(tokens, tokens, lr=1e-4)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s, result, samples

    assert engine.listener is not None
    every, engine.listener.norms.every = engine.listener.norms.every, 1  # measured in each step, then shared out
    for _ in range(4):
        step(True)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * steps):
        taken[number % 2 == 0].append(step(number % 2 == 0)[0])
    _, plain, _ = step(True)
    looked = [step(True, 1 + number) for number in range(4)]
    last = looked[-1][2][0].fields(looked[-1][1].phases, data_s=0.0, before_s=0.0) if looked[-1][2] else {}
    on, off = (statistics.median(taken[key]) for key in (True, False))
    ratios = sorted(a / b for a, b in zip(taken[True], taken[False], strict=True))
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "compile": compiled,
                "step_s_on": on,
                "step_s_off": off,
                "ratio_median": ratios[len(ratios) // 2],
                "estimated_every": every,
                "compute_s": plain.compute_s,
                "wait_s": plain.wait_s,
                "noise": [plain.noise.trace, plain.noise.squared],
                "sampled_s": [one[0] for one in looked],
                "spans": last.get("spans", [])[:12],
                "collectives": last.get("collectives"),
                "told": told,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
