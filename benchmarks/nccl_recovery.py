"""Seconds from a fault to the next step, and what it cost, for every kind of loss: gloo on CPUs, or NCCL on one GPU.

    python benchmarks/nccl_recovery.py [--device cuda] [--only kill --only hang ...] [--seconds 540] [--keep DIR]

Every case is a real `phalanx drill` of examples/drill.toml's model on four ranks, compared with an undisturbed `phalanx
train` of the same job; "one by one" is a run with eight faults, seven steps apart. `--device cuda` puts all four ranks
on one GPU (NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1) and sets PHALANX_RANKS_PER_GPU. A line per fault:

- seconds from the fault to the end of the next step on the last rank, less the median step of the undisturbed run; for
  a hang less fault.dead_after_s too;
- epochs that were made after the first, incidents, the highest count of failures in a row, processes that had to be
  replaced because they did not get out of the old epoch by themselves;
- survivors that kept their process, and with it their CUDA context;
- steps whose parameter digests equal those of the undisturbed run, on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JOB = HERE.parent / "examples" / "drill.toml"
RANKS, STEPS, DEAD_AFTER_S = 4, 16, 5.0
FIRST_STEP, APART = 6, 7  # the first fault comes in this step, the others so many steps after each other
FLOOR_S = 2.5
SETTINGS = (f"fault.dead_after_s={DEAD_AFTER_S}", "fault.digest_every=1", "checkpoint.interval_s=1")
LAYOUTS = {
    "zero3": (),
    "tensor": ("parallel.tensor=2", "parallel.shard=2", "parallel.zero=1"),
    "pipeline": ("parallel.pipeline=2", "parallel.shard=2", "parallel.zero=1"),
}
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One fault of a run; `{step}` in its text is the step at which it comes."""

    name: str
    fault: str
    extra_s: float = 0.0  # until a fault of the kind can be noticed at all
    floor: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run and what happens to it: its faults come one after the other, some steps apart."""

    name: str
    hits: tuple[Hit, ...] = ()
    layout: str = "zero3"
    compile: bool = False
    hosts: int = 1
    steps: int = STEPS
    kill_after_go_s: float | None = None  # instead of faults: rank 2 is killed so long after the first epoch may begin


ONE_BY_ONE = (
    Hit(name="kill", fault="kill:rank=2,step={step}"),
    Hit(name="kill in a collective", fault="kill:rank=1,step={step},point=collective"),
    Hit(name="hang", fault="hang:rank=1,step={step}", extra_s=DEAD_AFTER_S),
    Hit(name="hang in a collective", fault="hang:rank=2,step={step},point=collective", extra_s=DEAD_AFTER_S),
    Hit(name="cuda error", fault="cuda-error:rank=3,step={step}"),
    Hit(name="two kills", fault="kill:rank=1+3,step={step}"),
    Hit(name="kill rank 0", fault="kill:rank=0,step={step}"),
    Hit(name="kill during a save", fault="kill:rank=1,step={step},point=save-data"),
)
LONG = FIRST_STEP + APART * len(ONE_BY_ONE) + 4


def collective_kill(layout: str, *, compiled: bool = False) -> Case:
    name = f"kill, {layout}{', compiled' if compiled else ''}"
    hit = Hit(name=name, fault="kill:rank=2,step={step},point=collective", floor=not compiled)
    return Case(name=name, hits=(hit,), layout=layout, compile=compiled)


CASES = (
    Case(name="one by one", hits=ONE_BY_ONE, steps=LONG),
    Case(name="kill 0.8 s into start-up", kill_after_go_s=0.8, steps=LONG),
    collective_kill("pipeline"),
    collective_kill("tensor"),
    Case(name="kill 0.1 s into start-up", kill_after_go_s=0.1, steps=LONG),
    # The job goes on with the other host's ranks, and takes its old size again when the host is back: two epochs.
    Case(
        name="host lost",
        hits=(Hit(name="host lost", fault="host:host=1,step={step}", extra_s=1.0, floor=False),),
        hosts=2,
        steps=LONG,
    ),
    collective_kill("zero3", compiled=True),
)


# ---- a run and its record --------------------------------------------------------------------------------------------


def make_job(folder: Path) -> Path:
    """The job of the drills on a small text of its own."""
    from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
    from phalanx.train.data.documents import Reading
    from phalanx.train.data.progress import BuildProgress

    (folder / "text.txt").write_text("\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(2500)))
    origins = (TextOrigin(path=folder / "text.txt"),)
    recipe = Recipe(origins=origins, vocab=300, heldout=0.1, reading=Reading(split_on="blank"))
    build_dataset(recipe, folder / "data", lambda size: BuildProgress(sys.stderr, size))
    text = JOB.read_text(encoding="utf-8")
    corpus = next(line for line in text.splitlines() if line.startswith("corpus ="))
    (folder / "job.toml").write_text(text.replace(corpus, 'path = "data"'))
    return folder / "job.toml"


def command(verb: str, job: Path, runs: Path, case: Case, device: str) -> list[str]:
    words = [sys.executable, "-m", "phalanx", verb, str(job), "--runs", str(runs), "--steps", str(case.steps)]
    settings = [*SETTINGS, *LAYOUTS[case.layout], f"train.compile={str(case.compile).lower()}"]
    for setting in settings:
        words += ["--set", setting]
    if device == "cuda":
        words += ["--cluster", f"{RANKS}xH200:1"]
    if verb == "drill":
        words += ["--no-replay", "--hosts", str(case.hosts)]
        for number, hit in enumerate(case.hits):
            words += ["--fault", hit.fault.format(step=FIRST_STEP + APART * number)]
    return words


def run_phalanx(
    words: Sequence[str], folder: Path, *, seconds: float, watch: Callable[[], None] = lambda: None
) -> tuple[int | None, str]:
    """Exit code and output; a run that takes too long is asked to end, then made to. `watch` is called often."""
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environ.setdefault("PHALANX_RANKS_PER_GPU", str(RANKS))
    if environ.get("PYTHONPATH"):  # relative to where we were started
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environ["PYTHONPATH"].split(os.pathsep)))
    log = folder / "output.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            list(words), cwd=folder, env=environ, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
        until_s = time.monotonic() + seconds
        while (code := process.poll()) is None and time.monotonic() < until_s:
            watch()
            time.sleep(0.02)
        if code is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def lines(path: Path) -> list[Event]:
    """Every whole line of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True, slots=True)
