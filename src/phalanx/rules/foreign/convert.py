"""A configuration of another trainer as a job: read, completed, loaded, and written as a job file."""

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
    """What came of it; `text` is the equivalent job file.

    `missing` is what no plan can be made without: in `resolved` stand-ins take its place, and nothing may be planned.
    """

    resolved: ResolvedJob
    practice: Practice
    unmapped: tuple[Unmapped, ...]
    text: str
    trainer: str
    mapped: tuple[tuple[str, str], ...]  # (their key, our key)
    irrelevant: tuple[tuple[str, str], ...]  # (their key, why)
    missing: tuple[Problem, ...]
    devices: int  # as the file or the caller says; 0 is not said
    cluster: str  # spec of the job; empty where it is not known
    unknown: Mapping[str, str]  # job key -> why the file leaves its value open: nobody may judge by it
    their_keys: Mapping[str, str]  # job key -> the key that says it in this trainer's files
    settings: Mapping[str, ForeignSetting]  # every setting, by its own name and by the reader's word for it
    practice_keys: Mapping[str, str]  # field of `practice` -> the setting that changed it
    open_why: str  # why what the file leaves out may still be given; empty where it may not
    partial: str  # which setting makes it train a part of the weights only; empty where all are trained
    notes: tuple[str, ...]  # what a reader of the report should know, and no rule judges
    changed: str  # an argument of a fork's own that changes how a step is computed; empty where there is none


def convert_config(
    path: Path, kind: str, *, cluster: str | None = None, overrides: Sequence[str] = (), folder: Path | None = None
) -> ConvertedConfig:
    """Read a configuration of `kind`; raises UserError when it is none."""
    trainer = find_trainer(kind)
    variables, overrides = split_variables(overrides)
    read = trainer.read(path, variables)
    config = Conversion(
        file=str(path), title=trainer.title, leaves=read.leaves, open_why=read.open_why, notes=[*read.notes]
    )
    if not config.leaves:
        raise mistake(str(path), f"holds no settings of {trainer.title}", fix=trainer.example)
    trainer.translate(config)
    if trainer.name == "megatron":
        heed_deepspeed(config)
    config.values["parallel.framework"] = JobSetting(value=trainer.framework, note="whose efficiency the plan assumes")
    spec = cluster or _cluster_set(overrides)
    # What stands on the command line is relative to where the caller is, what stands in a job to the job's folder.
    found = resolve_cluster(spec, base=None if cluster else path.parent) if spec else None
    check_machines(config)
    devices = found.devices if found is not None else config.machines[0] * config.machines[1]
    complete_job(config, devices=devices, settings=overrides, habits=habits_of(trainer.name))
    _set_cluster(config, spec, found, named=bool(cluster))
    if not config.values.keys() & {"batch.global_sequences", "batch.global_tokens"}:
        config.add_missing("does not say how many sequences a step takes", GIVE_BATCH)
    changed: dict[str, Any] = config.practice
    practice = replace(habits_of(trainer.name), **changed)
    return _converted_config(config, trainer, practice, devices=devices, spec=spec, found=found, folder=folder)


_VARIABLE = re.compile(r"([A-Za-z_]\w*|\d{1,2})=(.*)", re.DOTALL)


