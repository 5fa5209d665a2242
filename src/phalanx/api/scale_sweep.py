"""`phalanx.scale.sweep`: a grid of small runs on this machine or a cluster, and the table for fitting a scaling law."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.jobs import AnyJob, read_job
from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.api.scale_inputs import require_number, require_whole
from phalanx.errors import mistake
from phalanx.io.path_probes import is_folder, resolve_path
from phalanx.io.tables import text_table
from phalanx.job.load import ResolvedJob
from phalanx.job.model import TOKENS_PER_PARAMETER
from phalanx.job.schema import Job
from phalanx.scale.step_law import ENOUGH_STEPS
from phalanx.scale.sweep_grid import (
    SPREAD,
    SweepRun,
    budget_list,
    decides_digest,
    parse_budgets,
    rates_text,
    sweep_runs,
)
from phalanx.scale.sweep_store import DIVERGED, DONE, SweepFolder, SweepOutcome
from phalanx.units import format_count, format_money, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.api.launch_results import LaunchResult
    from phalanx.plan.plan import Plan

WHERE = "phalanx scale sweep"
# Small runs that share a GPU: none of them fills it.
PER_GPU = 4
# Checkpoints of a run: the one at which its decay begins must stay.
KEPT_CHECKPOINTS = 100
COUNTING = "N all parameters, embedding and head included; C = 6·N·D"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sweep(PublicResult):
    """A grid of runs and their outcomes; `table` is the file for `phalanx scale fit`.

    >>> result = phalanx.scale.sweep("examples/scaling.toml", budgets="1e12..1e14", dry_run=True)  # doctest: +SKIP
    >>> len(result.outcomes), result.predicted_usd  # doctest: +SKIP
    """

    folder: str
    table: str
    method: str
    outcomes: tuple[SweepOutcome, ...]
    predicted_s: tuple[float, ...]  # of each run, if it had this machine to itself
    predicted_usd: float | None  # for all runs; None if no price is known
    rates: str
    wall_s: float
    is_dry: bool
    on: str = ""  # the cluster's system; empty for this machine
    launched: LaunchResult | None = None  # submitted to Slurm or Kubernetes, or to be submitted in a dry run

    @property
    def group(self) -> str:
        """The group name of the runs on a cluster."""
        return sweep_group(Path(self.folder))

    @property
    def is_complete(self) -> bool:
        """True if every run is done, or was given up as diverged."""
        return all(outcome.is_final for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """1 if runs failed or diverged; runs that a cluster still has count as neither."""
        fine = (DONE, "waiting", "running") if self.on else (DONE,)
        return 0 if self.is_dry or all(outcome.state in fine for outcome in self.outcomes) else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the grid with its outcomes."""
        rows = [
            {
                "run": outcome.run.name,
                "params": outcome.run.params,
                "tokens": outcome.run.tokens,
                "flops": outcome.run.flops,
                "budget": outcome.run.budget,
                "layers": outcome.run.job.model.layers,
                "hidden": outcome.run.job.model.hidden,
                "heads": outcome.run.job.model.heads,
                "lr": outcome.run.job.optim.lr,
                "batch_tokens": outcome.run.job.batch.global_tokens,
                "steps": outcome.run.steps,
                "trunk": outcome.run.trunk,
                "state": outcome.state,
                "loss": outcome.loss,
                "message": outcome.message,
                "cached": outcome.cached,
                "digest": outcome.digest,
                "folder": outcome.folder,
                "seconds": outcome.seconds,
                "predicted_s": predicted_s,
            }
            for outcome, predicted_s in zip(self.outcomes, self.predicted_s, strict=True)
        ]
        return {
            "folder": self.folder,
            "table": self.table,
            "method": self.method,
            "counting": COUNTING,
            "rates": self.rates,
            "predicted_s": sum(self.predicted_s),
            "predicted_usd": self.predicted_usd,
            "wall_s": self.wall_s,
            "on": self.on,
            "submitted": list(self.launched.ids) if self.launched else [],
            "texts": dict(self.launched.texts) if self.launched and self.is_dry else {},
            "runs": rows,
        }

    def __str__(self) -> str:
        head = ["run", "budget", "N", "D", "layers × width", "lr", "batch", "steps", "time" if self.is_dry else "loss"]
        rows = [head]
        for outcome, predicted_s in zip(self.outcomes, self.predicted_s, strict=True):
            run, job = outcome.run, outcome.run.job
            last = f"{outcome.loss:.4f}" if outcome.loss is not None else outcome.state
            rows.append(
                [
                    run.name,
                    f"{run.budget:.2e}",
                    format_count(run.params),
                    format_count(run.tokens),
                    f"{job.model.layers} × {job.model.hidden}",
                    f"{job.optim.lr:.2e}",
                    f"{job.batch.global_tokens:,}",
                    f"{run.steps:,}",
                    ("cached" if outcome.is_final else format_seconds(predicted_s)) if self.is_dry else last,
                ]
            )
        flops = sum(outcome.run.flops for outcome in self.outcomes)
        cost = "price unknown" if self.predicted_usd is None else format_money(self.predicted_usd)
        lines = [
            f"{plural(len(self.outcomes), 'run')} ({self.method}), {flops:.3g} FLOPs in all; {COUNTING}",
            self.rates,
            "",
            *text_table(rows, right=range(1, len(head))),
            "",
        ]
        if self.is_dry:
            where = f"on {self.on}, one device per run, in all" if self.on else "on this machine"
            lines.append(f"predicted: {format_seconds(sum(self.predicted_s))} {where}, {cost}; nothing was started")
            if self.launched is not None:
                lines += ["", str(self.launched)]
            return "\n".join(lines)
        for outcome in self.outcomes:
            if outcome.state != DONE and not (self.on and outcome.state in ("waiting", "running")):
                lines.append(f"{outcome.run.name} {outcome.state}{': ' + outcome.message if outcome.message else ''}")
        cached = sum(outcome.cached and outcome.is_final for outcome in self.outcomes)
        reused = f", {plural(cached, 'run')} from earlier calls" if cached else ""
        if self.on and not self.is_complete:
            done = sum(outcome.is_final for outcome in self.outcomes)
            lines.append(f"{done} of {plural(len(self.outcomes), 'run')} have ended; table so far: {self.table}")
            lines.append(f"repeat the command to collect the others; phalanx queue --group {self.group} lists them")
            return "\n".join(lines)
        if self.on:
            lines.append(f"all {plural(len(self.outcomes), 'run')} have ended; table: {self.table}")
        else:
            lines.append(f"took {format_seconds(self.wall_s)}{reused}; table: {self.table}")
        lines.append(f"next: phalanx scale fit {self.table} --params-counted total --flops-counted 6nd")
        return "\n".join(lines)


