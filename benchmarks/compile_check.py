"""What the comparison of compiled with eager code finds and costs, and what NCCL's records say; on one GPU, or on CPUs.

    python benchmarks/compile_check.py [--device cuda] [--seconds 400] [--only NAME ...] [--keep DIR]

Every case is a real `phalanx train` of a few steps, on one to four ranks; with `--device cuda` all of them on one GPU
(NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1). Printed per case: the difference of the gradients, the bound,
seconds of the comparison and of compiling, seconds to the first step with and without it, and whether losses and
digests of both runs are equal. Then a run whose compiler is wrong on purpose (gradients × 0.66), `phalanx show` of a
run, and what the flight recorders say of a rank that was stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STEPS = 4
JOB = """\
name = "check"
[model]
name = "check-llama"
layers = 4
hidden = 256
heads = 8
kv_heads = 4
head_dim = 32
ffn = 768
vocab = 512
[data]
path = "data"
sequence = 128
tokens = 1_000_000
[batch]
global_tokens = 2048
micro = 2
[precision]
compute = "fp32"
[parallel]
tensor = 1
context = 1
pipeline = 1
[train]
compile = true
samples = 0
evaluate_sequences = 0
[comm]
init_timeout_s = 120
[checkpoint]
interval_s = 3600
[fault]
digest_every = 1
dead_after_s = 5
"""
DEEP = ("model.layers=16",)
MOE = ("model.experts=8", "model.experts_per_token=2", "model.expert_ffn=256")
# Name, ranks, settings. The first are what the report is about; the others show how far healthy runs are from bounds.
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("1 rank fp32", 1, ()),
    ("4 ranks ZeRO-3 bf16", 4, ("parallel.shard=4", "parallel.zero=3", "precision.compute=bf16")),
    ("1 rank fp8", 1, ("precision.compute=fp8",)),
    ("4 ranks TP2 CP2 Ulysses bf16", 4, (
        "parallel.tensor=2", "parallel.context=2", "parallel.context_kind=ulysses", "precision.compute=bf16",
    )),
    ("4 ranks PP2 ZeRO-1 bf16", 4, (
        "parallel.pipeline=2", "parallel.virtual_pipeline=1", "parallel.schedule=1f1b", "parallel.shard=2",
        "parallel.zero=1", "precision.compute=bf16",
    )),
    ("1 rank bf16, 16 layers", 1, ("precision.compute=bf16", *DEEP)),
    ("1 rank bf16, experts", 1, ("precision.compute=bf16", *MOE)),
    ("1 rank fp8, 16 layers", 1, ("precision.compute=fp8", *DEEP)),
    ("1 rank fp32, 16 layers", 1, DEEP),
    ("4 ranks TP4 fp32", 4, ("parallel.tensor=4",)),
)  # fmt: skip
# Loaded by every process of a run before anything else: its compiler returns gradients times a factor.
WRONG = """\
import sys

if "supervise.coordinator" not in " ".join(sys.orig_argv):  # which has seconds to start, and needs no torch
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def times(graph, _):
        return make_boxed_func(lambda *args: [one * 0.66 if torch.is_tensor(one) else one for one in graph(*args)])

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=times)
    compile_with = torch.compile
    torch.compile = lambda *args, **more: compile_with(*args, **{**more, "backend": backend})
"""


def main() -> int:
    """Run what fits into the time; one that fails does not end the rest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--only", nargs="*", default=[], help="cases, and wrong, show, stopped")
    parser.add_argument("--once", action="store_true", help="each case once, with the comparison, and not compared")
    parser.add_argument("--keep", default="")
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(folder)
        bench = Bench(folder, args.device, until_s, once=args.once)
        parts: list[tuple[str, Callable[[], None]]] = [
            (name, lambda name=name, ranks=ranks, settings=settings: bench.both(name, ranks, settings))  # type: ignore[misc]
            for name, ranks, settings in CASES
            if args.device == "cuda" or "fp8" not in name
        ]
        parts[2:2] = [("wrong", bench.wrong), ("show", bench.show), ("stopped", bench.stopped)]
        for name, run in parts:
            if args.only and name not in args.only:
                continue
            if time.monotonic() > until_s - 20:
                print(f"{name}: no time left", flush=True)
                continue
            try:
                run()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return 0


