"""A fabric and its traffic: by name, out of files of ours, of htsim or a job's plan; and as files for htsim."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api import traffic_text as text
from phalanx.api.results import PublicResult, Tell, silent, teller
from phalanx.errors import mistake
from phalanx.io.visible import one_line
from phalanx.units import format_bytes, parse_count, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.packets.start_times import Schedule
    from phalanx.sim.traffic_matrix import Flows

TRAFFIC, NBYTES = "permutation", "2M"

_JOB = re.compile(r"^(?P<file>.+\.toml)(?::(?P<axis>[a-z_-]+))?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricTraffic:
    """Flows, what they are called, when they start, what fails in their file, and what of it is not simulated."""

    name: str
    flows: Flows
    schedule: Schedule | None = None  # None: together
    watched: int | None = None  # a flow whose own rate matters: the victim of an incast
    failed: tuple[str, ...] = ()
    not_mapped: tuple[str, ...] = ()


def load_fabric(name: str) -> tuple[Fabric, tuple[str, ...]]:
    """The fabric a text names, and what of its file it cannot hold."""
    if name.strip().lower().endswith(".topo"):
        from phalanx.sim.htsim.topology import read_topo

        topo = read_topo(Path(name.strip()))
        return topo.fabric, topo.not_mapped
    from phalanx.network.fabric.fabric_file import parse_fabric

    return parse_fabric(name), ()


def named_fabric(name: str, tell: Tell = silent) -> Fabric:
    """The same for pages that have no place for what a file's fabric leaves out: it is told."""
    fabric, said = load_fabric(name)
    for one in said:
        tell(f"{name.strip()}: not mapped: {one}")
    return fabric


def load_traffic(name: str | None, nbytes: str | None, seed: int, fabric: Fabric, tell: Tell) -> FabricTraffic:
    """By name, or from a CSV matrix or a job."""
    from phalanx.sim.traffic_matrix import INCAST, named_traffic

    if seed < 0:  # numpy would refuse it
        raise mistake("--seed", f"{seed} is below zero", fix="use 0 or more")
    name = name or TRAFFIC
    if says_bytes(name):
        return _traffic_file(name.strip(), nbytes, fabric, tell)
    try:
        size = parse_count(nbytes or NBYTES)
    except ValueError as error:
        raise mistake("--bytes", f"{error}"[:160], fix="write it as 2M or 2000000") from None
    made = named_traffic(name, fabric, size, seed=seed)
    return FabricTraffic(name=name, flows=made, watched=len(made) - 1 if name == INCAST else None)


def load_matrix(path: Path, fabric: Fabric, *, timed: bool) -> FabricTraffic:
    """From a .cm file; with the times at which its flows start where the engine has a clock (`timed`)."""
    from phalanx.sim.htsim.connection_matrix import read_cm

    matrix = read_cm(path)
    if matrix.nodes > fabric.hosts:
        what = f"{matrix.nodes:,} nodes, but {fabric.name} has {fabric.hosts:,} hosts"
        raise mistake(str(path), what, fix="use a larger fabric, or the .topo file of this matrix")
    return FabricTraffic(
        name=one_line(path.name),
        flows=matrix.flows(),
        schedule=matrix.schedule() if timed else None,
        failed=matrix.failed(),
        not_mapped=matrix.not_mapped(timed=timed),
    )


def says_bytes(name: str) -> bool:
    """Whether traffic is named by a file, which also says how much is sent: a CSV matrix, or a job."""
    return re.search(r"\.(csv|toml(:[a-z_-]+)?)$", name.strip().lower()) is not None


def _traffic_file(name: str, nbytes: str | None, fabric: Fabric, tell: Tell) -> FabricTraffic:
    if nbytes:
        raise mistake("--bytes", f"{name[:80]} already says who sends how much", fix="leave out --bytes")
    if name.lower().endswith(".csv"):
        from phalanx.sim.traffic_matrix import read_matrix

        return FabricTraffic(name=one_line(Path(name).name), flows=read_matrix(Path(name), fabric.hosts))
    return FabricTraffic(name=one_line(Path(name).name), flows=_plan_flows(name, fabric, tell))


