"""Conversion of another trainer's configuration to a job: read, completed, loaded, and rendered as a job file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.job.draft import Origin
from phalanx.job.load import ResolvedJob, load_table
from phalanx.job.schema import SECTIONS
from phalanx.rules.credential_text import is_secret
from phalanx.rules.evidence import ForeignSetting, Unmapped
from phalanx.rules.facts.trainers import Practice, habits_of
from phalanx.rules.foreign.adapters import changed_steps, partial_training
from phalanx.rules.foreign.conversion import NEVER, Conversion, JobSetting, their_keys, value_text
from phalanx.rules.foreign.finish import GIVE_BATCH, GIVE_CLUSTER, add_stand_ins, check_machines, complete_job
from phalanx.rules.foreign.job_text import UNKNOWN_CLUSTER, render_job_file
from phalanx.rules.foreign.readers import Trainer, find_trainer
from phalanx.rules.foreign.with_deepspeed import heed_deepspeed
from phalanx.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedConfig:
    """The result of a conversion; `text` is the equivalent job file.

    `missing` is information without which no plan can be made: `resolved` then contains stand-ins, and must not be
    planned.
    """

    resolved: ResolvedJob
    practice: Practice
    unmapped: tuple[Unmapped, ...]
    text: str
    trainer: str
    mapped: tuple[tuple[str, str], ...]  # (trainer's key, job key)
    irrelevant: tuple[tuple[str, str], ...]  # (trainer's key, reason)
    missing: tuple[Problem, ...]
    devices: int  # as given by the file or the caller; 0 if not given
    cluster: str  # spec of the job; empty if it is not known
    unknown: Mapping[str, str]  # job key -> why its value is not known: no rule may judge by it
    their_keys: Mapping[str, str]  # job key -> the key that sets it in this trainer's files
    settings: Mapping[str, ForeignSetting]  # every setting, by its own name and by the reader's name for it
    practice_keys: Mapping[str, str]  # field of `practice` -> the setting that changed it
    open_why: str  # why settings that the file leaves out may still be given; empty if they may not
    partial: str  # the setting that restricts training to a part of the weights; empty if all are trained
    notes: tuple[str, ...]  # remarks for the report that no rule judges
    changed: str  # a fork's argument that changes how a step is computed; empty if there is none


def convert_config(
    path: Path, kind: str, *, cluster: str | None = None, overrides: Sequence[str] = (), folder: Path | None = None
) -> ConvertedConfig:
    """Convert a configuration of `kind`; raise UserError if the file is not one.

    Args:
        path: The configuration file.
        kind: Name of the trainer.
        cluster: Cluster given on the command line; overrides the file's.
        overrides: Settings of --set: keys of the job, and variables of a script.
        folder: Folder of the job file to be written, for relative paths.
    """
    trainer = find_trainer(kind)
    variables, overrides = split_variables(overrides)
    read_config = trainer.read(path, variables)
    config = Conversion(
        file=str(path),
        title=trainer.title,
        leaves=read_config.leaves,
        open_why=read_config.open_why,
        notes=[*read_config.notes],
    )
    if not config.leaves:
        raise mistake(str(path), f"holds no settings of {trainer.title}", fix=trainer.example)
    trainer.translate(config)
    if trainer.name == "megatron":
        heed_deepspeed(config)
    config.values["parallel.framework"] = JobSetting(value=trainer.framework, note="whose efficiency the plan assumes")
    spec = cluster or _cluster_set(overrides)
    # A path on the command line is relative to the caller's folder, a path in a job to the job's folder.
    resolved_cluster = resolve_cluster(spec, base=None if cluster else path.parent) if spec else None
    check_machines(config)
    devices = resolved_cluster.devices if resolved_cluster is not None else config.machines[0] * config.machines[1]
    complete_job(config, devices=devices, settings=overrides, habits=habits_of(trainer.name))
    _set_cluster(config, spec, resolved_cluster, named=bool(cluster))
    if not config.values.keys() & {"batch.global_sequences", "batch.global_tokens"}:
        config.add_missing("does not say how many sequences a step takes", GIVE_BATCH)
    changed: dict[str, Any] = config.practice
    practice = replace(habits_of(trainer.name), **changed)
    return _converted_config(
        config, trainer, practice, devices=devices, spec=spec, found=resolved_cluster, folder=folder
    )


_VARIABLE = re.compile(r"([A-Za-z_]\w*|\d{1,2})=(.*)", re.DOTALL)


def split_variables(overrides: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Separate variables of a script from keys of a job, which have a dot.

    >>> split_variables(["TP=8", "1=data", "model.vocab=50304"])
    ({'TP': '8', '1': 'data'}, ('model.vocab=50304',))
    """
    variables: dict[str, str] = {}
    keys: list[str] = []
    for override in overrides:
        match = _VARIABLE.fullmatch(override)
        if match is not None and match.group(1) not in ("name", "profile", "spec"):
            variables[match.group(1)] = match.group(2)
        else:
            keys.append(override)
    return variables, tuple(keys)


