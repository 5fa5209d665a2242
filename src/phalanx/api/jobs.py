"""Job files: read one, write a first one, translate another trainer's, and show where every value comes from."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import Overrides, PublicResult, Tell, warn
from phalanx.errors import Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.tables import text_table
from phalanx.job.load import ResolvedJob
from phalanx.job.load import load as load_file
from phalanx.job.schema import Job
from phalanx.job.template import TINY

if TYPE_CHECKING:
    from phalanx.job.model import Preset
    from phalanx.plan.inputs import InputFindings
    from phalanx.record.account.communication import Communication
    from phalanx.record.run import Run
    from phalanx.rules.foreign.convert import ConvertedConfig

AnyJob = str | Path | ResolvedJob | Job
LOCAL = "local"


def load(path: str | Path, *, overrides: Overrides = ()) -> ResolvedJob:
    """Read a job file; raises one UserError with every mistake in it, each with its line.

    `overrides` change settings as `--set` does: `["parallel.tensor=8"]` or `{"parallel.tensor": 8}`.

    >>> job = load("examples/llama-3-8b-64xH100.toml", overrides={"parallel.tensor": 8})
    >>> job.job.parallel.tensor
    8
    """
    return load_file(path, overrides=override_texts(overrides))


def override_texts(overrides: Overrides) -> list[str]:
    """Overrides as `--set` takes them.

    >>> override_texts({"optim.lr": 3e-4, "data.shuffle": True, "model.preset": "gpt2"})
    ['optim.lr=0.0003', 'data.shuffle=true', 'model.preset="gpt2"']
    """
    if not isinstance(overrides, Mapping):
        return list(overrides)
    from phalanx.io.toml import to_toml

    return [f"{key}={to_toml({'v': value}).strip().removeprefix('v = ')}" for key, value in overrides.items()]


def read_job(job: AnyJob, overrides: Overrides = (), *, where: str = "phalanx") -> ResolvedJob:
    """The job of a path, of what `load` returned, or of a bare Job, whose relative paths start from this folder."""
    if isinstance(job, str | Path):
        return load(job, overrides=overrides)
    if not isinstance(job, Job | ResolvedJob):
        raise mistake(
            where,
            f"job = {str(job)[:60]!r} is of type {type(job).__name__}",
            fix="pass the result of phalanx.load, or a path",
        )
    if overrides:
        raise mistake(where, "overrides need a job file", fix="give them to phalanx.load")
    return job if isinstance(job, ResolvedJob) else ResolvedJob(job=job, path=Path("job.toml"), origins={})


def look_at_files(resolved: ResolvedJob, tell: Tell) -> InputFindings:
    """The data, tokenizer, weights and code that a job names. Contradictions raise UserError; what is not here is told.

    For functions that start nothing: a job may be planned on a machine that has none of its files.
    """
    from phalanx.plan.inputs import look_at_inputs

    found = look_at_inputs(resolved.job, resolved.path.parent, origins=resolved.origins)
    if found.refused:
        raise UserError(found.refused)
    for line in found.remarks:
        tell(line)
    warn(found.missing, tell)
    return found


# ---- show ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobTable(PublicResult):
    """Every resolved value of a job and where it came from; of a run, also how its ranks communicate."""

    resolved: ResolvedJob
    run: Run | None
    communication: Communication | None

    def __str__(self) -> str:
        lines = [job_table(self.resolved)]
        if self.run is not None:
            from phalanx.record.account.communication import communication_lines

            found = communication_lines(self.communication) if self.communication is not None else None
            lines += ["", "COMMUNICATION", *(f"  {line}" for line in found or ["no rank has started yet"])]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Path, job, origins, and values that follow from others."""
        from phalanx.io.codec import json_values
        from phalanx.job.load import job_to_dict, job_to_rows

        tokens = auto_tokens(self.resolved)
        shown = {
            "path": str(self.resolved.path),
            "job": job_to_dict(self.resolved.job),
            "origins": {key: origin for key, _, origin in job_to_rows(self.resolved)},
            "derived": {"data.tokens": tokens} if tokens else {},
        }
        return shown if self.run is None else {**shown, "communication": json_values(self.communication)}


