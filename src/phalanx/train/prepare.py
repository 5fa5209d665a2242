"""Checks and plans a job, or an earlier run, before any process is started.

Everything that can be refused is refused here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.elastic.gpus import (
    SHARED,
    ask_nccl,
    check_free,
    check_mps,
    check_nccl,
    check_preload,
    shared_settings,
)
from phalanx.elastic.preflight import MOST_RANKS_PER_CORE
from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.discover import discover
from phalanx.hardware.this_machine import allowed_ranks
from phalanx.io.checksums import CHECKSUMS, verify_checksums
from phalanx.io.files import read_text
from phalanx.io.path_probes import is_file, is_folder, path_exists, resolve_path
from phalanx.io.user_code import absolute_code
from phalanx.job.load import ResolvedJob, job_to_dict, load
from phalanx.job.schema import Batch, Job
from phalanx.plan.inputs import InputFindings, look_at_inputs
from phalanx.plan.layout import Layout
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.train.plugins import absolute_references, code_refused, needs_consent
from phalanx.units import first_few, plural

# Settings that a resumed run may change: how it is computed and observed, never the data it learns from.
FREE = (
    *("parallel.", "cluster.", "train.", "comm.", "checkpoint.", "fault.", "telemetry.", "cost.", "launch."),
    *("batch.micro", "name", "profile", "waiver", "plugins.callbacks", "plugins.metrics", "plugins.source"),
)
# These change the loss curve: allowed in a resumed run, with a warning.
BENDS_THE_CURVE = ("optim.", "precision.", "numerics.", "data.tokens", "plugins.loss")
# No effect on training, and missing in plans before 0.7: never compared.
ONLY_SAID = "model.sliding_window"
FIXED_OPTIM = ("optim.name",)  # its state is in the checkpoint


def need_torch() -> None:
    """Raise UserError with the command that installs it, if the training extra is not installed."""
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise mistake(
            "phalanx train",
            f"needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed",
            fix="pip install 'phalanx[train]'",
        )


def load_job(path: str, *, overrides: Sequence[str], cluster: str | None, steps: int) -> ResolvedJob:
    """Load the job with the overrides, on `cluster`; `steps` > 0 trains so many steps instead of data.tokens."""
    settings = [*overrides, *_cluster_override(cluster, sharing=_ranks_per_gpu(path, overrides) if cluster else 1)]
    resolved = load(path, overrides=settings)
    if steps <= 0:
        return resolved
    tokens = tokens_of(steps, resolved.job.batch)
    return load(path, overrides=[*settings, f"data.tokens={tokens}"])


def _cluster_override(cluster: str | None, *, sharing: int) -> list[str]:
    """Return the command line's cluster as an override of the job, so that a resumed run uses it too."""
    if cluster is None:
        return []
    # Resolved here, so that an error names the option, not a key that the file may not have.
    resolve_cluster(cluster, ranks_per_gpu=sharing)
    if cluster.endswith(".toml") or "/" in cluster:
        return [f"cluster.file={json.dumps(str(resolve_path(cluster)))}"]
    return [f"cluster.spec={json.dumps(cluster)}"]


def _ranks_per_gpu(path: str, overrides: Sequence[str]) -> int:
    """Return the ranks per GPU that the job allows; 1 for an invalid job, whose errors are raised later."""
    try:
        return load(path, overrides=overrides).job.train.ranks_per_gpu
    except UserError:
        return 1