class Record:
    """What a run wrote down."""

    path: Path

    def told(self, kind: str) -> list[Event]:
        return [one for one in lines(self.path / "supervisor.jsonl") if one["event"] == kind]

    def of_ranks(self, kind: str) -> list[Event]:
        files = sorted(self.path.glob("events-*.jsonl"))
        return [one for path in files for one in lines(path) if one["event"] == kind]

    def fired(self) -> list[Event]:
        found = [json.loads(path.read_text()) for path in (self.path / "drill").glob("fired-*.json")]
        return sorted(found, key=lambda one: one["t_s"])

    def digests(self) -> dict[tuple[int, int], str]:
        """Of rank and step; what was done again counts."""
        steps = sorted(self.of_ranks("step"), key=lambda one: one["t"])
        return {(one["rank"], one["step"]): one["digest"] for one in steps if one.get("digest")}

    def step_s(self) -> float:
        took = [one["duration_s"] for one in self.of_ranks("step") if one["step"] > 2]
        return statistics.median(took) if took else float("nan")


def newest(runs: Path) -> Record | None:
    found = sorted((one for one in runs.glob("*") if (one / "supervisor.jsonl").exists()), key=lambda one: one.name)
    return Record(found[-1]) if found else None


class Killer:
    """Kills a rank from outside, a while after the first epoch was told to go."""

    def __init__(self, runs: Path, after_go_s: float | None) -> None:
        self._runs, self._after_go_s = runs, after_go_s
        self.fired: list[Event] = []

    def __call__(self) -> None:
        record = newest(self._runs) if self._after_go_s is not None and not self.fired else None
        went = record.told("restore") if record is not None else []
        if record is not None and went and time.time() > went[0]["t"] + (self._after_go_s or 0.0):
            (member,) = (one for one in record.told("epoch")[0]["members"] if one["rank"] == 2)
            self.fired.append({"t_s": time.time(), "rank": 2, "epoch": 1})
            os.kill(member["pid"], signal.SIGKILL)


