"""Readers for claims about NCCL: its machine as described in a row, its tables and choices, and bus bandwidths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

from phalanx.errors import UserError
from phalanx.network import nccl_tables as tables
from phalanx.network.collective_fit import LEAST_BYTES, Point, allowed_error, fit_ends, fit_points, wire_share
from phalanx.network.nccl_choice import (
    OPERATIONS,
    AlgorithmChoice,
    Operation,
    bus_bytes_per_s,
    choose_pair,
    expect_collective,
    expected_s,
    possible_pairs,
    start_up_us,
)
from phalanx.network.nccl_system import Channels, NcclSystem, build_system
from phalanx.network.nccl_tables import Family
from phalanx.validate.network_claims import (
    Claim,
    ClaimContext,
    ClaimOutcome,
    ClaimReader,
    calibrated,
    count_before,
    number_matching,
    reproduced,
    size_bytes,
    skipped,
    without_size,
)

FAMILY_OF: Mapping[str, Family] = {
    "V100": "volta",
    "A100": "ampere",
    "A800": "ampere",
    "H100": "hopper",
    "H200": "hopper",
    "H800": "hopper",
    "GH200": "hopper",
    "B200": "blackwell",
    "B300": "blackwell",
    "GB200": "blackwell",
    "GB300": "blackwell",
}
# Per GPU, if a row with several nodes names no NIC: the common NIC of Hopper and Blackwell boards.
NIC_GBPS = 400.0
MOST = 1 << 20
_NODES = re.compile(r"\b(\d+) nodes? x (\d+) ([A-Z]+\d+)\b|\b(\d+) ?x ?(\d+) ([A-Z]+\d+)\b|\b(\d+)x ([A-Z]+\d+)\b")
_RACK = re.compile(r"\bNVL(\d+)\b")


def machine(text: str, *, nvls: bool = True) -> NcclSystem | None:
    """Parse `4 nodes x 8 B200 ... 8x400G`, `4x8 H100, 3.2T IB`, `8x H200` or `NVL72`; None if nothing matches."""
    shape = _system_shape(text)
    if shape is None:
        return None
    nodes, per_node, gpu = shape
    family = FAMILY_OF.get(gpu)
    if family is None or not 0 < nodes * per_node <= MOST or nodes * per_node < 2:
        return None
    return build_system(nodes=nodes, per_node=per_node, family=family, nic_gbps=_nic_gbps(text, per_node), nvls=nvls)


def _system_shape(text: str) -> tuple[int, int, str] | None:
    if match := _NODES.search(text):
        first = match[1] or match[4]
        if first:
            return int(first[:7]), int((match[2] or match[5])[:7]), match[3] or match[6]
        return 1, int(match[7][:7]), match[8]
    if match := _RACK.search(text):
        return 1, int(match[1][:4]), "GB200"
    return None


def _nic_gbps(text: str, per_node: int) -> float:
    if match := re.search(r"\b\d+x(\d+)G\b", text):
        return float(match[1])
    host_terabits = number_matching(text, r"([\d.]+)T (?:IB|RoCE|EFA)")
    return 1000.0 * host_terabits / per_node if host_terabits else NIC_GBPS


# ---- NCCL's tables and choices ---------------------------------------------------------------------------------------


SAME = "a constant of our model, read in the same source"
EXACT = 1e-3
MIB = 2**20
LARGEST_POWER = 50  # a pebibyte: larger than any message
PER_NODE = 8  # if a row names only the number of ranks
BY_NODES: Mapping[str, Mapping[tables.Family, tables.Triple]] = {
    "LL max bandwidth": tables.LL_MOST_GB,
    "per-channel Ring LL128": tables.RING_LL128_CHANNEL_GB,
    "per-channel Tree LL128": tables.TREE_LL128_CHANNEL_GB,
    "per-channel Tree Simple": tables.TREE_CHANNEL_GB,
    "per-channel NVLSTree": tables.NVLS_TREE_CHANNEL_GB,
}


def hop_latency(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare base, NVLink, PCI and network latency of an algorithm and protocol."""
    hop, _latency, algorithm, protocol = row.quantity.split(" ")[:4]
    for known_hop, of_hop in tables.LATENCY_US.items():
        for name, triple in of_hop.items():
            if (known_hop, name) == (hop, algorithm) and protocol in tables.PROTOCOLS:
                return calibrated(row, triple[[*tables.PROTOCOLS].index(protocol)], SAME, tolerance=EXACT)
    return None


