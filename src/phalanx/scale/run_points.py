"""Points from run folders: exact parameter counts, tokens from steps, and the last evaluated held-out loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import PhalanxError, Problem, UserError, mistake
from phalanx.io.codec import from_json_values
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.values import at, integer, number, text
from phalanx.job.dataset import read_manifest
from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim, Scale
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.scale.fit_result import UsedRates
from phalanx.scale.points import COLUMNS, ScalingPoints, TableOptions, make_points, read_points
from phalanx.scale.shapes import counted_params

PLAN, RUN_ID = "plan.json", "run_id"
TABLE = "points.csv"  # phalanx scale sweep writes it next to its runs
MOST_RUNS = 10_000
# Share of the largest FLOPs above which runs belong to the largest budget.
LARGEST_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLosses:
    """A run so far: its size as the law counts it, and its losses after each number of tokens."""

    name: str
    state: str
    params: int
    planned_tokens: float
    tokens: tuple[float, ...]
    losses: tuple[float, ...]
    evaluated: bool  # True for losses on held-out text, False for training losses
    tokenizer: str = ""  # digests, as in a sweep's table; empty where the dataset is missing
    data: str = ""
    optim: Optim = field(default_factory=Optim)  # with the schedule of its learning rate


def read_run_points(folder: Path, options: TableOptions) -> ScalingPoints:
    """Read a run folder, a folder of runs, or a folder with a table of points; raises UserError."""
    if is_file(folder / TABLE):
        return read_points(folder / TABLE, options)
    if is_run(folder):
        runs = [folder]
    else:
        runs = sorted(path for path in folder.iterdir() if is_folder(path) and is_run(path))[:MOST_RUNS]
    if not runs:
        fix = f"name a table, a run folder, a folder of runs, or one with a file {TABLE}"
        raise mistake(str(folder), "holds no runs", fix=fix)
    rows: list[tuple[int, dict[str, str]]] = []
    problems: list[Problem] = []
    for row_number, path in enumerate(runs, start=1):
        try:
            rows.append((row_number, _run_row(path, options)))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    names = {name: name for name in COLUMNS if name in rows[0][1]}
    for name in options.where:
        if name not in names:
            fix = f"runs have {', '.join(names)}"
            raise mistake(f"--where {name}", "is no column of a table of runs", fix=fix)
    rows = [(line, row) for line, row in rows if all(row[key] == value for key, value in options.where.items())]
    return make_points(str(folder), rows, names, options)


def is_run(folder: Path) -> bool:
    """Return True if a folder is a run's, started or not."""
    return is_file(folder / PLAN) or is_file(folder / RUN_ID)


def _run_row(folder: Path, options: TableOptions) -> dict[str, str]:
    """Return the table row of one run; raises UserError for a run that did not finish or was never evaluated."""
    where = str(folder)
    if not is_file(folder / PLAN):
        problem = f"was ended before it began: it has no {PLAN}"
        raise UserError(Problem(where=where, what=problem, fix="move it out of the folder; nothing was trained in it"))
    run = read_run_losses(folder, counted=options.params_counted)
    if run.state != "done":
        raise UserError(
            Problem(
                where=where,
                what=f"is {run.state or 'not finished'}, after {run.tokens[-1] if run.tokens else 0:,.0f} of "
                f"{run.planned_tokens:,.0f} tokens",
                why="a run whose learning rate has not decayed is no point of a law",
                fix=f"phalanx train --resume {where}, or move it out of the folder",
            )
        )
    if not run.evaluated or not run.losses:
        fix = "set train.evaluate_sequences above 0, and a dataset with held-out text"
        raise UserError(Problem(where=where, what="was never evaluated on held-out text", fix=fix))
    job = at(Run(path=folder).plan(), "job")
    batch = at(job, "batch")
    sequence = integer(at(job, "data"), "sequence") or 0
    return {
        "run": run.name,
        "params": str(run.params),
        "tokens": repr(run.tokens[-1]),
        "loss": repr(run.losses[-1]),
        "tokenizer": run.tokenizer,
        "data": run.data,
        "seed": str(integer(at(job, "data"), "seed") or 0),
        "lr": repr(number(at(job, "optim"), "lr") or float("nan")),
        "batch_tokens": str((integer(batch, "global_sequences") or 0) * sequence),
        "parametrization": parametrization_text(from_json_values(Scale, dict(at(job, "scale")), where, noun="plan")),
        "status": "done",
    }


