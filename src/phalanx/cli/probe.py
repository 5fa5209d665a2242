"""`phalanx probe`: measure this machine and store a profile that later plans of `local` use."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import MAX_RANKS, NUMPY_WORKER, MachineProfile, probe, save_profile, usual_path
from phalanx.hardware.types import Machine
from phalanx.units import format_bytes, format_flops, format_seconds

TORCH_WORKER = "phalanx.train.probe"  # run as a process of its own: this one never imports torch
LEAST_S, MOST_S = 2.0, 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx probe`."""
    add_json(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to store the profile")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time it may take (default 30)")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="folder whose disk is measured")
    parser.add_argument("--engine", choices=("auto", "torch", "numpy"), default="auto", help="auto: torch if installed")


def run(args: argparse.Namespace) -> int:
    """Measure, store, print."""
    if not LEAST_S <= args.seconds <= MOST_S:
        why = "shorter is noise, longer teaches nothing"
        raise mistake("--seconds", f"{args.seconds:g} is out of range", why=why, fix=f"use {LEAST_S:g} to {MOST_S:g}")
    if not args.disk.is_dir():
        raise mistake("--disk", f"{args.disk} is not a folder", fix="name the folder checkpoints will go to")
    machine = discover()
    for text in machine.notes:
        note(f"note: {text}")
    read_later = _read_later(machine)
    out = args.out or read_later
    own = out == usual_path(machine.hostname, os.environ)
    if not own:
        _check_folder(out)
    profile = _measure(machine, args)
    save_profile(profile, out, folders=own)
    note(f"profile stored in {out}; {_use(out, read_later)}")
    if args.json:
        print_json(profile)
    else:
        say(table(profile))
    return 0


def _check_folder(out: Path) -> None:
    """Refuse a place that cannot be written to before half a minute is spent."""
    if not out.parent.is_dir():
        what = f"cannot be written: there is no folder {out.parent}"
        raise SystemFailure(Problem(where=str(out), what=what, fix="make the folder, or name another --out"))


def _use(out: Path, read_later: Path) -> str:
    if out.absolute() == read_later.absolute():
        return "plans of the cluster local on this machine use it now"
    return f"plans of the cluster local use it with PHALANX_PROFILE={out}, and phalanx cluster with --profile {out}"


def _read_later(machine: Machine) -> Path:
    """Where later plans look for a profile of this machine."""
    named = os.environ.get("PHALANX_PROFILE", "")
    return Path(named) if named else usual_path(machine.hostname, os.environ)


def _measure(machine: Machine, args: argparse.Namespace) -> MachineProfile:
    installed = importlib.util.find_spec("torch") is not None
    if args.engine == "torch" and not installed:
        raise mistake("--engine torch", "torch is not installed", fix="pip install 'phalanx[train]'")
    if args.engine == "numpy" or not installed:
        if machine.gpus:
            note("note: GPUs can only be measured with torch (pip install 'phalanx[train]'); measuring the CPU")
        return _probe(machine, args, torch=False)
    try:
        return _probe(machine, args, torch=True)
    except SystemFailure as error:
        if args.engine == "torch":
            raise
        note(f"note: torch does not work here ({error.problems[0].why}); measuring with numpy")
        return _probe(machine, args, torch=False)


def _probe(machine: Machine, args: argparse.Namespace, *, torch: bool) -> MachineProfile:
    gpu = torch and bool(machine.gpus)
    # Two ranks at least on a CPU: a collective needs a partner.
    ranks = len(machine.gpus) if gpu else min(MAX_RANKS, max(2, machine.usable_cores))
    note(f"probing {ranks} {'GPU(s)' if gpu else 'core(s)'} with {'torch' if torch else 'numpy'}")
    return probe(
        machine,
        worker=TORCH_WORKER if torch else NUMPY_WORKER,
        device="cuda" if gpu else "cpu",
        ranks=ranks,
        seconds=args.seconds,
        disk_folder=args.disk,
        environ=os.environ,
        report=lambda text: note(f"  {text}"),
    )


def table(profile: MachineProfile) -> str:
    """The profile as a person reads it."""
    unit = "GPU" if profile.device == "cuda" else "core"
    lines = [
        f"{profile.device_name}: {profile.ranks} {unit}s at work together, {profile.engine}, {profile.seconds:.1f} s",
        f"  matmul, {profile.precision:<10} {format_flops(profile.matmul_flops)} per {unit} at best",
        *(f"    n = {size:<12} {format_flops(rate)}" for size, rate in profile.matmul_by_size),
        f"  memory             {format_bytes(profile.memory_bytes_per_s)}/s per {unit}",
        f"  small operation    {format_seconds(profile.launch_s)}",
    ]
    if profile.all_reduce:
        speed = f"{format_bytes(profile.link_bytes_per_s)}/s"
        lines.append(f"  ring over {profile.backend:<8} {format_seconds(profile.link_latency_s)} a step, {speed}")
        lines += [f"    {format_bytes(size):<16} {format_seconds(elapsed)}" for size, elapsed in profile.all_reduce]
    disk = f"{format_bytes(profile.disk_bytes_per_s)}/s" if profile.disk_bytes_per_s else "not measured"
    return "\n".join([*lines, f"  disk, with fsync   {disk}"])
