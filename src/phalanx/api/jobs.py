"""Job files: read one, translate another trainer's, and show the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import Overrides, PublicResult, Tell, warn
from phalanx.errors import Problem, UserError, mistake
from phalanx.io.path_probes import is_file, is_folder, path_exists
from phalanx.job.load import ResolvedJob
from phalanx.job.load import load as load_file
from phalanx.job.schema import Job

if TYPE_CHECKING:
    from phalanx.plan.inputs import InputFindings
    from phalanx.record.account.communication import Communication
    from phalanx.record.run import Run
    from phalanx.rules.foreign.convert import ConvertedConfig

AnyJob = str | Path | ResolvedJob | Job
LOCAL = "local"


def load(path: str | Path, *, overrides: Overrides = ()) -> ResolvedJob:
    """Read a job file; raise one UserError with every mistake in it, each with its line.

    `overrides` change settings as `--set` does: `["parallel.tensor=8"]` or `{"parallel.tensor": 8}`.

    >>> job = load("examples/llama-3-8b-64xH100.toml", overrides={"parallel.tensor": 8})
    >>> job.job.parallel.tensor
    8
    """
    return load_file(path, overrides=override_texts(overrides))


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides in the form of `--set`.

    >>> override_texts({"optim.lr": 3e-4, "data.shuffle": True, "model.preset": "gpt2"})
    ['optim.lr=0.0003', 'data.shuffle=true', 'model.preset="gpt2"']
    """
    if not isinstance(overrides, Mapping):
        return list(overrides)
    from phalanx.io.toml import to_toml

    return [f"{key}={to_toml({'v': value}).strip().removeprefix('v = ')}" for key, value in overrides.items()]


def read_job(job: AnyJob, overrides: Overrides = (), *, where: str = "phalanx") -> ResolvedJob:
    """Return the job of a path, of a result of `load`, or of a bare Job.

    Relative paths of a bare Job start in the current folder.
    """
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


def job_as_file(job: AnyJob, runs: Path) -> str:
    """Return the file of a job; write a job in memory to the runs folder, since a drill record names its file."""
    if isinstance(job, str | Path):
        return str(job)
    import hashlib

    from phalanx.io.files import write_text
    from phalanx.io.toml import to_toml
    from phalanx.job.load import job_to_dict
    from phalanx.train.prepare import with_absolute_files

    absolute_job = with_absolute_files(read_job(job, where="phalanx.drill")).job
    text = to_toml(job_to_dict(absolute_job))
    path = runs / f"{absolute_job.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, fix="name another folder with runs=")
    return str(path)


def look_at_files(resolved: ResolvedJob, tell: Tell) -> InputFindings:
    """Check the data, tokenizer, weights and code that a job names.

    Contradictions raise UserError; missing files are printed.

    For functions that start nothing: a job may be planned on a machine that has none of its files.
    """
    from phalanx.plan.inputs import look_at_inputs

    findings = look_at_inputs(resolved.job, resolved.path.parent, origins=resolved.origins)
    if findings.refused:
        raise UserError(findings.refused)
    for line in findings.remarks:
        tell(line)
    warn(findings.missing, tell)
    return findings


# ---- show ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobTable(PublicResult):
    """Every resolved value of a job and its origin; of a run, also how its ranks communicate."""

    resolved: ResolvedJob
    run: Run | None
    communication: Communication | None

    def __str__(self) -> str:
        lines = [str(self.resolved)]
        if self.run is not None:
            from phalanx.record.account.communication import communication_lines

            lines_found = communication_lines(self.communication) if self.communication is not None else None
            lines += ["", "COMMUNICATION", *(f"  {line}" for line in lines_found or ["no rank has started yet"])]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<JobTable of {self.run!r}>" if self.run is not None else f"<JobTable of {self.resolved!r}>"

    def to_dict(self) -> dict[str, Any]:
        """Return path, job, origins, and values that follow from others."""
        from phalanx.io.codec import json_values
        from phalanx.job.load import job_to_dict, job_to_rows
        from phalanx.job.text import auto_tokens

        tokens = auto_tokens(self.resolved.job)
        values = {
            "path": str(self.resolved.path),
            "job": job_to_dict(self.resolved.job),
            "origins": {key: origin for key, _, origin in job_to_rows(self.resolved)},
            "derived": {"data.tokens": tokens} if tokens else {},
        }
        return values if self.run is None else {**values, "communication": json_values(self.communication)}


