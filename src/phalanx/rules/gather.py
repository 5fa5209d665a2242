"""Collection of the evidence for a path: a job file, a plan, a run folder, or another trainer's configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.files import read_head
from phalanx.io.path_probes import is_file, is_folder, path_exists, shown_path, unreachable
from phalanx.job.load import ResolvedJob, job_to_dict, load, load_waivers
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.plan.plan_cache import cached_plan
from phalanx.record.drill_record import drill_subject
from phalanx.record.run import Run, open_run
from phalanx.record.run_files import has_events, read_json
from phalanx.rules.evidence import Evidence, Unmapped
from phalanx.rules.facts.data_facts import DataFacts, folder_facts, megatron_facts, named_facts
from phalanx.rules.facts.drill_facts import DrillFacts, find_drills
from phalanx.rules.facts.host import HostFacts, this_host
from phalanx.rules.facts.parity import parity_of
from phalanx.rules.facts.trainers import PHALANX, Practice
from phalanx.rules.plan_consistency import require_coherent
from phalanx.rules.profiles import PROFILES, HardwareProfile, find_profile, profile_of, scaling_of

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts
    from phalanx.rules.foreign.convert import ConvertedConfig

Progress = Callable[[int, int], None]  # bytes read, total bytes
# Factor on a device's memory with which a layout that does not fit is planned, so that other rules can judge it.
ROOMY = 1000.0
FIRST_BYTES = 2**20  # of a JSON file, which must contain its schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The options of a check, in addition to the target."""

    overrides: tuple[str, ...] = ()
    cluster: str | Cluster | None = None
    profile: str | None = None
    plan: Path | Plan | None = None  # the plan of the checked job, in place of a new one
    drills: tuple[Path, ...] = ()
    look: bool = True  # inspect this machine if the job runs on it
    parity: tuple[Path, Path] | None = None  # two runs, one in a narrow format
    source: str = ""  # the configuration's trainer, such as "megatron"; empty detects it
    waivers: Path | None = None  # a file of [[waiver]] tables, for targets that cannot hold them


