"""Points out of run folders: size by exact count, tokens by steps, loss by the last evaluation on held-out text."""

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
TABLE = "points.csv"  # what phalanx scale sweep writes beside its runs
MOST_RUNS = 10_000
LARGEST_SHARE = 0.7  # of the largest FLOPs: the runs of the largest budget


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLosses:
    """A run so far: its size as a law counts it, and the loss after so many tokens."""

    name: str
    state: str
    params: int
    planned_tokens: float
    tokens: tuple[float, ...]
    losses: tuple[float, ...]
    evaluated: bool  # on held-out text; otherwise these are training losses
    tokenizer: str = ""  # digests, as a sweep's table has them; empty where the dataset is gone
    data: str = ""
    optim: Optim = field(default_factory=Optim)  # with the schedule of its learning rate


def read_run_points(folder: Path, options: TableOptions) -> ScalingPoints:
    """A run folder, a folder of them, or one with a table of points."""
    if is_file(folder / TABLE):
        return read_points(folder / TABLE, options)
    if is_run(folder):
        runs = [folder]
    else:
        runs = sorted(one for one in folder.iterdir() if is_folder(one) and is_run(one))[:MOST_RUNS]
    if not runs:
        fix = f"name a table, a run folder, a folder of runs, or one with a file {TABLE}"
        raise mistake(str(folder), "holds no runs", fix=fix)
    rows: list[tuple[int, dict[str, str]]] = []
    problems: list[Problem] = []
    for place, path in enumerate(runs, start=1):
        try:
            rows.append((place, _run_row(path, options)))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    known = {name: name for name in COLUMNS if name in rows[0][1]}
    for name in options.where:
        if name not in known:
            fix = f"runs have {', '.join(known)}"
            raise mistake(f"--where {name}", "is no column of a table of runs", fix=fix)
    rows = [(line, row) for line, row in rows if all(row[key] == value for key, value in options.where.items())]
    return make_points(str(folder), rows, known, options)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, begun or not."""
    return is_file(folder / PLAN) or is_file(folder / RUN_ID)


def _run_row(folder: Path, options: TableOptions) -> dict[str, str]:
    where = str(folder)
    if not is_file(folder / PLAN):
        what = f"was ended before it began: it has no {PLAN}"
        raise UserError(Problem(where=where, what=what, fix="move it out of the folder; nothing was trained in it"))
    found = read_run_losses(folder, counted=options.params_counted)
    if found.state != "done":
        raise UserError(
            Problem(
                where=where,
                what=f"is {found.state or 'not finished'}, after {found.tokens[-1] if found.tokens else 0:,.0f} of "
                f"{found.planned_tokens:,.0f} tokens",
                why="a run whose learning rate has not decayed is no point of a law",
                fix=f"phalanx train --resume {where}, or move it out of the folder",
            )
        )
    if not found.evaluated or not found.losses:
        fix = "set train.evaluate_sequences above 0, and a dataset with held-out text"
        raise UserError(Problem(where=where, what="was never evaluated on held-out text", fix=fix))
    job = at(Run(path=folder).plan(), "job")
    batch = at(job, "batch")
    sequence = integer(at(job, "data"), "sequence") or 0
    return {
        "run": found.name,
        "params": str(found.params),
        "tokens": repr(found.tokens[-1]),
        "loss": repr(found.losses[-1]),
        "tokenizer": found.tokenizer,
        "data": found.data,
        "seed": str(integer(at(job, "data"), "seed") or 0),
        "lr": repr(number(at(job, "optim"), "lr") or float("nan")),
        "batch_tokens": str((integer(batch, "global_sequences") or 0) * sequence),
        "parametrization": parametrization_text(from_json_values(Scale, dict(at(job, "scale")), where, noun="plan")),
        "status": "done",
    }


def parametrization_text(scale: Scale) -> str:
    """What a learning rate belongs to, as a table has it: the parametrization with its base shape; empty for standard.

    >>> parametrization_text(Scale(parametrization="completep", base_width=64, base_depth=3, base_head_dim=8))
    'completep:64:3:8'
    """
    if scale.parametrization == "standard":
        return ""
    return f"{scale.parametrization}:{scale.base_width}:{scale.base_depth}:{scale.base_head_dim}"


def used_rates(points: ScalingPoints) -> UsedRates | None:
    """Learning rate and batch of the best run of the largest budget; None where the table does not say them.

    Of several runs of one size and tokens, as of a search for the rate, that is the one with the best rate.
    """
    if points.lr is None:
        return None
    known = np.isfinite(points.lr) & (points.lr > 0.0)
    if not known.any():
        return None
    near = known & (points.flops > LARGEST_SHARE * points.flops[known].max())
    best = int(np.flatnonzero(near)[np.argmin(points.loss[near])])
    batch = points.batch_tokens[best] if points.batch_tokens is not None else 0.0
    words = re.fullmatch(
        r"(mup|completep):(\d{1,6}):(\d{1,4}):(\d{1,4})", points.parametrization[best] if points.parametrization else ""
    )
    return UsedRates(
        params=float(points.params[best]),
        tokens=float(points.tokens[best]),
        lr=float(points.lr[best]),
        batch_tokens=float(batch) if np.isfinite(batch) and batch > 0.0 else 0.0,
        parametrization=words[1] if words else "",
        base_width=int(words[2]) if words else 0,
        base_depth=int(words[3]) if words else 0,
        base_head_dim=int(words[4]) if words else 0,
    )


def read_run_losses(folder: Path, *, counted: str) -> RunLosses:
    """The record of a run, finished or not; raises UserError where the folder is none."""
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
    """Digests of the tokenizer and of the data a run reads; of a dataset that is gone, its path stands for it."""
    paths = [str(one) for one in data.get("paths") or () if isinstance(one, str)]
    try:
        manifests = [read_manifest(Path(one)) for one in paths]
    except (PhalanxError, OSError):
        return "", "+".join(paths)
    return "+".join(one.tokenizer_sha256[:16] for one in manifests), "+".join(one.digest[:16] for one in manifests)