def parametrization_text(scale: Scale) -> str:
    """Return the parametrization with its base shape, to which a learning rate belongs; empty for standard.

    >>> parametrization_text(Scale(parametrization="completep", base_width=64, base_depth=3, base_head_dim=8))
    'completep:64:3:8'
    """
    if scale.parametrization == "standard":
        return ""
    return f"{scale.parametrization}:{scale.base_width}:{scale.base_depth}:{scale.base_head_dim}"


def used_rates(points: ScalingPoints) -> UsedRates | None:
    """Return the learning rate and batch of the best run of the largest budget; None where the table lacks them.

    Among several runs of one size and token count, as from a learning-rate search, the best run has the best rate.
    """
    if points.lr is None:
        return None
    has_rate = np.isfinite(points.lr) & (points.lr > 0.0)
    if not has_rate.any():
        return None
    near = has_rate & (points.flops > LARGEST_SHARE * points.flops[has_rate].max())
    best = int(np.flatnonzero(near)[np.argmin(points.loss[near])])
    batch = points.batch_tokens[best] if points.batch_tokens is not None else 0.0
    match = re.fullmatch(
        r"(mup|completep):(\d{1,6}):(\d{1,4}):(\d{1,4})", points.parametrization[best] if points.parametrization else ""
    )
    return UsedRates(
        params=float(points.params[best]),
        tokens=float(points.tokens[best]),
        lr=float(points.lr[best]),
        batch_tokens=float(batch) if np.isfinite(batch) and batch > 0.0 else 0.0,
        parametrization=match[1] if match else "",
        base_width=int(match[2]) if match else 0,
        base_depth=int(match[3]) if match else 0,
        base_head_dim=int(match[4]) if match else 0,
    )


def read_run_losses(folder: Path, *, counted: str) -> RunLosses:
    """Read the losses of a run, finished or not; raises UserError where the folder is not a run's."""
    run = Run(path=folder)
    plan: Mapping[str, Any] = run.plan()
    job = at(plan, "job")
    shape = from_json_values(ModelShape, dict(at(job, "model")), f"{folder}/plan.json", noun="plan")
    sequence = integer(at(job, "data"), "sequence") or 0
    batch_tokens = float((integer(at(job, "batch"), "global_sequences") or 0) * sequence)
    history = RunHistory.open(run)
    ranks = list(run.recorded())
    rank = ranks[0] if ranks else 0
    points: dict[int, float] = {}
    for event in history.events("evaluate", rank=rank) if ranks else ():
        step, loss = integer(event, "step"), number(event, "loss")
        if step is not None and loss is not None:
            points[step] = loss
    evaluated = bool(points)
    if not evaluated and ranks:
        curve = history.curve("loss", rank=rank)
        points = {int(step): float(mean) for step, mean in zip(curve.step, curve.mean, strict=True) if mean is not None}
    steps = sorted(points)
    tokenizer, data = _data_identity(at(job, "data"))
    return RunLosses(
        name=run.name,
        state=text(run.status(), "state"),
        params=counted_params(shape, counted),
        planned_tokens=float(integer(at(plan, "duration"), "tokens") or 0),
        tokens=tuple(step * batch_tokens for step in steps),
        losses=tuple(points[step] for step in steps),
        evaluated=evaluated,
        tokenizer=tokenizer,
        data=data,
        optim=from_json_values(Optim, dict(at(job, "optim")), f"{folder}/plan.json", noun="plan"),
    )


def _data_identity(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the digests of a run's tokenizer and data; for a missing dataset, an empty string and its paths."""
    paths = [str(path) for path in data.get("paths") or () if isinstance(path, str)]
    try:
        manifests = [read_manifest(Path(path)) for path in paths]
    except (PhalanxError, OSError):
        return "", "+".join(paths)
    return "+".join(manifest.tokenizer_sha256[:16] for manifest in manifests), "+".join(
        manifest.digest[:16] for manifest in manifests
    )