def gather_evidence(
    target: str,
    request: Request,
    *,
    today: date,
    environ: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Evidence:
    """Gather all evidence about a target; raises UserError when it is nothing that can be checked."""
    environ = dict(os.environ) if environ is None else environ
    evidence = _of_target(target, request, today=today, environ=environ, progress=progress)
    if request.waivers is not None:
        evidence = _with_waivers(evidence, request.waivers)
    if request.parity is None:
        return evidence
    first, second = (open_run(path) for path in request.parity)
    return replace(evidence, parity=parity_of(first, second))


def _with_waivers(evidence: Evidence, path: Path) -> Evidence:
    """Add the waivers of a file; their numbers continue after the job's own."""
    waivers, origins = load_waivers(path)
    first = len(evidence.all_waivers)
    lines = {}
    for key, origin in origins.items():
        _, number, name = key.split(".")
        lines[f"waiver.{first + int(number)}.{name}"] = origin
    return replace(evidence, waivers=waivers, origins={**evidence.origins, **lines})


def _of_target(
    target: str, request: Request, *, today: date, environ: dict[str, str], progress: Progress | None
) -> Evidence:
    target, name = split_recipe(target)
    if name:
        request = replace(request, overrides=(*request.overrides, f"recipe={name}"))
    path = Path(target)
    if _is_folder(path):
        refuse_extras(target, request, "a run")
        return of_run(_run_at(path), request, today=today, environ=environ, progress=progress)
    if is_plan(path):
        refuse_extras(target, request, "a plan")
        return of_plan(_plan_in(path), request, today=today, environ=environ, path=path)
    from phalanx.rules.foreign.detect import trainer_of_file

    if kind := request.source or trainer_of_file(path):
        return of_foreign(path, kind, request, today=today, environ=environ)
    resolved = load(path, overrides=request.overrides)
    plan = given_plan(request.plan, resolved) if request.plan is not None else None
    return of_job(resolved, request, today=today, environ=environ, made=plan)


def split_recipe(target: str) -> tuple[str, str]:
    """Split a target into a Python file and the name of a recipe in it.

    >>> split_recipe("config_registry.py::llama3_8b"), split_recipe("job.toml")
    (('config_registry.py', 'llama3_8b'), ('job.toml', ''))
    """
    file, mark, name = target.rpartition("::")
    return (file, name) if mark and file.endswith(".py") and name.isidentifier() else (target, "")


def _is_folder(path: Path) -> bool:
    """Return whether a target is a folder; raises UserError when the path does not exist."""
    if path_exists(path):
        return is_folder(path)
    problem = unreachable(path) or "there is no such file or folder"
    raise mistake(shown_path(path), problem, fix="name a job file, a plan, or the folder of a run")


def refuse_extras(target: str, request: Request, noun: str) -> None:
    """Raise UserError for options that cannot change a plan or a run, rather than ignore them."""
    options = {
        "--set": request.overrides,
        "--cluster": request.cluster,
        "--plan": request.plan,
        "--from": request.source,
    }
    for option, value in options.items():
        if value:
            raise mistake(
                target, f"{option} does not change {noun}", why="its job is settled", fix="check the job file with it"
            )


def _run_at(path: Path) -> Run:
    """Return the run in a folder, also one that has lost all files except its events."""
    try:
        return open_run(path)
    except UserError:
        if has_events(os.listdir(path)):
            return Run(path=path)
        raise


def is_plan(path: Path) -> bool:
    """Return whether a file is a plan as `phalanx plan --out` writes it."""
    if path.suffix != ".json" or not is_file(path):
        return False
    # For a file that cannot be read, the reader of job files gives the reason.
    return b'"phalanx.plan/' in read_head(path, FIRST_BYTES)


def _plan_in(path: Path) -> Plan:
    """Read the plan in a file; raises UserError when it is not a plan, or one whose parts contradict each other."""
    return require_coherent(Plan.from_dict(read_json(path), where=str(path)), str(path))


def given_plan(given: Path | Plan, resolved: ResolvedJob) -> Plan:
    """Return the plan of a file or in memory; raises UserError when it belongs to another job."""
    plan = given if isinstance(given, Plan) else _plan_in(given)
    path = Path("plan.json") if isinstance(given, Plan) else given
    # Sections whose values differ; waivers, profile and rules concern the specification only and do not change a
    # plan.
    before, after = job_to_dict(plan.job), job_to_dict(resolved.job)
    ignored = ("waiver", "profile", "rules")
    changed = [key for key in {**before, **after} if key not in ignored and before.get(key) != after.get(key)]
    if changed:
        raise mistake(
            str(path),
            f"is the plan of another job: {', '.join(changed[:4])} differ from {resolved.path}",
            fix=f"write it again: phalanx plan {resolved.path} --out {path}",
        )
    return plan


def of_job(
    resolved: ResolvedJob,
    request: Request,
    *,
    today: date,
    environ: dict[str, str],
    practice: Practice | None = None,
    unmapped: tuple[Unmapped, ...] = (),
    made: Plan | None = None,
) -> Evidence:
    """Return the evidence of a job, planned if possible; `made` is its plan if the caller already has it."""
    refusals: tuple[Problem, ...] = ()
    plan, cluster = made, made.cluster if made is not None else None
    if plan is None:
        plan, refusals, cluster = _plan_job(resolved, request, environ)
    profile = _hardware_profile(request, resolved.job.profile, cluster)
    devices = plan.layout.devices if plan is not None else (cluster.devices if cluster is not None else 1)
    return Evidence(
        target=str(resolved.path),
        job=resolved.job,
        practice=practice or PHALANX,
        profile=profile,
        scaling=scaling_of(devices),
        today=today,
        origins=resolved.origins,
        job_file=str(resolved.path),
        plan=plan,
        refusals=refusals,
        host=_host_facts(request, cluster),
        # Drills are records of our own trainer and prove nothing about another one.
        drills=_drill_records(request, environ, resolved.job, plan, resolved.path.parent) if practice is None else (),
        unmapped=unmapped,
        data=_own_data(resolved) if practice is None else None,
        devices_said=devices if plan is None and cluster is not None else 0,
    )


def _own_data(resolved: ResolvedJob) -> DataFacts | None:
    """Return facts about the job's data folders; None where the corpus is built or the data comes from code."""
    paths = resolved.job.data.paths
    return folder_facts(paths, resolved.path.parent) if paths and is_file(resolved.path) else None


def _plan_job(
    resolved: ResolvedJob, request: Request, environ: dict[str, str]
) -> tuple[Plan | None, tuple[Problem, ...], Cluster | None]:
    """Return the plan or the reasons why there is none, and the cluster. Raises UserError for an unknown cluster."""
    if isinstance(request.cluster, Cluster):
        cluster = request.cluster
    else:
        target = request.cluster or resolved.job.cluster.target
        cluster = resolve_cluster(target, base=None if request.cluster else resolved.path.parent)
    try:
        return cached_plan(resolved, cluster, environ=environ), (), cluster
    except UserError as error:
        return _plan_without_memory(resolved, cluster, error, environ), error.problems, cluster


def _plan_without_memory(
    resolved: ResolvedJob, cluster: Cluster, error: UserError, environ: dict[str, str]
) -> Plan | None:
    """Plan a fixed layout that does not fit into memory as if it did, so that the other rules can judge it.

    MEM001 reports that it does not fit. A free search is not repeated: it would choose a layout that the user did
    not request.
    """
    job = resolved.job
    if job.parallel.mode != "fixed" or not any("does not fit" in problem.what for problem in error.problems):
        return None
    device = cluster.accelerator
    roomy = replace(device, memory_bytes=max(1.0, device.memory_bytes) * ROOMY)
    try:
        plan = cached_plan(resolved, replace(cluster, accelerator=roomy), environ=environ)
    except UserError:
        return None
    # The plan's usable bytes are those of the enlarged device: scale them back.
    memory = replace(plan.memory, device_bytes=device.memory_bytes, usable_bytes=plan.memory.usable_bytes / ROOMY)
    fitting = tuple(alternative for alternative in plan.alternatives if alternative.memory_bytes <= memory.usable_bytes)
    return replace(plan, cluster=cluster, memory=memory, alternatives=fitting, pareto=())


def of_plan(
    plan: Plan, request: Request, *, today: date, environ: dict[str, str], path: Path | None = None
) -> Evidence:
    """Return the evidence of a plan, from a file or in memory.

    The job comes from the plan, so its keys have no lines.
    """
    return Evidence(
        target=str(path) if path is not None else plan.job.name,
        job=plan.job,
        practice=PHALANX,
        profile=_hardware_profile(request, plan.job.profile, plan.cluster),
        scaling=scaling_of(plan.layout.devices),
        today=today,
        plan=plan,
        plan_file=str(path) if path is not None else "",
        host=_host_facts(request, plan.cluster),
        drills=_drill_records(request, environ, plan.job, plan, path.parent if path is not None else Path()),
    )


def of_run(
    run: Run, request: Request, *, today: date, environ: dict[str, str], progress: Progress | None = None
) -> Evidence:
    """Return the evidence of a run folder: its resolved job, its plan, and the events of all ranks."""
    # Deferred: a check of a job does not need the event readers.
    from phalanx.rules.log.stream import read_log

    return with_log(before_log(run, request, today=today, environ=environ), read_log(run, progress=progress))


def before_log(run: Run, request: Request, *, today: date, environ: dict[str, str]) -> Evidence:
    """Return the evidence of a run without its events; it is fixed when the run starts, so it is read once."""
    damaged: dict[str, Problem] = {}
    resolved, plan = _job_of(run, damaged), _plan_of(run, damaged)
    job = resolved.job if resolved is not None else (plan.job if plan is not None else None)
    cluster = plan.cluster if plan is not None else None
    return Evidence(
        target=str(run.path),
        job=job,
        practice=PHALANX,
        profile=_hardware_profile(request, job.profile if job is not None else "auto", cluster),
        scaling=scaling_of(plan.layout.devices if plan is not None else 1),
        today=today,
        origins=resolved.origins if resolved is not None else {},
        job_file=str(run.job_toml) if resolved is not None else "",
        plan=plan,
        plan_file=str(run.plan_json) if plan is not None else "",
        host=_host_facts(request, cluster),
        drills=_drill_records(request, environ, job, plan, run.path, beside=run.path.parent),
        damaged=damaged,
    )


def with_log(evidence: Evidence, log: LogFacts) -> Evidence:
    """Add the run log to the evidence; the scaling class is then that of the ranks that ran."""
    scaling = scaling_of(log.world) if log.world else evidence.scaling
    return replace(evidence, log=log, scaling=scaling)


def _job_of(run: Run, damaged: dict[str, Problem]) -> ResolvedJob | None:
    try:
        return load(run.job_toml)
    except UserError as error:  # an older run, or a damaged one: the plan may still hold the job
        _note_damage(damaged, "J", run.job_toml, error)
        return None


def _plan_of(run: Run, damaged: dict[str, Problem]) -> Plan | None:
    try:
        return _plan_in(run.plan_json)
    except UserError as error:
        _note_damage(damaged, "P", run.plan_json, error)
        return None


def _note_damage(damaged: dict[str, Problem], letter: str, path: Path, error: UserError) -> None:
    """Record that a file of the run cannot be used; a file that does not exist is not damaged."""
    if os.path.lexists(path):
        first = error.problems[0]
        where = first.where.removeprefix(f"{path.parent}{os.sep}")
        message = f"cannot be used: {first.what}"
        damaged[letter] = Problem(where=where, what=message, fix=f"put {path.name} back as phalanx train wrote it")


def of_foreign(path: Path, kind: str, request: Request, *, today: date, environ: dict[str, str]) -> Evidence:
    """Return the evidence of another trainer's configuration, as far as the job schema has keys for it."""
    from phalanx.rules.foreign.convert import convert_config

    if request.drills:
        raise mistake(
            str(path),
            "--drills says nothing of another trainer",
            why="a drill breaks a run of Phalanx",
            fix="leave --drills out; a waiver may name what was drilled elsewhere",
        )
    if isinstance(request.cluster, Cluster):
        problem = f"cluster = {request.cluster.name[:60]!r} is of type Cluster"
        raise mistake(str(path), problem, fix='give a spec such as "8xH100:4", or a cluster file')
    config = convert_config(path, kind, cluster=request.cluster, overrides=request.overrides)
    recipe = next((override.partition("=")[2] for override in request.overrides if override.startswith("recipe=")), "")
    target = f"{path}::{recipe}" if recipe and path.suffix == ".py" else str(path)
    refusals = config.missing or _part_of_weights(config, path)
    # Placeholders fill in for model, batch or cluster: no plan may be made from them.
    if refusals:
        cluster = resolve_cluster(config.cluster, base=path.parent) if config.cluster else None
        return Evidence(
            target=target,
            job=config.resolved.job,
            practice=config.practice,
            profile=_hardware_profile(request, config.resolved.job.profile, cluster),
            scaling=scaling_of(max(1, config.devices)),
            today=today,
            origins=config.resolved.origins,
            job_file=str(path),
            refusals=refusals,
            devices_said=config.devices,
            their_keys=config.their_keys,
            settings=config.settings,
            practice_keys=config.practice_keys,
            open_why=config.open_why,
            file_notes=config.notes,
            partial=config.partial,
            changed=config.changed,
            data=_foreign_data(config, path),
            unmapped=_without_waivers(config.unmapped),
        )
    evidence = of_job(
        config.resolved,
        request,
        today=today,
        environ=environ,
        practice=config.practice,
        unmapped=_without_waivers(config.unmapped),
    )
    return replace(
        evidence,
        target=target,
        their_keys=config.their_keys,
        settings=config.settings,
        practice_keys=config.practice_keys,
        open_why=config.open_why,
        file_notes=config.notes,
        partial=config.partial,
        changed=config.changed,
        data=_foreign_data(config, path),
    )


def _part_of_weights(found: ConvertedConfig, path: Path) -> tuple[Problem, ...]:
    """Return why there can be no plan: an adapter, or an argument that a fork added.

    Memory, speed and checkpoints of an adapter are not those of the whole model, which a plan describes.
    """
    if found.changed and not found.partial:
        message = f"computes its steps in a way of its own ({found.changed}), and the plan is of the original"
        return (Problem(where=str(path), what=message, fix="nothing: what an argument of a fork does is not known"),)
    if not found.partial:
        return ()
    message = f"trains a part of its weights only ({found.partial}), and the plan is of all of them"
    return (Problem(where=str(path), what=message, fix="nothing: memory and speed of an adapter are not predicted"),)


DATA_PATHS = ("data_path", "train_data_path")
FEW_STEPS = 100  # our choice, the same number as in OPT001
OTHER_DATA = ("data_args_path", "per_split_data_args_path", "mock_data", "train_data_exact_num_epochs", "dataset_path")


def _foreign_data(found: ConvertedConfig, path: Path) -> DataFacts | None:
    """Return facts about the data of another trainer's file; None if they are unknown or need not be stated there."""
    settings = {name: found.settings.get(name) for name in (*DATA_PATHS, *OTHER_DATA, "training.dataset")}
    if found.trainer == "torchtitan":
        corpus = settings["training.dataset"]
        return named_facts(str(corpus.value), setting="training.dataset") if corpus is not None else None
    if found.trainer != "megatron" or path.suffix in (".yaml", ".yml"):
        return None
    for name in DATA_PATHS:
        if (setting := settings[name]) is not None and setting.value is not None:
            words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
            return megatron_facts([str(word) for word in words], path.parent, setting=name)
    other_setting = next((name for name in OTHER_DATA if settings[name] is not None), "")
    # Paths in a variable that holds several arguments ("$DATA_ARGS") cannot be read: then nothing is known.
    is_training = found.settings.keys() & {"train_iters", "train_samples"} and not _is_short(found)
    # Conversion of a checkpoint into another format trains nothing.
    converts = found.settings.keys() >= {"load_dir", "save_dir"}
    # Forks have names of their own for the data (--train-weighted-split-paths-path, --dataset-config); image data is
    # mocked.
    own_words = re.compile(r"data|corpus|blend|split_paths|img_|vision")
    names_data = any(own_words.search(name.lower().replace("-", "_")) for name in found.settings)
    names_data = names_data or any(setting.is_own_flag for setting in found.unmapped)
    if not other_setting and (not is_training or converts or names_data or found.open_why):
        return None
    return DataFacts(named=1 if other_setting else 0, setting=other_setting)


def _is_short(found: ConvertedConfig) -> bool:
    """Return whether a Megatron script runs at most FEW_STEPS steps, a test for which forks make up their data."""
    steps = found.settings.get("train_iters")
    text = str(steps.value) if steps is not None else ""
    return text.isdigit() and int(text[:9]) <= FEW_STEPS


def _without_waivers(unmapped: Sequence[Unmapped]) -> tuple[Unmapped, ...]:
    """Report all waivers of another trainer's file as one unmapped setting that names the option to use instead."""
    kept_settings = tuple(setting for setting in unmapped if setting.key.partition(".")[0] != "waiver")
    if len(kept_settings) == len(unmapped):
        return kept_settings
    return (
        *kept_settings,
        Unmapped(key="waiver", value="[[waiver]]", why="is not read here: give it with --waivers FILE"),
    )


def _hardware_profile(request: Request, wanted: str, cluster: Cluster | None) -> HardwareProfile:
    if request.profile:
        return find_profile(request.profile)
    if wanted != "auto":
        return find_profile(wanted)
    return profile_of(cluster) if cluster is not None else PROFILES["custom"]


def _host_facts(request: Request, cluster: Cluster | None) -> HostFacts | None:
    """Return facts about this machine if the job is to run on it, else None."""
    if not request.look or cluster is None or not cluster.name.startswith("local"):
        return None
    return this_host()


def _drill_records(
    request: Request,
    environ: dict[str, str],
    job: Job | None,
    plan: Plan | None,
    base: Path,
    *,
    beside: Path | None = None,
) -> tuple[DrillFacts, ...]:
    """Return the drill records, each compared with this job; `base` is the folder of the job's relative paths."""
    roots: Sequence[Path] = (*request.drills, *([beside] if beside is not None else []))
    subject = None
    if job is not None and plan is not None:
        subject = drill_subject(job_to_dict(job), asdict(plan.layout), base=base)
    return find_drills(roots, environ=environ, subject=subject)
