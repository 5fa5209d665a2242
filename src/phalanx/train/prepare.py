"""From a job file, or an earlier run, to a plan that can be launched; what can be refused is refused here."""

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

# What a resumed run may change: how it is computed and watched, never what is learnt from.
FREE = (
    *("parallel.", "cluster.", "train.", "comm.", "checkpoint.", "fault.", "telemetry.", "cost.", "launch."),
    *("batch.micro", "name", "profile", "waiver", "plugins.callbacks", "plugins.metrics", "plugins.source"),
)
BENDS_THE_CURVE = ("optim.", "precision.", "numerics.", "data.tokens", "plugins.loss")  # allowed, with a warning
ONLY_SAID = "model.sliding_window"  # nothing that runs depends on it, and plans before 0.7 do not name it
FIXED_OPTIM = ("optim.name",)  # its state is in the checkpoint


def need_torch() -> None:
    """Refuse early, with the command that helps, where the training extra is not installed."""
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise mistake(
            "phalanx train",
            f"needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed",
            fix="pip install 'phalanx[train]'",
        )


def load_job(path: str, *, overrides: Sequence[str], cluster: str | None, steps: int) -> ResolvedJob:
    """The job with the overrides, on `cluster`; `steps` > 0 trains so many steps instead of data.tokens."""
    wanted = [*overrides, *_cluster_override(cluster, sharing=_ranks_per_gpu(path, overrides) if cluster else 1)]
    resolved = load(path, overrides=wanted)
    if steps <= 0:
        return resolved
    tokens = tokens_of(steps, resolved.job.batch)
    return load(path, overrides=[*wanted, f"data.tokens={tokens}"])


def _cluster_override(cluster: str | None, *, sharing: int) -> list[str]:
    """The cluster of the command line as part of the job, so that a resumed run finds it there."""
    if cluster is None:
        return []
    # Complains about the option, not about a key the file may not have.
    resolve_cluster(cluster, ranks_per_gpu=sharing)
    if cluster.endswith(".toml") or "/" in cluster:
        return [f"cluster.file={json.dumps(str(resolve_path(cluster)))}"]
    return [f"cluster.spec={json.dumps(cluster)}"]


def _ranks_per_gpu(path: str, overrides: Sequence[str]) -> int:
    """Ranks per GPU that a job allows; 1 for a job that cannot be read, whose mistakes are told later."""
    try:
        return load(path, overrides=overrides).job.train.ranks_per_gpu
    except UserError:
        return 1


def tokens_of(steps: int, batch: Batch) -> int:
    """Tokens that `steps` steps see, the batch ramp walked.

    >>> tokens_of(10, Batch(global_tokens=8192, global_sequences=32))
    81920
    """
    tokens = 0
    for stage in batch.ramp:
        count = min(steps, -(-max(0, stage.until_tokens - tokens) // stage.global_tokens))
        tokens, steps = tokens + count * stage.global_tokens, steps - count
    return tokens + steps * batch.global_tokens


def has_own_data_only(job: Job) -> bool:
    """Whether a job has no dataset folder, because it brings data of its own."""
    return bool(job.plugins.data) and not job.data.paths and not job.data.corpus


def find_data(job: Job, base: Path) -> tuple[Path, ...]:
    """The dataset folders of a job, built now if it names a corpus that is not built yet; progress on stderr."""
    if has_own_data_only(job):
        return ()
    from phalanx.train.data.corpus import ensure_dataset
    from phalanx.train.data.progress import BuildProgress

    return ensure_dataset(
        job.data, base, vocab=job.model.vocab, progress_for=lambda size: BuildProgress(sys.stderr, size)
    )


def plan_for_run(resolved: ResolvedJob, *, earlier: Layout | None = None) -> Plan:
    """The plan of a job; the files it names as absolute paths, so that the run can be resumed from anywhere.

    `earlier` is the layout of a run that is resumed.
    """
    return make_plan(with_absolute_files(resolved), earlier=earlier)


def with_absolute_files(resolved: ResolvedJob) -> ResolvedJob:
    """The job with the files it names as absolute paths."""
    return dataclasses.replace(resolved, job=_absolute_paths(resolved.job, resolved.path.parent))


def _absolute_paths(job: Job, base: Path) -> Job:
    """The job with cluster file and own code as absolute paths; `base` is the folder of the job file."""
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
    """The plan with its dataset folders as absolute paths, relative ones taken from `base`."""
    data = dataclasses.replace(
        plan.job.data, paths=tuple(str(resolve_path(path)) for path in find_data(plan.job, base))
    )
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, data=data))


