"""How long a fabric needs to get over a lost part, and until the part is back: the one set that every command uses.

They are readings of wording, not measurements: docs/fabric.md says which. A simulation that cannot afford one of them
(ten seconds of packets) takes a shorter one and says so.
"""

from __future__ import annotations

from phalanx.network.fabric.types import Fabric

# "A few tens of microseconds" until a sender leaves a dead path (arXiv:2605.04333 section 2.1).
EDGE_RECOVERY_S = 30e-6
# "Seconds or even tens of seconds" until a conventional fabric routes around (openai.com/index/mrc-supercomputer-
# networking): the middle of 1 to 100. NCCL waits 30 s before it gives up, so the job lives.
CONVERGE_S = 10.0
# InfiniBand switches take another port by themselves where one between switches fails (SHIELD, docs.nvidia.com/
# networking). Of a time there is only the vendor's claim of 5,000 times less than a subnet manager's 10 to 20 s: weak.
SHIELD_S = 3e-3
# All QPs of a NIC move off a dead port in "a few seconds" (arXiv:2605.04333 section 3); a dead T0 is that for each of
# its NICs.
REMAP_S = 3.0
# NCCL gives a connection up after 4.096 us * 2^20 * 7 tries (net_ib: IbTimeout 20, IbRetryCnt 7): a longer stall kills
# the job, a shorter one only costs its own time.
GIVE_UP_S = 4.096e-6 * 2**20 * 7
# "Most failed links return within a minute" (the post): nine of ten is our reading of "most", and four hours for a hand
# with a new cable are a choice of ours.
FLAP_SHARE, FLAP_S, CABLE_S = 0.9, 60.0, 4 * 3600.0
LINK_BACK_S = FLAP_SHARE * FLAP_S + (1 - FLAP_SHARE) * CABLE_S  # on average: 1,494 s
T1_BACK_S = 120.0  # forwarding was back 2 minutes after a T1 went down (arXiv:2605.04333 section 5.1)
SWITCH_BACK_S = 360.0  # half of Azure's switch failures were shorter (Singh et al., SIGCOMM CCR 51(2), 2021)
# A NIC's transceiver, all its planes at once. A calibration: with the 3 s of moving QPs it is the quarter of a minute
# by which the paper's 50,000-GPU job fell behind when a glitch flapped four NIC-T0 links and it did not crash (section
# 5.1). That the four were those of one NIC is our reading.
TRANSCEIVER_BACK_S = 12.0
# Share of a step that waits for the network where no job is named: what the planner predicts for Llama 3.1 405B on
# 16,384 H100 (examples/), 12 %. Yours differs: --job says it.
WAITS = 0.12


def pace(lost: float, *, waits: float) -> float:
    """Of the usual speed, while one NIC lacks a share of its bandwidth: all wait for it, as far as they wait at all.

    >>> round(pace(1 / 8, waits=1.0), 3), round(pace(1 / 8, waits=0.12), 3), pace(1.0, waits=0.12)
    (0.875, 0.983, 0.0)
    """
    return 1.0 / (1.0 + waits * lost / (1.0 - lost)) if lost < 1.0 else 0.0


def sprays(fabric: Fabric) -> bool:
    """Whether senders can choose paths and planes: MRC runs on Ethernet only."""
    return fabric.switch.kind != "infiniband"


def ports_move(fabric: Fabric) -> bool:
    """Whether a NIC that loses a port, or its T0, carries on by another plane."""
    return fabric.planes > 1 and sprays(fabric)


def stall_s(fabric: Fabric, recovery_s: float) -> float:
    """Until what is lost above the T0s is bypassed."""
    return recovery_s if sprays(fabric) else max(recovery_s, SHIELD_S)
