"""Inputs of fabric simulations, fabric and traffic, from names, files or a job's plan; and their export for htsim."""

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
    """Flows with their name and start times, the failures in their file, and what of the file is not simulated."""

    name: str
    flows: Flows
    schedule: Schedule | None = None  # None: all start together
    watched: int | None = None  # a flow whose rate is shown separately: the victim of an incast
    failed: tuple[str, ...] = ()
    not_mapped: tuple[str, ...] = ()


def load_fabric(name: str) -> tuple[Fabric, tuple[str, ...]]:
    """Return the fabric that a text names, and what of its file the fabric cannot represent."""
    if name.strip().lower().endswith(".topo"):
        from phalanx.sim.htsim.topology import read_topo

        topo = read_topo(Path(name.strip()))
        return topo.fabric, topo.not_mapped
    from phalanx.network.fabric.fabric_file import parse_fabric

    return parse_fabric(name), ()


def named_fabric(name: str, tell: Tell = silent) -> Fabric:
    """Return the fabric that a text names, and print what of its file is left out."""
    fabric, left_out = load_fabric(name)
    for remark in left_out:
        tell(f"{name.strip()}: not mapped: {remark}")
    return fabric


def load_traffic(name: str | None, nbytes: str | None, seed: int, fabric: Fabric, tell: Tell) -> FabricTraffic:
    """Return traffic by name, or from a CSV matrix or a job."""
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
    flows = named_traffic(name, fabric, size, seed=seed)
    return FabricTraffic(name=name, flows=flows, watched=len(flows) - 1 if name == INCAST else None)


def load_matrix(path: Path, fabric: Fabric, *, timed: bool) -> FabricTraffic:
    """Return traffic from a .cm file; with `timed`, for engines with a clock, also the start times of its flows."""
    from phalanx.sim.htsim.connection_matrix import read_cm

    matrix = read_cm(path)
    if matrix.nodes > fabric.hosts:
        message = f"{matrix.nodes:,} nodes, but {fabric.name} has {fabric.hosts:,} hosts"
        raise mistake(str(path), message, fix="use a larger fabric, or the .topo file of this matrix")
    return FabricTraffic(
        name=one_line(path.name),
        flows=matrix.flows(),
        schedule=matrix.schedule() if timed else None,
        failed=matrix.failed(),
        not_mapped=matrix.not_mapped(timed=timed),
    )


def says_bytes(name: str) -> bool:
    """Return True if traffic is named by a file that states how much is sent: a CSV matrix, or a job."""
    return re.search(r"\.(csv|toml(:[a-z_-]+)?)$", name.strip().lower()) is not None


def _traffic_file(name: str, nbytes: str | None, fabric: Fabric, tell: Tell) -> FabricTraffic:
    if nbytes:
        raise mistake("--bytes", f"{name[:80]} already says who sends how much", fix="leave out --bytes")
    if name.lower().endswith(".csv"):
        from phalanx.sim.traffic_matrix import read_matrix

        return FabricTraffic(name=one_line(Path(name).name), flows=read_matrix(Path(name), fabric.hosts))
    return FabricTraffic(name=one_line(Path(name).name), flows=_plan_flows(name, fabric, tell))


def _plan_flows(name: str, fabric: Fabric, tell: Tell) -> Flows:
    """Return the flows of a job's collectives in a step: of one axis, or of all axes that leave a fast domain."""
    import numpy as np

    from phalanx.job.load import load
    from phalanx.plan.make import make_plan
    from phalanx.sim.plan_flows import plan_collectives
    from phalanx.sim.traffic_matrix import make_flows

    match = _JOB.match(name.strip())
    assert match is not None, "says_bytes() said so"
    plan = make_plan(load(match["file"]), allow_unfinishable=True)
    if plan.layout.devices > fabric.hosts:
        explanation = f"the plan runs on {plural(plan.layout.devices, 'device')}, {fabric.name} joins {fabric.hosts:,}"
        raise mistake("--traffic", explanation, fix=f"use a fabric of at least {plan.layout.devices:,} NICs")
    flows_by_axis = {
        collective.axis.replace(" ", "-"): (collective.operation, collective.flows)
        for collective in plan_collectives(plan)
        if collective.flows is not None
    }
    if not flows_by_axis:
        explanation = f"nothing of {match['file']} leaves a fast domain"
        raise mistake("--traffic", explanation, fix="use a plan of several hosts")
    if match["axis"] and match["axis"].lower() not in flows_by_axis:
        explanation = f"the axis {match['axis'][:20]} sends nothing between hosts"
        raise mistake(
            "--traffic", explanation, fix="use " + " or ".join(f"{match['file']}:{axis}" for axis in flows_by_axis)
        )
    wanted_axis = match["axis"].lower() if match["axis"] else None
    picked_axes = {axis: entry for axis, entry in flows_by_axis.items() if wanted_axis in (None, axis)}
    for axis, (operation, flows) in picked_axes.items():
        tell(f"{axis}: {operation}, {plural(len(flows), 'flow')}, {format_bytes(float(flows.nbytes.sum()))} in a step")
    every_flow = [flows for _, flows in picked_axes.values()]
    return make_flows(
        np.concatenate([flows.source for flows in every_flow]),
        np.concatenate([flows.target for flows in every_flow]),
        np.concatenate([flows.nbytes for flows in every_flow]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HtsimFiles(PublicResult):
    """A fabric and its traffic as files of htsim, and what the files cannot represent."""

    fabric: str
    files: tuple[dict[str, Any], ...]
    not_mapped: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for file in self.files:
            counts = ", ".join(f"{value:,} {key}" for key, value in file.items() if key != "file")
            lines.append(f"wrote {file['file']}: {counts}")
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
    loaded_fabric, left_out = load_fabric(str(fabric))
    topology = write_topo(loaded_fabric)
    left_out += topology.not_mapped
    files: list[dict[str, Any]] = []
    matrix_text, connections = "", 0
    if cm:
        sent = load_traffic(traffic, str(nbytes) if nbytes is not None else None, seed, loaded_fabric, tell)
        matrix, changed = matrix_of(sent.flows, topology.nodes, parts=loaded_fabric.planes)
        matrix_text, left_out, connections = write_cm(matrix), left_out + changed, len(sent.flows)
    if topo:
        write_text(Path(topo), topology.text, fix="name another --topo")
        files.append({"file": str(topo), "nodes": topology.nodes, "tiers": loaded_fabric.tiers})
    if cm:
        write_text(Path(cm), matrix_text, fix="name another --cm")
        files.append({"file": str(cm), "nodes": topology.nodes, "connections": connections})
    return HtsimFiles(fabric=loaded_fabric.name, files=tuple(files), not_mapped=left_out)
