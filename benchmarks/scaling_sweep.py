"""Does a law fitted to small budgets predict the largest? A sweep, its largest budget left out of the fit.

    python benchmarks/scaling_sweep.py                            30 runs on CPU cores, up to 0.3M parameters
    python benchmarks/scaling_sweep.py --preset cpu-tied          30 runs, up to 0.2M, embedding and head tied
    python benchmarks/scaling_sweep.py --preset gpu               30 runs on a GPU, 10M to 90M parameters, to fit
    python benchmarks/scaling_sweep.py --preset gpu-left-out      beside it: 3 runs of a budget four times as large
    python benchmarks/scaling_sweep.py --preset tiny              the same path in about a minute
    python benchmarks/scaling_sweep.py --table fit.csv --table left-out.csv    only the fit, of tables that are there

`--minutes` ends the sweep in time: runs in the middle are saved, and the same command goes on. `--copy FOLDER` gets the
table, the result and state.json; with `--state state.json` another machine goes on from the runs that are done.
The law is fitted to all budgets but the largest and asked for the losses of that, with the 80 % interval that
`phalanx scale predict` has.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import phalanx
from phalanx.io.files import replace_text
from phalanx.io.tables import markdown_table
from phalanx.scale.judge_run import law_band

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A job and the grid around it."""

    job: Path
    budgets: str
    tokens_per_parameter: float
    sizes: int = 6
    spread: float = 4.0
    parallel: int | None = None
    overrides: tuple[str, ...] = ()


PRESETS = {
    # Embedding and head apart: tied, the loss of so small a run hangs on its seed (6 % between two, 1 % without). Below
    # 2e11 FLOP losses fall more slowly with compute than above: models have learnt little but which token follows which
    # (benchmarks/2026-11-18-scaling-sweep-cpu.md).
    "cpu": Preset(
        job=HERE.parent / "examples" / "scaling.toml",
        budgets="2e11..1e12",
        tokens_per_parameter=10,
        spread=2.2,
        overrides=("model.tied=false",),
    ),
    "cpu-tied": Preset(
        job=HERE.parent / "examples" / "scaling.toml",
        budgets="6e10..6e11",
        tokens_per_parameter=12,
        spread=2.2,
    ),
    # 10M to 150M in minutes leaves a few hundredths of a token per parameter.
    "gpu": Preset(
        job=HERE / "data" / "scaling-gpu.toml",
        budgets="1.2e14..1.2e15",
        tokens_per_parameter=0.07,
        spread=1.7,
        parallel=12,
    ),
    "gpu-left-out": Preset(
        job=HERE / "data" / "scaling-gpu.toml",
        budgets="4.8e15",
        tokens_per_parameter=0.07,
        sizes=3,
        spread=1.4,
        parallel=3,
    ),
    "tiny": Preset(
        job=HERE.parent / "examples" / "scaling.toml",
        budgets="1e9,2e9,4e9,1.6e10",
        tokens_per_parameter=0.3,
        sizes=3,
        spread=2.0,
        overrides=("batch.global_tokens=128", "train.evaluate_sequences=32"),
    ),
}


def read_tables(tables: Sequence[Path]) -> list[dict[str, str]]:
    """The rows of all of them."""
    rows: list[dict[str, str]] = []
    for one in tables:
        with one.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def predict_left_out(tables: Sequence[Path], *, method: str) -> list[dict[str, float]]:
    """Each run of the largest budget: measured, predicted without it, and the 80 % interval."""
    rows = [row for row in read_tables(tables) if row["status"] == "done"]
    largest = max(float(row["budget"]) for row in rows)
    known, asked = (
        [row for row in rows if (float(row["budget"]) == largest) == is_asked] for is_asked in (False, True)
    )
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "known.csv"
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(known)
        fitted = phalanx.scale.fit(part, method=method, params_counted="total", flops_counted="6nd").fit
    found = []
    for row in asked:
        params, tokens = float(row["params"]), float(row["tokens"])
        predicted, low, high = law_band(fitted, params, tokens)
        found.append(
            {
                "params": params,
                "tokens": tokens,
                "loss": float(row["loss"]),
                "predicted": predicted,
                "low": low,
                "high": high,
            }
        )
    return found


def result_text(rows: list[dict[str, float]], *, command: str, took: str) -> str:
    """The dated page."""
    table = [
        [
            f"{one['params']:,.0f}",
            f"{one['tokens']:,.0f}",
            f"{one['loss']:.4f}",
            f"{one['predicted']:.4f}",
            f"{one['low']:.4f} to {one['high']:.4f}",
            f"{one['predicted'] / one['loss'] - 1:+.2%}",
            "yes" if one["low"] <= one["loss"] <= one["high"] else "no",
        ]
        for one in rows
    ]
    head = ["N", "D", "loss", "predicted", "80 % interval", "error", "inside"]
    best = min(rows, key=lambda one: one["loss"])
    worst = max(abs(one["predicted"] / one["loss"] - 1) for one in rows)
    return (
        "# A sweep whose largest budget is left out\n\n"
        f"`{command}`, {date.today()}{took}.\n\n{markdown_table(head, table)}\n\n"
        f"Lowest loss of the largest budget: {best['predicted'] / best['loss'] - 1:+.2%}; largest error {worst:.2%}.\n"
    )