def sweep_group(folder: Path) -> str:
    """Return the group name of a sweep's jobs on a cluster, from its folder.

    >>> sweep_group(Path("runs/sweep-scaling"))
    'sweep-scaling'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.absolute().name).strip("-.") or "sweep"


def sweep(
    job: AnyJob,
    *,
    budgets: str | Iterable[float],
    sizes: int = 7,
    method: str = "isoflop",
    out: str | Path | None = None,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    spread: float = SPREAD,
    parallel: int | None = None,
    on: str | None = None,
    queue: str | None = None,
    overrides: Overrides = (),
    dry_run: bool = False,
    progress: bool | Tell = True,
) -> Sweep:
    """Train a grid of small models of the job's family, and write the table that `scale.fit` reads.

    `budgets` are in FLOPs, as "1e15..1e17" or numbers; for each, `sizes` models from a fourth to four times (`spread`)
    the present optimum at `tokens_per_parameter`. "isoflop" trains each from the start; "wsd" trains the runs of one
    size as one trunk with short decays, which gives the same numbers for less. Results are stored in `out` under the
    hash of the inputs that determine them: a repeated call trains only what is missing, and an interrupted run
    continues from its checkpoint. `parallel` runs share this machine, by default one per core or four per GPU.
    `on="slurm"` or "k8s" submits them there as one group instead, to partition or queue `queue`; a repeated call
    collects the runs that have ended.

    >>> result = phalanx.scale.sweep("examples/scaling.toml", budgets="1e12..1e14")  # doctest: +SKIP
    >>> law = phalanx.scale.fit(result.table)  # doctest: +SKIP
    """
    tell = teller(progress)
    resolved = read_job(job, overrides, where=WHERE)
    if out is not None and not str(out):
        raise mistake("--out", "is empty", why="it would be the folder here", fix="name a folder, or leave it out")
    require_whole("--sizes", sizes)
    if parallel is not None:
        require_whole("--parallel", parallel)
    for option, value in (("--tokens-per-parameter", tokens_per_parameter), ("--spread", spread)):
        require_number(option, value)
    budget_flops = parse_budgets(budget_list(budgets))
    grid = sweep_runs(
        resolved.job,
        budgets=budget_flops,
        sizes=sizes,
        method=method,
        tokens_per_parameter=tokens_per_parameter,
        spread=spread,
    )
    _refuse_job(resolved.job)
    if parallel is not None and not 1 <= parallel <= 4096:
        raise mistake(WHERE, f"--parallel {parallel} is not between 1 and 4,096", fix="one per core, or a few per GPU")
    if short := [sweep_run for sweep_run in grid if sweep_run.steps < ENOUGH_STEPS]:
        least = min(short, key=lambda sweep_run: sweep_run.steps)
        takes = "1 run takes" if len(short) == 1 else f"{plural(len(short), 'run')} take"
        tell(
            f"warning: {takes} fewer than {ENOUGH_STEPS} steps ({least.name} {least.steps}): "
            "such runs may not have begun to learn from context, and a law bends to them; use a smaller "
            "batch.global_tokens, larger budgets, or more --tokens-per-parameter"
        )
    if on in (None, "local"):
        on = None
        if queue is not None:
            raise mistake("--queue", "names a partition or queue of a cluster", fix="add --on slurm or --on k8s")
        gpus, cores = _devices(resolved.job)
        grid = [replace(sweep_run, job=_local_job(sweep_run.job, on_gpu=gpus > 0)) for sweep_run in grid]
    else:
        from phalanx.api.sweep_launch import one_device_job, refuse_launch

        refuse_launch(on, method=method, parallel=parallel)
        gpus = cores = 0
        grid = [replace(sweep_run, job=one_device_job(sweep_run.job, resolved.path.parent)) for sweep_run in grid]
    folder = SweepFolder(path=Path(out) if out is not None else Path("runs") / f"sweep-{resolved.job.name}")
    identity: dict[str, Any] = {}
    paths = [resolved.path.parent / data_path for data_path in resolved.job.data.paths]
    if not dry_run or (paths and all(is_folder(path) for path in paths)):  # a dry run builds no dataset
        grid, identity = _with_data(grid, resolved, tell)
    data = str(identity.get("data", ""))
    outcomes = [folder.outcome(sweep_run, decides_digest(sweep_run, data=data)) for sweep_run in grid]
    plans = _plan_all([outcome.run for outcome in outcomes], resolved)
    predicted = _predicted_seconds([outcome.run for outcome in outcomes], plans, devices=max(gpus, 1))
    price = plans[0].bill.usd_per_device_hour
    usd = None if not price else price[1] * max(gpus, 1) * sum(predicted) / 3600.0
    planned_sweep = Sweep(
        folder=str(folder.path),
        table=str(folder.table),
        method=method,
        outcomes=tuple(outcomes),
        predicted_s=tuple(predicted),
        predicted_usd=usd,
        rates=rates_text(resolved.job),
        wall_s=0.0,
        is_dry=dry_run,
        on=on or "",
    )
    if on is not None:
        return _launch_grid(planned_sweep, plans, folder, identity, resolved, queue=queue, tell=tell)
    if dry_run:
        return planned_sweep
    return _train_grid(
        planned_sweep, plans, folder, identity, gpus=gpus, parallel=parallel or gpus * PER_GPU or cores, tell=tell
    )


def _refuse_job(job: Job) -> None:
    """Raise UserError for settings that a sweep does not support."""
    from phalanx.job.plugin_reference import list_references

    if plugin_keys := [key for key, _ in list_references(job.plugins)]:
        message = f"plugins.{plugin_keys[0]} names code of your own, which a sweep does not run"
        raise mistake(WHERE, message, fix="sweep without it, or train the runs one by one with phalanx.train")
    if job.train.weights:
        raise mistake("train.weights", "a sweep trains models of many sizes from the start", fix="leave it out")
    if not job.train.evaluate_sequences:
        message = "0: the loss of a run would not be measured on held-out text"
        raise mistake("train.evaluate_sequences", message, fix="use 64 or more")


def _devices(job: Job) -> tuple[int, int]:
    """Return the number of GPUs of this machine that the job may use, and its cores."""
    from phalanx.hardware.discover import discover

    machine = discover()
    wants_cpu = job.cluster.target.startswith("local-cpu")
    return 0 if wants_cpu else len(machine.gpus), machine.usable_cores


def _local_job(job: Job, *, on_gpu: bool) -> Job:
    """Return the job as one rank of this machine, without features that only long runs need."""
    from phalanx.job.run_sections import ClusterChoice
    from phalanx.job.schema import Parallel

    return replace(
        job,
        parallel=Parallel(mode="fixed", data=1, zero=0),
        train=replace(job.train, evaluate_every=0, samples=0),
        checkpoint=replace(job.checkpoint, path="checkpoints", keep=KEPT_CHECKPOINTS, memory_every=0),
        fault=replace(job.fault, digest_every=0, spares=0, on_loss="rebuild"),
        telemetry=replace(job.telemetry, peers_every_s=0.0, timeline_every=0, prometheus=False),
        cluster=ClusterChoice(spec="local:1" if on_gpu else "local-cpu:1"),
        rules=(),
    )


def _with_data(grid: list[SweepRun], resolved: ResolvedJob, tell: Tell) -> tuple[list[SweepRun], dict[str, Any]]:
    """Return the runs with their dataset, built now if the job names a corpus, and its identity for the table."""
    from phalanx.job.dataset import read_manifest
    from phalanx.train.prepare import find_data, need_torch

    need_torch()
    paths = tuple(resolve_path(path) for path in find_data(resolved.job, resolved.path.parent))
    manifests = [read_manifest(path) for path in paths]
    if not sum(manifest.total("tokens", "heldout") for manifest in manifests):
        raise mistake(str(paths[0]), "holds nothing out", why="losses of a law are on text that was not trained on")
    unique = sum(manifest.total("tokens", "train") for manifest in manifests)
    if most := [sweep_run for sweep_run in grid if sweep_run.tokens > 4 * unique]:
        reads = "1 run reads" if len(most) == 1 else f"{plural(len(most), 'run')} read"
        tell(
            f"warning: {reads} the {format_count(unique)} tokens of the data more than four "
            f"times ({most[-1].name} {most[-1].tokens / unique:.1f} times); repeated tokens are "
            "worth less (arXiv:2305.16264)"
        )
    texts = tuple(str(path) for path in paths)
    identity = {
        "tokenizer": "+".join(manifest.tokenizer_sha256[:16] for manifest in manifests),
        "data": "+".join(manifest.digest[:16] for manifest in manifests),
        "unique_tokens": unique,
    }
    return [
        replace(sweep_run, job=replace(sweep_run.job, data=replace(sweep_run.job.data, paths=texts)))
        for sweep_run in grid
    ], identity


def _plan_all(grid: list[SweepRun], resolved: ResolvedJob) -> list[Plan]:
    """Return a plan of each run; all mistakes of the job are raised before any run starts."""
    from phalanx.plan.make import make_plan
    from phalanx.plan.trainable import trainer_problems

    plans = []
    for sweep_run in grid:
        plan = make_plan(replace(resolved, job=sweep_run.job))
        if problems := trainer_problems(plan.job, plan.layout, plan.cluster):
            from phalanx.errors import UserError

            raise UserError(problems)
        plans.append(plan)
    return plans


def _predicted_seconds(grid: list[SweepRun], plans: list[Plan], *, devices: int) -> list[float]:
    """Predict the seconds of each run with the whole machine to itself: packed runs share the machine's speed."""
    trunks = {sweep_run.name: sweep_run.decay_step for sweep_run in grid}
    return [
        plan.prediction.step_s * (sweep_run.steps - trunks.get(sweep_run.trunk, 0)) / devices
        for sweep_run, plan in zip(grid, plans, strict=True)
    ]


