"""`phalanx init`: write a job file that works as it stands."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import Problem, SystemFailure, mistake, nearest
from phalanx.io.files import replace_text
from phalanx.job.model import Preset, known_presets
from phalanx.job.template import DATA, TINY, render, vocab_of
from phalanx.plan.parameter_counts import count_parameters

LOCAL = "local"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx init`."""
    parser.add_argument("path", metavar="PATH", nargs="?", default="job.toml", help="file to write (job.toml)")
    parser.add_argument("--model", metavar="PRESET", default=TINY, help=f"a known model ({TINY})")
    parser.add_argument("--cluster", metavar="SPEC", default=LOCAL, help='such as "8xH100:16" (local: this machine)')
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what to do next."""
    path, preset = Path(args.path), _preset(args.model)
    devices = _devices(args.cluster, base=path.parent)
    shape = replace(preset.model(), vocab=vocab_of(preset))
    text = render(
        file=args.path,
        name=job_name(path),
        preset=preset,
        cluster=args.cluster,
        cores=_cores(),
        parameters=count_parameters(shape).total,
    )
    _write(path, text, force=args.force)
    if args.json:
        print_json({"path": str(path), "model": args.model, "cluster": args.cluster})
    else:
        say(path)
    for number, line in enumerate(_next_steps(path, model=args.model, devices=devices)):
        note(f"{'next: ' if not number else '      '}{line}")
    return 0


def _next_steps(path: Path, *, model: str, devices: int) -> list[str]:
    """Commands that work as they stand, from the current folder, each with what it is for behind a #."""
    job, data = shlex.quote(str(path)), shlex.quote(str(path.parent / DATA))
    build = f"phalanx data build {data}"
    steps = [
        (f"phalanx plan {job}", "the layout, its time, memory and money; needs no data"),
        (f"{build} --corpus offline-english", "text to try with, fetched once; or name your own files and folders"),
        (f"phalanx train {job}", "Ctrl-C saves; phalanx train --resume RUN goes on")
        if not devices
        else (f"srun --ntasks={devices} phalanx train {job}", "on the cluster; or torchrun, mpirun: docs/training.md"),
    ]
    if model != TINY:
        steps[1] = (f"{build} --corpus offline-english", "text to try with, fetched once")
        steps.insert(2, (f"# {build} YOUR_TEXT --tokenizer tokenizer.json", f"your own, with the tokenizer of {model}"))
    width = max(len(command) for command, _ in steps)
    return [f"{command:<{width}}  # {why}" for command, why in steps]


def job_name(path: Path) -> str:
    """A legal job name from a file name.

    >>> job_name(Path("/tmp/My first run.toml"))
    'my-first-run'
    """
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).lstrip("._-")[:63] or "job"


def _preset(name: str) -> Preset:
    known = known_presets()
    if name in known:
        return known[name]
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
    raise mistake("--model", f'"{name[:60]}" is not a known model', fix=fix)


def _devices(spec: str, *, base: Path) -> int:
    """Of a cluster of several hosts, else 0; refuses one that nobody knows before a file names it."""
    if spec == LOCAL:
        return 0
    from phalanx.hardware.cluster import resolve  # reads the accelerator tables

    cluster = resolve(spec, base=base)
    return cluster.devices if cluster.hosts > 1 else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(path: Path, text: str, *, force: bool) -> None:
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
