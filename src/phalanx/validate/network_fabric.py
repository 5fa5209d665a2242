"""Readers for claims about fabrics: the fabric described in a row, its sizes, failures and measured constants."""

from __future__ import annotations

import re

from phalanx.hardware.failures import HOPPER_SITE, llama_device_days, site_figures
from phalanx.network.fabric.decisions import harmonic_number, idle_share, late_step, max_to_mean
from phalanx.network.fabric.fabric_bill import fabric_bill, failure_loss, tier_links
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.failure_budget import (
    CABLE_PER_DAY,
    CONVERGE_S,
    EDGE_RECOVERY_S,
    FLAP_S,
    LLAMA_COUNT,
    MONTH_DAYS,
    REMAP_S,
    T1_BACK_S,
    TRANSCEIVER_BACK_S,
    WAITS,
    pace_with_loss,
)
from phalanx.network.fabric.sizing import ClosShape, most_hosts, size_fabric, split_t0
from phalanx.network.fabric.switch_catalogue import unnamed_switch
from phalanx.plan.physics import shipped_physics
from phalanx.sim.packets.transport import MRC
from phalanx.validate.network_claims import (
    Claim,
    ClaimContext,
    ClaimOutcome,
    ClaimReader,
    NotStated,
    calibrated,
    count_before,
    number_matching,
    pair_before,
    ranged,
    reproduced,
    stated,
)

# The boxes of arXiv:2605.04333: 512 ports of 100G, 64 of 800G.
BOX_GBPS = 51_200
NIC_GBPS = 800.0
# `8x100G` up to this total is a NIC in planes, `64x800G` beyond it is a switch.
MOST_NIC_GBPS = 1600
MOST_PORTS = 4096  # of one switch; no product has more than 1,024
MOST_TIERS = 4
HOSTS = r"(?:hosts?|NICs?|GPUs?)(?! per\b)"


def words(row: Claim) -> str:
    """Return the row's texts, conditions first: if both name a number, the conditions are more exact."""
    return f"{row.conditions}, {row.quantity}"


def planes(row: Claim) -> int:
    """Return the number of planes of a NIC; 1 if the row does not state it."""
    text = words(row)
    count = count_before(text, "planes?")
    if count is None and (nic := _nic_in_planes(text)):
        count = nic[0]
    if count is None and (speed := number_matching(text, r"(\d+)G plane")):
        count = int(NIC_GBPS / speed) if 0 < speed <= NIC_GBPS else None
    return count or 1


def said_planes(row: Claim) -> int:
    """Return the number of planes; raise NotStated if the row does not state it."""
    text = words(row)
    if not (count_before(text, "planes?") or _nic_in_planes(text) or number_matching(text, r"(\d+)G plane")):
        raise NotStated("how many planes")
    return planes(row)


def radix(row: Claim) -> int:
    """Return the number of ports of a switch: as stated, or those of a 51.2T box at the stated port speed."""
    text = words(row)
    ports = count_before(text, "ports?") or _number_after(text, r"(?:radix|k ?=) ?(\d+)")
    if not ports and (box := pair_before(text, "G")) and box[0] * box[1] > MOST_NIC_GBPS:
        ports = box[0]
    if not ports:
        ports = int(
            (1000.0 * (number_matching(text, r"(\d+(?:\.\d+)?)T\b(?! IB)") or BOX_GBPS / 1000))
            / stated(_port_gbps(text), "ports, planes or the speed of a port")
        )
    if not 2 <= ports <= MOST_PORTS:
        raise NotStated(f"a switch: {ports:,} ports are none")
    return ports


def tiers(row: Claim, *, default: int | None = None) -> int:
    """Return the number of tiers, one to four."""
    count = count_before(words(row), "tiers?") or default
    if count is None or not 1 <= count <= MOST_TIERS:
        raise NotStated(f"how many tiers (1 to {MOST_TIERS})")
    return count


