"""`phalanx.scale.sweep`: a grid of small runs, packed on this machine, whose table a scaling law is fitted to."""

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
PER_GPU = 4  # small runs that share a GPU: none of them fills it
KEPT_CHECKPOINTS = 100  # of a run: the one where its decay begins must stay
COUNTING = "N all parameters, embedding and head included; C = 6·N·D"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sweep(PublicResult):
    """A grid of runs and what became of it; `table` is the file for `phalanx scale fit`.

    >>> made = phalanx.scale.sweep("examples/scaling.toml", budgets="1e12..1e14", dry_run=True)  # doctest: +SKIP
    >>> len(made.outcomes), made.predicted_usd  # doctest: +SKIP
    """

    folder: str
    table: str
    method: str
    outcomes: tuple[SweepOutcome, ...]
    predicted_s: tuple[float, ...]  # of each run, with this machine to itself
    predicted_usd: float | None  # for all of it; None where no price is known
    rates: str
    wall_s: float
    is_dry: bool
    on: str = ""  # the cluster's system; empty: this machine
    launched: LaunchResult | None = None  # what was, or would be, submitted to Slurm or Kubernetes

    @property
    def group(self) -> str:
        """What the runs are called together on a cluster."""
        return sweep_group(Path(self.folder))

    @property
    def is_complete(self) -> bool:
        """Whether every run is done, or was given up as diverged."""
        return all(one.is_final for one in self.outcomes)

    @property
    def exit_code(self) -> int:
        """1 where runs failed or diverged; runs that a cluster still has are neither."""
        fine = (DONE, "waiting", "running") if self.on else (DONE,)
        return 0 if self.is_dry or all(one.state in fine for one in self.outcomes) else 1

    def to_dict(self) -> dict[str, Any]:
        """The grid with its outcomes."""
        rows = [
            {
                "run": one.run.name,
                "params": one.run.params,
                "tokens": one.run.tokens,
                "flops": one.run.flops,
                "budget": one.run.budget,
                "layers": one.run.job.model.layers,
                "hidden": one.run.job.model.hidden,
                "heads": one.run.job.model.heads,
                "lr": one.run.job.optim.lr,
                "batch_tokens": one.run.job.batch.global_tokens,
                "steps": one.run.steps,
                "trunk": one.run.trunk,
                "state": one.state,
                "loss": one.loss,
                "message": one.message,
                "cached": one.cached,
                "digest": one.digest,
                "folder": one.folder,
                "seconds": one.seconds,
                "predicted_s": predicted_s,
            }
            for one, predicted_s in zip(self.outcomes, self.predicted_s, strict=True)
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
        for one, predicted_s in zip(self.outcomes, self.predicted_s, strict=True):
            run, job = one.run, one.run.job
            last = f"{one.loss:.4f}" if one.loss is not None else one.state
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
                    ("cached" if one.is_final else format_seconds(predicted_s)) if self.is_dry else last,
                ]
            )
        flops = sum(one.run.flops for one in self.outcomes)
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
        for one in self.outcomes:
            if one.state != DONE and not (self.on and one.state in ("waiting", "running")):
                lines.append(f"{one.run.name} {one.state}{': ' + one.message if one.message else ''}")
        cached = sum(one.cached and one.is_final for one in self.outcomes)
        reused = f", {plural(cached, 'run')} from earlier calls" if cached else ""
        if self.on and not self.is_complete:
            done = sum(one.is_final for one in self.outcomes)
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
    """The name of a sweep's jobs on a cluster: that of its folder.

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

    `budgets` are FLOPs, as "1e15..1e17" or numbers; of each, `sizes` models from a fourth to four times (`spread`) the
    present optimum at `tokens_per_parameter`. "isoflop" trains each from the start; "wsd" trains the runs of one size
    as one trunk with short decays, which gives the same numbers for less. Results are kept in `out` under the hash of
    what decides them: called again, only what is missing is trained; an interrupted run goes on from its checkpoint.
    `parallel` runs share this machine, one core each or four on a GPU unless given. `on="slurm"` or "k8s" submits them
    there as one group instead, to partition or queue `queue`; called again, it collects what has ended.

    >>> made = phalanx.scale.sweep("examples/scaling.toml", budgets="1e12..1e14")  # doctest: +SKIP
    >>> law = phalanx.scale.fit(made.table)  # doctest: +SKIP
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
    listed = parse_budgets(budget_list(budgets))
    grid = sweep_runs(
        resolved.job,
        budgets=listed,
        sizes=sizes,
        method=method,
        tokens_per_parameter=tokens_per_parameter,
        spread=spread,
    )
    _refuse_job(resolved.job)
    if parallel is not None and not 1 <= parallel <= 4096:
        raise mistake(WHERE, f"--parallel {parallel} is not between 1 and 4,096", fix="one per core, or a few per GPU")
    if short := [one for one in grid if one.steps < ENOUGH_STEPS]:
        least = min(short, key=lambda one: one.steps)
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
        grid = [replace(one, job=_local_job(one.job, on_gpu=gpus > 0)) for one in grid]
    else:
        from phalanx.api.sweep_launch import one_device_job, refuse_launch

        refuse_launch(on, method=method, parallel=parallel)
        gpus = cores = 0
        grid = [replace(one, job=one_device_job(one.job, resolved.path.parent)) for one in grid]
    folder = SweepFolder(path=Path(out) if out is not None else Path("runs") / f"sweep-{resolved.job.name}")
    identity: dict[str, Any] = {}
    paths = [resolved.path.parent / one for one in resolved.job.data.paths]
    if not dry_run or (paths and all(is_folder(path) for path in paths)):  # a dry run builds no dataset
        grid, identity = _with_data(grid, resolved, tell)
    data = str(identity.get("data", ""))
    outcomes = [folder.outcome(one, decides_digest(one, data=data)) for one in grid]
    plans = _plan_all([one.run for one in outcomes], resolved)
    predicted = _predicted_seconds([one.run for one in outcomes], plans, devices=max(gpus, 1))
    price = plans[0].bill.usd_per_device_hour
    usd = None if not price else price[1] * max(gpus, 1) * sum(predicted) / 3600.0
    found = Sweep(
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
        return _launch_grid(found, plans, folder, identity, resolved, queue=queue, tell=tell)
    if dry_run:
        return found
    return _train_grid(
        found, plans, folder, identity, gpus=gpus, parallel=parallel or gpus * PER_GPU or cores, tell=tell
    )


def _refuse_job(job: Job) -> None:
    """Raise UserError for what a sweep does not do."""
    from phalanx.job.plugin_reference import list_references

    if found := [key for key, _ in list_references(job.plugins)]:
        what = f"plugins.{found[0]} names code of your own, which a sweep does not run"
        raise mistake(WHERE, what, fix="sweep without it, or train the runs one by one with phalanx.train")
    if job.train.weights:
        raise mistake("train.weights", "a sweep trains models of many sizes from the start", fix="leave it out")
    if not job.train.evaluate_sequences:
        what = "0: the loss of a run would not be measured on held-out text"
        raise mistake("train.evaluate_sequences", what, fix="use 64 or more")


def _devices(job: Job) -> tuple[int, int]:
    """GPUs of this machine that the job may use, and its cores."""
    from phalanx.hardware.discover import discover

    machine = discover()
    wants_cpu = job.cluster.target.startswith("local-cpu")
    return 0 if wants_cpu else len(machine.gpus), machine.usable_cores


def _local_job(job: Job, *, on_gpu: bool) -> Job:
    """The job as one rank of this machine, without what only long runs need."""
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
    """The runs with their dataset, built now if the job names a corpus, and what identifies it in the table."""
    from phalanx.job.dataset import read_manifest
    from phalanx.train.prepare import find_data, need_torch

    need_torch()
    paths = tuple(resolve_path(path) for path in find_data(resolved.job, resolved.path.parent))
    manifests = [read_manifest(path) for path in paths]
    if not sum(one.total("tokens", "heldout") for one in manifests):
        raise mistake(str(paths[0]), "holds nothing out", why="losses of a law are on text that was not trained on")
    unique = sum(one.total("tokens", "train") for one in manifests)
    if most := [one for one in grid if one.tokens > 4 * unique]:
        reads = "1 run reads" if len(most) == 1 else f"{plural(len(most), 'run')} read"
        tell(
            f"warning: {reads} the {format_count(unique)} tokens of the data more than four "
            f"times ({most[-1].name} {most[-1].tokens / unique:.1f} times); repeated tokens are "
            "worth less (arXiv:2305.16264)"
        )
    texts = tuple(str(path) for path in paths)
    identity = {
        "tokenizer": "+".join(one.tokenizer_sha256[:16] for one in manifests),
        "data": "+".join(one.digest[:16] for one in manifests),
        "unique_tokens": unique,
    }
    return [replace(one, job=replace(one.job, data=replace(one.job.data, paths=texts))) for one in grid], identity


def _plan_all(grid: list[SweepRun], resolved: ResolvedJob) -> list[Plan]:
    """A plan of each run. All mistakes of the job come out before anything is started."""
    from phalanx.plan.make import make_plan
    from phalanx.plan.trainable import trainer_problems

    plans = []
    for one in grid:
        plan = make_plan(replace(resolved, job=one.job))
        if problems := trainer_problems(plan.job, plan.layout, plan.cluster):
            from phalanx.errors import UserError

            raise UserError(problems)
        plans.append(plan)
    return plans


def _predicted_seconds(grid: list[SweepRun], plans: list[Plan], *, devices: int) -> list[float]:
    """Of each run with the whole machine to itself: packed runs share what one of them alone would have."""
    trunks = {one.name: one.decay_step for one in grid}
    return [
        plan.prediction.step_s * (one.steps - trunks.get(one.trunk, 0)) / devices
        for one, plan in zip(grid, plans, strict=True)
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
    left = [number for number, one in enumerate(found.outcomes) if not one.is_final]
    outcomes = list(found.outcomes)
    tell_ended = _progress_teller(found, tell, began_s=began_s)

    def on_ended(outcome: SweepOutcome, done_s: float, left: int) -> None:
        folder.write_table(outcomes, identity=identity)  # a sweep that is killed has a table of what is done
        tell_ended(outcome, done_s, left)

    try:
        folder.write_table(outcomes, identity=identity)
        if left:
            workers = min(parallel, len(left))
            where = f"{plural(gpus, 'GPU')}" if gpus else "one core each"
            asked = f"{plural(len(left), 'run')} of {len(outcomes)} to train"
            tell(f"{asked}, {workers} at a time ({where}), in {folder.path}")
            with SweepPool(folder, workers=workers, gpus=gpus) as pool:
                pool.train(outcomes, plans, weights=found.predicted_s, on_ended=on_ended)
    except KeyboardInterrupt:
        done = sum(one.is_final for one in outcomes)
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
    """Submit what is missing, collect what has ended, and write the table of it."""
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
    """What a line of progress says of it: an estimate that is below a second is none.

    >>> _time_left(0.00854), _time_left(12.34), _time_left(5400)
    ('', 'and about 12 s ', 'and about 1.50 h ')
    """
    if seconds < 1.0:
        return ""
    return f"and about {f'{seconds:.0f} s' if seconds < 120.0 else format_seconds(seconds)} "


def _progress_teller(found: Sweep, tell: Tell, *, began_s: float) -> Callable[[SweepOutcome, float, int], None]:
    """Tells of each run that ended, and what is left in time and money by the pace so far."""
    total = sum(seconds for one, seconds in zip(found.outcomes, found.predicted_s, strict=True) if not one.is_final)

    def on_ended(outcome: SweepOutcome, done_s: float, left: int) -> None:
        """`done_s` is the predicted time of the runs that are done, with shares of those that are going on."""
        said = f"loss {outcome.loss:.4f}" if outcome.loss is not None else outcome.state
        if outcome.state in (DIVERGED, "failed"):
            said += f": {outcome.message}"
        line = f"{outcome.run.name}: {said}, {format_seconds(outcome.seconds)}"
        if left and done_s > 0:
            left_s = (time.monotonic() - began_s) * max(total - done_s, 0.0) / done_s
            line += f"; {plural(left, 'run')} {_time_left(left_s)}left"
            if found.predicted_usd is not None and sum(found.predicted_s) > 0.0 and _time_left(left_s):
                line += f", {format_money(found.predicted_usd / sum(found.predicted_s) * left_s)}"
        tell(line)

    return on_ended