def by_nodes(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare limits by GPU family and number of nodes."""
    table, family = BY_NODES.get(row.quantity), _device_family(row.conditions)
    nodes = number_matching(row.conditions, r"(\d+) nodes?\b")
    if table is None or family is None or not nodes:
        return None
    return calibrated(row, table[family][min(int(nodes), 3) - 1], SAME, tolerance=EXACT)


def efficiency(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare the efficiency of reductions in the switch (NVLS)."""
    family = _device_family(row.conditions)
    return None if family is None else calibrated(row, tables.NVLS_EFFICIENCY[family], SAME, tolerance=EXACT)


def link_rate(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare GB/s of one NVLink."""
    sm = number_matching(row.conditions, r"sm(\d+)")
    if sm is None or sm < 80:
        return None
    family: tables.Family = "blackwell" if sm >= 100 else "hopper" if sm >= 90 else "ampere"
    return calibrated(row, tables.NVLINK_GB[family], SAME, tolerance=EXACT)


def tree_correction(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare the correction factor of trees by message size, c(S)."""
    nbytes, name = number_matching(row.conditions, r"bytes (\d+)"), row.quantity.rpartition(" ")[2]
    for protocol, factors in tables.TREE_CORRECTION.items():
        if protocol == name and nbytes and nbytes >= 64:
            place = int(nbytes / 64).bit_length() - 1
            return calibrated(row, factors[place], SAME, tolerance=EXACT) if place < len(factors) else None
    return None


def _device_family(text: str) -> tables.Family | None:
    return next((family for family in tables.FAMILIES if text.lower().startswith(family)), None)


def _ranked_system(row: Claim) -> NcclSystem | None:
    """Return a system with the ranks and channels that the row names.

    Rows about latency name no channels and need none.
    """
    ranks = count_before(row.conditions, "ranks?")
    per_node = count_before(row.conditions, "per node") or PER_NODE
    if not ranks or ranks % per_node:
        return None
    channels = re.search(r"(\d+) ch x ([\d.]+) GB/s", row.conditions)
    speed = float(channels[2]) if channels else 24.0
    ring = Channels(count=int(channels[1]) if channels else 16, inside_gb=speed, across_gb=speed)
    named_families = (family_name for family_name in tables.FAMILIES if family_name in row.conditions.lower())
    family: tables.Family = next(named_families, "hopper")
    nodes = ranks // per_node
    amd = "AMD" in row.conditions
    return NcclSystem(
        nodes=nodes, per_node=per_node, family=family, ring=ring, nvls=None, cpu="amd" if amd else "intel"
    )


def crossing(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare the first power of two at which NCCL's model has the ring faster than the tree."""
    comm = _ranked_system(row)
    if comm is None:
        return None
    for power in range(10, LARGEST_POWER):
        best = choose_pair(comm, 2.0**power)
        if best.algorithm == "Ring":
            return reproduced(row, 2.0**power / MIB, "network/nccl_choice", tolerance=EXACT)
    return None


def start_up(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare the latency of an algorithm and protocol for an empty message."""
    name, protocol = row.quantity.split(" ")[:2]
    comm = _ranked_system(row)
    if comm is None or protocol not in tables.PROTOCOLS:
        return None
    algorithm: tables.Algorithm = "Ring" if name == "ring" else "Tree"
    chosen = next(known_protocol for known_protocol in tables.PROTOCOLS if known_protocol == protocol)
    scale = {"ms": 1e-3, "us": 1.0, "s": 1e-6}.get(row.unit)
    if scale is None:
        return None
    return reproduced(
        row, scale * start_up_us(comm, algorithm, chosen, nbytes=0.0), "network/nccl_choice", tolerance=EXACT
    )


def last_of_pair(row: Claim, _: ClaimContext) -> ClaimOutcome | None:
    """Compare the largest power of two for which NCCL takes the named pair before it takes another."""
    pair = re.search(r"using (\w+) (LL128|LL|Simple)", row.quantity)
    system = machine(row.conditions)
    if pair is None or system is None or row.unit != "MiB":
        return None
    sizes = (2.0**power for power in range(10, LARGEST_POWER))

    def holds(nbytes: float) -> bool:
        best = choose_pair(system, nbytes)
        return (best.algorithm.lower(), best.protocol) == (pair[1].lower(), pair[2])

    sizes_of_pair = list(takewhile(holds, sizes))
    if not sizes_of_pair:
        return reproduced(row, 0.0, "network/nccl_choice: never takes it")
    then = choose_pair(system, 2 * sizes_of_pair[-1])
    pairs = len(possible_pairs(system, 2 * sizes_of_pair[-1]))
    note = f"network/nccl_choice; then {then.algorithm} {then.protocol} of {pairs} pairs"
    return reproduced(row, sizes_of_pair[-1] / MIB, note, tolerance=EXACT)


NCCL_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^(base|NVLINK|PCI|NET) latency \w+ \w+", hop_latency),
    (r"^LL max bandwidth|^per-channel ", by_nodes),
    (r"^NVLS efficiency", efficiency),
    (r"^NVLink bandwidth per link", link_rate),
    (r"^treeCorrectionFactor", tree_correction),
    (r"^ring first beats tree", crossing),
    (r"^(ring|tree) \w+ latency", start_up),
    (r"^largest payload still using", last_of_pair),
)


# ---- measured bus bandwidth of a collective --------------------------------------------------------------------------


GB = 1e9
LARGE = 8 * 2**30  # the plateau, for a row that names no size
MODEL_ERROR = 0.10
SMALL = "the call and the range of small messages are fitted to this source among others"


def bus_bandwidth(row: Claim, context: ClaimContext) -> ClaimOutcome | None:
    """Compare a bus bandwidth, computed from the two ends of its series or by NCCL's model.

    A series (three or more sizes from 16 MiB on, of the same system, operation and tool) is fitted on its two ends,
    which count as calibrated; the sizes between are held out. Below 16 MiB the row is compared with the range of the
    NCCL model, which was fitted to it among others. Everything else is NCCL's model, which knows only the links of the
    system: a prediction without any fit, meant for sizes from about 1 GiB on.
    """
    operation = next((name for name in OPERATIONS if name in row.quantity), None)
    if operation is None or row.unit != "GB/s":
        return None
    words = f"{row.quantity}; {row.conditions}"
    off = "NVLS off" in row.quantity or "no SHARP" in row.quantity
    comm = machine(words, nvls=not off)
    if comm is None:
        return skipped(row, "its GPUs are not among those of NCCL's model")
    nbytes, is_measured = size_bytes(row.conditions), "computed" not in row.source
    if is_measured and nbytes is not None and nbytes < LEAST_BYTES:
        return _small_message(row, comm, operation, nbytes)
    series = _claim_series(row, context) if is_measured and nbytes is not None else ()
    end_points = fit_ends(_series_points(series, operation, comm.ranks))
    if nbytes is not None and end_points is not None:
        return _fitted_claim(row, comm, operation, nbytes, end_points)
    return _modelled_claim(row, comm, operation, nbytes or LARGE)


def _small_message(row: Claim, comm: NcclSystem, operation: Operation, nbytes: float) -> ClaimOutcome:
    """Compare with the model's range, not its middle, below 16 MiB: the cost of a call depends on the network."""
    expected = expect_collective(comm, nbytes, operation=operation)
    assert expected is not None  # rings exist for every operation
    low, high = (
        bus_bytes_per_s(comm, nbytes, seconds, operation=operation) / GB
        for seconds in (expected.high_s, expected.low_s)
    )
    gb_per_s = bus_bytes_per_s(comm, nbytes, expected.seconds, operation=operation) / GB
    inside = row.value is not None and low <= row.value <= high
    note = f"{SMALL}; 80 % of systems: {low:.3g} to {high:.3g}"
    return calibrated(row, gb_per_s, note, tolerance=expected.high_s / expected.seconds - 1 if inside else 0.0)


def _claim_series(row: Claim, context: ClaimContext) -> tuple[Claim, ...]:
    key = (row.source, row.quantity, without_size(row.conditions))
    return tuple(
        claim
        for claim in context.rows
        if (claim.source, claim.quantity, without_size(claim.conditions)) == key and size_bytes(claim.conditions)
    )


def _series_points(series: tuple[Claim, ...], operation: Operation, ranks: int) -> tuple[Point, ...]:
    share = wire_share(operation, ranks)
    points = []
    for claim in series:
        nbytes = size_bytes(claim.conditions)
        if nbytes and claim.value and claim.value > 0:
            points.append(Point(nbytes=nbytes, seconds=share * nbytes / (claim.value * GB)))
    return tuple(points)


def _fitted_claim(
    row: Claim, comm: NcclSystem, operation: Operation, nbytes: float, picked: tuple[Point, Point]
) -> ClaimOutcome:
    try:
        fit = fit_points(picked, ranks=comm.ranks, nodes=comm.nodes, operation=operation)
    except UserError as error:
        return skipped(row, f"its series makes no fit: {error.problems[0].what}")
    gb_per_s = fit.bus_bytes_per_s(nbytes) / GB
    sizes = " and ".join(_size_name(point.nbytes) for point in picked)
    if nbytes in (picked[0].nbytes, picked[1].nbytes):
        return calibrated(row, gb_per_s, "one of the two points its series is fitted on")
    return reproduced(row, gb_per_s, f"fitted on {sizes}", tolerance=allowed_error(nbytes), inverse=True)


def _modelled_claim(row: Claim, comm: NcclSystem, operation: Operation, nbytes: float) -> ClaimOutcome | None:
    algorithm = _named_algorithm(row.quantity)
    best = _best_choice(comm, nbytes, operation, algorithm)
    if best is None:
        return skipped(row, f"NCCL has no {algorithm} for it")
    # Rows computed from NCCL's model use its rounded rates and no pipeline fill; measured rows use the wire's.
    computed = "computed" in row.source
    seconds = best.seconds if computed else expected_s(comm, best, nbytes, operation=operation)
    gb_per_s = bus_bytes_per_s(comm, nbytes, seconds, operation=operation) / GB
    picks = f"NCCL's model, no fit: {best.algorithm} {best.protocol}"
    logged = re.search(r"\balgo (\w+)", row.conditions)
    if logged is None:
        return reproduced(row, gb_per_s, picks, tolerance=MODEL_ERROR)
    agrees = logged[1].lower() == best.algorithm.lower()
    note = f"{picks}, as logged" if agrees else f"{picks}, but {logged[1]} was logged"
    return reproduced(row, gb_per_s, note, tolerance=MODEL_ERROR if agrees else 0.0)


def _named_algorithm(quantity: str) -> str | None:
    rest = quantity.partition("busbw")[2].lower()
    if "nvls off" in rest or "no sharp" in rest:
        return None
    if "nvls" in rest or "sharp" in rest:
        return "NVLS"
    return "Ring" if "ring" in rest else None


def _best_choice(comm: NcclSystem, nbytes: float, operation: Operation, wanted: str | None) -> AlgorithmChoice | None:
    if wanted is None:
        return choose_pair(comm, nbytes, operation=operation)
    choices = [choice for choice in possible_pairs(comm, nbytes, operation=operation) if choice.algorithm == wanted]
    return min(choices, key=lambda choice: choice.seconds, default=None)


def _size_name(nbytes: float) -> str:
    mib = nbytes / 2**20
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB"


COLLECTIVE_READERS: tuple[tuple[str, ClaimReader], ...] = ((rf"\b({'|'.join(OPERATIONS)}) busbw", bus_bandwidth),)