def write_state(out: Path, target: Path) -> None:
    """What is known of finished runs, in one file: another machine need not train them again."""
    known = {one.stem: json.loads(one.read_text()) for one in sorted((out / "results").glob("*.json"))}
    done = {digest: value for digest, value in known.items() if value["state"] in ("done", "diverged")}
    replace_text(target, json.dumps(done, indent=1) + "\n")


def restore_state(source: Path, out: Path) -> int:
    """Finished runs of another machine; those that are here stay. How many were taken."""
    taken = 0
    for digest, value in json.loads(source.read_text()).items():
        folder = str(value["folder"])
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not re.fullmatch(r"\w[\w.-]*", folder):
            raise SystemExit(f"{source}: {digest[:20]!r} with folder {folder[:40]!r} is no result of a sweep")
        result = out / "results" / f"{digest}.json"
        if not result.exists():
            (out / "runs" / folder).mkdir(parents=True, exist_ok=True)
            result.parent.mkdir(parents=True, exist_ok=True)
            replace_text(result, json.dumps(value, indent=1) + "\n")
            taken += 1
    return taken


def stop_in_time(minutes: float) -> None:
    """Interrupt the sweep as Ctrl-C does, once."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 60.0 * minutes)


def train_grid(options: argparse.Namespace, preset: Preset) -> Path:
    """Sweep as far as the time goes; the table of what is done."""
    out: Path = options.out or Path("runs") / f"scaling-{options.preset}"
    if options.state and options.state.exists():
        print(f"{restore_state(options.state, out)} finished runs taken from {options.state}", flush=True)
    if options.minutes:
        stop_in_time(options.minutes)
    overrides = [*preset.overrides, *options.set]
    if options.data:
        overrides.append(f"data.path={options.data.resolve()}")
    try:
        made = phalanx.scale.sweep(
            preset.job,
            budgets=options.budgets or preset.budgets,
            sizes=preset.sizes,
            tokens_per_parameter=preset.tokens_per_parameter,
            spread=preset.spread,
            parallel=options.parallel or preset.parallel,
            out=out,
            overrides=overrides,
            dry_run=options.dry_run,
            progress=lambda line: print(f"[{time.monotonic() - BEGAN:.0f} s] {line}", flush=True),
        )
        print(made, flush=True)
    except KeyboardInterrupt:
        print("out of time: the same command goes on", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if options.copy and (out / "results").is_dir():
            options.copy.mkdir(parents=True, exist_ok=True)
            write_state(out, options.copy / "state.json")
            if (out / "points.csv").is_file():
                replace_text(options.copy / "points.csv", (out / "points.csv").read_text())
    return out / "points.csv"


BEGAN = time.monotonic()


def main() -> None:
    """Sweep, leave the largest budget out, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu")
    parser.add_argument("--budgets", help="other budgets than the preset's")
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--data", type=Path, help="folder of a dataset, instead of the corpus that is built")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path, help="folder of the sweep (runs/scaling-PRESET)")
    parser.add_argument("--minutes", type=float, help="stop the sweep after so many; saving takes up to one more")
    parser.add_argument("--copy", type=Path, help="folder that gets points.csv, state.json and the result")
    parser.add_argument("--state", type=Path, help="state.json of an earlier call on another machine")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--table", type=Path, action="append", help="fit this table; train nothing; may be repeated")
    parser.add_argument("--fit", default="vpnls")
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    options = parser.parse_args()
    tables = options.table or [train_grid(options, PRESETS[options.preset])]
    if options.dry_run:
        return
    rows = read_tables(tables)
    if left := sum(row["status"] not in ("done", "diverged") for row in rows):
        raise SystemExit(f"{left} runs are missing: repeat the command")
    if len({row["budget"] for row in rows}) < 3:
        print(f"no fit: {tables[0]} holds too few budgets; give both tables with --table")
        return
    used = os.times()
    processor_s = used.user + used.system + used.children_user + used.children_system
    took = "" if options.table else f", {time.monotonic() - BEGAN:.0f} s, {processor_s:.0f} s of processor time"
    named = "".join(f" --table {one.name}" for one in options.table or ())
    preset = named or f" --preset {options.preset}"
    text = result_text(
        predict_left_out(tables, method=options.fit), command=f"python benchmarks/scaling_sweep.py{preset}", took=took
    )
    print(text)
    name = f"{date.today()}-scaling-sweep-{options.preset}.md"
    for folder in (options.copy, options.write):
        if folder:
            replace_text(folder / name, text)


if __name__ == "__main__":
    main()