def ratio(row: Claim) -> float:
    """Return the oversubscription; 1 if the row does not state it."""
    return number_matching(row.conditions, r"(?<![\d-])(\d+(?:\.\d+)?):1\b") or 1.0


def shape(row: Claim, *, default_tiers: int | None = None) -> ClosShape:
    """Return planes, tiers and oversubscription of a row."""
    return ClosShape(planes=planes(row), tiers=tiers(row, default=default_tiers), oversubscription=ratio(row))


def fabric(row: Claim) -> Fabric:
    """Return the fabric that a row describes, at its full size if the row names no hosts."""
    clos, ports = shape(row, default_tiers=2), radix(row)
    hosts = count_before(row.conditions, HOSTS) or most_hosts(ports, clos)
    # The NIC's speed does not affect the counts: any speed that is divisible by the planes works.
    return size_fabric(hosts, 100.0 * clos.planes, unnamed_switch(ports, 100.0), clos)


def _port_gbps(text: str) -> float | None:
    if speed := number_matching(text, r"planes? ?(?:x|×|of) ?(\d+)G") or number_matching(
        text, r"(\d+)G (?:planes?|ports?)"
    ):
        return speed
    if nic := _nic_in_planes(text):
        return float(nic[1])
    parts = count_before(text, "planes?")
    return (number_matching(text, r"(\d+)G NIC") or NIC_GBPS) / parts if parts else None


def _nic_in_planes(text: str) -> tuple[int, int] | None:
    pair = pair_before(text, "G")
    return pair if pair and pair[0] * pair[1] <= MOST_NIC_GBPS else None


def _number_after(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1][:9]) if match else None


# ---- the shape of a fabric: exact arithmetic -------------------------------------------------------------------------


EXACT = 1e-3  # exact values are printed with four digits
SAMPLED = 0.02  # the Monte Carlo error of the rows themselves
# Units per link; more is a typing mistake, and loads up to this count fit in an array.
MOST_UNITS = 10**8
# The two ends of the comparison in arXiv:2605.04333 section 2: 8 planes on two tiers of 512x100G, one plane of 64x800G.
MULTI_PLANE, MULTI_RADIX, SINGLE_RADIX = ClosShape(planes=8, tiers=2), 512, 64
TIER_OF = {"NIC-T0": 0, "T0-T1": 1, "T1-T2": 2}