def check_data(plan: Plan) -> tuple[Problem, ...]:
    """The data is whole and fits the model and the sequence; raises UserError, returns warnings."""
    from phalanx.train.data.token_samples import TokenDataset, check_dataset

    job = plan.job
    if has_own_data_only(job):
        return ()  # looked at row by row while it is read
    dataset = TokenDataset.open([Path(path) for path in job.data.paths], "train")
    return check_dataset(dataset, model_vocab=job.model.vocab, sequence=job.data.sequence)


def check_inputs(job: Job, resolved: ResolvedJob, base: Path, *, fresh: bool) -> InputFindings:
    """The files that a job names are here, and fit it and each other; raises UserError, returns what to warn of.

    `job` names its files by absolute paths. Before the data of a corpus is built it cannot be compared: ask again when
    it is.
    """
    found = look_at_inputs(job, base, origins=resolved.origins, fresh=fresh)
    if problems := (*found.refused, *found.missing):
        raise UserError(problems)
    if fresh and job.train.weights and not job.model.module:
        from phalanx.train.models.hf_weights import check_hf  # imports torch

        check_hf(Path(job.train.weights), job.model)
    return found


def check_weight_files(job: Job) -> None:
    """The weights that training starts from are what was exported, where their folder has digests; raises UserError."""
    folder = Path(job.train.weights)
    if not job.train.weights or not is_file(folder / CHECKSUMS):
        return
    _, problems = verify_checksums(folder, fix="copy the folder again from where it is whole, or export it again")
    if problems:
        raise UserError([dataclasses.replace(one, why="training would start from damaged weights") for one in problems])