def _train_grid(
    found: Sweep,
    plans: list[Plan],
    folder: SweepFolder,
    identity: dict[str, Any],
    *,
    gpus: int,
    parallel: int,
    tell: Tell,
) -> Sweep:
    from phalanx.api.sweep_pool import SweepPool

    folder.prepare()
    began_s = time.monotonic()
    unfinished = [number for number, outcome in enumerate(found.outcomes) if not outcome.is_final]
    outcomes = list(found.outcomes)
    tell_ended = _progress_teller(found, tell, began_s=began_s)

    def on_ended(outcome: SweepOutcome, done_s: float, left: int) -> None:
        # A sweep that is killed has a table of the finished runs.
        folder.write_table(outcomes, identity=identity)
        tell_ended(outcome, done_s, left)

    try:
        folder.write_table(outcomes, identity=identity)
        if unfinished:
            workers = min(parallel, len(unfinished))
            where = f"{plural(gpus, 'GPU')}" if gpus else "one core each"
            to_train = f"{plural(len(unfinished), 'run')} of {len(outcomes)} to train"
            tell(f"{to_train}, {workers} at a time ({where}), in {folder.path}")
            with SweepPool(folder, workers=workers, gpus=gpus) as pool:
                pool.train(outcomes, plans, weights=found.predicted_s, on_ended=on_ended)
    except KeyboardInterrupt:
        done = sum(outcome.is_final for outcome in outcomes)
        tell(f"interrupted: {done} of {plural(len(outcomes), 'run')} are done and stored in {folder.path}")
        tell("repeat the command to continue; unfinished runs resume from their checkpoints")
        raise
    finally:
        folder.write_table(outcomes, identity=identity)
    return replace(found, outcomes=tuple(outcomes), wall_s=time.monotonic() - began_s)