# ---- one case --------------------------------------------------------------------------------------------------------


def measure(case: Case, job: Path, folder: Path, device: str, whole: Record, *, seconds: float) -> list[dict[str, Any]]:
    """Run one case; what came of each of its faults."""
    folder.mkdir()
    began_s = time.monotonic()
    killer = Killer(folder / "runs", case.kill_after_go_s)
    words = command("drill" if case.hits else "train", job, folder / "runs", case, device)
    code, output = run_phalanx(words, folder, seconds=seconds, watch=killer)
    common: dict[str, Any] = {"case": case.name, "exit": code, "wall_s": round(time.monotonic() - began_s, 1)}
    record = newest(folder / "runs")
    if record is None:
        return [common | {"problem": output[-1500:]}]
    ours, theirs = record.digests(), whole.digests()
    common["digests"] = f"{sum(ours.get(key) == value for key, value in theirs.items())} of {len(theirs)}"
    if code != 0 or len(ours) < len(theirs):
        common["problem"] = output[-1500:] + rank_logs(record)
    hits = case.hits or (Hit(name=case.name, fault="", floor=False),)
    fired = [one | {"id": 0} for one in killer.fired] or record.fired()
    rows = []
    for number, hit in enumerate(hits):
        mine = [one for one in fired if one["id"] == number]
        later = [one["t_s"] for one in fired if one["id"] != number and mine and one["t_s"] > mine[-1]["t_s"]]
        row = came_of(hit, record, mine, until_s=min(later, default=float("inf")), step_s=whole.step_s())
        rows.append(common | {"case": hit.name} | row)
    return rows


def came_of(hit: Hit, record: Record, fired: Sequence[Event], *, until_s: float, step_s: float) -> dict[str, Any]:
    """Epochs, incidents and times between a fault and the next one."""
    if not fired:
        return {"fired": 0}
    began_s = fired[0]["t_s"]
    epochs = [one for one in record.told("epoch") if began_s < one["t"] < until_s]
    incidents = [one for one in record.told("incident") if began_s < one["t"] < until_s]
    replaced = [one for one in record.told("replacement") if began_s < one["t"] < until_s]
    found: dict[str, Any] = {
        "fired": len(fired),
        "epochs": len(epochs),
        "incidents": len(incidents),
        "in_a_row": max((one["in_a_row"] for one in incidents), default=0),
        "replaced": len(replaced),
        "causes": [said(one) for one in (*incidents, *replaced)],
    }
    if not epochs:
        return found
    found["kept"] = kept(record, epochs[0], {one["rank"] for one in fired})
    return found | times(hit, record, epochs, fired[-1]["t_s"], step_s)


def said(event: Event) -> str:
    cause = event["cause"]
    text = (cause["message"] or f"signal {cause['signal']}").splitlines()[0][:90]
    return f"{event['event']} rank {event['rank']}: {cause['kind']} {text}"


def kept(record: Record, epoch: Event, lost: set[int]) -> str:
    """Survivors whose process, and with it their CUDA context, is the same in the epoch after a fault."""
    before = [one for one in record.told("epoch") if one["epoch"] < epoch["epoch"]][-1]
    was, now = ({one["rank"]: one["pid"] for one in event["members"]} for event in (before, epoch))
    for one in record.told("replacement"):
        if one["epoch"] == before["epoch"]:
            was[one["rank"]] = one["pid"]
        elif one["epoch"] == epoch["epoch"]:
            now[one["rank"]] = one["pid"]
    survivors = set(was) - lost if -1 not in lost else set(now)
    return f"{len([rank for rank in survivors if now.get(rank) == was[rank]])} of {len(survivors)}"


