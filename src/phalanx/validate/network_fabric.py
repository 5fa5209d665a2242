"""The fabric that a row's words describe: hosts, planes, ports, tiers."""

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

BOX_GBPS = 51_200  # the boxes of arXiv:2605.04333: 512 ports of 100G, 64 of 800G
NIC_GBPS = 800.0
MOST_NIC_GBPS = 1600  # `8x100G` up to here is a NIC in planes, `64x800G` beyond is a switch
MOST_PORTS = 4096  # of one switch: none has more than 1,024
MOST_TIERS = 4
HOSTS = r"(?:hosts?|NICs?|GPUs?)(?! per\b)"


def words(row: Claim) -> str:
    """Conditions first: where both name a number, they are the more exact."""
    return f"{row.conditions}, {row.quantity}"


def planes(row: Claim) -> int:
    """Planes of a NIC; 1 where nothing is said."""
    text = words(row)
    found = count_before(text, "planes?")
    if found is None and (nic := _nic_in_planes(text)):
        found = nic[0]
    if found is None and (speed := number_matching(text, r"(\d+)G plane")):
        found = int(NIC_GBPS / speed) if 0 < speed <= NIC_GBPS else None
    return found or 1


def said_planes(row: Claim) -> int:
    """The same where it must be said."""
    text = words(row)
    if not (count_before(text, "planes?") or _nic_in_planes(text) or number_matching(text, r"(\d+)G plane")):
        raise NotStated("how many planes")
    return planes(row)


def radix(row: Claim) -> int:
    """Ports of a switch: said, or those of a 51.2T box at the speed of a port."""
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
    """One to four."""
    found = count_before(words(row), "tiers?") or default
    if found is None or not 1 <= found <= MOST_TIERS:
        raise NotStated(f"how many tiers (1 to {MOST_TIERS})")
    return found


def ratio(row: Claim) -> float:
    """Oversubscription; 1 where nothing is said."""
    return number_matching(row.conditions, r"(?<![\d-])(\d+(?:\.\d+)?):1\b") or 1.0


def shape(row: Claim, *, default_tiers: int | None = None) -> ClosShape:
    """Planes, tiers and oversubscription."""
    return ClosShape(planes=planes(row), tiers=tiers(row, default=default_tiers), oversubscription=ratio(row))


def fabric(row: Claim) -> Fabric:
    """The fabric a row describes; full when it names no hosts."""
    made, ports = shape(row, default_tiers=2), radix(row)
    hosts = count_before(row.conditions, HOSTS) or most_hosts(ports, made)
    # The speed of a NIC changes no count: any that the planes divide will do.
    return size_fabric(hosts, 100.0 * made.planes, unnamed_switch(ports, 100.0), made)


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
    found = pair_before(text, "G")
    return found if found and found[0] * found[1] <= MOST_NIC_GBPS else None


def _number_after(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1][:9]) if found else None


# Rows about the shape of a fabric: exact arithmetic.


EXACT = 1e-3  # exact values are printed with four digits
SAMPLED = 0.02  # the rows' own Monte Carlo error
MOST_UNITS = 10**8  # per link: a slip beyond, and an array of every load up to there
# The two ends of the comparison in arXiv:2605.04333 section 2: 8 planes on two tiers of 512x100G, one plane of 64x800G.
MULTI_PLANE, MULTI_RADIX, SINGLE_RADIX = ClosShape(planes=8, tiers=2), 512, 64
TIER_OF = {"NIC-T0": 0, "T0-T1": 1, "T1-T2": 2}