def tokens_of(steps: int, batch: Batch) -> int:
    """Return the number of tokens in the first `steps` steps, with the batch ramp.

    >>> tokens_of(10, Batch(global_tokens=8192, global_sequences=32))
    81920
    """
    tokens = 0
    for stage in batch.ramp:
        count = min(steps, -(-max(0, stage.until_tokens - tokens) // stage.global_tokens))
        tokens, steps = tokens + count * stage.global_tokens, steps - count
    return tokens + steps * batch.global_tokens


def has_own_data_only(job: Job) -> bool:
    """Return True if the job has no dataset folder, because a plug-in provides its data."""
    return bool(job.plugins.data) and not job.data.paths and not job.data.corpus


def find_data(job: Job, base: Path) -> tuple[Path, ...]:
    """Return the dataset folders of a job; a named corpus that is not built yet is built now.

    Progress is printed on stderr.
    """
    if has_own_data_only(job):
        return ()
    from phalanx.train.data.corpus import ensure_dataset
    from phalanx.train.data.progress import BuildProgress

    return ensure_dataset(
        job.data, base, vocab=job.model.vocab, progress_for=lambda size: BuildProgress(sys.stderr, size)
    )


def plan_for_run(resolved: ResolvedJob, *, earlier: Layout | None = None) -> Plan:
    """Plan a job whose file paths are made absolute, so that the run can be resumed from any folder.

    `earlier` is the layout of a run that is resumed.
    """
    return make_plan(with_absolute_files(resolved), earlier=earlier)


def with_absolute_files(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with its cluster file, weights and code as absolute paths."""
    return dataclasses.replace(resolved, job=_absolute_paths(resolved.job, resolved.path.parent))


def _absolute_paths(job: Job, base: Path) -> Job:
    """Return the job with cluster file, weights and code as absolute paths; `base` is the job file's folder."""
    file, module = job.cluster.file, absolute_code(job.model.module, base)
    weights = str(resolve_path(base / job.train.weights)) if job.train.weights else ""
    return dataclasses.replace(
        job,
        train=dataclasses.replace(job.train, weights=weights),
        cluster=dataclasses.replace(job.cluster, file=str(resolve_path(base / file)) if file else ""),
        model=dataclasses.replace(job.model, module=module),
        rules=tuple(absolute_code(name, base) for name in job.rules),
        plugins=absolute_references(job.plugins, base),
    )


def with_data(plan: Plan, base: Path) -> Plan:
    """Return the plan with its dataset folders as absolute paths; relative ones start at `base`."""
    data = dataclasses.replace(
        plan.job.data, paths=tuple(str(resolve_path(path)) for path in find_data(plan.job, base))
    )
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, data=data))


def check_data(plan: Plan) -> tuple[Problem, ...]:
    """Check that the data is complete and fits model and sequence; raise UserError, or return warnings."""
    from phalanx.train.data.token_samples import TokenDataset, check_dataset

    job = plan.job
    if has_own_data_only(job):
        return ()  # a plug-in's data is checked row by row while it is read
    dataset = TokenDataset.open([Path(path) for path in job.data.paths], "train")
    return check_dataset(dataset, model_vocab=job.model.vocab, sequence=job.data.sequence)


def check_inputs(job: Job, resolved: ResolvedJob, base: Path, *, fresh: bool) -> InputFindings:
    """Check that the files a job names exist and fit the job and each other; raise UserError, or return warnings.

    `job` names its files by absolute paths. The data of a corpus can be compared only once it is built: call this
    again then.
    """
    findings = look_at_inputs(job, base, origins=resolved.origins, fresh=fresh)
    if problems := (*findings.refused, *findings.missing):
        raise UserError(problems)
    if fresh and job.train.weights and not job.model.module:
        from phalanx.train.models.hf_weights import check_hf  # imports torch

        check_hf(Path(job.train.weights), job.model)
    return findings


def check_weight_files(job: Job) -> None:
    """Raise UserError if the initial weights differ from the checksums of their folder, where it has some."""
    folder = Path(job.train.weights)
    if not job.train.weights or not is_file(folder / CHECKSUMS):
        return
    _, problems = verify_checksums(folder, fix="copy the folder again from where it is whole, or export it again")
    if problems:
        raise UserError(
            [dataclasses.replace(problem, why="training would start from damaged weights") for problem in problems]
        )


def check_writable(runs: Path, checkpoints: str, *, run: Path | None = None) -> None:
    """Check that run folders can be created in `runs` (or that `run`, which continues, can be written).

    Also checks the checkpoint folder. A checkpoint folder outside of the run is created, but its parent must exist: a
    disk that is not mounted would go unnoticed otherwise.
    """
    base = runs if run is None else run
    _require_writable(f"--runs {runs}" if run is None else str(run), base, why="the run could not be recorded")
    if "://" in checkpoints:
        return
    where, folder = f"checkpoint.path = {checkpoints!r}", base / checkpoints
    if Path(checkpoints).is_absolute() and not is_folder(folder.parent):
        raise mistake(
            where,
            f"there is no folder {folder.parent}",
            why="is its disk mounted?",
            fix="mount it, or create the folder",
        )
    _require_writable(where, folder, why="the run could not save")


def _require_writable(where: str, folder: Path, *, why: str) -> None:
    """Raise UserError unless new files can be made in the folder, or in its nearest existing parent."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path_exists(path)), Path("/"))
    if not is_folder(existing):
        raise mistake(where, f"{existing} is a file", why=why, fix="name a folder")
    try:
        tempfile.TemporaryDirectory(
            prefix=".phalanx-", dir=existing
        ).cleanup()  # permission bits do not show read-only mounts, nor bind root
    except OSError as error:
        raise mistake(
            where,
            f"{existing} cannot be written: {error.strerror or error}",
            why=why,
            fix="mount it for writing, or name another folder",
        ) from error


def check_trainable(plan: Plan) -> None:
    """Raise UserError with every reason why the trainer cannot run the plan."""
    from phalanx.plan.trainable import trainer_problems

    if problems := trainer_problems(plan.job, plan.layout, plan.cluster):
        raise UserError(problems)


def check_code(job: Job, *, allowed: bool, or_else: str = "") -> None:
    """Raise UserError if the job names its own code and the user has not allowed it.

    `or_else` is appended to the fix.
    """
    keys = needs_consent(job)
    if keys and not allowed:
        problems = [problem for key in keys for problem in code_refused(key, _value_text(job, key)).problems]
        raise UserError([dataclasses.replace(problem, fix=f"{problem.fix}{or_else}") for problem in problems])


def _value_text(job: Job, key: str) -> str:
    """Return the value of a key that names code, as text for a message."""
    section, _, name = key.partition(".")
    if key == "plugins.source":
        return f"{plural(len(job.plugins.source), 'line')} of Python"
    value = getattr(getattr(job, section), name)
    return value if isinstance(value, str) else ", ".join(value)


def counting_baselines(job: Job) -> dict[str, float]:
    """Return the bits per byte that counts of single tokens and of pairs reach on the held-out text.

    Takes a few seconds.
    """
    if has_own_data_only(job):
        return {}
    from phalanx.train.data.baselines import count_baselines as count
    from phalanx.train.data.token_samples import TokenDataset

    baselines = count(TokenDataset.open([Path(path) for path in job.data.paths], "train", vocab=job.model.vocab))
    return {f"{name}_bits_per_byte": value for name, value in baselines.items()}


def read_plan(path: str, resolved: ResolvedJob | None) -> Plan:
    """Read a plan from a file; raise UserError if it is not the plan of the given job."""
    plan = Plan.from_json(read_text(Path(path), noun="plan"), where=path)
    changed = changed_keys(plan.job, resolved.job) if resolved is not None else []
    if resolved is not None and changed:
        raise mistake(
            path,
            f"is the plan of another job: {first_few(changed, 4)} differ from {resolved.path}",
            fix=f"write it again: phalanx plan {resolved.path} --out {path}",
        )
    base = resolved.path.parent if resolved is not None else Path(path).parent
    return dataclasses.replace(plan, job=_absolute_paths(plan.job, base))


def job_in(plan: Plan, path: Path) -> ResolvedJob:
    """Return the job of a plan that came without a job file, so without line numbers."""
    return ResolvedJob(job=plan.job, path=path, origins={})


def job_of(run: Run, plan: Plan) -> ResolvedJob:
    """Return the job of a run that continues, with the line numbers of its file where they can be read."""
    try:
        return dataclasses.replace(load(run.job_toml), job=plan.job)
    except UserError:  # a job file of an older version; the plan decides
        return job_in(plan, run.job_toml)


def check_here(plan: Plan) -> None:
    """Raise UserError, with a setting that works instead, if this machine lacks the devices of the plan."""
    machine = discover()
    ranks, device = plan.layout.devices, plan.cluster.accelerator
    if device.family == "cpu":
        max_ranks = MOST_RANKS_PER_CORE * machine.usable_cores
        if ranks > max_ranks:
            why = f"{plural(machine.usable_cores, 'core')} can run at most {plural(max_ranks, 'rank')}"
            raise mistake(
                plan.cluster.name, f"asks for {plural(ranks, 'rank')} on this machine", why=why, fix="use local:4"
            )
        return
    gpus, allowed = len(machine.gpus), allowed_ranks(plan.job.train.ranks_per_gpu, os.environ)
    if gpus * allowed < ranks:
        gpus_text = plural(gpus, "GPU")
        fix = (
            f"start a task per rank: srun --ntasks={ranks}, mpirun -n {ranks}, or torchrun on every host; "
            "or try it here with --cluster local:4"
        )
        if gpus:
            fix += f"; or let {-(-ranks // gpus)} ranks share a GPU with --ranks-per-gpu, which needs NCCL 2.30"
        raise mistake(
            plan.cluster.name,
            f"the plan needs {ranks:,} × {device.name}, but this machine has {gpus_text}"
            + (f", each shared by up to {allowed} ranks" if allowed > 1 and gpus else ""),
            why="phalanx train starts ranks on one machine only",
            fix=fix,
        )
    _check_libraries(shared=ranks > gpus, where=f"{ranks} ranks on {gpus} GPU{'s' if gpus != 1 else ''}")
    share = -(-ranks // gpus)
    need = share * plan.memory.total_bytes
    checks = [check_free(gpu, needed_bytes=need, where=f"GPU {gpu.index}") for gpu in machine.gpus[:ranks]]
    if problems := [problem for problem in checks if problem is not None]:
        raise UserError(problems)


def check_gpus(allowed: int, *, where: str, tell: Callable[[str], None]) -> int:
    """Return the number of GPUs on which ranks can be started, `allowed` on each.

    Raises UserError for what prevents it.
    """
    machine = discover()
    gpus = len(machine.gpus)
    if not gpus:
        raise mistake(
            where,
            "no GPU is visible on this machine",
            why="; ".join(machine.notes),
            fix="use --device cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    _check_libraries(shared=allowed > 1, where=f"{allowed} ranks per GPU")
    if allowed > 1:
        tell(sharing_note(allowed, os.environ))
    return gpus


def tell_sharing(plan: Plan, tell: Callable[[str], None]) -> None:
    """Pass the note on shared GPUs to `tell`; does nothing on cores, or where GPUs are not shared."""
    allowed = allowed_ranks(plan.job.train.ranks_per_gpu, os.environ)
    if allowed > 1 and plan.cluster.accelerator.family != "cpu":
        tell(sharing_note(allowed, os.environ))


def sharing_note(share: int, environ: Mapping[str, str]) -> str:
    """Return one line that names the NCCL settings of ranks that share GPUs."""
    applied = shared_settings(environ)
    names = " ".join(f"{name}={value}" for name, value in {**SHARED, **environ}.items() if name in SHARED)
    user_note = "" if len(applied) == len(SHARED) else " (yours are kept)"
    return f"  up to {share} ranks share a GPU, with {names}{user_note}; they also share its memory and speed"


def _check_libraries(*, shared: bool, where: str) -> None:
    """Raise UserError for preloaded libraries, a broken MPS daemon or an old NCCL, which keep ranks from their GPUs."""
    problems = [*check_preload(os.environ), *check_mps(os.environ)]
    if shared and not problems:
        nccl = ask_nccl(os.environ)
        problem = nccl if isinstance(nccl, Problem) else check_nccl(nccl, where=where)
        problems = [problem] if problem is not None else []
    if problems:
        raise UserError(problems)


def resumed_plan(
    run: Run, *, overrides: Sequence[str], cluster: str | None, steps: int
) -> tuple[Plan, tuple[Problem, ...]]:
    """Return the plan with which a run continues, and warnings.

    It is the run's own plan, or a new one where overrides, cluster or steps are given. Raises UserError for a change
    that a resumed run cannot make.
    """
    run.check_settings()
    old = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    if not run.saved_steps():
        lost_step = run.committed_step()
        what = "has no checkpoint to resume from"
        raise mistake(
            str(run.path),
            what if lost_step is None else f"{what}: that of step {lost_step:,} was saved, and is gone",
            fix=f"start it again: phalanx train {run.job_toml}",
        )
    if not overrides and cluster is None and steps <= 0:
        _refuse_finished(run, old)
        return old, ()
    resolved = load_job(str(run.job_toml), overrides=overrides, cluster=cluster, steps=steps)
    warnings = _changes_refused(run, old.job, resolved.job)
    is_same_split = resolved.job.parallel == old.job.parallel and resolved.job.batch.micro == old.job.batch.micro
    plan = plan_for_run(resolved, earlier=old.layout if is_same_split else None)
    _refuse_finished(run, plan)
    return plan, warnings


def _refuse_finished(run: Run, plan: Plan) -> None:
    """Raise UserError if the run has done all steps of the plan."""
    from phalanx.train.data.batches import BatchPlan

    job = plan.job
    total = BatchPlan.of(job.batch, sequence=job.data.sequence, tokens=plan.duration.tokens).steps
    if max(run.saved_steps()) >= total:
        raise mistake(
            str(run.path),
            f"is finished: all {total:,} steps are done",
            fix=f"continue with --steps N above {total:,}; phalanx train --report {run.path} shows the result",
        )


def _changes_refused(run: Run, old: Job, new: Job) -> tuple[Problem, ...]:
    """Raise UserError for changed settings that a resumed run must keep.

    Returns warnings for changes that alter the loss curve.
    """
    changed = changed_keys(old, new)
    curve_keys = [key for key in changed if key.startswith(BENDS_THE_CURVE) and key not in FIXED_OPTIM]
    refused_keys = [key for key in changed if not key.startswith(FREE) and key not in curve_keys]
    before, after = flat_settings(old), flat_settings(new)
    if refused_keys:
        raise UserError(
            [
                Problem(
                    where=str(run.path),
                    what=f"{key} = {after.get(key)!r} cannot replace {before.get(key)!r} in a resumed run",
                    why="the checkpoint would not match, or the data would change",
                    fix="start a new run; a resumed one may change parallel.*, batch.micro, train.* and the cluster",
                )
                for key in refused_keys
            ]
        )
    return tuple(
        Problem(
            where=str(run.path),
            what=f"{key} = {after.get(key)!r} instead of {before.get(key)!r}: the loss curve changes from here on",
        )
        for key in curve_keys
    )


def changed_keys(old: Job, new: Job) -> list[str]:
    """Return the dotted keys whose values differ."""
    before, after = flat_settings(old), flat_settings(new)
    return [key for key in {**before, **after} if before.get(key) != after.get(key) and key != ONLY_SAID]


def flat_settings(job: Job) -> dict[str, Any]:
    """Return every setting by its dotted key."""
    result: dict[str, Any] = {}
    for section, value in job_to_dict(job).items():
        if isinstance(value, dict):
            result |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            result[section] = value
    return result
