"""The launch systems by name."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import mistake
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.local import LocalSystem
from phalanx.launch.slurm import SlurmSystem
from phalanx.launch.system import LaunchSystem


def open_system(name: str, environ: Mapping[str, str]) -> LaunchSystem:
    """Return the launch system called `name`; raises UserError if there is none."""
    if name == "local":
        return LocalSystem(environ)
    if name == "slurm":
        return SlurmSystem(environ)
    if name == "k8s":
        return KubernetesSystem(environ)
    raise mistake(f"--on {name}", "is not a launch system of this version", fix="use local, slurm or k8s")