def hosts(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the maximum number of hosts, 2·(k/2)^L."""
    host_count = most_hosts(radix(row), shape(row))
    return reproduced(row, host_count, "fabric/sizing", tolerance=EXACT)


def _full_fabric(radix: int, shape: ClosShape) -> Fabric:
    gbps = NIC_GBPS if NIC_GBPS % shape.planes == 0 else 100.0 * shape.planes
    return size_fabric(most_hosts(radix, shape), gbps, unnamed_switch(radix, gbps / shape.planes), shape)


def per_host_ratio(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare switches or optics per host of eight planes with those of a single plane of several tiers."""
    against = count_before(row.quantity, "tiers?") or 3
    many = _full_fabric(MULTI_RADIX, MULTI_PLANE)
    single = _full_fabric(SINGLE_RADIX, ClosShape(planes=1, tiers=against))
    if row.quantity.startswith("optics"):
        computed = fabric_bill(many).optics_800g / many.hosts / (fabric_bill(single).optics_800g / single.hosts)
        return reproduced(row, computed, "fabric/fabric_bill", tolerance=EXACT)
    return reproduced(
        row, many.switches / many.hosts / (single.switches / single.hosts), "fabric/fabric_bill", tolerance=EXACT
    )


def hops(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the number of switches on the longest path."""
    sized = size_fabric(64, 800.0, unnamed_switch(64, 800.0), ClosShape(planes=1, tiers=tiers(row)))
    return reproduced(row, sized.hops, "fabric/types", tolerance=EXACT)


def under_t0(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the number of ports of a T0 that lead to hosts."""
    return reproduced(row, split_t0(radix(row), 2, ratio(row))[0], "fabric/sizing", tolerance=EXACT)


def uplink_loss(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the share of bandwidth lost with one uplink of a T0."""
    sized = _full_fabric(radix(row), ClosShape(planes=planes(row), tiers=2))
    return reproduced(row, 100 * failure_loss(sized).t0_t1_link, "fabric/fabric_bill; the row is rounded")


def nic_loss(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the share of a NIC's bandwidth lost with one plane."""
    sized = _full_fabric(SINGLE_RADIX, ClosShape(planes=said_planes(row), tiers=2))
    return reproduced(row, 100 * failure_loss(sized).nic_link, "fabric/fabric_bill; the row is rounded")


def total(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the switches or links of a complete fabric."""
    sized = fabric(row)
    boxes = {"switches": sized.switches, "T0 switches": sized.planes * sized.t0, "T1 switches": sized.planes * sized.t1}
    boxes["T2 switches"] = sized.planes * sized.t2
    name = row.quantity.rpartition(" total")[0]
    if name in boxes:
        return reproduced(row, boxes[name], "fabric/sizing", tolerance=EXACT)
    tier = TIER_OF[name.split(" ")[0]]
    links = tier_links(sized)
    if tier >= len(links):
        raise NotStated(f"a fabric with {name}: it has {sized.tiers} tiers")
    return reproduced(row, links[tier], "fabric/fabric_bill", tolerance=EXACT)


def per_host(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare switches or 800G-class optics per NIC of a full fabric."""
    sized = _full_fabric(radix(row), shape(row))
    total_count = sized.switches if row.quantity.startswith("switches") else fabric_bill(sized).optics_800g
    return reproduced(row, total_count / sized.hosts, "fabric/fabric_bill", tolerance=EXACT)


def paths(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the paths between hosts under different T0s: one over each T1 of each plane, in two tiers."""
    if t1 := count_before(row.conditions, "T1s?"):
        return reproduced(row, planes(row) * t1, "planes x T1", tolerance=EXACT)
    return reproduced(row, fabric(row).paths, "fabric/types", tolerance=EXACT)


def touched(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the probability that a connection has a path over one given T1."""
    text = words(row)
    entropy, ways = (
        stated(count_before(text, "EVs?"), "how many EVs"),
        stated(count_before(text, "paths?"), "of how many paths"),
    )
    return reproduced(row, 100 * (1 - (1 - 1 / ways) ** entropy), "1-(1-1/paths)^EVs", tolerance=5e-3)


def link_load(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the maximum link load, by the balls-into-bins model."""
    units = stated(
        count_before(row.conditions, "(?:units?|flows?|QPs?|EVs?|packets?) per link"), "how many units per link"
    )
    links = stated(count_before(row.conditions, "(?:up)?links"), "how many links")
    if units > MOST_UNITS:
        raise NotStated(f"a load: {units:,} units per link are none")
    return reproduced(row, max_to_mean(units, links), "fabric/loads, no sampling", tolerance=SAMPLED)


def spray_load(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the busiest uplink of all T0s if every connection draws its paths at random.

    A T0-T1 link is counted in one direction, as in the table and in `phalanx fabric decisions`: the other direction is
    another draw of the same kind, and the busiest of both is 1 to 2 % higher.
    """
    entropy, sized = stated(count_before(row.conditions, "EVs?(?: per QP)?"), "how many EVs per QP"), fabric(row)
    units = sized.t0_down * entropy / sized.planes / sized.t0_up
    if units > MOST_UNITS:
        raise NotStated(f"a load: {units:,.0f} units per link are none")
    computed = max_to_mean(units, sized.t0_up, groups=sized.planes * sized.t0)
    return reproduced(row, computed, "fabric/loads over the uplinks of all T0s and planes")


def idle_links(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the share of links without any flow."""
    units = stated(count_before(row.conditions, "(?:units?|flows?|QPs?) per link"), "how many units per link")
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * idle_share(units), "fabric/loads", tolerance=SAMPLED)


def late(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the probability that at least one of N transfers is late."""
    text = words(row)
    chance = number_matching(text, r"p ?= ?([\d.]+(?:e-?\d+)?)(?!\d|\^)")
    if power := re.search(r"p ?= ?10\^-?(\d+)", text):
        chance = 10.0 ** -int(power[1][:3])
    flows = number_matching(text, r"N ?= ?([\d,]+)") or count_before(text, "(?:transfers?|flows?|GPUs?)")
    if chance is None or not 0 <= chance < 1:
        raise NotStated("the chance p that a transfer is late")
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * late_step(chance, int(stated(flows, "how many transfers N"))), "fabric/decisions")


def slowest(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the expected maximum over the mean of N times, the harmonic number."""
    text = words(row)
    flows = number_matching(text, r"N ?= ?([\d,]+)") or count_before(text, "(?:transfers?|flows?)")
    return reproduced(
        row, harmonic_number(int(stated(flows, "how many transfers N"))), "fabric/decisions", tolerance=EXACT
    )


FABRIC_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^(max )?hosts( at|,| in| of)|^(max|most) hosts", hosts),
    (r"^(switch|switches|switch count|optics) ratio", per_host_ratio),
    (r"^(max |worst )?switch hops", hops),
    (r"^hosts (under one T0|one switch away)", under_t0),
    (r"^capacity lost per (failed )?T0-T1 link", uplink_loss),
    (r"^NIC bandwidth lost per (failed )?NIC-T0 link", nic_loss),
    (r"^(switches|T[012] switches|T0-T1 links|NIC-T0 links|T1-T2 links) total", total),
    (r"^(switches|optics) per host", per_host),
    (r"^(links|share of links) idle|^idle links", idle_links),
    (r"\bstep\b.*\blate\b|^late steps", late),
    (r"^(distinct )?paths (between hosts|per host pair)", paths),
    (r"^QPs touched by one T1", touched),
    (r"^max link load", link_load),
    (r"^worst T0-T1 link load", spray_load),
    (r"^E\[max\]/mean", slowest),
)


# ---- values taken from sources: default constants, field rates, and what follows from them ---------------------------


# arXiv:2605.04333 table 1: GB/s of a GPU's NIC.
CLUSTER_GB = {"A": 100.0, "B": 100.0, "C": 50.0, "D": 50.0}
REFERENCE = "mrc-131k"
# Relative tolerance required for the peak of a collective.
PEAK = 0.03


def latency(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the latency: two links under one T0, four over a T1."""
    links = 4 if "cross T1" in row.quantity else 2
    hop_s = parse_fabric(REFERENCE).hop_s
    return calibrated(row, 1e6 * (MRC.host_s + links * hop_s), "host_s and hop_s were set from this measurement")


def write_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the payload's share of the line rate."""
    line = stated(
        number_matching(row.conditions, r"(\d+)G NIC") or number_matching(row.conditions, r"(\d+)G\b"),
        "the NIC's speed",
    )
    return calibrated(row, line * MRC.payload_bytes / MRC.packet_bytes, "the header bytes were set from this")


def goodput(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the goodput computed from the header bytes that the row names."""
    payload = stated(number_matching(row.conditions, r"(\d+) ?B payload"), "the payload's bytes")
    header = stated(number_matching(row.conditions, r"(\d+) ?B headers?"), "the headers' bytes")
    line = stated(number_matching(row.conditions, r"(\d+)G\b"), "the line's speed")
    return reproduced(row, line * payload / (payload + header), "payload / (payload + headers)", tolerance=1e-3)


def collective_peak(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the planner's share of a NIC's rate for a collective.

    It was fitted to published training runs other than this one.
    """
    name = row.conditions.rpartition("Cluster ")[2][:1]
    if name not in CLUSTER_GB:
        raise NotStated("which of the paper's clusters it is")
    share = float(shipped_physics().nic)
    return reproduced(row, CLUSTER_GB[name] * share, f"plan/physics: {share:.3f} of a NIC's line rate", tolerance=PEAK)


def link_month(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the failures of cables per month, in per cent."""
    return calibrated(row, 100 * CABLE_PER_DAY * MONTH_DAYS, "our rate of cable failures is this one")


def llama(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the counted network interruptions of Llama 3's training."""
    return calibrated(row, LLAMA_COUNT, "our rate of network interruptions is this one")


def _interruptions_per_day(row: Claim) -> float:
    gpus = stated(count_before(row.conditions, "GPUs?"), "how many GPUs")
    everything = "all cause" in f"{row.quantity} {row.conditions}".lower().replace("-", " ")
    return (
        gpus
        * (next(figure.value for figure in site_figures() if figure.site == HOPPER_SITE) if everything else LLAMA_COUNT)
        / llama_device_days()
    )


def interruptions(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare interruptions per day, by the number of GPUs."""
    return reproduced(row, _interruptions_per_day(row), "fabric/budget", tolerance=5e-3)


def between_interruptions(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the time between interruptions."""
    scale = stated({"h": 24.0, "hours": 24.0, "min": 1440.0, "minutes": 1440.0}.get(row.unit), "a unit of time")
    return reproduced(row, scale / _interruptions_per_day(row), "fabric/budget", tolerance=0.02)


def lost_share(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the share of the cluster's time lost if every interruption by the network costs a restart."""
    minutes = stated(number_matching(row.conditions, r"([\d.]+) ?min"), "how many minutes a restart takes")
    per_day = number_matching(row.conditions, r"([\d.]+) (?:network-caused )?(?:restarts?|interruptions?)")
    per_day = per_day or _interruptions_per_day(row)
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * per_day * minutes / 1440, "fabric/budget")


def link_failures(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare link failures per day, by the number of cables."""
    links = number_matching(row.conditions, r"([\d,]+) (?:800G-equivalent )?(?:links|cables)")
    return reproduced(row, stated(links, "how many links") * CABLE_PER_DAY, "fabric/budget", tolerance=5e-3)


def mean_time(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the mean time between failures of any of the parts, given the life of one part."""
    text = f"{row.conditions}, {row.quantity}"
    years = stated(number_matching(text, r"(\d+(?:\.\d+)?)[ -]years?"), "the years one part lives")
    parts = stated(count_before(text, "(?:links?|NICs?|GPUs?|hosts?)"), "how many parts")
    scale = stated(
        {"h": 8760.0, "hours": 8760.0, "min": 525_600.0, "minutes": 525_600.0}.get(row.unit), "a unit of time"
    )
    return reproduced(row, scale * years / parts, "years / parts", tolerance=0.02)


def _taken_from_source(ours: float, note: str) -> ClaimReader:
    def read(row: Claim, _: ClaimContext) -> ClaimOutcome:
        return calibrated(row, ours, note)

    return read


# arXiv:2605.04333, section 2.1: 128 to 256 paths per connection. Table 1: cluster A is 4x200G on 256-port boxes.
ENTROPY, WAYS = (128, 256), 4 * 128

GIVEN_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^p2p latency", latency),
    (r"^p2p write bandwidth", write_rate),
    (r"^goodput from header overhead", goodput),
    (r"^NCCL over MRC peak", collective_peak),
    (r"^NIC-ToR link failures per month", link_month),
    (r"^network switch/cable interruptions", llama),
    (r"^(network |all-cause )?interruptions per day", interruptions),
    (r"between (network |all-cause )?interruptions", between_interruptions),
    (r"lost to (the )?network", lost_share),
    (r"MTTF|between (NIC )?link failures", mean_time),
    (r"^link failures per day", link_failures),
    (r"^entropy values per QP, low", _taken_from_source(ENTROPY[0], "the lower end of what the paper gives")),
    (r"^entropy values per QP, high", _taken_from_source(MRC.paths, "our default number of paths")),
    (r"^path failure bypass", _taken_from_source(1e6 * EDGE_RECOVERY_S, "our default of recovery at the edge")),
    (r"^conventional fabric reroute", _taken_from_source(CONVERGE_S, "our default of routing's convergence")),
    (r"^link recovery time, most", _taken_from_source(FLAP_S / 60, "our default time until a link is back")),
    (r"^NIC port failure QP remap", _taken_from_source(REMAP_S, "our default time for moving a NIC's connections")),
    (r"^T1 forwarding restored", _taken_from_source(T1_BACK_S / 60, "our default time until a T1 is back")),
)


# ---- observations on the clusters of arXiv:2605.04333, compared with its fabric and the default constants ------------


CLUSTER_NIC_GBPS = 800.0
# Planes of the large GPU cluster A in its table 1: 4x200G.
PLANES = 4
MINUTE_S = 60.0
# Section 2.4: a NIC lost less than one packet a second.
LOST_PER_S = 1.0


def cage_flaps(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the drop of a job's throughput in a minute in which NIC-T0 links flap.

    If all links of a NIC share one transceiver, no traffic moves until it is back; that time was set from the paper.
    With fewer links, a NIC moves its connections and continues with the rest; how much the job waits for it is
    unknown.
    """
    lanes = stated(count_before(row.quantity, "NIC-T0 links?"), "how many links")
    planes = count_before(f"{row.conditions}, {row.quantity}", "planes?") or PLANES
    if lanes >= planes:
        still_s = TRANSCEIVER_BACK_S + REMAP_S
        note = f"fabric/recovery: all {planes} links of a NIC, {still_s:g} s of the minute; that time was set here"
        return calibrated(row, 100 * still_s / MINUTE_S, note)
    low, high = _slow_share(1 / planes, waits=WAITS), _slow_share(lanes / planes, waits=1.0)
    note = f"fabric/recovery: {low:.1f} if links are of as many NICs, {high:.1f} if of one and the job is all network"
    return ranged(row, (low + high) / 2, note, between=(low, high))


def _slow_share(lost: float, *, waits: float) -> float:
    """Return the per cent of a minute lost by moving connections and by a NIC that lacks a share of its bandwidth."""
    return 100 * (REMAP_S + (MINUTE_S - REMAP_S) * (1 - pace_with_loss(lost, waits=waits))) / MINUTE_S


def touched_by_stop(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the connections with a path over one T1; the paper gives their number of paths as a range."""
    low, high = (100 * (1 - (1 - 1 / WAYS) ** entropy) for entropy in ENTROPY)
    middle = 100 * (1 - (1 - 1 / WAYS) ** (sum(ENTROPY) / 2))
    note = f"{low:.1f} with {ENTROPY[0]} EVs to {high:.1f} with {ENTROPY[1]}, of {WAYS} paths (4x200G, 256 ports)"
    return ranged(row, middle, note, between=(low, high))


def loss_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the loss rate of one packet per second relative to what a NIC sends."""
    gbps = number_matching(row.conditions, r"(\d+)G\b") or CLUSTER_NIC_GBPS
    computed = LOST_PER_S * 8 * MRC.packet_bytes / (gbps * 1e9)
    return reproduced(
        row, computed, f"section 2.4: under one lost packet a second and NIC, of {gbps:g}G", tolerance=0.1
    )


PAPER_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^job throughput drop, \d+ NIC-T0 links? flap", cage_flaps),
    (r"^QPs affected by T1 stop", touched_by_stop),
    (r"^loss rate after start", loss_rate),
)