def _cluster_set(overrides: Sequence[str]) -> str:
    specs = [
        override.partition("=")[2].strip("\"' ")
        for override in overrides
        if override.startswith(("cluster.spec=", "cluster.file="))
    ]
    return specs[-1] if specs else ""


def _set_cluster(config: Conversion, spec: str, found: Cluster | None, *, named: bool) -> None:
    hosts, devices_each = config.machines
    machines = f"{hosts} × {devices_each} devices" if hosts and devices_each else ""
    if found is None:
        problem = "does not say what it runs on" + (f": {machines} of an unknown kind" if machines else "")
        config.add_missing(problem, GIVE_CLUSTER)
        note = f"{machines}: " if machines else ""
        config.values["cluster.spec"] = JobSetting(
            value=UNKNOWN_CLUSTER, note=f'{note}name it, as "8xH100:{hosts or 16}"'
        )
        return
    note = "--cluster"
    if machines and hosts * devices_each != found.devices:
        note = f"--cluster, {found.devices:,} devices; the file says {machines}"
        for key, settled in config.settled.items():
            if settled.text.startswith("cluster:"):
                config.leave_unmapped(key, f"--cluster has {found.devices:,} devices and goes before it")
    # --set gave it, so it is in the job already
    if not named:
        return
    for key in ("cluster.spec", "cluster.file"):
        config.values.pop(key, None)
    if spec.endswith(".toml") or "/" in spec:
        config.values["cluster.file"] = JobSetting(value=os.path.relpath(spec, Path(config.file).parent), note=note)
    else:
        config.values["cluster.spec"] = JobSetting(value=spec, note=note)


def _shown_value(key: str, value: object) -> str:
    """Return a value as in the file, without credentials: the output may end up in logs of CI."""
    return "[looks like a credential]" if is_secret(f"{key}={value}") else value_text(value)


def _converted_config(
    config: Conversion,
    trainer: Trainer,
    practice: Practice,
    *,
    devices: int,
    spec: str,
    found: Cluster | None,
    folder: Path | None,
) -> ConvertedConfig:
    steps = config.values.pop("checkpoint.steps", None)
    # As the file has them, including values that no job may have
    original_values = dict(config.values)
    partial = partial_training(config, trainer.name)
    changed = changed_steps(config, trainer.name)
    if not config.missing:
        # No plan predicts how long its steps take
        if partial or changed:
            _leave_steps(config, steps)
        resolved = _with_interval(config, None if partial or changed else steps, found)
    if config.missing:
        _leave_steps(config, steps)
        add_stand_ins(config)
        resolved = _load_converted(config)
        config.values = original_values
    unmapped = tuple(
        Unmapped(key=key, value=_shown_value(key, config.leaves[key].value), why=settled.text)
        for key, settled in config.settled.items()
        if settled.fate == "unmapped"
    )
    return ConvertedConfig(
        resolved=resolved,
        practice=practice,
        unmapped=unmapped,
        text=render_job_file(config, name=resolved.job.name, unmapped=unmapped, folder=folder),
        trainer=trainer.name,
        mapped=tuple((key, settled.text) for key, settled in config.settled.items() if settled.fate == "mapped"),
        irrelevant=tuple(
            (key, settled.text) for key, settled in config.settled.items() if settled.fate == "irrelevant"
        ),
        missing=tuple(config.missing),
        devices=devices,
        cluster=spec,
        unknown=dict(config.unknown),
        their_keys=their_keys(config.theirs, title=config.title, arguments=trainer.name == "megatron"),
        settings=_raw_settings(config),
        open_why=config.open_why,
        partial=partial,
        changed=changed,
        notes=tuple(config.notes),
        practice_keys={
            settled.text.removeprefix("practice: "): key
            for key, settled in config.settled.items()
            if settled.text.startswith("practice: ")
        },
    )


