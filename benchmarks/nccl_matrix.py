"""Every kind of layout × eager or compiled × formats × recompute × offload × compression, against one process.

    python benchmarks/nccl_matrix.py --device cuda --out matrix.jsonl          # several NCCL ranks on one GPU, 8 min
    python benchmarks/nccl_matrix.py --device cpu --out matrix.jsonl --sample 6 --seed 1 --seconds 300
    python benchmarks/nccl_matrix.py --out matrix.jsonl --page benchmarks/2026-11-16-nccl-matrix.md

Every case is 5 steps of a tiny model on 4 or 8 ranks, in fresh processes; compiled ones are started twice: first with a
compile cache that is empty when the matrix begins and that all cases share, then again with what is in it by then.
Losses and gradient norms are held against one process in the same format, with the same kernels; what is refused before
the start is listed with its reason. Lines are written as they come; `--done FILE` leaves out what FILE already has.
On one GPU the ranks share it (NCCL 2.30 or later), and MPS is started for the length of it where its control program is
found: without, small steps of many ranks are several times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from layout_matrix import (  # tests/layout_matrix.py
    MATRIX_CASES,
    MatrixCase,
    bounds_of,
    judge_case,
    layout_of,
    reference_name,
    reference_of,
    refusals,
    runs_compiled,
    sample_cases,
    trial_of,
)

from phalanx.elastic.gpus import NcclLibrary, ask_nccl
from phalanx.errors import PhalanxError
from phalanx.hardware.discover import discover
from phalanx.train.verify.proof import CACHE
from phalanx.train.verify.ranks import PRELOAD, TrialPlace, run_ranks, warm_up
from phalanx.train.verify.trial import Trial, TrialOutcome, run_trial

MPS = "nvidia-cuda-mps-control"
COMPILER = ["torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"]
FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


class Results:
    """Lines of a file, written as they come, by several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()

    def write(self, line: dict[str, Any]) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        told = line.get("error") or "; ".join(line.get("refused", ())) or f"{line.get('wall_s', 0.0):.1f} s"
        if "name" in line:
            print(f"{line['start']:>9}  {line['name']}: {told[:160]}", flush=True)


