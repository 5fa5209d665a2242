"""What decides how the months of a plan go: rates, times, places, and what the job does about failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from phalanx.plan.build import HOST_LINK_BYTES_PER_S
from phalanx.plan.digests import digest_every
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import HOST_COPY_BYTES_PER_S, REPAIR_S
from phalanx.plan.shrink import shrink
from phalanx.sim.months.causes import Cause, per_day
from phalanx.sim.months.network import Network, job_causes
from phalanx.sim.months.progress import Saving
from phalanx.units import DAY_S

# Corruption that no digest looks for shows as NaN or a bad loss: ByteRobust took 4,289 s from NaN to the restart
# (arXiv 2509.16293, table 6).
UNNOTICED_S = 4289.0
# Planned interruptions of Llama 3 405B: 47 in 54 days on 2,048 hosts (arXiv 2407.21783 section 3.3.4).
PLANNED_PER_DAY, PLANNED_HOSTS = 47 / 54, 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A job as its months see it. `paces` are the pace at so many missing hosts; 0 and a count left out cannot run."""

    mix: tuple[Cause, ...]
    mtbf_s: float
    shape: float = 1.0  # of the Weibull gaps between failures; 1 is Poisson
    detect_s: float
    restart_s: float  # from noticing to the next step: localisation included
    saving: Saving
    digest_s: float  # between comparisons of weights
    spares: int
    repair_s: float = REPAIR_S
    planned_per_day: float = 0.0
    recovery: str = "auto"
    restarts: int = 3  # failures in a row before the supervisor gives up
    network: Network = field(default_factory=Network)  # that made the mix
    paces: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({0: 1.0}))

    def pace(self, missing: int) -> float:
        """Of the planned speed, with so many hosts missing; 0 when the job must wait."""
        return self.paces.get(missing, 0.0)


def policy(
    plan: Plan,
    *,
    network: Network | None = None,
    shape: float = 1.0,
    planned_per_day: float | None = None,
    repair_s: float = REPAIR_S,
) -> Policy:
    """What a plan says, with the rest as given or usual."""
    r, fault = plan.reliability, plan.job.fault
    planned = usual_planned_per_day(r.hosts) if planned_per_day is None else planned_per_day
    every = digest_every(fault, r, plan.prediction)
    network = network or Network()
    mix, mtbf_s = job_causes(plan, network)
    return Policy(
        mix=mix,
        mtbf_s=mtbf_s,
        shape=shape,
        detect_s=fault.detect_s,
        restart_s=fault.restart_s,
        saving=_saving(plan),
        digest_s=every * plan.prediction.step_s if every else math.inf,
        spares=0 if fault.recovery == "shrink" else r.spares,  # under "shrink" lost ranks are not replaced
        repair_s=repair_s,
        planned_per_day=planned,
        recovery=fault.recovery,
        restarts=fault.restarts,
        network=network,
        paces=_paces(plan),
    )


def usual_planned_per_day(hosts: int) -> float:
    """Llama 3's rate per host; a larger cluster shares its windows, which is an assumption of ours."""
    return PLANNED_PER_DAY * min(1.0, hosts / PLANNED_HOSTS)


def _saving(plan: Plan) -> Saving:
    r, step_s = plan.reliability, plan.prediction.step_s
    lag_s = r.persist_s if plan.job.checkpoint.asynchronous else 0.0
    if not r.memory_every:
        return Saving(interval_s=r.interval_s, blocking_s=r.blocking_s, lag_s=lag_s)
    on_cpu = plan.cluster.accelerator.family == "cpu"
    speed = HOST_COPY_BYTES_PER_S if on_cpu else HOST_LINK_BYTES_PER_S
    every_s = r.memory_every * step_s
    return Saving(
        interval_s=r.interval_s,
        blocking_s=r.blocking_s,
        lag_s=lag_s,
        copy_every_s=every_s,
        copy_share=r.checkpoint_bytes / plan.layout.devices / speed / every_s,
    )


def _paces(plan: Plan) -> Mapping[int, float]:
    """Pace by missing hosts: the same batch on fewer data ranks takes more micro-batches."""
    found = {0: 1.0}
    if plan.job.fault.recovery not in ("auto", "shrink"):
        return MappingProxyType(found)
    full, host_devices = plan.layout, plan.cluster.host_devices
    each, sequences = full.devices // full.data, full.data * full.micro_batch * full.accumulation
    by_data: dict[int, float] = {}  # whole data ranks decide: thousands of hosts are a few layouts
    for missing in range(1, plan.reliability.hosts):
        ranks = full.devices - missing * host_devices
        if ranks // each not in by_data:
            fewer = shrink(full, ranks=ranks, sequences=sequences)
            by_data[ranks // each] = full.accumulation / fewer.accumulation if fewer else 0.0
        found[missing] = by_data[ranks // each]
    return MappingProxyType(found)


def units(plan: Plan, cause: Cause) -> float:
    """How many devices, hosts, links or switches can have a failure."""
    return cause.units or (plan.reliability.hosts if cause.unit == "host" else plan.layout.devices)


def failures_per_day(made: Policy, cause: Cause) -> float:
    """Of all of them."""
    return cause.share * per_day(made.mtbf_s)


def expected_failures(made: Policy, days: float) -> float:
    """How many failures a run of so many days should see."""
    return days * DAY_S / made.mtbf_s
