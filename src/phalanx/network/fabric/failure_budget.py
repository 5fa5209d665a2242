"""Recovery and repair times of a fabric that every command uses, and the failure budget they lead to.

The times are interpretations of published statements, not measurements; docs/fabric.md lists the sources. A
simulation that cannot afford one of them (ten seconds of packets) uses a shorter time and reports it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.errors import mistake
from phalanx.hardware.failures import llama_device_days
from phalanx.network.fabric.fabric_bill import fabric_bill, failure_loss
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.units import DAY_S, HOUR_S

# "A few tens of microseconds" until a sender leaves a dead path (arXiv:2605.04333 section 2.1).
EDGE_RECOVERY_S = 30e-6
# "Seconds or even tens of seconds" until a conventional fabric routes around a failure
# (openai.com/index/mrc-supercomputer-networking): the middle of 1 to 100. NCCL waits 30 s before it gives up, so the
# job survives.
CONVERGE_S = 10.0
# InfiniBand switches take another port by themselves where a link between switches fails (SHIELD,
# docs.nvidia.com/networking). The time is weak evidence: the vendor claims 5,000 times less than a subnet manager's
# 10 to 20 s.
SHIELD_S = 3e-3
# All QPs of a NIC move off a dead port in "a few seconds" (arXiv:2605.04333 section 3). A dead T0 costs that time for
# each of its NICs.
REMAP_S = 3.0
# NCCL gives a connection up after 4.096 us * 2^20 * 7 tries (net_ib: IbTimeout 20, IbRetryCnt 7). A longer stall ends
# the job; a shorter one costs only its own time.
GIVE_UP_S = 4.096e-6 * 2**20 * 7
# "Most failed links return within a minute" (the same page). Our assumptions: "most" is nine of ten, and replacing a
# cable takes four hours.
FLAP_SHARE, FLAP_S, CABLE_S = 0.9, 60.0, 4 * 3600.0
LINK_BACK_S = FLAP_SHARE * FLAP_S + (1 - FLAP_SHARE) * CABLE_S  # on average: 1,494 s
# Forwarding was back 2 minutes after a T1 went down (arXiv:2605.04333 section 5.1).
T1_BACK_S = 120.0
# Half of Azure's switch failures were shorter (Singh et al., SIGCOMM CCR 51(2), 2021).
SWITCH_BACK_S = 360.0
# A NIC's transceiver fails with all its planes at once. A calibration: with the 3 s of moving QPs it makes the
# quarter of a minute by which the paper's 50,000-GPU job fell behind when a glitch flapped four NIC-T0 links and it
# did not crash (section 5.1). We assume that the four links belonged to one NIC.
TRANSCEIVER_BACK_S = 12.0
# Share of a step that waits for the network where no job is given: the planner's prediction for Llama 3.1 405B on
# 16,384 H100 (examples/), 12 %. Other jobs differ; --job computes theirs.
WAITS = 0.12


def pace_with_loss(lost: float, *, waits: float) -> float:
    """Return the speed as a share of the usual one while one NIC lacks the share `lost` of its bandwidth.

    All ranks wait for that NIC during the share `waits` of a step, in which they wait for the network.

    >>> round(pace_with_loss(1 / 8, waits=1.0), 3), round(pace_with_loss(1 / 8, waits=0.12), 3)
    (0.875, 0.983)
    >>> pace_with_loss(1.0, waits=0.12)
    0.0
    """
    return 1.0 / (1.0 + waits * lost / (1.0 - lost)) if lost < 1.0 else 0.0


def can_spray(fabric: Fabric) -> bool:
    """Return True if senders can choose paths and planes: MRC runs on Ethernet only."""
    return fabric.switch.kind != "infiniband"


def ports_move(fabric: Fabric) -> bool:
    """Return True if a NIC that loses a port or its T0 continues on another plane."""
    return fabric.planes > 1 and can_spray(fabric)


def stall_s(fabric: Fabric, recovery_s: float) -> float:
    """Return the seconds until a failure above the T0s is bypassed."""
    return recovery_s if can_spray(fabric) else max(recovery_s, SHIELD_S)


# The reliability budget of a fabric: failures per day by part, and the share of the cluster they cost.
# Two field rates from separate measurements agree within a tenth at 131,072 GPUs: 4.9 cable failures a day (Alibaba)
# and 5.2 network interruptions (Llama 3). Both are rates of those networks, not a prediction for yours: give your
# own.
# HPN's links are a NIC's, so failures are counted per cable as wide as a NIC. How many of eight planes a failed cable
# takes is not published. We charge one plane, and report two other assumptions: every lane fails as often as a cable
# (so many times more failures), or a cable takes all planes of its NIC (and the job restarts).


MONTH_DAYS = 30.4
# Alibaba HPN, SIGCOMM'24: 0.057 % of NIC-ToR links fail per month. A link there is a NIC's cable, so we count cables.
CABLE_PER_DAY = 0.057e-2 / MONTH_DAYS
# Singh et al., SIGCOMM CCR 51(2), 2021: of 180,000 datacentre switches 98 % ran through their first three months.
SWITCH_PER_DAY = -math.log(0.98) / (3 * MONTH_DAYS)
# Llama 3 (arXiv:2407.21783 table 5): 35 interruptions by switch or cable, 16,384 GPUs, 54 days.
LLAMA_COUNT = 35
RESTART_S = (600.0, 900.0)  # 10 to 15 minutes from failure to the next useful step
# T0-T1 links flap "several times a minute" during training (the same page); by the paper's figure 5, as we read it,
# once every 2 to 3 minutes. We take the lower rate, on the 75,000-GPU job of section 5.1. Weak: the figure's job is
# not named.
FLAP_PER_CABLE_DAY = DAY_S / 150 / 75000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRate:
    """The failure rate of one kind of part."""

    part: str
    count: int
    failures_per_day: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureAnswer:
    """Assumptions about the response to a failure: bypass, restart and repair times."""

    recovery_s: float = EDGE_RECOVERY_S  # until traffic uses other paths
    restart_s: float = RESTART_S[0]
    repair_s: float = LINK_BACK_S  # of a cable
    waits: float = WAITS  # share of a step that waits for the network
    # True: senders leave dead paths and ports. False: switches route around, and QPs stay on their port.
    edge: bool = True
    # What fails with a cable: one plane of its NIC; each lane on its own, at the cable's rate; or all planes.
    cable: Literal["plane", "lanes", "whole"] = "plane"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCost:
    """The cost of network failures per day with one way of recovery."""

    seconds_per_event: float
    lost_share: float  # of the whole cluster's time
    lost_gpu_hours_per_day: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBudget:
    """The failures of a fabric per day, and their cost with several ways of recovery."""

    parts: tuple[PartRate, ...]
    cable_failures_per_day: float  # HPN's rate
    switch_failures_per_day: float
    failures_per_day: float  # of all parts
    interruptions_per_day: float  # Llama 3's rate
    interruptions_interval: tuple[float, float]  # 95 %, from the 35 interruptions that were counted
    day_spread: tuple[int, int]  # 95 % of days have between the first and the second number
    restart: tuple[
        FailureCost, FailureCost
    ]  # every interruption at Llama 3's rate restarts the job: quick and slow restart
    # Parts at their rates; switches route around, a NIC's cable or T0 restarts the job.
    conventional: FailureCost
    # Parts at their rates; recovery at the edge, where a failed cable takes one plane of its NIC.
    edge: FailureCost
    edge_lanes: FailureCost  # the same, if every lane of a cable fails as often as a cable
    # The same, if a failed cable takes all planes of its NIC: the job restarts.
    edge_whole: FailureCost
    waits: float  # share of a step that waits for the network


def failure_budget(
    fabric: Fabric,
    *,
    recovery_s: float = EDGE_RECOVERY_S,
    restart_s: tuple[float, float] = RESTART_S,
    repair_s: float = LINK_BACK_S,
    waits: float = WAITS,
) -> FailureBudget:
    """Return the failures per day of a fabric and their cost, with restarts and with recovery at the edge."""
    for name, value in (("recovery", recovery_s), ("restart", restart_s[0]), ("repair", repair_s)):
        if not (math.isfinite(value) and value >= 0):
            raise mistake("fabric", f"a {name} of {value:g} s", fix="use seconds, 0 or more")
    parts = part_rates(fabric)
    per_day = interruptions_per_day(fabric)
    low, high = poisson_interval(LLAMA_COUNT)
    scale = fabric.hosts / llama_device_days()
    quick, slow = (cost_of(fabric, seconds) for seconds in restart_s)
    answer = FailureAnswer(recovery_s=recovery_s, restart_s=restart_s[0], repair_s=repair_s, waits=waits)
    return FailureBudget(
        parts=parts,
        cable_failures_per_day=sum(part.failures_per_day for part in parts if "cables" in part.part),
        switch_failures_per_day=sum(part.failures_per_day for part in parts if "switches" in part.part),
        failures_per_day=sum(part.failures_per_day for part in parts),
        interruptions_per_day=per_day,
        interruptions_interval=(low * scale, high * scale),
        day_spread=poisson_spread(per_day),
        restart=(quick, slow),
        conventional=bypass_cost(fabric, replace(answer, recovery_s=CONVERGE_S, edge=False)),
        edge=bypass_cost(fabric, answer),
        edge_lanes=bypass_cost(fabric, replace(answer, cable="lanes")),
        edge_whole=bypass_cost(fabric, replace(answer, cable="whole")),
        waits=waits,
    )


def part_rates(fabric: Fabric) -> tuple[PartRate, ...]:
    """Return the failure rates of cables and switches by tier."""
    names = ("NIC-T0", "T0-T1", "T1-T2", "T2-T3")
    counts = (fabric.t0, fabric.t1, fabric.t2, fabric.t3)
    cables = [(f"{names[tier]} cables", links // fabric.planes) for tier, links in enumerate(fabric_bill(fabric).links)]
    boxes = [(f"T{tier} switches", fabric.planes * count) for tier, count in enumerate(counts) if count]
    return tuple(
        PartRate(part=part, count=count, failures_per_day=count * rate)
        for rows, rate in ((cables, CABLE_PER_DAY), (boxes, SWITCH_PER_DAY))
        for part, count in rows
    )


def bypass_cost(fabric: Fabric, answer: FailureAnswer) -> FailureCost:
    """Return the daily cost of the failures of all parts, each kind at its own rate and cost."""
    parts = part_rates(fabric)
    lanes = fabric.planes if answer.cable == "lanes" else 1
    lost_s = sum(
        part.failures_per_day * part_s(fabric, part.part, answer) * (lanes if "cables" in part.part else 1)
        for part in parts
    )
    return _failure_cost(fabric, lost_s, sum(part.failures_per_day for part in parts))


def part_s(fabric: Fabric, part: str, answer: FailureAnswer) -> float:
    """Return the seconds that the whole job loses to one failure of a kind of part.

    After the stall the job runs slower until the part is back, by the share of its steps that waits for the network.
    A NIC needs REMAP_S to leave a port, however fast paths change. A NIC whose QPs cannot leave the port is cut off,
    and the job restarts.
    """
    if answer.recovery_s > GIVE_UP_S:
        return answer.restart_s
    cables, lost = "cables" in part, failure_loss(fabric)
    back_s = answer.repair_s if cables else SWITCH_BACK_S
    if part in ("NIC-T0 cables", "T0 switches"):
        if not answer.edge or not ports_move(fabric) or (cables and answer.cable == "whole"):
            # A host is replaced; for a switch the job waits.
            return answer.restart_s + (0.0 if cables else SWITCH_BACK_S)
        return max(answer.recovery_s, REMAP_S) + back_s * (1 - pace_with_loss(lost.nic_link, waits=answer.waits))
    # T2 and above carry less: an upper bound.
    share = lost.t0_t1_link / fabric.planes if cables else lost.t1
    if not answer.edge or not can_spray(fabric):
        # A QP cannot leave its plane, and the message waits for it.
        share *= fabric.planes
    elif cables and answer.cable == "whole":
        share = min(1 / fabric.planes, share * fabric.planes)
    return stall_s(fabric, answer.recovery_s) + back_s * (1 - pace_with_loss(share, waits=answer.waits))


def flap_share(fabric: Fabric, recovery_s: float) -> float:
    """Return the largest share of time in which a job stalls because flapping links above T0 are not yet bypassed.

    A flap does not restart the job. An upper bound: every flap is assumed to hit the job and to need the whole time,
    though a switch drops its own dead uplinks sooner than routing converges.
    """
    cables = sum(fabric_bill(fabric).links[1:]) // fabric.planes
    return min(1.0, cables * FLAP_PER_CABLE_DAY * min(recovery_s, GIVE_UP_S) / DAY_S)


def interruptions_per_day(fabric: Fabric) -> float:
    """Return the network failures per day that interrupt the job, at Llama 3's rate per GPU."""
    return fabric.hosts * LLAMA_COUNT / llama_device_days()


