"""The policy that a simulation of months follows: failure rates, recovery times, spare hosts and checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from phalanx.plan.auto_settings import digest_every
from phalanx.plan.case_columns import HOST_LINK_BYTES_PER_S
from phalanx.plan.model_replicas import REGROUP_S
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import HOST_COPY_BYTES_PER_S, REPAIR_S
from phalanx.plan.shrink_layout import shrink_layout
from phalanx.sim.months.causes import Cause, NetworkCauses, job_causes, per_day
from phalanx.units import DAY_S

# Corruption that no digest detects shows as NaN or a bad loss: ByteRobust took 4,289 s from NaN to the restart (arXiv
# 2509.16293, table 6).
UNNOTICED_S = 4289.0
# Planned interruptions of Llama 3 405B: 47 in 54 days on 2,048 hosts (arXiv 2407.21783 section 3.3.4).
PLANNED_PER_DAY, PLANNED_HOSTS = 47 / 54, 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class LeavingOut:
    """The costs of leaving a lost model replica out. `pace` applies while replicas sum gradients themselves."""

    replicas: int
    # Stall after the failure is noticed: the step in flight, and new connections of the other replicas.
    stall_s: float
    rejoin_s: float  # every rank waits so long when the replica is back
    pace: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthsPolicy:
    """The policy of a job for a simulation of months.

    `paces` has the pace by number of missing hosts; with 0, or a number that is not in it, the job cannot run.
    """

    mix: tuple[Cause, ...]
    mtbf_s: float
    shape: float = 1.0  # of the Weibull gaps between failures; 1 is Poisson
    detect_s: float
    restart_s: float  # from noticing to the next step, with localisation
    saving: Saving
    digest_s: float  # between comparisons of weights
    spares: int
    repair_s: float = REPAIR_S
    planned_per_day: float = 0.0
    recovery: str = "auto"
    restarts: int = 3  # failures in a row after which the coordinator gives up
    # The network that the causes in `mix` come from.
    network: NetworkCauses = field(default_factory=NetworkCauses)
    paces: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({0: 1.0}))
    # For a lost model replica, instead of a restart of all ranks; None: all restart.
    leaving: LeavingOut | None = None

    def pace(self, missing: int) -> float:
        """Return the share of the planned speed with `missing` hosts missing; 0 when the job must wait."""
        return self.paces.get(missing, 0.0)


def months_policy(
    plan: Plan,
    *,
    network: NetworkCauses | None = None,
    shape: float = 1.0,
    planned_per_day: float | None = None,
    repair_s: float = REPAIR_S,
) -> MonthsPolicy:
    """Return the policy of a plan, with the given or usual values for the rest."""
    r, fault = plan.reliability, plan.job.fault
    planned = usual_planned_per_day(r.hosts) if planned_per_day is None else planned_per_day
    digest_steps = digest_every(fault, r, plan.prediction)
    network = network or NetworkCauses()
    mix, mtbf_s = job_causes(plan, network)
    return MonthsPolicy(
        mix=mix,
        mtbf_s=mtbf_s,
        shape=shape,
        detect_s=fault.detect_s,
        restart_s=fault.restart_s,
        saving=_saving_policy(plan),
        digest_s=digest_steps * plan.prediction.step_s if digest_steps else math.inf,
        # Under "shrink" lost ranks are not replaced.
        spares=0 if fault.recovery == "shrink" else r.spares,
        repair_s=repair_s,
        planned_per_day=planned,
        recovery=fault.recovery,
        restarts=fault.restarts,
        network=network,
        paces=_pace_by_missing(plan),
        leaving=leaving_out(plan) if fault.on_loss == "leave-out" else None,
    )


def leaving_out(plan: Plan) -> LeavingOut | None:
    """Return the costs of leaving a replica out, as in the plan.

    None with one model replica, or for a plan without these values.
    """
    loss, step_s = plan.reliability.replica_loss, plan.prediction.step_s
    if loss is None:
        return None
    stall_s = step_s / 2 + REGROUP_S
    return LeavingOut(
        replicas=loss.replicas,
        stall_s=stall_s,
        rejoin_s=max(0.0, loss.leave_out.stall_s - plan.job.fault.detect_s - stall_s),
        pace=step_s / (step_s + loss.exchange_s),
    )


def usual_planned_per_day(hosts: int) -> float:
    """Return Llama 3's rate per host; we assume that larger clusters share maintenance windows."""
    return PLANNED_PER_DAY * min(1.0, hosts / PLANNED_HOSTS)


def _saving_policy(plan: Plan) -> Saving:
    """Return the intervals and costs of checkpoints and in-memory copies as the plan predicts them."""
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