def split_variables(overrides: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables of a script apart from keys of a job, which have a dot.

    >>> split_variables(["TP=8", "1=data", "model.vocab=50304"])
    ({'TP': '8', '1': 'data'}, ('model.vocab=50304',))
    """
    variables: dict[str, str] = {}
    keys: list[str] = []
    for one in overrides:
        found = _VARIABLE.fullmatch(one)
        if found is not None and found.group(1) not in ("name", "profile", "spec"):
            variables[found.group(1)] = found.group(2)
        else:
            keys.append(one)
    return variables, tuple(keys)


def _cluster_set(overrides: Sequence[str]) -> str:
    found = [
        one.partition("=")[2].strip("\"' ") for one in overrides if one.startswith(("cluster.spec=", "cluster.file="))
    ]
    return found[-1] if found else ""


def _set_cluster(config: Conversion, spec: str, found: Cluster | None, *, named: bool) -> None:
    hosts, each = config.machines
    said = f"{hosts} × {each} devices" if hosts and each else ""
    if found is None:
        what = "does not say what it runs on" + (f": {said} of an unknown kind" if said else "")
        config.add_missing(what, GIVE_CLUSTER)
        note = f"{said}: " if said else ""
        config.values["cluster.spec"] = JobSetting(
            value=UNKNOWN_CLUSTER, note=f'{note}name it, as "8xH100:{hosts or 16}"'
        )
        return
    note = "--cluster"
    if said and hosts * each != found.devices:
        note = f"--cluster, {found.devices:,} devices; the file says {said}"
        for key, settled in config.settled.items():
            if settled.text.startswith("cluster:"):
                config.leave_unmapped(key, f"--cluster has {found.devices:,} devices and goes before it")
    if not named:  # --set said it, and stands in the job already
        return
    for key in ("cluster.spec", "cluster.file"):
        config.values.pop(key, None)
    if spec.endswith(".toml") or "/" in spec:
        config.values["cluster.file"] = JobSetting(value=os.path.relpath(spec, Path(config.file).parent), note=note)
    else:
        config.values["cluster.spec"] = JobSetting(value=spec, note=note)


def _shown_value(key: str, value: object) -> str:
    """As the file has it, but for credentials: what is printed ends up in the logs of CI."""
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
    written = dict(config.values)  # as the file says them, also where no job may have them
    partial = partial_training(config, trainer.name)
    changed = changed_steps(config, trainer.name)
    if not config.missing:
        if partial or changed:  # no plan says how long its steps take
            _leave_steps(config, steps)
        resolved = _with_interval(config, None if partial or changed else steps, found)
    if config.missing:
        _leave_steps(config, steps)
        add_stand_ins(config)
        resolved = _load_converted(config)
        config.values = written
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
        mapped=tuple((key, one.text) for key, one in config.settled.items() if one.fate == "mapped"),
        irrelevant=tuple((key, one.text) for key, one in config.settled.items() if one.fate == "irrelevant"),
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
            one.text.removeprefix("practice: "): key
            for key, one in config.settled.items()
            if one.text.startswith("practice: ")
        },
    )


def _raw_settings(config: Conversion) -> dict[str, ForeignSetting]:
    """Every leaf under its own name, and under the reader's word for it where it has one."""
    found = dict(config.leaves)
    for name in (*config.names, *config.read_as):
        if (leaf := config.find_leaf(name)) is not None:
            found.setdefault(name, leaf)
    return {
        name: ForeignSetting(
            key=leaf.key,
            value=leaf.value,
            line=leaf.line,
            comment=leaf.comment,
            earlier=leaf.earlier,
            twice=leaf.twice,
        )
        for name, leaf in found.items()
    }


def _with_interval(config: Conversion, steps: JobSetting | None, found: Cluster | None) -> ResolvedJob:
    """Steps between checkpoints as seconds, with the predicted step of the same job."""
    resolved = _load_converted(config)
    if steps is None or not isinstance(steps.value, int) or found is None or "checkpoint.interval_s" in config.values:
        return resolved
    from phalanx.plan.make import make_plan  # numpy: only for those who save by steps

    try:
        # Every stage of a ramp is priced on its own; the seconds of a full step need none.
        job = resolved.job
        made = make_plan(replace(resolved, job=replace(job, batch=replace(job.batch, ramp=()))), found)
    except UserError:
        _leave_steps(config, steps)  # there is no plan, and gathering will say why
        return resolved
    step_s, wall_s = made.prediction.step_s, made.duration.wall_s
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
    """The job. Values that no job may have are told as what is missing is, and left out: the rest is judged on."""
    refused: list[Problem] = []
    for _ in range(MOST_TRIES):
        try:
            found = _load_strictly(config)
        except UserError as error:
            named = [key for one in error.problems for key in JOB_KEY.findall(one.what)]
            wrong = [key for key in dict.fromkeys(named) if key in config.values and not key.startswith("model.")]
            if not wrong or any(config.values[key].note.startswith("--") for key in wrong):
                raise  # the caller's own --set, or nothing that could be left out
            refused += error.problems
            for key in wrong:  # a default that takes its place is not what the file says
                del config.values[key]
                config.unknown.setdefault(key, error.problems[0].what)
            continue
        config.missing += [one for one in refused if one not in config.missing]
        return found
    raise UserError(refused)


def _load_strictly(config: Conversion) -> ResolvedJob:
    table: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for key, said in config.values.items():
        section, _, name = key.partition(".")
        if not name:
            table[key] = said.value
        else:
            inner = table.setdefault(section, {})
            assert isinstance(inner, dict)
            inner[name] = said.value
        origins[key] = _setting_origin(config, said)
    table.setdefault(
        "name", re.sub(r"[^a-z0-9._-]+", "-", Path(config.file).stem.lower()).lstrip("._-")[:63] or "imported"
    )
    return load_table(Path(config.file), table, origins)


def _setting_origin(config: Conversion, said: JobSetting) -> Origin:
    if said.note.startswith("--"):
        return Origin(kind="set", where=said.note)
    if said.key:
        return Origin(kind="file", where=f"{config.file}:{said.line}")
    if said.note.startswith("default of"):  # as good as written: leaving a key out is how its default is chosen
        return Origin(kind="file", where=f"{config.file} ({said.note})")
    return Origin(kind="derived", where=said.note or config.title)