def _launch_grid(
    found: Sweep,
    plans: list[Plan],
    folder: SweepFolder,
    identity: dict[str, Any],
    resolved: ResolvedJob,
    *,
    queue: str | None,
    tell: Tell,
) -> Sweep:
    """Submit the missing runs, collect those that have ended, and write their table."""
    from phalanx.api.sweep_launch import launch_group

    outcomes = list(found.outcomes)
    if not found.is_dry:
        folder.prepare()
    launched = launch_group(
        outcomes,
        plans,
        folder,
        resolved,
        on=found.on,
        queue_name=queue,
        group=found.group,
        dry_run=found.is_dry,
        tell=tell,
    )
    if not found.is_dry:
        folder.write_table(outcomes, identity=identity)
    return replace(found, outcomes=tuple(outcomes), launched=launched)


def _time_left(seconds: float) -> str:
    """Format the remaining time for a progress line; empty for an estimate below a second.

    >>> _time_left(0.00854), _time_left(12.34), _time_left(5400)
    ('', 'and about 12 s ', 'and about 1.50 h ')
    """
    if seconds < 1.0:
        return ""
    return f"and about {f'{seconds:.0f} s' if seconds < 120.0 else format_seconds(seconds)} "


def _progress_teller(found: Sweep, tell: Tell, *, began_s: float) -> Callable[[SweepOutcome, float, int], None]:
    """Return a function that prints each ended run, with the remaining time and money at the pace so far."""
    total = sum(
        seconds for outcome, seconds in zip(found.outcomes, found.predicted_s, strict=True) if not outcome.is_final
    )

    def on_ended(outcome: SweepOutcome, done_s: float, left: int) -> None:
        """Print an ended run; `done_s` is the predicted time of the finished runs, with shares of the running ones."""
        result = f"loss {outcome.loss:.4f}" if outcome.loss is not None else outcome.state
        if outcome.state in (DIVERGED, "failed"):
            result += f": {outcome.message}"
        line = f"{outcome.run.name}: {result}, {format_seconds(outcome.seconds)}"
        if left and done_s > 0:
            left_s = (time.monotonic() - began_s) * max(total - done_s, 0.0) / done_s
            line += f"; {plural(left, 'run')} {_time_left(left_s)}left"
            if found.predicted_usd is not None and sum(found.predicted_s) > 0.0 and _time_left(left_s):
                line += f", {format_money(found.predicted_usd / sum(found.predicted_s) * left_s)}"
        tell(line)

    return on_ended