def show(job: AnyJob, *, overrides: Overrides = ()) -> JobTable:
    """Return every value of a job, or of the job of a run folder, and its origin.

    >>> show("examples/drill.toml").to_dict()["origins"]["batch.micro"]
    'examples/drill.toml:25'
    """
    run = None
    if isinstance(job, str | Path) and is_folder(job):
        from phalanx.record.run import open_run

        run = open_run(job)
        job = run.job_toml
    resolved = read_job(job, overrides, where="phalanx.show")
    if run is None:
        return JobTable(resolved=resolved, run=None, communication=None)
    from phalanx.record.account.communication import read_communication
    from phalanx.record.archive.history import RunHistory

    return JobTable(resolved=resolved, run=run, communication=read_communication(RunHistory.open(run)))


# ---- import ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ImportedJob(PublicResult):
    """Another trainer's configuration as a job file, and the settings that could not be translated."""

    converted: ConvertedConfig
    path: Path | None  # the file it was written to

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.converted.text.removesuffix("\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the job file's text and the result for every setting."""
        converted = self.converted
        return {
            "trainer": converted.trainer,
            "path": str(self.path) if self.path is not None else None,
            "job": converted.text,
            "cluster": converted.cluster or None,
            "mapped": [{"key": key, "job_key": job_key} for key, job_key in converted.mapped],
            "irrelevant": [{"key": key, "why": reason} for key, reason in converted.irrelevant],
            "unmapped": [
                {"key": setting.key, "value": setting.value, "why": setting.why} for setting in converted.unmapped
            ],
            "missing": [{"what": gap.what, "fix": gap.fix} for gap in converted.missing],
            "unknown": [{"job_key": key, "why": reason} for key, reason in converted.unknown.items()],
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
    """Translate a configuration of another trainer (Megatron-LM, torchtitan, DeepSpeed, NeMo …) into a job file.

    Nothing is dropped silently: the result and the file list every setting that has no place in a job. Without `out`
    nothing is written. Raises UserError if the model or the batch cannot be determined.

    >>> print(import_job("torchtitan.toml", cluster="8xH100:4", out="job.toml"))  # doctest: +SKIP
    """
    from phalanx.io.files import write_text
    from phalanx.rules.foreign.convert import convert_config
    from phalanx.rules.foreign.readers import find_trainer

    file, target = Path(path), Path(out) if out else None
    if target is not None and path_exists(target) and not force:
        raise mistake(
            str(target),
            "exists already",
            why="import never overwrites on its own",
            fix="name another --out, or add --force",
        )
    converted = convert_config(
        file,
        find_trainer(trainer or _recognised_trainer(file)).name,
        cluster=cluster,
        overrides=override_texts(overrides),
        folder=target.parent if target is not None else None,
    )
    # Without a model or a batch the job file would not load; without a cluster it loads and reports it.
    gaps: Sequence[Problem] = [gap for gap in converted.missing if "--cluster" not in gap.fix]
    if gaps:
        raise UserError(gaps)
    if target is not None:
        write_text(target, converted.text, fix="name another --out")
    return ImportedJob(converted=converted, path=target)


def _recognised_trainer(path: Path) -> str:
    from phalanx.io.files import read_text
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.foreign.readers import TRAINERS

    if not is_file(path):
        read_text(path, noun="configuration")  # raises with the reason
    kind = trainer_of_file(path)
    if not kind:
        raise mistake(
            str(path),
            "is not a configuration that Phalanx recognises",
            fix=f"say whose it is with --from: {', '.join(TRAINERS)}",
        )
    return kind
