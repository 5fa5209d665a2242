"""Fit the constants of the cost model to a table of published runs, with priors; print errors and leave-one-source-out.

    python benchmarks/fit_physics.py TABLE.csv [MORE.csv ...] [--write] [--leave-one-out OUT.md]

Every source weighs the same however many rows it has, errors are robust (soft L1 at 5 %), physics constants have
log-normal priors at the textbook value, and a framework's scalars are pulled towards the shared profile: what the data
cannot tell stays where it was. The table's measured columns are read here and nowhere in the product.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from phalanx.plan.calibrate import apply_calibration, fit_calibration
from phalanx.plan.cases import Cases
from phalanx.plan.physics import Physics, Profile, shipped_physics, shipped_profiles
from phalanx.plan.prediction import step_interval
from phalanx.plan.step import predict_step
from phalanx.validate.throughput_rows import predict_rows
from phalanx.validate.throughput_score import SCATTER_SHARE, take_rows
from phalanx.validate.throughput_table import PublishedRun, number, read_table

Floats = NDArray[np.float64]

SCALE = 0.05  # errors below 5 % count squared, above linearly: the noise floor between teams (planner.md)
DRAWS = 5  # seeded choices of three calibration rows
PER_SOURCE = 20.0  # every source counts as this many observations against the priors


@dataclass(frozen=True)
class Prior:
    """A constant's textbook value, bounds, and how far (in log) the data may pull it.

    Frameworks differ in host overheads by an order of magnitude, but the next framework nobody has measured is not
    expected at their mean: there the shared value stays close to what bare PyTorch shows.
    """

    value: float
    low: float
    high: float
    sigma: float
    shared: float = 0.0  # how far the shared value may move; 0 stands for sigma


PHYSICS = {
    "sustained": Prior(0.85, 0.6, 1.0, 0.1),
    "throttled": Prior(0.95, 0.7, 1.1, 0.1),
    "fp8": Prior(0.85, 0.3, 1.0, 0.2),
    "fp4": Prior(0.7, 0.2, 1.0, 0.3),
    "tail": Prior(0.3, 0.02, 1.0, 0.5),
    "start_s": Prior(5e-6, 1e-6, 2e-5, 0.5),
    "unaligned": Prior(0.15, 1e-3, 1.0, 0.5),
    "grouped": Prior(0.7, 0.2, 1.0, 0.3),
    "expert_rows": Prior(100.0, 1.0, 2000.0, 0.7),
    "flash": Prior(0.6, 0.2, 1.2, 0.3),
    "flash_lag": Prior(0.7, 0.3, 1.2, 0.2),
    "flash_dim": Prior(30.0, 1.0, 200.0, 0.6),
    "flash_length": Prior(400.0, 50.0, 2000.0, 0.3),  # FlashAttention-2's causal curve, arXiv 2307.08691
    "flash_backward": Prior(1.2, 0.8, 1.6, 0.2),
    "batched": Prior(0.5, 0.1, 1.0, 0.3),
    "batched_dim": Prior(64.0, 1.0, 400.0, 0.6),
    "odd_head": Prior(3.0, 1.0, 8.0, 0.5),
    "softmax_bytes": Prior(14.0, 4.0, 40.0, 0.3),
    "memory": Prior(0.8, 0.79, 0.81, 0.01),
    "hidden_passes": Prior(10.0, 4.0, 40.0, 0.4),
    "qkv_passes": Prior(2.0, 0.2, 10.0, 0.5),
    "ffn_passes": Prior(1.5, 0.3, 6.0, 0.5),
    "expert_passes": Prior(6.0, 1.0, 40.0, 0.6),
    "cast_bytes": Prior(3.0, 0.1, 20.0, 0.6),
    "loss_bytes": Prior(20.0, 6.0, 60.0, 0.5),
    "selective": Prior(0.3, 0.05, 1.0, 0.6),
    "kernels": Prior(25.0, 24.9, 25.1, 0.01),
    "tensor_kernels": Prior(0.3, 0.02, 2.0, 0.5),
    "expert_kernels": Prior(20.0, 2.0, 100.0, 0.6),
    "link": Prior(0.75, 0.4, 1.0, 0.2),
    "nic": Prior(0.75, 0.2, 1.0, 0.25),
    "link_latency": Prior(1.0, 0.2, 8.0, 0.6),
    "nic_latency": Prior(1.0, 0.2, 8.0, 0.6),
    "pacing": Prior(0.3, 0.01, 1.0, 0.6),
}
PROFILE = {
    "gemm": Prior(1.0, 0.6, 1.15, 0.08),
    "elementwise": Prior(1.0, 0.3, 4.0, 0.35),
    "flash": Prior(1.0, 0.4, 2.0, 0.25),
    "expert": Prior(1.0, 0.3, 2.0, 0.3),
    "launch_s": Prior(10e-6, 1e-6, 1e-4, 0.6, 0.3),
    "fabric_loss": Prior(0.05, 0.002, 1.0, 0.5, 0.3),
    "tensor_exposed": Prior(0.8, 0.05, 2.0, 0.4),
    "expert_exposed": Prior(0.5, 0.05, 2.0, 0.5),
    "pipeline_exposed": Prior(0.6, 0.05, 3.0, 0.6),
    # Overlap is implemented or it is not: frameworks differ widely, in logits.
    "data_overlap": Prior(0.6, 0.02, 0.98, 1.5),
    "scatter_overlap": Prior(0.5, 0.02, 0.98, 1.5),
    "gather_overlap": Prior(0.4, 0.02, 0.98, 1.5),
    "shard_traffic": Prior(1.0, 0.8, 12.0, 0.3),
    "shard_sharpness": Prior(4.0, 1.0, 12.0, 0.4),
    "micro_s": Prior(1e-3, 1e-5, 0.05, 0.8, 0.4),
    "pipeline_s": Prior(1e-3, 1e-5, 0.1, 0.8, 0.4),
    "tensor_pipeline_s": Prior(2e-5, 1e-6, 1e-2, 2.5, 0.5),
    "step_s": Prior(0.005, 1e-4, 0.5, 1.0, 0.4),
    "step_log_devices_s": Prior(1e-3, 1e-5, 0.05, 0.8, 0.4),
    "optimizer_bytes": Prior(34.0, 15.0, 80.0, 0.3),
}
# What may differ between frameworks; the other scalars are one number for all. A share above 1 means traffic that also
# slows the compute it runs beside.
DIFFERS = (
    "gemm", "elementwise", "flash", "expert", "launch_s", "fabric_loss", "tensor_exposed", "expert_exposed",
    "data_overlap", "scatter_overlap", "gather_overlap", "shard_traffic", "shard_sharpness", "micro_s",
    "tensor_pipeline_s", "step_s",
)  # fmt: skip
# Known from the code of each framework, not fitted.
GRADIENT_BYTES = {"megatron-lm": 2.0, "megatron-deepspeed": 2.0, "composer-fsdp": 2.0, "deepspeed": 2.0}
# nanotron's ZeRO-1 gathers the updated parameters after optimizer.step() and waits for them.
GATHER_OVERLAP = {"nanotron": 0.02}
# 1 where the split into stages counts the head; Megatron and plain torch pipelines split layers evenly.
BALANCED = dict.fromkeys(
    ("megatron-lm", "megatron-core", "megatron-bridge", "deepspeed", "composer-fsdp", "torchtitan"), 0.0
)
# nanotron blocks on tensor collectives inside a pipeline (26 ms per layer at tensor 8): start there, not at the prior.
START = {("nanotron", "tensor_pipeline_s"): np.log(100.0)}


@dataclass(frozen=True)
class Problem:
    """Cases with their measured step times."""

    cases: Cases
    rows: tuple[PublishedRun, ...]
    seconds: Floats
    source: NDArray[np.str_]
    family: NDArray[np.intp]
    families: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """How a vector of logs becomes constants: shared values first, then one deviation per family and scalar."""

    families: tuple[str, ...]

    @property
    def shared(self) -> list[Prior]:
        return [*PHYSICS.values(), *PROFILE.values()]

    def start(self) -> Floats:
        deviations = np.zeros((len(self.families), len(PROFILE)))
        for (family, name), value in START.items():
            if family in self.families:
                deviations[self.families.index(family), list(PROFILE).index(name)] = value
        return np.concatenate([[np.log(prior.value) for prior in self.shared], deviations.ravel()])

    def bounds(self) -> tuple[Floats, Floats]:
        count = len(self.families) * len(PROFILE)
        low = np.concatenate([[np.log(p.low) for p in self.shared], np.full(count, -4.0)])
        high = np.concatenate([[np.log(p.high) for p in self.shared], np.full(count, 6.0)])
        return low - 1e-6, high + 1e-6

    def unpack(self, vector: Floats, family: NDArray[np.intp]) -> tuple[Physics, Profile]:
        """Constants, and a profile with one entry per case; family -1 is the shared (default) profile."""
        physics_count = len(PHYSICS)
        logs = vector[: physics_count + len(PROFILE)]
        shared = [float(np.clip(np.exp(log), p.low, p.high)) for log, p in zip(logs, self.shared, strict=True)]
        constants = Physics(**dict(zip(PHYSICS, shared[:physics_count], strict=True)))
        deviations = vector[physics_count + len(PROFILE) :].reshape(len(self.families), len(PROFILE))
        deviations = np.vstack([deviations, np.zeros((1, len(PROFILE)))]) * [name in DIFFERS for name in PROFILE]
        scalars: dict[str, Floats] = {}
        for column, (name, prior) in enumerate(PROFILE.items()):
            base, shift = shared[physics_count + column], deviations[family, column]
            if name in ("data_overlap", "scatter_overlap", "gather_overlap"):  # a share: move in logits
                scalars[name] = 1.0 / (1.0 + np.exp(-(np.log(base / (1.0 - base)) + shift)))
            else:
                scalars[name] = np.clip(base * np.exp(shift), prior.low, prior.high)
        names = [*self.families, "default"]
        waits = np.array([GATHER_OVERLAP.get(name, np.nan) for name in names])[family]
        scalars["gather_overlap"] = np.where(np.isnan(waits), scalars["gather_overlap"], waits)
        scalars["gradient_bytes"] = np.array([GRADIENT_BYTES.get(name, 4.0) for name in names])[family]
        scalars["balanced_stages"] = np.array([BALANCED.get(name, 1.0) for name in names])[family]
        return constants, Profile(**scalars)


def load(paths: Sequence[Path], constants: Physics, known: dict[str, Profile]) -> Problem:
    """Scored rows of the table: pre-training, tiers A and B, with a step time; see shared/tools/plan_score.py."""
    rows = tuple(row for path in paths for row in read_table(path).rows if scored(row))
    found = predict_rows(rows, constants=constants, framework_profiles=known)
    kept = [rows[index] for index in found.priced]
    families = tuple(sorted(set(found.frameworks) - {"default"}))
    return Problem(
        cases=found.cases,
        rows=tuple(kept),
        seconds=np.array([number(row, "step_s") or np.nan for row in kept]),
        source=np.array([row["source"] for row in kept]),
        family=np.array([families.index(name) if name in families else -1 for name in found.frameworks]),
        families=families,
    )


def scored(row: PublishedRun) -> bool:
    """Rows the published score counts."""
    good = row.get("status") == "ok" and row.get("tier") in ("A", "B") and row.get("task") in ("", "pretrain")
    mfu = number(row, "measured_mfu_pct")
    idle = row.get("source") in ("hf-ultrascale", "vtrain-single") and mfu is not None and mfu < 5
    return good and bool(number(row, "step_s")) and not idle


def fit(problem: Problem, chosen: NDArray[np.bool_], start: Floats, iterations: int) -> Floats:
    """The vector with the least robust error plus prior cost."""
    space = Space(problem.families)
    picked = np.nonzero(chosen)[0]
    table, target, family = problem.cases.take(picked), np.log(problem.seconds[picked]), problem.family[picked]
    weight = source_weights(problem.source[picked])
    centre = np.array([np.log(p.value) for p in space.shared])
    spread = np.array([p.shared or p.sigma for p in space.shared])
    family_spread = np.array([p.sigma for p in PROFILE.values()])

    def residuals(vector: Floats) -> Floats:
        error = (np.log(predict_step(table, *space.unpack(vector, family)).step_s) - target) / SCALE
        robust = weight * np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))
        prior = (vector[: centre.size] - centre) / spread
        pooled = vector[centre.size :].reshape(len(problem.families), -1) / family_spread
        return np.concatenate([robust, prior, pooled.ravel()])

    low, high = space.bounds()
    inside = np.clip(start, low + 1e-9, high - 1e-9)
    return least_squares(residuals, inside, bounds=(low, high), x_scale=0.3, max_nfev=iterations).x


def source_weights(source: NDArray[np.str_]) -> Floats:
    """Equal weight per source; sources under 8 rows count for less.

    Weights that grow with the rows, even by their fourth root, halve the error on nothing and double the error on
    sources left out: large sweeps then bend the shared constants (2026-11-15).
    """
    names, counts = np.unique(source, return_counts=True)
    rows = dict(zip(names, counts, strict=True))
    return np.array([np.sqrt(PER_SOURCE * min(1.0, rows[name] / 8.0) / rows[name]) for name in source])


@dataclass(frozen=True)
class SourceError:
    """Errors of one source."""

    source: str
    rows: int
    median: float
    p90: float
    bias: float


def errors(problem: Problem, vector: Floats) -> list[SourceError]:
    """Median, ninetieth percentile and bias of the relative error per source."""
    seconds = predict_step(problem.cases, *Space(problem.families).unpack(vector, problem.family)).step_s
    relative = seconds / problem.seconds - 1.0
    return [source_error(str(name), relative[problem.source == name]) for name in sorted(set(problem.source))]


def source_error(name: str, relative: Floats) -> SourceError:
    """The figures of one source."""
    size = np.abs(relative)
    return SourceError(
        name, size.size, float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(relative))
    )


@dataclass(frozen=True)
class LeftOut:
    """A source predicted by constants that never saw it, plain and after calibrating on three of its rows."""

    plain: SourceError
    calibrated_median: float
    calibrated_p90: float


def leave_one_out(problem: Problem, iterations: int, jobs: int) -> list[LeftOut]:
    """Every source of five rows or more, left out in turn."""
    names, counts = np.unique(problem.source, return_counts=True)
    large = [str(name) for name, count in zip(names, counts, strict=True) if count >= 5]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(partial(left_out, problem, iterations), large))


def left_out(problem: Problem, iterations: int, name: str) -> LeftOut:
    """One source left out; a framework seen nowhere else gets the default profile.

    The fit starts from the priors: a warm start would leak what the left-out source taught.
    """
    held_out = problem.source == name
    vector = fit(problem, ~held_out, Space(problem.families).start(), iterations)
    unseen = ~np.isin(problem.family, problem.family[~held_out])
    labels = [*problem.families, "default"]
    constants, stacked = Space(problem.families).unpack(vector, np.arange(len(labels)))
    known = {label: _one(stacked, index, len(labels)) for index, label in enumerate(labels)}
    for index in set(problem.family[held_out & unseen]):
        known[labels[index]] = known["default"]
    # Unstated settings of the held-out rows are chosen anew: the ones at hand were chosen by constants that saw them.
    found = predict_rows(tuple(problem.rows[at] for at in np.nonzero(held_out)[0]), constants=constants,
                         framework_profiles=known)  # fmt: skip
    times, seconds = found.times, problem.seconds[held_out]
    plain = source_error(name, times.step_s / seconds - 1.0)
    shown = ["default" if unseen[at] else problem.families[problem.family[at]] for at in np.nonzero(held_out)[0]]
    low, high = step_interval(found.cases, times, shown)
    medians, tails = [], []
    for seed in range(DRAWS):
        drawn = np.isin(np.arange(seconds.size), np.random.default_rng(seed).choice(seconds.size, 3, replace=False))
        scatter = SCATTER_SHARE * np.log(high / low) / 2.0
        scalars = fit_calibration(take_rows(times, drawn), seconds[drawn], scatter[drawn])
        rest = np.abs(apply_calibration(take_rows(times, ~drawn), scalars).step_s / seconds[~drawn] - 1.0)
        medians.append(np.median(rest))
        tails.append(np.quantile(rest, 0.9))
    result = LeftOut(plain, float(np.mean(medians)), float(np.mean(tails)))
    print_errors([plain])
    after = f"median {result.calibrated_median:6.1%}  p90 {result.calibrated_p90:6.1%}"
    print(f"{'':22}        calibrated on 3 rows: {after}", flush=True)
    return result


def print_errors(found: Sequence[SourceError]) -> None:
    """One line per source."""
    for one in found:
        print(f"{one.source:22} {one.rows:5d}  median {one.median:6.1%}  p90 {one.p90:6.1%}  bias {one.bias:+6.1%}",
              flush=True)  # fmt: skip


def macro(found: Sequence[SourceError]) -> str:
    """Plain mean over sources with five rows or more."""
    large = [one for one in found if one.rows >= 5]
    return (f"mean over {len(large)} sources: median {np.mean([o.median for o in large]):.1%}, "
            f"p90 {np.mean([o.p90 for o in large]):.1%}")  # fmt: skip


def write_constants(path: Path, space: Space, vector: Floats) -> None:
    """physics.toml, as the package ships it."""
    names = [*space.families, "default"]
    constants, profile = space.unpack(vector, np.arange(len(names)))
    lines = ["# Constants of the cost model, written by benchmarks/fit_physics.py; their meaning: physics.py.", ""]
    lines += ["[physics]", *(f"{name} = {_toml(getattr(constants, name))}" for name in PHYSICS)]
    for index, name in enumerate(names):
        lines += ["", f"[profile.{name}]"]
        for field in fields(Profile):
            value = np.broadcast_to(np.asarray(getattr(profile, field.name)), len(names))[index]
            lines.append(f"{field.name} = {_toml(float(value))}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: float) -> str:
    text = f"{value:.4g}"
    return text if "." in text or "e" in text else f"{text}.0"


def main() -> None:
    """Fit, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--write", action="store_true", help="replace the shipped constants")
    parser.add_argument("--leave-one-out", type=Path, metavar="OUT.md")
    parser.add_argument("--rounds", type=int, default=2, help="unstated settings are chosen anew in each round")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", type=Path, help="keep the fitted vector (.npy)")
    args = parser.parse_args()
    constants, known = shipped_physics(), shipped_profiles()
    vector: Floats | None = None
    for _ in range(args.rounds):
        problem = load(args.tables, constants, known)
        space = Space(problem.families)
        vector = fit(problem, np.ones(problem.seconds.size, bool), space.start() if vector is None else vector,
                     args.iterations)  # fmt: skip
        fitted, stacked = space.unpack(vector, np.arange(len(problem.families) + 1))
        names = [*problem.families, "default"]
        constants = fitted
        known = {name: _one(stacked, index, len(names)) for index, name in enumerate(names)}
    assert vector is not None
    found = errors(problem, vector)
    print_errors(found)
    print(macro(found))
    if args.save:
        np.save(args.save, vector)
    if args.write:
        target = Path(__file__).parent.parent / "src/phalanx/plan/physics.toml"
        write_constants(target, space, vector)
        print(f"wrote {target.name}")
    if args.leave_one_out:
        left = leave_one_out(problem, args.iterations, args.jobs)
        print("left out:", macro([one.plain for one in left]))
        args.leave_one_out.write_text(markdown(found, left), encoding="utf-8")