def times(hit: Hit, record: Record, epochs: Sequence[Event], fired_s: float, step_s: float) -> dict[str, Any]:
    """From the fault to the next step of all ranks, and where the time went."""
    for epoch in epochs:
        number, world = epoch["epoch"], epoch["world"]
        first: dict[int, Event] = {}
        for one in record.of_ranks("step"):
            if one["epoch"] == number and one["t"] > fired_s:
                first.setdefault(one["rank"], one)
        if len(first) < world:
            continue
        went_s = next(one["t"] for one in record.told("restore") if one["epoch"] == number)
        ready_s = max((one["t"] for one in record.of_ranks("ready") if one["epoch"] == number), default=went_s)
        done_s = max(one["t"] for one in first.values())
        parts = {
            "noticed": epoch["t"] - fired_s,
            "left": went_s - epoch["t"],
            "built": ready_s - went_s,
            "stepped": done_s - ready_s,
        }
        total_s = done_s - fired_s - step_s - hit.extra_s
        verdict = "" if not hit.floor else "met" if total_s <= FLOOR_S else "MISSED"
        return {
            "seconds": round(done_s - fired_s, 2),
            "less_step_and_silence": round(total_s, 2),
            "floor": verdict,
            **{name: round(value, 2) for name, value in parts.items()},
        }
    return {"times": "no step of all ranks after the fault"}


def rank_logs(record: Record) -> str:
    """The last lines of every rank and of the agent."""
    told = []
    for path in sorted((record.path / "logs").glob("*.log")):
        text = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
        told += [f"-- {path.name}", *(line[:300] for line in text)]
    return "\n".join(["", *told])


# ---- all of them -----------------------------------------------------------------------------------------------------

COLUMNS = ("case", "less_step_and_silence", "floor", "seconds", "noticed", "left", "built", "stepped", "epochs")
COLUMNS += ("incidents", "in_a_row", "replaced", "kept", "digests", "exit")


def device_name(device: str) -> str:
    import torch

    began_s = time.monotonic()
    from phalanx.hardware.discover import discover

    discover()
    looked_s = time.monotonic() - began_s
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU, gloo"
    return f"{on}, torch {torch.__version__}, {os.cpu_count()} cores; looking at the machine takes {looked_s:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", action="append", choices=[one.name for one in CASES])
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after so long")
    parser.add_argument("--keep", type=Path, help="write the runs here, and leave them")
    args = parser.parse_args()
    began_s = time.monotonic()
    print(device_name(args.device), flush=True)
    cases = [one for one in CASES if not args.only or one.name in args.only]
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        job = make_job(root)
        whole: dict[tuple[str, bool, int], Record] = {}
        rows = []
        for number, case in enumerate(cases):
            if time.monotonic() - began_s > args.seconds:
                print(f"not begun: {case.name}", flush=True)
                continue
            found = one_case(number, case, job, root, args.device, whole)
            rows += found
            for row in found:
                print(json.dumps({key: value for key, value in row.items() if key != "problem"}), flush=True)
            if found[0].get("problem"):
                print(f"  {found[0]['problem']}", flush=True)
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "–")) for column in COLUMNS) + " |")


def one_case(
    number: int, case: Case, job: Path, root: Path, device: str, whole: dict[tuple[str, bool, int], Record]
) -> list[dict[str, Any]]:
    """A case, and before it the undisturbed run of its layout and length, if there was none yet."""
    try:
        key = (case.layout, case.compile, case.steps)
        if key not in whole:
            plain = Case(name="undisturbed", layout=case.layout, compile=case.compile, steps=case.steps)
            folder = root / f"{number}-whole"
            folder.mkdir()
            code, output = run_phalanx(command("train", job, folder / "runs", plain, device), folder, seconds=300.0)
            record = newest(folder / "runs")
            if code != 0 or record is None:
                told = output[-1500:] + (rank_logs(record) if record is not None else "")
                return [{"case": case.name, "problem": f"the undisturbed run ended with {code}: {told}"}]
            whole[key] = record
            print(f"undisturbed, {case.layout}, compile {case.compile}: step {record.step_s():.3f} s", flush=True)
        return measure(case, job, root / str(number), device, whole[key], seconds=200.0)
    except Exception as error:  # the others are still worth their time
        return [{"case": case.name, "problem": f"{type(error).__name__}: {error}"}]


if __name__ == "__main__":
    main()