def check_writable(runs: Path, checkpoints: str, *, run: Path | None = None) -> None:
    """Run folders can be made in `runs` (or `run` be written, which goes on), and checkpoints where the job wants them.

    A checkpoint folder outside of the run is made, but not the one around it: a disk that is not mounted would go
    unnoticed.
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
    """A folder, or the nearest one around it that is there, takes new files."""
    there = next((one for one in (folder, *folder.absolute().parents) if path_exists(one)), Path("/"))
    if not is_folder(there):
        raise mistake(where, f"{there} is a file", why=why, fix="name a folder")
    try:
        tempfile.TemporaryDirectory(prefix=".phalanx-", dir=there).cleanup()  # modes say nothing about root, or mounts
    except OSError as error:
        raise mistake(
            where,
            f"{there} cannot be written: {error.strerror or error}",
            why=why,
            fix="mount it for writing, or name another folder",
        ) from error


def check_trainable(plan: Plan) -> None:
    """The trainer can run what is planned; raises UserError with everything it cannot."""
    from phalanx.plan.trainable import trainer_problems

    if problems := trainer_problems(plan.job, plan.layout, plan.cluster):
        raise UserError(problems)


def check_code(job: Job, *, allowed: bool, or_else: str = "") -> None:
    """A job that brings its own code needs a word of the person who runs it; `or_else` is another cure."""
    keys = needs_consent(job)
    if keys and not allowed:
        found = [problem for key in keys for problem in code_refused(key, _value_text(job, key)).problems]
        raise UserError([dataclasses.replace(one, fix=f"{one.fix}{or_else}") for one in found])


def _value_text(job: Job, key: str) -> str:
    section, _, name = key.partition(".")
    if key == "plugins.source":
        return f"{plural(len(job.plugins.source), 'line')} of Python"
    value = getattr(getattr(job, section), name)
    return value if isinstance(value, str) else ", ".join(value)


def counting_baselines(job: Job) -> dict[str, float]:
    """Bits per byte that counting single tokens and pairs reaches on the held-out text; a few seconds."""
    if has_own_data_only(job):
        return {}
    from phalanx.train.data.baselines import count_baselines as count
    from phalanx.train.data.token_samples import TokenDataset

    found = count(TokenDataset.open([Path(path) for path in job.data.paths], "train", vocab=job.model.vocab))
    return {f"{name}_bits_per_byte": value for name, value in found.items()}


def read_plan(path: str, resolved: ResolvedJob | None) -> Plan:
    """A plan from a file; it must be of the same job, if one is named beside it."""
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
    """The job of a plan that came without a job file: no line of it is known."""
    return ResolvedJob(job=plan.job, path=path, origins={})


def job_of(run: Run, plan: Plan) -> ResolvedJob:
    """The job of a run that goes on, with the lines of its file where they can be read."""
    try:
        return dataclasses.replace(load(run.job_toml), job=plan.job)
    except UserError:  # of an older version: its plan is what counts
        return job_in(plan, run.job_toml)


def check_here(plan: Plan) -> None:
    """This machine has the devices of the plan; raises UserError naming what to write instead."""
    machine = discover()
    ranks, device = plan.layout.devices, plan.cluster.accelerator
    if device.family == "cpu":
        most = MOST_RANKS_PER_CORE * machine.usable_cores
        if ranks > most:
            why = f"{plural(machine.usable_cores, 'core')} can run at most {plural(most, 'rank')}"
            raise mistake(
                plan.cluster.name, f"asks for {plural(ranks, 'rank')} on this machine", why=why, fix="use local:4"
            )
        return
    gpus, allowed = len(machine.gpus), allowed_ranks(plan.job.train.ranks_per_gpu, os.environ)
    if gpus * allowed < ranks:
        found = plural(gpus, "GPU")
        fix = (
            f"start a task per rank: srun --ntasks={ranks}, mpirun -n {ranks}, or torchrun on every host; "
            "or try it here with --cluster local:4"
        )
        if gpus:
            fix += f"; or let {-(-ranks // gpus)} ranks share a GPU with --ranks-per-gpu, which needs NCCL 2.30"
        raise mistake(
            plan.cluster.name,
            f"the plan needs {ranks:,} × {device.name}, but this machine has {found}"
            + (f", each shared by up to {allowed} ranks" if allowed > 1 and gpus else ""),
            why="phalanx train starts ranks on one machine only",
            fix=fix,
        )
    _check_libraries(shared=ranks > gpus, where=f"{ranks} ranks on {gpus} GPU{'s' if gpus != 1 else ''}")
    share = -(-ranks // gpus)
    need = share * plan.memory.total_bytes
    looked = [check_free(gpu, needed_bytes=need, where=f"GPU {gpu.index}") for gpu in machine.gpus[:ranks]]
    if problems := [one for one in looked if one is not None]:
        raise UserError(problems)


def check_gpus(allowed: int, *, where: str, tell: Callable[[str], None]) -> int:
    """GPUs of this machine that ranks can be started on, `allowed` on each; raises UserError for what is in the way."""
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
    """Say what ranks that share GPUs are started with; nothing on cores, or where none may."""
    allowed = allowed_ranks(plan.job.train.ranks_per_gpu, os.environ)
    if allowed > 1 and plan.cluster.accelerator.family != "cpu":
        tell(sharing_note(allowed, os.environ))


def sharing_note(share: int, environ: Mapping[str, str]) -> str:
    """What is done for ranks that share GPUs, in a line."""
    ours = shared_settings(environ)
    names = " ".join(f"{name}={value}" for name, value in {**SHARED, **environ}.items() if name in SHARED)
    kept = "" if len(ours) == len(SHARED) else " (yours are kept)"
    return f"  up to {share} ranks share a GPU, with {names}{kept}; they also share its memory and speed"


def _check_libraries(*, shared: bool, where: str) -> None:
    """Nothing that is preloaded, half alive or too old stands between the ranks and their GPUs."""
    problems = [*check_preload(os.environ), *check_mps(os.environ)]
    if shared and not problems:
        found = ask_nccl(os.environ)
        problem = found if isinstance(found, Problem) else check_nccl(found, where=where)
        problems = [problem] if problem is not None else []
    if problems:
        raise UserError(problems)


def resumed_plan(
    run: Run, *, overrides: Sequence[str], cluster: str | None, steps: int
) -> tuple[Plan, tuple[Problem, ...]]:
    """The plan to go on with: the run's own, or a new one when the layout may change; and what to warn about."""
    run.check_settings()
    old = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    if not run.saved_steps():
        lost = run.committed_step()
        what = "has no checkpoint to resume from"
        raise mistake(
            str(run.path),
            what if lost is None else f"{what}: that of step {lost:,} was saved, and is gone",
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
    changed = changed_keys(old, new)
    bends = [key for key in changed if key.startswith(BENDS_THE_CURVE) and key not in FIXED_OPTIM]
    refused = [key for key in changed if not key.startswith(FREE) and key not in bends]
    before, after = flat_settings(old), flat_settings(new)
    if refused:
        raise UserError(
            [
                Problem(
                    where=str(run.path),
                    what=f"{key} = {after.get(key)!r} cannot replace {before.get(key)!r} in a resumed run",
                    why="the checkpoint would not match, or the data would change",
                    fix="start a new run; a resumed one may change parallel.*, batch.micro, train.* and the cluster",
                )
                for key in refused
            ]
        )
    return tuple(
        Problem(
            where=str(run.path),
            what=f"{key} = {after.get(key)!r} instead of {before.get(key)!r}: the loss curve changes from here on",
        )
        for key in bends
    )


def changed_keys(old: Job, new: Job) -> list[str]:
    """Dotted keys whose values differ."""
    before, after = flat_settings(old), flat_settings(new)
    return [key for key in {**before, **after} if before.get(key) != after.get(key) and key != ONLY_SAID]


def flat_settings(job: Job) -> dict[str, Any]:
    """Every setting by its dotted key."""
    result: dict[str, Any] = {}
    for section, value in job_to_dict(job).items():
        if isinstance(value, dict):
            result |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            result[section] = value
    return result