def _one(stacked: Profile, index: int, count: int) -> Profile:
    values = {f.name: float(np.broadcast_to(np.asarray(getattr(stacked, f.name)), count)[index]) for f in
              fields(Profile)}  # fmt: skip
    return Profile(**values)


def markdown(found: Sequence[SourceError], left: Sequence[LeftOut]) -> str:
    """Errors in sample, left out, and left out but calibrated, side by side."""
    by_name = {one.plain.source: one for one in left}
    lines = [
        "| source | rows | in sample | | left out | | left out, calibrated on 3 rows | |",
        "|---|---|---|---|---|---|---|---|",
        "| | | median | p90 | median | p90 | median | p90 |",
    ]
    for one in found:
        other = by_name.get(one.source)
        tail = "| – | – | – | –"
        if other:
            tail = f"| {other.plain.median:.1%} | {other.plain.p90:.1%} "
            tail += f"| {other.calibrated_median:.1%} | {other.calibrated_p90:.1%}"
        lines.append(f"| {one.source} | {one.rows} | {one.median:.1%} | {one.p90:.1%} {tail} |")
    inside = [one for one in found if one.rows >= 5]
    columns = [
        [one.median for one in inside], [one.p90 for one in inside],
        [one.plain.median for one in left], [one.plain.p90 for one in left],
        [one.calibrated_median for one in left], [one.calibrated_p90 for one in left],
    ]  # fmt: skip
    means = " | ".join(f"**{np.mean(column):.1%}**" for column in columns)
    return "\n".join([*lines, f"| **mean** | | {means} |", ""])


if __name__ == "__main__":
    main()
