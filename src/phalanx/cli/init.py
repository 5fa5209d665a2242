"""`phalanx init`: write a job file that works as it stands."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import Problem, WorldError, mistake, nearest
from phalanx.files import replace_text
from phalanx.job.presets import Preset, presets
from phalanx.job.template import render

LOCAL, TINY = "local", "phalanx-tiny"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx init`."""
    parser.add_argument("path", metavar="PATH", nargs="?", default="job.toml", help="file to write (job.toml)")
    parser.add_argument("--model", metavar="PRESET", default=TINY, help=f"a known model ({TINY})")
    parser.add_argument("--cluster", metavar="SPEC", default=LOCAL, help='such as "8xH100:16" (local: this machine)')
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what to do next."""
    path = Path(args.path)
    _know_cluster(args.cluster, base=path.parent)
    text = render(file=args.path, name=job_name(path), preset=_preset(args.model), cluster=args.cluster, cores=_cores())
    _write(path, text, force=args.force)
    if args.json:
        print_json({"path": str(path), "model": args.model, "cluster": args.cluster})
    else:
        say(path)
    note(f"next: phalanx plan {path}")
    return 0


def job_name(path: Path) -> str:
    """A legal job name from a file name.

    >>> job_name(Path("/tmp/My first run.toml"))
    'my-first-run'
    """
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).lstrip("._-")[:63] or "job"


def _preset(name: str) -> Preset:
    known = presets()
    if name in known:
        return known[name]
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
    raise mistake("--model", f'"{name[:60]}" is not a known model', fix=fix)


def _know_cluster(spec: str, *, base: Path) -> None:
    """Refuse a cluster nobody knows before a file names it."""
    if spec != LOCAL:
        from phalanx.hardware.cluster import resolve  # reads the accelerator tables

        resolve(spec, base=base)


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
        raise WorldError(Problem(where=str(path), what=f"cannot be written: {error.strerror or error}")) from error