class Matrix:
    """What runs the cases, several at a time."""

    def __init__(self, args: argparse.Namespace, results: Results, cache: str, done: set[tuple[str, str]]) -> None:
        self.args, self.results, self.cache, self.done = args, results, cache, done
        self.ends_s = time.monotonic() + args.seconds
        self.gpus = len(discover().gpus)
        self.failed: list[tuple[str, Trial, str]] = []
        self.alone = False  # one at a time
        self.with_mps = False
        self.free_ranks, self.room = args.ranks, threading.Condition()

    def run(self, name: str, trial: Trial, start: str) -> bool:
        """One start of a case or reference, when there is room for its ranks; whether there was time for it."""
        if (name, start) in self.done:
            return True
        world = trial.settings.layout.devices
        with self.room:
            self.room.wait_for(lambda: self.free_ranks >= min(world, self.args.ranks))
            self.free_ranks -= world
        try:
            left_s = self.ends_s - time.monotonic()
            if left_s < (40 if start == "cold" else 15):  # what cannot end is not begun
                return False
            self._run(name, trial, start, limit_s=min(self.args.limit, left_s))
            return True
        finally:
            with self.room:
                self.free_ranks += world
                self.room.notify_all()

    def _run(self, name: str, trial: Trial, start: str, *, limit_s: float) -> None:
        """Whatever goes wrong is a line."""
        began_s, world = time.monotonic(), trial.settings.layout.devices
        environ = {CACHE: self.cache, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
        if self.alone or not self.with_mps:
            environ |= without_mps()
        place = TrialPlace(shared=self.args.device == "cuda" and world > self.gpus, environ=environ)
        line: dict[str, Any] = {"name": name, "start": start, "world": world, "reference": reference_name(trial)}
        try:
            line |= told(run_trial(trial, limit_s=limit_s, debug=self.args.debug, place=place))
        except PhalanxError as error:
            line["error"] = str(error)[:2000]
            if limit_s < self.args.limit and "no answer within" in line["error"]:
                print(f"      cut  {name}: the time is over", flush=True)
                return
        except Exception as error:  # one failing case must not end the rest
            line["error"] = f"{type(error).__name__}: {error}"[:2000]
        line["wall_s"] = round(time.monotonic() - began_s, 2)
        if "error" in line and not self.alone:
            self.failed.append((name, trial, start))
            line["again"] = True
        self.results.write(line)

    def trial(self, case: MatrixCase) -> Trial:
        """With the compiler that was asked for."""
        made = trial_of(case, device=self.args.device)
        return replace(made, settings=replace(made.settings, compile_backend=self.args.backend))

    def case(self, case: MatrixCase) -> None:
        """All starts of a case, one after the other."""
        trial = self.trial(case)
        if not runs_compiled(case):
            self.run(case.name, trial, "eager")
            return
        if self.run(case.name, trial, "cold"):
            self.run(case.name, trial, "warm")


def told(outcome: TrialOutcome) -> dict[str, Any]:
    """What a line keeps of an outcome."""
    return {
        "losses": outcome.losses,
        "norms": outcome.norms,
        "skipped": sum(outcome.skipped),
        "quarrels": outcome.quarrels[:3],
        "graphs": list(outcome.graphs),
        "seconds": round(outcome.seconds, 2),
    }


def outcome_of(line: dict[str, Any]) -> TrialOutcome:
    """The reverse."""
    count = len(line["losses"])
    return TrialOutcome(
        losses=line["losses"],
        norms=line["norms"],
        skipped=[False] * count,
        tokens=[0] * count,
        evaluations=[],
        grads=[],
        params=[{} for _ in range(count)],
        quarrels=line["quarrels"],
        loss_scale=1.0,
        seconds=line["seconds"],
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was cut off is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(text))
    return found


@contextmanager
def mps(wanted: bool) -> Iterator[bool]:
    """CUDA's multi-process service of our own, where its program is; whether there is one."""
    program = shutil.which(MPS)
    if not wanted or program is None or any(name in os.environ for name in FOLDERS):
        yield False
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    os.environ.update(dict.fromkeys(FOLDERS, folder))
    started = subprocess.run([program, "-d"], check=False, timeout=30, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield started.returncode == 0
    finally:
        with suppress(Exception):
            subprocess.run([program], input="quit\n", text=True, check=False, timeout=20, capture_output=True)
        for name in FOLDERS:
            os.environ.pop(name, None)


def without_mps() -> dict[str, str]:
    """What keeps a process from looking for MPS: a folder without its pipes."""
    return {FOLDERS[0]: str(Path(tempfile.gettempdir()) / "no-such-mps")}


def works(args: argparse.Namespace, environ: dict[str, str]) -> str:
    """Whether two ranks reach each other on the GPU; else why not."""
    place = TrialPlace(device=args.device, shared=True, environ=environ)
    try:
        run_ranks(divmod, 2, 2, limit_s=90, debug=args.debug, place=place)
    except PhalanxError as error:
        return str(error)
    return ""


def preload(args: argparse.Namespace) -> None:
    """Import the compiler once, before the ranks are forked: 3 to 5 s per rank. Not where that starts CUDA."""
    if args.device == "cuda" and not args.quick:
        text = (
            f"import os, {', '.join(COMPILER)}\nif not os.fork():\n    import torch\n    torch.ones(1, device='cuda')\n"
            "    os._exit(0)\nraise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
        )
        environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        done = subprocess.run([sys.executable, "-c", text], check=False, timeout=120, capture_output=True, env=environ)
        if done.returncode:
            print("the compiler is imported by every rank: its import starts CUDA", flush=True)
            return
    warm_up((*PRELOAD, *COMPILER))  # the server that later calls find running


def about(args: argparse.Namespace, *, with_mps: bool) -> dict[str, Any]:
    """What it ran on."""
    import torch

    nccl = ask_nccl(os.environ) if args.device == "cuda" else None
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    machine = discover()
    return {
        "about": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": commit.stdout.strip(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "nccl": f"NCCL {'.'.join(map(str, nccl.version))}" if isinstance(nccl, NcclLibrary) else "",
            "device": machine.gpus[0].name if args.device == "cuda" and machine.gpus else machine.cpu_model,
            "gpus": len(machine.gpus),
            "cores": machine.usable_cores,
            "mps": with_mps,
            "ranks": args.ranks,
            "seed": args.seed,
            "sample": args.sample,
        }
    }


def chosen(args: argparse.Namespace) -> list[MatrixCase]:
    """The cases of this call."""
    cases = [case for case in MATRIX_CASES if not args.only or any(word in case.name for word in args.only)]
    return sample_cases(cases, args.sample, args.seed) if args.sample else cases


def perform(args: argparse.Namespace) -> None:
    """Run what was chosen, references first."""
    out = Path(args.out)
    done = {(one["name"], one["start"]) for file in (out, args.done) if file for one in read(Path(file))
            if "name" in one and "error" not in one}  # fmt: skip
    results, cases = Results(out), chosen(args)
    with mps(args.device == "cuda" and args.mps) as with_mps, tempfile.TemporaryDirectory(prefix="matrix-") as cache:
        preload(args)
        warm_up()
        if args.device == "cuda" and with_mps and not args.quick and (why := works(args, {})):
            print(f"two ranks on the GPU with MPS: {why}", flush=True)
            with_mps = False
        if args.device == "cuda" and not with_mps and not args.quick and (why := works(args, without_mps())):
            print(f"two ranks on the GPU: {why}", flush=True)
        results.write(about(args, with_mps=with_mps))
        matrix = Matrix(args, results, cache, done)
        matrix.with_mps = with_mps
        run_all(matrix, cases)
        matrix.alone = True
        for name, trial, start in list(matrix.failed):  # once more, alone: a neighbour may have been the cause
            matrix.run(name, trial, start)
    print(summary(read(out)), flush=True)


def run_all(matrix: Matrix, cases: Sequence[MatrixCase]) -> None:
    """Refusals at once, then references, then the cases, cheap ones first: time may run out."""
    device, runnable = matrix.args.device, []
    for case in cases:
        found = refusals(case, device=device)
        if not found:
            runnable.append(case)
        elif (case.name, "refused") not in matrix.done:
            lines = [problem.render().replace("\n", ";") for problem in found]
            world = layout_of(case).devices
            matrix.results.write({"name": case.name, "start": "refused", "world": world, "refused": lines})
    trials = [matrix.trial(case) for case in runnable]
    references = {reference_name(one): reference_of(one) for one in trials}
    with ThreadPoolExecutor(max(1, matrix.args.ranks // 2)) as pool:
        for name, trial in references.items():
            pool.submit(matrix.run, name, trial, "reference")
        for case in sorted(runnable, key=turn):
            pool.submit(matrix.case, case)


def turn(case: MatrixCase) -> int:
    """What is cheap first: eager; what shares its graphs with another case; formats; eight ranks; experts."""
    if not case.compiled:
        return 0
    if case.recompute != "none" or case.offload != "none" or case.compression != "none":
        return 1
    if case.shape == "experts":
        return 5
    return 2 if case.precision == "bf16" and layout_of(case).devices == 4 else 3 if case.precision == "fp8" else 4


# ---- what came of it -------------------------------------------------------------------------------------------------


def verdicts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per case: its starts, how far each is from its reference, and the word for it."""
    references = {one["name"]: one for one in lines if one.get("start") == "reference" and "losses" in one}
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for one in lines:
        if "name" in one and ((one["name"], one["start"]) not in best or "error" not in one):
            best[one["name"], one["start"]] = one
    rows = []
    for case in MATRIX_CASES:
        row: dict[str, Any] = {"case": case, "starts": {}, "verdict": "not run", "reason": ""}
        starts = ["cold", "warm"] if runs_compiled(case) else ["eager"]
        if (line := best.get((case.name, "refused"))) is not None:
            row |= {"verdict": "refused", "reason": line["refused"][0]}
        for start in starts:
            line = best.get((case.name, start))
            if line is None:
                continue
            row["starts"][start] = line
            if "error" in line:
                row |= {"verdict": "failed", "reason": f"{start}: {line['error'].splitlines()[0]}"}
            elif (reference := references.get(line["reference"])) is None:
                row |= {"verdict": "not compared", "reason": f"no {line['reference']}"}
            else:
                found = judge_case(case, outcome_of(line), outcome_of(reference))
                line["compared"] = found
                if found.first is not None:
                    row |= {"verdict": "WRONG", "reason": f"{start}: {found.first.render()}"}
                elif row["verdict"] == "not run":
                    row["verdict"] = "right"
        if row["verdict"] == "right" and len(row["starts"]) < len(starts):
            row |= {"verdict": "right", "reason": "second start not run"}
        rows.append(row)
    return rows


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Counts, and whatever is not right."""
    rows = verdicts(lines)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    bad = [f"  {row['verdict']}: {row['case'].name}: {row['reason'][:300]}" for row in rows
           if row["verdict"] in ("WRONG", "failed", "not compared")]  # fmt: skip
    return "\n".join([", ".join(f"{count} {word}" for word, count in counts.items()), *bad])


def page(lines: Sequence[dict[str, Any]], *, commit: str, note: str = "") -> str:
    """The dated page."""
    rows = [row for row in verdicts(lines) if row["verdict"] != "not run"]
    about = next((one["about"] for one in lines if "about" in one), {})
    ranks_at_a_time = " and ".join(str(one["about"]["ranks"]) for one in lines if "about" in one)
    wall_s = sum(one.get("wall_s", 0.0) for one in lines)
    ranks = f"{about.get('gpus', 0)} × {about.get('device', '')}" if about.get("nccl") else about.get("device", "")
    starts = sum(len(row["starts"]) for row in rows)
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("right", "refused", "WRONG", "failed")}
    ran = [row for row in rows if row["starts"]]
    hits = [sum(row["starts"][start]["graphs"][0] for row in ran if start in row["starts"]
                and "graphs" in row["starts"][start]) for start in ("cold", "warm")]  # fmt: skip
    text = [
        f"# Every kind of layout against one process, {about.get('date', '')}",
        "",
        f"`python benchmarks/nccl_matrix.py --device {'cuda' if about.get('nccl') else 'cpu'}` on {ranks}, "
        f"{about.get('nccl') or 'gloo'}, torch {about.get('torch', '')}, Python {about.get('python', '')}, commit "
        f"{about.get('commit') or commit}; {ranks_at_a_time} ranks at a time"
        f"{', under MPS' if about.get('mps') else ''}.",
        "",
        f"{len(rows)} combinations: {counts['right']} right, {counts['refused']} refused before the start, "
        f"{counts['WRONG']} wrong, {counts['failed']} failed. {starts} starts of 4 or 8 ranks, {wall_s / 60:.0f} "
        "minutes of them together. Five steps each of a model of 2 or 4 layers (hidden 64, 256 words, 64 tokens), "
        "compared with one process in the same format, eager or compiled as the case is, uncompressed. Nothing is "
        "evaluated on held-out data. Cold: the first start; the compile cache "
        "was empty when the matrix began, and all cases share it. Warm: the same again in new processes "
        f"({hits[0]} graphs of all ranks came from the cache in first starts, {hits[1]} in second ones).",
        "",
        "Errors are relative, the largest of 5 steps. Allowed in the first step (4 times that later): "
        + "; ".join(
            f"{name} loss {bounds.loss:.1e}, norm {bounds.norm:.1e}"
            for name, bounds in (
                (one, bounds_of(replace(MATRIX_CASES[0], precision=one))) for one in ("fp32", "bf16", "fp8")
            )
        )
        + " (train/verify/compare.py says why). Compiled Ulysses in Phalanx 0.6 was 0.34 off in the norm of the "
        "first step.",
        *(("", note) if note else ()),
        "",
        "| layout | ranks | format | compiled | besides | loss: cold | warm | norm: cold | warm | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row["case"]
        besides = [f"recompute {case.recompute}"] if case.recompute != "none" else []
        besides += [f"offload {case.offload}"] if case.offload != "none" else []
        besides += [f"gradients {case.compression}"] if case.compression != "none" else []
        first = row["starts"].get("cold") or row["starts"].get("eager")
        cells = [_error(one, key) for key in ("loss", "norm") for one in (first, row["starts"].get("warm"))]
        verdict = row["verdict"] + (f": {row['reason']}" if row["reason"] else "")
        how = "yes" if case.compiled else "no"
        start = [case.layout_name, str(layout_of(case).devices), case.precision, how, ", ".join(besides)]
        text.append(f"| {' | '.join([*start, *cells, verdict.replace('|', '/')])} |")
    missing = [row["case"].name for row in verdicts(lines) if row["verdict"] == "not run"]
    if missing:
        text += ["", f"Not run, for want of time on that machine: {'; '.join(missing)}."]
    return "\n".join(text) + "\n"


def _error(line: dict[str, Any] | None, key: str) -> str:
    found = line.get("compared") if line is not None else None
    return f"{getattr(found, key):.1e}" if found is not None else ""


def main() -> None:
    """Run it, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", required=True, help="JSON lines, appended")
    parser.add_argument("--done", help="leave out what this file already has")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these words")
    parser.add_argument("--sample", type=int, default=0, help="so many, drawn by the seed (all)")
    parser.add_argument("--seed", default="1")
    parser.add_argument(
        "--ranks", type=int, default=0, help="at a time, of all cases together (2 per core, at least 8)"
    )
    parser.add_argument("--quick", action="store_true", help="do not try first whether two ranks and MPS work")
    parser.add_argument("--seconds", type=float, default=450.0, help="start nothing after so long (450)")
    parser.add_argument("--limit", type=float, default=120.0, help="longest wait for one start (120)")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; aot_eager needs no compiler (inductor)"
    )
    parser.add_argument("--no-mps", dest="mps", action="store_false")
    parser.add_argument("--debug", action="store_true", help="show what ranks print, and the trace of one that fails")
    parser.add_argument("--list", action="store_true", help="print the cases, run nothing")
    parser.add_argument("--commit", default="", help="of the page, where the machine had no repository")
    parser.add_argument("--note", default="", help="a paragraph of the page on how this file came about")
    parser.add_argument("--page", help="write this page from --out, run nothing")
    args = parser.parse_args()
    args.ranks = args.ranks or max(8, min(32, 2 * (os.cpu_count() or 1)))
    if args.list:
        for case in chosen(args):
            found = refusals(case, device=args.device)
            print(f"{layout_of(case).devices} ranks  {case.name}{'  REFUSED: ' + found[0].what if found else ''}")
        return
    if args.page:
        Path(args.page).write_text(page(read(Path(args.out)), commit=args.commit, note=args.note), encoding="utf-8")
        print(summary(read(Path(args.out))))
        return
    began_s = time.monotonic()
    perform(args)
    print(f"{time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