def _plan_flows(name: str, fabric: Fabric, tell: Tell) -> Flows:
    """What the collectives of a job's plan send in a step: one axis, or all that leave a fast domain, together."""
    import numpy as np

    from phalanx.job.load import load
    from phalanx.plan.make import make_plan
    from phalanx.sim.plan_flows import plan_collectives
    from phalanx.sim.traffic_matrix import make_flows

    match = _JOB.match(name.strip())
    assert match is not None, "says_bytes() said so"
    plan = make_plan(load(match["file"]), allow_unfinishable=True)
    if plan.layout.devices > fabric.hosts:
        what = f"the plan runs on {plural(plan.layout.devices, 'device')}, {fabric.name} joins {fabric.hosts:,}"
        raise mistake("--traffic", what, fix=f"use a fabric of at least {plan.layout.devices:,} NICs")
    sent = {
        one.axis.replace(" ", "-"): (one.operation, one.flows)
        for one in plan_collectives(plan)
        if one.flows is not None
    }
    if not sent:
        what = f"nothing of {match['file']} leaves a fast domain"
        raise mistake("--traffic", what, fix="use a plan of several hosts")
    if match["axis"] and match["axis"].lower() not in sent:
        what = f"the axis {match['axis'][:20]} sends nothing between hosts"
        raise mistake("--traffic", what, fix="use " + " or ".join(f"{match['file']}:{axis}" for axis in sent))
    wanted = match["axis"].lower() if match["axis"] else None
    picked = {axis: one for axis, one in sent.items() if wanted in (None, axis)}
    for axis, (operation, one) in picked.items():
        tell(f"{axis}: {operation}, {plural(len(one), 'flow')}, {format_bytes(float(one.nbytes.sum()))} in a step")
    every = [one for _, one in picked.values()]
    return make_flows(
        np.concatenate([one.source for one in every]),
        np.concatenate([one.target for one in every]),
        np.concatenate([one.nbytes for one in every]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HtsimFiles(PublicResult):
    """A fabric and its traffic as files of htsim, and what they do not hold."""

    fabric: str
    files: tuple[dict[str, Any], ...]
    not_mapped: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for one in self.files:
            rest = ", ".join(f"{value:,} {key}" for key, value in one.items() if key != "file")
            lines.append(f"wrote {one['file']}: {rest}")
        return "\n".join([*lines, *text.not_mapped_text(self.not_mapped)])


def export(
    fabric: str | Path,
    *,
    topo: str | Path | None = None,
    cm: str | Path | None = None,
    traffic: str | None = None,
    nbytes: str | int | None = None,
    seed: int = 0,
    progress: bool | Tell = False,
) -> HtsimFiles:
    """Write a fabric (.topo) and its traffic (.cm) for the packet simulator htsim.

    >>> export("clos2:64x400G/2p/16", topo="clos.topo", cm="ring.cm", traffic="ring")  # doctest: +SKIP
    """
    from phalanx.io.files import write_text
    from phalanx.sim.htsim.connection_matrix import matrix_of, write_cm
    from phalanx.sim.htsim.topology import write_topo

    tell = teller(progress)
    where = "phalanx fabric export"
    if not topo and not cm:
        raise mistake(where, "nothing to write", fix="add --topo FILE.topo, --cm FILE.cm or both")
    if not cm and (traffic or nbytes):
        raise mistake(where, "traffic, but no file for it", fix="add --cm FILE.cm")
    found, said = load_fabric(str(fabric))
    made = write_topo(found)
    said += made.not_mapped
    files: list[dict[str, Any]] = []
    matrix_text, connections = "", 0
    if cm:
        sent = load_traffic(traffic, str(nbytes) if nbytes is not None else None, seed, found, tell)
        matrix, changed = matrix_of(sent.flows, made.nodes, parts=found.planes)
        matrix_text, said, connections = write_cm(matrix), said + changed, len(sent.flows)
    if topo:
        write_text(Path(topo), made.text, fix="name another --topo")
        files.append({"file": str(topo), "nodes": made.nodes, "tiers": found.tiers})
    if cm:
        write_text(Path(cm), matrix_text, fix="name another --cm")
        files.append({"file": str(cm), "nodes": made.nodes, "connections": connections})
    return HtsimFiles(fabric=found.name, files=tuple(files), not_mapped=said)
