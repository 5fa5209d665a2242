"""The first job file: commented and valid as written, and the commands to run next."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult
from phalanx.errors import mistake, nearest
from phalanx.io.path_probes import path_exists
from phalanx.io.tables import text_table
from phalanx.io.write_errors import write_failure
from phalanx.job.template import DATA, TINY, render_template, vocab_of

if TYPE_CHECKING:
    from phalanx.job.model import Preset

LOCAL = "local"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NewJob(PublicResult):
    """A job file that was written, and the commands to run next."""

    path: str
    model: str
    cluster: str
    next_steps: tuple[str, ...]

    def __str__(self) -> str:
        return self.path

    def to_dict(self) -> dict[str, Any]:
        """Return the path, model and cluster of the job file."""
        return {"path": self.path, "model": self.model, "cluster": self.cluster}


def init(path: str | Path = "job.toml", *, model: str = TINY, cluster: str = LOCAL, force: bool = False) -> NewJob:
    """Write a commented job file that is valid as written; an existing file is kept unless `force`.

    >>> print(init("job.toml", model="llama-3-8b", cluster="8xH100:4"))  # doctest: +SKIP
    """
    from phalanx.job.parameter_counts import count_parameters
    from phalanx.plan.trainable import device_problems, model_problems

    file, preset = Path(path), _known_preset(model)
    hosts = 1
    untrained = [problem.what for problem in model_problems(preset.model())]
    # An unknown cluster is refused before a file names it.
    if cluster != LOCAL:
        # Imported here because it reads the accelerator tables.
        from phalanx.hardware.cluster import resolve_cluster

        resolved_cluster = resolve_cluster(cluster, base=file.parent)
        hosts = resolved_cluster.hosts
        untrained += [problem.what for problem in device_problems(resolved_cluster)]
    text = render_template(
        file=str(path),
        name=job_name(file),
        preset=preset,
        cluster=cluster,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        parameters=count_parameters(replace(preset.model(), vocab=vocab_of(preset))).total,
    )
    _write_new(file, text, force=force)
    _write_schema(file.parent)
    steps = tuple(_next_steps(file, model=model, hosts=hosts, untrained=untrained))
    return NewJob(path=str(file), model=model, cluster=cluster, next_steps=steps)


def job_name(path: Path) -> str:
    """Return a valid job name for a file name.

    >>> job_name(Path("/tmp/My first run.toml"))
    'my-first-run'
    """
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).lstrip("._-")[:63] or "job"


def _known_preset(name: str) -> Preset:
    from phalanx.job.model import known_presets

    presets = known_presets()
    if name in presets:
        return presets[name]
    close = nearest(name, presets)
    fix = f"did you mean {close}?" if close else f"the known models are {', '.join(presets)}"
    raise mistake("--model", f'"{name[:60]}" is not a known model', fix=fix)


def _next_steps(path: Path, *, model: str, hosts: int, untrained: Sequence[str]) -> list[str]:
    """Return the next commands to run in the current folder, each with its purpose after a #.

    `untrained` has the reasons why `phalanx train` cannot run this job: then it is planned and checked here, and
    trained elsewhere.
    """
    job, data = shlex.quote(str(path)), shlex.quote(str(path.parent / DATA))
    build = f"phalanx data build {data}"
    plan = (f"phalanx plan {job}", "the layout, its time, memory and cost; needs no data")
    if untrained:
        check = (f"phalanx check {job}", "the job and its plan against the specification")
        reasons = "; ".join(untrained)
        return [
            *_command_lines([plan, check]),
            f"# phalanx train cannot run it: {reasons}; plan it here, train it elsewhere",
        ]
    steps = [
        plan,
        (f"{build} --corpus offline-english", "sample text, downloaded once; or name your own files and folders"),
        (f"phalanx train {job}", "Ctrl-C saves; phalanx train --resume RUN continues")
        if hosts == 1
        else (
            f"phalanx launch {job} --on slurm",
            "or --on k8s: docs/launch.md; by srun, torchrun, mpirun: docs/training.md",
        ),
    ]
    if model != TINY:
        steps[1] = (f"{build} --corpus offline-english", "sample text, downloaded once")
        steps.insert(2, (f"# {build} YOUR_TEXT --tokenizer tokenizer.json", f"your own, with the tokenizer of {model}"))
    return _command_lines(steps)


def _command_lines(steps: Sequence[tuple[str, str]]) -> list[str]:
    return text_table([(command, f"# {reason}") for command, reason in steps])


def _write_schema(folder: Path) -> None:
    """Write the schema that the job file names, for editors; an existing file is only updated if Phalanx wrote it."""
    from phalanx.io.files import read_head, replace_text
    from phalanx.job.json_schema import SCHEMA_NAME, schema_text

    path = folder / SCHEMA_NAME
    if path_exists(path) and b'"title": "Phalanx job file"' not in read_head(path, 4096):
        return
    # Only an aid for editors: the job file is already written.
    with contextlib.suppress(OSError):
        replace_text(path, schema_text())


def _write_new(path: Path, text: str, *, force: bool) -> None:
    from phalanx.io.files import replace_text

    try:
        if force:
            replace_text(path, text)
            return
        # "x" checks and creates in one operation: of two simultaneous calls only one succeeds.
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
        raise write_failure(path, error, needed_bytes=len(text.encode())) from error
