"""The request to a launch system, computed from the plan and the settings alone, the same for every system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from phalanx.elastic.local_launch import ALLOW_CODE
from phalanx.errors import mistake
from phalanx.launch.settings import LaunchSettings
from phalanx.plan.plan import Plan
from phalanx.plan.prediction import predict_layout
from phalanx.plan.request import request_from_job
from phalanx.units import format_seconds, plural

# Seconds besides training: imports, the first step, the last checkpoint. Our own choice; a run on CPUs takes 20 s.
START_AND_END_S = 600.0
# Between the signal and the time limit, in addition to the plan's time for a checkpoint.
LEAST_SAVE_S = 60.0
MOST_SAVE_S = 900.0
NODE_MODULE = "phalanx.launch.node"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementGroup:
    """Consecutive hosts that communicate much and should be close together. Inner groups come first."""

    axes: tuple[str, ...]  # axes that run within a group, such as ("tensor", "pipeline")
    hosts: int  # of one group


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """The request to a launch system: hosts, devices, time, and the command to start on each host."""

    name: str
    group: str  # jobs that were launched together; may be empty
    run: str  # the run folder, visible to all hosts
    hosts: int  # hosts that the plan needs
    spares: int  # additional hosts, which replace lost ones
    devices_per_host: int
    accelerator: str  # "cpu" where ranks run on cores
    time_limit_s: float
    save_s: float  # time before the limit at which the run is asked to save and end
    environ: Mapping[str, str]
    checkpoint: str  # folder or URL of the checkpoints
    placement: tuple[PlacementGroup, ...]
    agent: tuple[str, ...]  # command of one host's agent; the run folder is its last argument
    settings: LaunchSettings
    # Key of the job and absolute path of the inputs that every host reads besides the run.
    inputs: tuple[tuple[str, str], ...] = ()
    shares_hosts: bool = False  # other jobs may run on the same host
    # Mount point of a cluster volume that contains the run; empty: the folder around the run.
    volume: str = ""

    @property
    def volume_folder(self) -> PurePosixPath:
        """The folder that every host sees: it contains the run, and must contain the job's inputs."""
        return PurePosixPath(self.volume or PurePosixPath(self.run).parent)

    @property
    def all_hosts(self) -> int:
        """The number of hosts of the plan and spares."""
        return self.hosts + self.spares


def launch_request(
    plan: Plan,
    settings: LaunchSettings,
    *,
    run: Path,
    python: str,
    name: str,
    group: str = "",
    spares: int = 0,
    allow_code: bool = False,
    inputs: Sequence[tuple[str, str]] = (),
    shares_hosts: bool = False,
    volume: str = "",
) -> LaunchRequest:
    """Return the request for a plan.

    `python` is the interpreter on the hosts, unless the settings name one. `volume` is the folder that all hosts see,
    if it is not the one around the run. Raises UserError if the ranks cannot be distributed to the requested hosts.
    """
    hosts, devices = deal_ranks(plan, settings)
    checkpoint = plan.job.checkpoint.path
    return LaunchRequest(
        name=name,
        group=group,
        run=str(run),
        hosts=hosts,
        spares=spares,
        devices_per_host=devices,
        accelerator=plan.cluster.accelerator.name if plan.cluster.accelerator.family != "cpu" else "cpu",
        time_limit_s=time_limit_s(plan, settings),
        save_s=save_allowance_s(plan),
        environ=dict(settings.environ),
        checkpoint=checkpoint if "://" in checkpoint else str(run / checkpoint),
        placement=placement_groups(plan, devices),
        agent=(settings.python or python, "-P", "-m", NODE_MODULE, "serve", *([ALLOW_CODE] if allow_code else [])),
        settings=settings,
        inputs=tuple(inputs),
        shares_hosts=shares_hosts,
        volume=volume,
    )


def deal_ranks(plan: Plan, settings: LaunchSettings) -> tuple[int, int]:
    """Return the number of hosts, and of devices on each of them."""
    ranks = plan.layout.devices
    if settings.hosts is None:
        devices = min(max(1, plan.cluster.host_devices), ranks)
        return math.ceil(ranks / devices), devices
    if settings.hosts > ranks:
        raise mistake(
            "launch.hosts",
            f"{plural(settings.hosts, 'host')} for {plural(ranks, 'rank')}",
            why="a host without a rank does nothing",
            fix=f"use at most {ranks}; --spares adds hosts that replace lost ones",
        )
    return settings.hosts, math.ceil(ranks / settings.hosts)


def time_limit_s(plan: Plan, settings: LaunchSettings) -> float:
    """Return the seconds to request, in whole minutes: the upper end of the plan's 80 % interval, unless one is set."""
    limit_s = settings.time_s if settings.time_s is not None else plan.duration.wall_s_high + START_AND_END_S
    return 60.0 * max(1, math.ceil(limit_s / 60.0))


def save_allowance_s(plan: Plan) -> float:
    """Return how long before the limit a run is asked to save: a step, the checkpoint, and a minute."""
    reliability = plan.reliability
    allowance_s = LEAST_SAVE_S + plan.prediction.step_s_high + reliability.blocking_s + reliability.persist_s
    return float(math.ceil(min(allowance_s, MOST_SAVE_S)))


def placement_groups(plan: Plan, devices_per_host: int) -> tuple[PlacementGroup, ...]:
    """Return groups of the mesh that span several hosts, innermost first, which is also the order of the ranks.

    An axis of `size` ranks, `stride` apart, lies within size × stride consecutive ranks.
    """
    spans: dict[int, list[str]] = {}
    for use in plan.mapping:
        hosts = math.ceil(use.size * use.stride / devices_per_host)
        if hosts > 1:
            spans.setdefault(hosts, []).append(use.axis)
    return tuple(PlacementGroup(axes=tuple(axes), hosts=hosts) for hosts, axes in sorted(spans.items()))


def placement_cost(plan: Plan, *, slower: float = 2.0) -> str:
    """Describe the cost of a worse placement, with links between hosts `slower` times as slow; empty for one host."""
    if plan.cluster.domains < 2 or not any("NIC" in use.tier for use in plan.mapping):
        return ""
    cluster = replace(plan.cluster, nic_bytes_per_s=plan.cluster.nic_bytes_per_s / slower)
    request, _ = request_from_job(plan.job, cluster)
    usual_request, _ = request_from_job(plan.job, plan.cluster)
    worse_s = predict_layout(request, plan.layout)[0].step_s
    increase = worse_s / predict_layout(usual_request, plan.layout)[0].step_s - 1.0
    return (
        f"with 1/{slower:g} of the bandwidth between hosts a step takes {format_seconds(plan.prediction.step_s)} "
        f"+ {increase:.1%}"
    )