def write_inputs(folder: Path) -> None:
    """A job and a small text to learn."""
    from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
    from phalanx.train.data.documents import Reading
    from phalanx.train.data.progress import BuildProgress

    (folder / "text.txt").write_text("\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(20000)))
    (folder / "job.toml").write_text(JOB)
    (folder / "wrong").mkdir(exist_ok=True)
    (folder / "wrong" / "sitecustomize.py").write_text(WRONG)
    if not (folder / "data").exists():
        recipe = Recipe(
            origins=(TextOrigin(path=folder / "text.txt"),), vocab=400, heldout=0.1, reading=Reading(split_on="blank")
        )
        build_dataset(recipe, folder / "data", lambda size: BuildProgress(sys.stderr, size))


class Bench:
    """Runs of one job in one folder."""

    def __init__(self, folder: Path, device: str, until_s: float, *, once: bool) -> None:
        self.folder, self.device, self.until_s, self.once = folder, device, until_s, once
        self.count = 0
        self.last: Path | None = None  # the newest run that worked

    def start(self, ranks: int, settings: Sequence[str], *, steps: int, wrong: bool = False) -> subprocess.Popen[bytes]:
        self.count += 1
        cluster = f"local-cpu:{ranks}" if self.device == "cpu" else f"{ranks}xH200"
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environ |= {"PHALANX_RANKS_PER_GPU": "4", "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}
        here = str(Path.cwd() / "src")
        extra = [str(self.folder / "wrong")] if wrong else []
        known = [str(Path(one).resolve()) for one in environ.get("PYTHONPATH", "").split(":") if one]
        environ["PYTHONPATH"] = ":".join([*extra, here, *known])
        words = ["train", "job.toml", "--runs", f"runs-{self.count}", "--cluster", cluster, "--steps", str(steps)]
        words += ["--no-check", "--no-probe", *(word for one in settings for word in ("--set", one))]
        with open(self.folder / f"out-{self.count}.txt", "wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "phalanx", *words], cwd=self.folder, env=environ, stdout=out, stderr=out
            )

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str, Path | None]:
        try:
            code = process.wait(max(5.0, self.until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end(process)
        said = (self.folder / f"out-{self.count}.txt").read_text(errors="replace")
        return code, said, self.run_folder()

    def run_folder(self) -> Path | None:
        return max((self.folder / f"runs-{self.count}").glob("*"), key=lambda one: one.name, default=None)

    def both(self, name: str, ranks: int, settings: Sequence[str]) -> None:
        """A case with the comparison, cold, and without it and with it again, warm."""
        found = []
        for check in ("true",) if self.once else ("true", "false", "true"):
            code, said, run = self.finish(self.start(ranks, [*settings, f"train.compile_check={check}"], steps=STEPS))
            if code or run is None:
                print(f"{name}: exit code {code}: {said[-900:]}", flush=True)
                return
            self.last = run
            found.append((events(run, 0), [steps_of(run, rank) for rank in range(ranks)]))
        told_without = found[1][0] if len(found) > 1 else []
        for what, (told, _) in zip(("cold", "warm"), found[::2], strict=False):
            (one,) = [event for event in told if event["event"] == "compile_check"]
            if one["passed"] is None:
                print(f"{name}, {what} cache: {one['reason']}", flush=True)
                continue
            without = f", without the comparison {first_step_s(told_without):.2f} s (warm)" if told_without else ""
            print(
                f"{name}, {what} cache: passed {one['passed']} gradients {one['gradient_difference']:.2e} "
                f"loss {one['loss_difference']:.2e} bound {one['bound']:.2e} norm {one['grad_norm']:.6g} for "
                f"{one['eager_grad_norm']:.6g}; {one['seconds']:.2f} s, {one['compile_s']:.2f} s of it compiling; "
                f"first step {first_step_s(told):.2f} s after ready{without}",
                flush=True,
            )
        if not self.once:
            same = all(steps == found[0][1] for _, steps in found)
            print(f"{name}: losses and digests equal with and without: {same}", flush=True)

    def wrong(self) -> None:
        """A compiler that returns gradients times 0.66 is stopped."""
        ranks = 4
        code, said, _ = self.finish(self.start(ranks, ("parallel.shard=4", "parallel.zero=3"), steps=STEPS, wrong=True))
        print(f"wrong compiler: exit code {code}\n{said[-1200:]}", flush=True)

    def show(self) -> None:
        """What an operator sees."""
        if self.last is None:
            print("show: no run worked", flush=True)
            return
        environ = {**os.environ, "PYTHONPATH": f"{Path.cwd() / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "show", str(self.last)], env=environ, capture_output=True, text=True
        )
        print(done.stdout.partition("\nCOMMUNICATION")[2] or done.stderr, flush=True)

    def stopped(self) -> None:
        """A rank is stopped in the middle of training; who do the recorders name?"""
        settings = ("parallel.shard=4", "parallel.zero=3", "train.compile=false", "fault.dead_after_s=8")
        process = self.start(4, settings, steps=100000)
        victim, began_s = 0, time.monotonic()
        run: Path | None = None
        try:
            while time.monotonic() < min(self.until_s, began_s + 120):
                time.sleep(0.2)
                run = run or self.run_folder()
                if run is None:
                    continue
                if not victim and len(steps_of(run, 0)) > 8:
                    epoch = [one for one in events_of(run / "supervisor.jsonl") if one["event"] == "epoch"][-1]
                    victim = int(epoch["members"][2]["pid"])
                    os.kill(victim, signal.SIGSTOP)
                    print("stopped: rank 2 stopped", flush=True)
                told = [one for one in events_of(run / "supervisor.jsonl") if one["event"] == "evidence"]
                if told:
                    print(f"stopped: {json.dumps(told[0])}", flush=True)
                    break
            else:
                print("stopped: no evidence", flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            end(process)
        if run is not None:
            sizes = [path.stat().st_size for path in (run / "flight").glob("*")] if (run / "flight").is_dir() else []
            print(f"stopped: files of recorders and their bytes {sizes}", flush=True)
            told_epochs = sorted({path.name.split("-rank")[0] for path in (run / "flight").glob("*")})
            from phalanx.record.account.flight_records import find_culprit, read_flights, recorded_generations
            from phalanx.record.run import open_run

            for epoch in recorded_generations(open_run(run)):
                print(f"stopped: {told_epochs}: {find_culprit(read_flights(open_run(run), epoch))}", flush=True)
            print((run / "flight").joinpath(sorted(os.listdir(run / "flight"))[0]).read_text()[:2600], flush=True)
            incidents = [one for one in events_of(run / "supervisor.jsonl") if one["event"] == "incident"]
            print(f"stopped: incidents {[(one['rank'], one['cause']) for one in incidents]}", flush=True)
        print((self.folder / f"out-{self.count}.txt").read_text(errors="replace")[-900:], flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if process.poll() is None:
        process.kill()
        process.wait()


def events_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may be growing."""
    with suppress(OSError):
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return []


def events(run: Path, rank: int) -> list[dict[str, Any]]:
    return events_of(run / f"events-{rank:05d}.jsonl")


def steps_of(run: Path, rank: int) -> list[tuple[float, float, str]]:
    return [
        (one["loss"], one["grad_norm"], one.get("digest") or "") for one in events(run, rank) if one["event"] == "step"
    ]


def first_step_s(told: Sequence[dict[str, Any]]) -> float:
    ready = next(one["t"] for one in told if one["event"] == "ready")
    return float(next(one["t"] for one in told if one["event"] == "step") - ready)


if __name__ == "__main__":
    sys.exit(main())