def hosts(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """2·(k/2)^L."""
    found = most_hosts(radix(row), shape(row))
    return reproduced(row, found, "fabric/sizing", tolerance=EXACT)


def _full_fabric(radix: int, shape: ClosShape) -> Fabric:
    gbps = NIC_GBPS if NIC_GBPS % shape.planes == 0 else 100.0 * shape.planes
    return size_fabric(most_hosts(radix, shape), gbps, unnamed_switch(radix, gbps / shape.planes), shape)


def per_host_ratio(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Switches or optics per host of eight planes against one plane of so many tiers."""
    against = count_before(row.quantity, "tiers?") or 3
    many = _full_fabric(MULTI_RADIX, MULTI_PLANE)
    one = _full_fabric(SINGLE_RADIX, ClosShape(planes=1, tiers=against))
    if row.quantity.startswith("optics"):
        ours = fabric_bill(many).optics_800g / many.hosts / (fabric_bill(one).optics_800g / one.hosts)
        return reproduced(row, ours, "fabric/fabric_bill", tolerance=EXACT)
    return reproduced(
        row, many.switches / many.hosts / (one.switches / one.hosts), "fabric/fabric_bill", tolerance=EXACT
    )


def hops(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Switches on the longest path."""
    made = size_fabric(64, 800.0, unnamed_switch(64, 800.0), ClosShape(planes=1, tiers=tiers(row)))
    return reproduced(row, made.hops, "fabric/types", tolerance=EXACT)


def under_t0(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Ports of a T0 that go down."""
    return reproduced(row, split_t0(radix(row), 2, ratio(row))[0], "fabric/sizing", tolerance=EXACT)


def uplink_loss(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Share of a T0's uplinks that one is."""
    made = _full_fabric(radix(row), ClosShape(planes=planes(row), tiers=2))
    return reproduced(row, 100 * failure_loss(made).t0_t1_link, "fabric/fabric_bill; the row is rounded")


def nic_loss(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Share of a NIC that a plane is."""
    made = _full_fabric(SINGLE_RADIX, ClosShape(planes=said_planes(row), tiers=2))
    return reproduced(row, 100 * failure_loss(made).nic_link, "fabric/fabric_bill; the row is rounded")


def total(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Switches or links of a whole fabric."""
    made = fabric(row)
    boxes = {"switches": made.switches, "T0 switches": made.planes * made.t0, "T1 switches": made.planes * made.t1}
    boxes["T2 switches"] = made.planes * made.t2
    name = row.quantity.rpartition(" total")[0]
    if name in boxes:
        return reproduced(row, boxes[name], "fabric/sizing", tolerance=EXACT)
    tier = TIER_OF[name.split(" ")[0]]
    links = tier_links(made)
    if tier >= len(links):
        raise NotStated(f"a fabric with {name}: it has {made.tiers} tiers")
    return reproduced(row, links[tier], "fabric/fabric_bill", tolerance=EXACT)


def per_host(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Switches or 800G-class optics for one NIC of a full fabric."""
    made = _full_fabric(radix(row), shape(row))
    whole = made.switches if row.quantity.startswith("switches") else fabric_bill(made).optics_800g
    return reproduced(row, whole / made.hosts, "fabric/fabric_bill", tolerance=EXACT)


def paths(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Paths between hosts under different T0s: over every T1 of every plane in two tiers."""
    if t1 := count_before(row.conditions, "T1s?"):
        return reproduced(row, planes(row) * t1, "planes x T1", tolerance=EXACT)
    return reproduced(row, fabric(row).paths, "fabric/types", tolerance=EXACT)


def touched(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Chance that a connection has a path over one given T1."""
    text = words(row)
    entropy, ways = (
        stated(count_before(text, "EVs?"), "how many EVs"),
        stated(count_before(text, "paths?"), "of how many paths"),
    )
    return reproduced(row, 100 * (1 - (1 - 1 / ways) ** entropy), "1-(1-1/paths)^EVs", tolerance=5e-3)


def link_load(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Balls into bins."""
    units = stated(
        count_before(row.conditions, "(?:units?|flows?|QPs?|EVs?|packets?) per link"), "how many units per link"
    )
    links = stated(count_before(row.conditions, "(?:up)?links"), "how many links")
    if units > MOST_UNITS:
        raise NotStated(f"a load: {units:,} units per link are none")
    return reproduced(row, max_to_mean(units, links), "fabric/loads, no sampling", tolerance=SAMPLED)


def spray_load(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """The busiest uplink of all T0s when every connection draws its paths at random.

    A T0-T1 link is counted once, as everywhere in the table and in `phalanx fabric decisions`: its way down is another
    draw of the same kind, and the busiest of both ways 1 to 2 % higher.
    """
    entropy, made = stated(count_before(row.conditions, "EVs?(?: per QP)?"), "how many EVs per QP"), fabric(row)
    units = made.t0_down * entropy / made.planes / made.t0_up
    if units > MOST_UNITS:
        raise NotStated(f"a load: {units:,.0f} units per link are none")
    ours = max_to_mean(units, made.t0_up, groups=made.planes * made.t0)
    return reproduced(row, ours, "fabric/loads over the uplinks of all T0s and planes")


def idle_links(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Links on which nothing falls."""
    units = stated(count_before(row.conditions, "(?:units?|flows?|QPs?) per link"), "how many units per link")
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * idle_share(units), "fabric/loads", tolerance=SAMPLED)


def late(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Chance that one of N transfers is late."""
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
    """The harmonic number."""
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


# Rows that we take as given: constants of our defaults, field rates, and what follows from them.


# arXiv:2605.04333 table 1: GB/s of a GPU's NIC.
CLUSTER_GB = {"A": 100.0, "B": 100.0, "C": 50.0, "D": 50.0}
REFERENCE = "mrc-131k"
PEAK = 0.03  # what the design asks of the peak of a collective


def latency(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Two links under one T0, four over a T1."""
    links = 4 if "cross T1" in row.quantity else 2
    hop_s = parse_fabric(REFERENCE).hop_s
    return calibrated(row, 1e6 * (MRC.host_s + links * hop_s), "host_s and hop_s were set from this measurement")


def write_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Payload's share of the line."""
    line = stated(
        number_matching(row.conditions, r"(\d+)G NIC") or number_matching(row.conditions, r"(\d+)G\b"),
        "the NIC's speed",
    )
    return calibrated(row, line * MRC.payload_bytes / MRC.packet_bytes, "the header bytes were set from this")


def goodput(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """The same from the bytes the row names."""
    payload = stated(number_matching(row.conditions, r"(\d+) ?B payload"), "the payload's bytes")
    header = stated(number_matching(row.conditions, r"(\d+) ?B headers?"), "the headers' bytes")
    line = stated(number_matching(row.conditions, r"(\d+)G\b"), "the line's speed")
    return reproduced(row, line * payload / (payload + header), "payload / (payload + headers)", tolerance=1e-3)


def collective_peak(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """What the planner takes a collective to get of a NIC: fitted to published training runs, of which this is none."""
    name = row.conditions.rpartition("Cluster ")[2][:1]
    if name not in CLUSTER_GB:
        raise NotStated("which of the paper's clusters it is")
    share = float(shipped_physics().nic)
    return reproduced(row, CLUSTER_GB[name] * share, f"plan/physics: {share:.3f} of a NIC's line rate", tolerance=PEAK)


def link_month(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Per cent of cables per month."""
    return calibrated(row, 100 * CABLE_PER_DAY * MONTH_DAYS, "our rate of cable failures is this one")


def llama(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Counted interruptions."""
    return calibrated(row, LLAMA_COUNT, "our rate of network interruptions is this one")


def _interruptions_per_day(row: Claim) -> float:
    gpus = stated(count_before(row.conditions, "GPUs?"), "how many GPUs")
    everything = "all cause" in f"{row.quantity} {row.conditions}".lower().replace("-", " ")
    return (
        gpus
        * (next(one.value for one in site_figures() if one.site == HOPPER_SITE) if everything else LLAMA_COUNT)
        / llama_device_days()
    )


def interruptions(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Per day, by GPUs."""
    return reproduced(row, _interruptions_per_day(row), "fabric/budget", tolerance=5e-3)


def between_interruptions(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """The same the other way round."""
    scale = stated({"h": 24.0, "hours": 24.0, "min": 1440.0, "minutes": 1440.0}.get(row.unit), "a unit of time")
    return reproduced(row, scale / _interruptions_per_day(row), "fabric/budget", tolerance=0.02)


def lost_share(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Of the cluster's time, when every interruption by the network costs a restart."""
    minutes = stated(number_matching(row.conditions, r"([\d.]+) ?min"), "how many minutes a restart takes")
    per_day = number_matching(row.conditions, r"([\d.]+) (?:network-caused )?(?:restarts?|interruptions?)")
    per_day = per_day or _interruptions_per_day(row)
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * per_day * minutes / 1440, "fabric/budget")


def link_failures(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Per day, by cables."""
    links = number_matching(row.conditions, r"([\d,]+) (?:800G-equivalent )?(?:links|cables)")
    return reproduced(row, stated(links, "how many links") * CABLE_PER_DAY, "fabric/budget", tolerance=5e-3)


def mean_time(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Between failures of any of so many parts that live so long."""
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


# Rows about the clusters of arXiv:2605.04333: what its fabric and our constants say about what was seen there.


CLUSTER_NIC_GBPS = 800.0
PLANES = 4  # of the large GPU cluster A in its table 1: 4x200G
MINUTE_S = 60.0
LOST_PER_S = 1.0  # section 2.4: a NIC lost less than one packet a second


def cage_flaps(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """All links of a NIC on one transceiver: nothing moves until it is back, and that time was set from the paper's.

    With fewer, a NIC moves its connections and goes on with what is left; how much the job waits for it is not known.
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
    """Per cent of a minute with moved connections and a NIC that lacks a share."""
    return 100 * (REMAP_S + (MINUTE_S - REMAP_S) * (1 - pace_with_loss(lost, waits=waits))) / MINUTE_S


def touched_by_stop(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Connections with a path over one T1: the paper gives their number of paths as a range."""
    low, high = (100 * (1 - (1 - 1 / WAYS) ** entropy) for entropy in ENTROPY)
    middle = 100 * (1 - (1 - 1 / WAYS) ** (sum(ENTROPY) / 2))
    words = f"{low:.1f} with {ENTROPY[0]} EVs to {high:.1f} with {ENTROPY[1]}, of {WAYS} paths (4x200G, 256 ports)"
    return ranged(row, middle, words, between=(low, high))


def loss_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """One packet a second of what a NIC sends."""
    gbps = number_matching(row.conditions, r"(\d+)G\b") or CLUSTER_NIC_GBPS
    ours = LOST_PER_S * 8 * MRC.packet_bytes / (gbps * 1e9)
    return reproduced(row, ours, f"section 2.4: under one lost packet a second and NIC, of {gbps:g}G", tolerance=0.1)


PAPER_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^job throughput drop, \d+ NIC-T0 links? flap", cage_flaps),
    (r"^QPs affected by T1 stop", touched_by_stop),
    (r"^loss rate after start", loss_rate),
)