def _pace_by_missing(plan: Plan) -> Mapping[int, float]:
    """Return the pace by missing hosts: the same batch on fewer data ranks takes more micro-batches."""
    paces = {0: 1.0}
    if plan.job.fault.recovery not in ("auto", "shrink"):
        return MappingProxyType(paces)
    full, host_devices = plan.layout, plan.cluster.host_devices
    devices_per_replica, sequences = full.devices // full.data, full.data * full.micro_batch * full.accumulation
    # Whole data ranks decide, so thousands of hosts need only a few layouts.
    by_data: dict[int, float] = {}
    for missing in range(1, plan.reliability.hosts):
        ranks = full.devices - missing * host_devices
        if ranks // devices_per_replica not in by_data:
            fewer = shrink_layout(full, ranks=ranks, sequences=sequences)
            by_data[ranks // devices_per_replica] = full.accumulation / fewer.accumulation if fewer else 0.0
        paces[missing] = by_data[ranks // devices_per_replica]
    return MappingProxyType(paces)


def failing_units(plan: Plan, cause: Cause) -> float:
    """Return the number of devices, hosts, links or switches that can fail with this cause."""
    return cause.units or (plan.reliability.hosts if cause.unit == "host" else plan.layout.devices)


def failures_per_day(made: MonthsPolicy, cause: Cause) -> float:
    """Return the failures per day of this cause, over all units."""
    return cause.share * per_day(made.mtbf_s)


def expected_failures(made: MonthsPolicy, days: float) -> float:
    """Return the number of failures expected in a run of `days` days."""
    return days * DAY_S / made.mtbf_s


# Training time that counts, and how much of it survives a failure: checkpoints on disk and copies in memory.


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """The saving of state: intervals and costs in seconds.

    `copy_every_s` is training time between copies in memory, infinite for none.
    """

    interval_s: float  # training time between checkpoints
    blocking_s: float  # training stalls so long for one
    lag_s: float  # from then until it is safe on disk
    copy_every_s: float = math.inf
    copy_share: float = 0.0  # time of a copy over the training time between two

    @property
    def cycle_s(self) -> float:
        """The wall-clock time from one checkpoint to the next."""
        return self.interval_s + self.blocking_s


class RunProgress:
    """Seconds of training done at the planned pace. Checkpoints are computed, not simulated one by one.

    >>> progress = RunProgress(Saving(interval_s=100.0, blocking_s=10.0, lag_s=5.0))
    >>> progress.advance(0.0, 224.0, speed=1.0)  # two checkpoints, done at 110 s and at 220 s
    204.0
    >>> progress.restore(224.0), progress.done_s  # the second was not on disk yet
    (104.0, 100.0)
    """

    def __init__(self, saving: Saving) -> None:
        self.done_s = 0.0
        self._saving = saving
        self._cycle_s = 0.0  # since the last checkpoint, or since the start
        self._base_s = 0.0  # training done when the job last started
        # (time, training done then) of checkpoints; the first is the state before training. Several may be in
        # progress at once, so one more than those is kept.
        writing = math.ceil(saving.lag_s / saving.cycle_s) if math.isfinite(saving.cycle_s) else 0
        self._taken = deque([(-math.inf, 0.0)], maxlen=writing + 2)

    @property
    def newest_s(self) -> float:
        """The training that was done when the newest checkpoint was taken."""
        return self._taken[-1][1]

    def advance(self, start_s: float, seconds: float, *, speed: float) -> float:
        """Run for `seconds` of wall-clock time from `start_s`; returns the seconds not spent on checkpoints.

        `speed` is the training time done per second of them.
        """
        s = self._saving
        if not math.isfinite(s.interval_s):
            self.done_s += seconds * speed
            return seconds
        before_s = min(self._cycle_s, s.interval_s)
        count, left_s = divmod(self._cycle_s + seconds, s.cycle_s)
        first_s, first_done_s = start_s + s.cycle_s - self._cycle_s, self.done_s + (s.interval_s - before_s) * speed
        for index in range(max(0, int(count) - (self._taken.maxlen or 1)), int(count)):
            self._taken.append((first_s + index * s.cycle_s, first_done_s + index * s.interval_s * speed))
        worked_s = max(0.0, count * s.interval_s + min(left_s, s.interval_s) - before_s)
        self._cycle_s = left_s
        self.done_s += worked_s * speed
        return worked_s

    def restore(self, now_s: float) -> float:
        """Go back to the newest state that survives a failure; returns the training time lost."""
        s = self._saving
        while self._taken[-1][0] + s.lag_s > now_s:
            self._taken.pop()
        copied_s = -math.inf
        if math.isfinite(s.copy_every_s):
            copied_s = self.done_s - math.fmod(self.done_s - self._base_s, s.copy_every_s)
        return self._back_to(max(copied_s, self.newest_s))

    def roll_back(self, done_s: float) -> float:
        """Go back to a checkpoint of that training time and discard later ones; returns the training time lost."""
        while self._taken and self._taken[-1][1] > done_s:
            self._taken.pop()
        if not self._taken or self.newest_s < done_s:
            self._taken.append((-math.inf, done_s))
        return self._back_to(min(done_s, self.done_s))

    def save(self) -> None:
        """Record a checkpoint for which training waited until it was on disk."""
        self._taken.append((-math.inf, self.done_s))
        self._back_to(self.done_s)

    def _back_to(self, done_s: float) -> float:
        lost_s = self.done_s - done_s
        self.done_s = self._base_s = done_s
        self._cycle_s = 0.0
        return lost_s