def show(job: AnyJob, *, overrides: Overrides = ()) -> JobTable:
    """Every value of a job, or of the job of a run folder, and where it came from."""
    run = None
    if isinstance(job, str | Path) and Path(job).is_dir():
        from phalanx.record.run import open_run

        run = open_run(job)
        job = run.job_toml
    resolved = read_job(job, overrides, where="phalanx.show")
    if run is None:
        return JobTable(resolved=resolved, run=None, communication=None)
    from phalanx.record.account.communication import read_communication
    from phalanx.record.archive.history import RunHistory

    return JobTable(resolved=resolved, run=run, communication=read_communication(RunHistory.open(run)))


def job_table(resolved: ResolvedJob) -> str:
    """Key, value and origin in three columns, a blank line between sections."""
    from phalanx.job.key_rules import shown_value
    from phalanx.job.load import job_to_rows
    from phalanx.job.schema import TOKENS_PER_PARAMETER

    def cell(value: object) -> str:
        if value is None:
            return "not given"
        return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else shown_value(value, limit=48)

    rows = [(key, cell(value), origin) for key, value, origin in job_to_rows(resolved)]
    if tokens := auto_tokens(resolved):
        note = f"{TOKENS_PER_PARAMETER} per parameter: {tokens:_}"
        rows = [(key, value, f"{origin}; {note}" if key == "data.tokens" else origin) for key, value, origin in rows]
    lines: list[str] = []
    section = ""
    for (key, _, _), line in zip(rows, text_table(rows), strict=True):
        if "." in key and key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def auto_tokens(resolved: ResolvedJob) -> int:
    """What `data.tokens = "auto"` comes to for this model; 0 where the job names a number."""
    from phalanx.job.schema import TOKENS_PER_PARAMETER
    from phalanx.plan.parameter_counts import count_parameters

    if resolved.job.data.tokens != "auto":
        return 0
    return TOKENS_PER_PARAMETER * count_parameters(resolved.job.model).total


# ---- init ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NewJob(PublicResult):
    """A job file that was written, and the commands that come next."""

    path: str
    model: str
    cluster: str
    next_steps: tuple[str, ...]

    def __str__(self) -> str:
        return self.path

    def to_dict(self) -> dict[str, Any]:
        """What was written."""
        return {"path": self.path, "model": self.model, "cluster": self.cluster}


def init(path: str | Path = "job.toml", *, model: str = TINY, cluster: str = LOCAL, force: bool = False) -> NewJob:
    """Write a commented job file that works as it stands; an existing file is kept unless `force`."""
    from phalanx.job.template import render_template, vocab_of
    from phalanx.plan.parameter_counts import count_parameters

    file, preset = Path(path), _known_preset(model)
    devices = 0
    if cluster != LOCAL:  # an unknown cluster is refused before a file names it
        from phalanx.hardware.cluster import resolve_cluster  # reads the accelerator tables

        found = resolve_cluster(cluster, base=file.parent)
        devices = found.devices if found.hosts > 1 else 0
    text = render_template(
        file=str(path),
        name=job_name(file),
        preset=preset,
        cluster=cluster,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        parameters=count_parameters(replace(preset.model(), vocab=vocab_of(preset))).total,
    )
    _write_new(file, text, force=force)
    steps = tuple(_next_steps(file, model=model, devices=devices))
    return NewJob(path=str(file), model=model, cluster=cluster, next_steps=steps)


def job_name(path: Path) -> str:
    """A legal job name from a file name.

    >>> job_name(Path("/tmp/My first run.toml"))
    'my-first-run'
    """
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).lstrip("._-")[:63] or "job"


def _known_preset(name: str) -> Preset:
    from phalanx.job.model import known_presets

    known = known_presets()
    if name in known:
        return known[name]
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
    raise mistake("--model", f'"{name[:60]}" is not a known model', fix=fix)