def cost_of(fabric: Fabric, seconds: float) -> FailureCost:
    """Return the daily cost of interruptions at Llama 3's rate, each of which takes `seconds` of the whole job."""
    return _failure_cost(fabric, interruptions_per_day(fabric) * seconds, interruptions_per_day(fabric))


def _failure_cost(fabric: Fabric, lost_s: float, events: float) -> FailureCost:
    """Return the cost of `lost_s` seconds a day, lost to `events` failures."""
    share = min(1.0, lost_s / DAY_S)
    hours = share * fabric.hosts * DAY_S / HOUR_S
    return FailureCost(seconds_per_event=lost_s / events, lost_share=share, lost_gpu_hours_per_day=hours)


def poisson_interval(count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Garwood's exact confidence interval for the mean of a Poisson count.

    >>> [round(bound, 1) for bound in poisson_interval(35)]
    [24.4, 48.7]
    """
    from scipy.special import gammaincinv

    tail = (1 - confidence) / 2
    low = float(gammaincinv(count, tail)) if count else 0.0
    return low, float(gammaincinv(count + 1, 1 - tail))


def poisson_spread(mean: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """Return the counts between which a Poisson variable lies with the given confidence.

    >>> poisson_spread(5.19), poisson_spread(0.0)
    ((1, 10), (0, 0))
    """
    from scipy.special import pdtrik

    tail = (1 - confidence) / 2
    if mean <= 0:
        return 0, 0
    # pdtrik returns a real number, which is negative where a count of 0 is already likelier than the tail.
    low, high = (max(0, math.ceil(float(pdtrik(share, mean)) - 1e-9)) for share in (tail, 1 - tail))
    return low, high