def _raw_settings(config: Conversion) -> dict[str, ForeignSetting]:
    """Return every leaf under its own name, and under the reader's name if it has one."""
    leaves = dict(config.leaves)
    for name in (*config.names, *config.read_as):
        if (leaf := config.find_leaf(name)) is not None:
            leaves.setdefault(name, leaf)
    return {
        name: ForeignSetting(
            key=leaf.key,
            value=leaf.value,
            line=leaf.line,
            comment=leaf.comment,
            earlier=leaf.earlier,
            twice=leaf.twice,
        )
        for name, leaf in leaves.items()
    }


def _with_interval(config: Conversion, steps: JobSetting | None, found: Cluster | None) -> ResolvedJob:
    """Load the job with steps between checkpoints converted to seconds, by the predicted step time of the same job."""
    resolved = _load_converted(config)
    if steps is None or not isinstance(steps.value, int) or found is None or "checkpoint.interval_s" in config.values:
        return resolved
    # Imports numpy, which is only needed here
    from phalanx.plan.make import make_plan

    try:
        # Every stage of a ramp is priced separately; the time of a full step needs none.
        job = resolved.job
        plan = make_plan(replace(resolved, job=replace(job, batch=replace(job.batch, ramp=()))), found)
    except UserError:
        # There is no plan, and gathering the evidence reports why
        _leave_steps(config, steps)
        return resolved
    step_s, wall_s = plan.prediction.step_s, plan.duration.wall_s
    note = f"{steps.value:,} steps × {step_s:.3g} s as predicted"
    if steps.value == NEVER:
        note = f"{steps.note}: all {format_seconds(wall_s)} of the run, as predicted, are at stake"
    seconds = round(min(1e9, max(1e-3, steps.value * step_s if steps.value != NEVER else wall_s)), 3)
    config.values["checkpoint.interval_s"] = JobSetting(value=seconds, key=steps.key, note=note, line=steps.line)
    config.mark_used(steps.key, by="checkpoint.interval_s")
    return _load_converted(config)


def _leave_steps(config: Conversion, steps: JobSetting | None) -> None:
    if steps is None or not steps.key:
        return
    if steps.value == NEVER:
        config.mark_used(steps.key, by="practice: saves")
    else:
        config.leave_unmapped(
            steps.key, "given in steps; converting it to seconds needs a plan (model, batch and cluster)"
        )


MOST_TRIES = 6
JOB_KEY = re.compile(rf"\b((?:{'|'.join(('model', *SECTIONS))})\.[a-z_]+)")


def _load_converted(config: Conversion) -> ResolvedJob:
    """Load the job without the values that no job may have, which are reported as missing.

    Rules judge the other values.
    """
    refused: list[Problem] = []
    for _ in range(MOST_TRIES):
        try:
            resolved = _load_strictly(config)
        except UserError as error:
            job_keys = [key for problem in error.problems for key in JOB_KEY.findall(problem.what)]
            refused_keys = [
                key for key in dict.fromkeys(job_keys) if key in config.values and not key.startswith("model.")
            ]
            if not refused_keys or any(config.values[key].note.startswith("--") for key in refused_keys):
                raise  # the caller's own --set, or nothing that could be left out
            refused += error.problems
            # The default that replaces it is not what the file sets
            for key in refused_keys:
                del config.values[key]
                config.unknown.setdefault(key, error.problems[0].what)
            continue
        config.missing += [problem for problem in refused if problem not in config.missing]
        return resolved
    raise UserError(refused)


def _load_strictly(config: Conversion) -> ResolvedJob:
    table: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for key, setting in config.values.items():
        section, _, name = key.partition(".")
        if not name:
            table[key] = setting.value
        else:
            section_table = table.setdefault(section, {})
            assert isinstance(section_table, dict)
            section_table[name] = setting.value
        origins[key] = _setting_origin(config, setting)
    table.setdefault(
        "name", re.sub(r"[^a-z0-9._-]+", "-", Path(config.file).stem.lower()).lstrip("._-")[:63] or "imported"
    )
    return load_table(Path(config.file), table, origins)


def _setting_origin(config: Conversion, said: JobSetting) -> Origin:
    if said.note.startswith("--"):
        return Origin(kind="set", where=said.note)
    if said.key:
        return Origin(kind="file", where=f"{config.file}:{said.line}")
    # Counts as written: leaving a key out chooses its default
    if said.note.startswith("default of"):
        return Origin(kind="file", where=f"{config.file} ({said.note})")
    return Origin(kind="derived", where=said.note or config.title)