def _next_steps(path: Path, *, model: str, devices: int) -> list[str]:
    """Commands that work as they stand, from the current folder, each with what it is for behind a #."""
    from phalanx.job.template import DATA

    job, data = shlex.quote(str(path)), shlex.quote(str(path.parent / DATA))
    build = f"phalanx data build {data}"
    steps = [
        (f"phalanx plan {job}", "the layout, its time, memory and cost; needs no data"),
        (f"{build} --corpus offline-english", "sample text, downloaded once; or name your own files and folders"),
        (f"phalanx train {job}", "Ctrl-C saves; phalanx train --resume RUN continues")
        if not devices
        else (f"srun --ntasks={devices} phalanx train {job}", "on the cluster; or torchrun, mpirun: docs/training.md"),
    ]
    if model != TINY:
        steps[1] = (f"{build} --corpus offline-english", "sample text, downloaded once")
        steps.insert(2, (f"# {build} YOUR_TEXT --tokenizer tokenizer.json", f"your own, with the tokenizer of {model}"))
    return text_table([(command, f"# {why}") for command, why in steps])


def _write_new(path: Path, text: str, *, force: bool) -> None:
    from phalanx.io.files import replace_text

    try:
        if force:
            replace_text(path, text)
            return
        # "x" makes the check and the creation one act: two calls at once cannot both win.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise mistake(
            str(path), "exists already", why="init never overwrites on its own", fix="name another file, or add --force"
        ) from error
    except (IsADirectoryError, FileNotFoundError, NotADirectoryError) as error:
        raise mistake(
            str(path), f"cannot be written: {error.strerror}", fix="name a file in a folder that exists"
        ) from error
    except OSError as error:
        raise SystemFailure(Problem(where=str(path), what=f"cannot be written: {error.strerror or error}")) from error


# ---- import ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ImportedJob(PublicResult):
    """Another trainer's configuration as a job file, and what of it could not be translated."""

    converted: ConvertedConfig
    path: Path | None  # where it was written

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.converted.text.removesuffix("\n")

    def to_dict(self) -> dict[str, Any]:
        """The job file's text and the fate of every setting."""
        found = self.converted
        return {
            "trainer": found.trainer,
            "path": str(self.path) if self.path is not None else None,
            "job": found.text,
            "cluster": found.cluster or None,
            "mapped": [{"key": key, "job_key": ours} for key, ours in found.mapped],
            "irrelevant": [{"key": key, "why": why} for key, why in found.irrelevant],
            "unmapped": [{"key": one.key, "value": one.value, "why": one.why} for one in found.unmapped],
            "missing": [{"what": one.what, "fix": one.fix} for one in found.missing],
        }


def import_job(
    path: str | Path,
    *,
    trainer: str = "",
    cluster: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    overrides: Overrides = (),
) -> ImportedJob:
    """Translate a configuration of torchtitan, Megatron-LM, DeepSpeed, Accelerate or NeMo into a job file.

    Nothing is dropped silently: the result and the file list every setting that has no place in a job. Without `out`
    nothing is written. Raises UserError where the model or the batch cannot be told.
    """
    from phalanx.io.files import write_text
    from phalanx.rules.foreign.convert import convert_config, find_trainer

    file, target = Path(path), Path(out) if out else None
    if target is not None and target.exists() and not force:
        raise mistake(
            str(target),
            "exists already",
            why="import never overwrites on its own",
            fix="name another --out, or add --force",
        )
    found = convert_config(
        file,
        find_trainer(trainer or _recognised_trainer(file)).name,
        cluster=cluster,
        overrides=override_texts(overrides),
        folder=target.parent if target is not None else None,
    )
    # Without a model or a batch the job file would not load; without a cluster it says so.
    lacking: Sequence[Problem] = [one for one in found.missing if "--cluster" not in one.fix]
    if lacking:
        raise UserError(lacking)
    if target is not None:
        write_text(target, found.text, fix="name another --out")
    return ImportedJob(converted=found, path=target)


def _recognised_trainer(path: Path) -> str:
    from phalanx.io.files import read_text
    from phalanx.rules.foreign.convert import TRAINERS
    from phalanx.rules.foreign.detect import trainer_of_file

    if not path.is_file():
        read_text(path, noun="configuration")  # says what is wrong with it
    kind = trainer_of_file(path)
    if not kind:
        raise mistake(
            str(path),
            "is not a configuration that Phalanx recognises",
            fix=f"say whose it is with --from: {', '.join(TRAINERS)}",
        )
    return kind
