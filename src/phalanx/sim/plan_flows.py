"""Convert a plan's collectives to flows: ranks in order on a fabric's NICs, without traffic inside fast domains.

A group with m members in each fast domain uses their m NICs in parallel (NCCL builds as many rings), so each NIC
carries 1/m of a ring's data, to the member at the same position in the next domain. A simulated step needs the
simultaneous pairs (`phase_pairs`), `fabric simulate` a step's bytes (`axis_flows`); both use `group_neighbours`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.errors import mistake
from phalanx.plan.mapping import AxisUse
from phalanx.plan.plan import Plan
from phalanx.sim.fabric_links import Ints
from phalanx.sim.traffic_matrix import MOST_FLOWS, Flows, make_flows

TREES = ("Tree", "NVLSTree")  # algorithms that send sums up and down double trees of domains


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTraffic:
    """The network traffic of one axis of a plan in a step.

    `flows` is None where all of it stays inside fast domains.
    """

    axis: str
    operation: str
    flows: Flows | None
    wire_s: float  # the plan's own prediction


def plan_collectives(plan: Plan) -> tuple[AxisTraffic, ...]:
    """Return every axis of a plan with the flows of one step."""
    ranks, domain = plan.layout.devices, plan.cluster.domain_devices
    return tuple(
        AxisTraffic(axis=use.axis, operation=use.operation, flows=axis_flows(use, ranks, domain), wire_s=use.wire_s)
        for use in plan.mapping
    )


def group_neighbours(size: int, stride: int, step: int, ranks: int, *, wraps: bool = True) -> tuple[Ints, Ints]:
    """Return (sources, targets): each member of groups of `size`, and the member `step` places further in its group.

    >>> [side.tolist() for side in group_neighbours(4, 1, 2, 4)]
    [[0, 1, 2, 3], [2, 3, 0, 1]]
    """
    source = np.arange(ranks - ranks % (size * stride), dtype=np.int64)
    position = source // stride % size
    next_position = position + step
    target = source + (next_position % size - position) * stride
    keeps = (source != target) & (wraps | (next_position < size))
    return source[keeps], target[keeps]


def phase_pairs(axis: str, *, size: int, stride: int, inside: int, ranks: int) -> tuple[Ints, Ints]:
    """Return the pairs that send at the same time on an axis.

    They are the next domain of a ring (`inside` members are in one domain), the next stage of a pipeline, or the
    member half the group away, the farthest phase of an all-to-all.
    """
    step = size // 2 if axis == "expert" else inside
    return group_neighbours(size, stride, step, ranks, wraps=axis != "pipeline")


def axis_flows(use: AxisUse, ranks: int, domain: int) -> Flows | None:
    """Return the flows of an axis between fast domains; None when there are none."""
    if "all-to-all" in use.operation:
        return _all_to_all(use, ranks, domain)
    if use.operation == "send":
        # Pipeline: half of the bytes go to the next stage, half to the previous one; the ends have one neighbour.
        first, second = group_neighbours(use.size, use.stride, 1, ranks, wraps=False)
        source, target = np.concatenate([first, second]), np.concatenate([second, first])
        return _flows_between(source, target, use.bytes_per_step / 2, domain)
    # Ring attention passes whole blocks from rank to rank; only collectives run several rings in parallel.
    together = 1 if use.operation == "ring send" else _members_together(use, domain)
    if together >= use.size or ranks <= domain:
        return None
    if use.algorithm in TREES:
        return _tree_flows(use, np.arange(ranks) // use.stride % use.size, together)
    # The bytes of one NIC: its part of the ring.
    return _flows_between(
        *group_neighbours(use.size, use.stride, together, ranks), use.bytes_per_step / together, domain
    )


def _members_together(use: AxisUse, domain: int) -> int:
    """Return the number of group members in one fast domain."""
    return max(1, min(use.size, domain // use.stride))


def _tree_flows(use: AxisUse, place: Ints, together: int) -> Flows:
    """Return both directions of two binary trees of domains, in heap order and mirrored, each with half of the sum.

    As in NCCL's double trees, a domain with two children in one tree is a leaf of the other, so a NIC sends two sums
    at most.
    """
    node, last = place // together, use.size // together - 1
    child = np.flatnonzero(node > 0)
    parent = child + (((node[child] - 1) // 2 - node[child]) * together) * use.stride
    mirrored = np.arange(len(place)) + (last - 2 * node) * together * use.stride
    up, down = np.concatenate([child, mirrored[child]]), np.concatenate([parent, mirrored[parent]])
    # bytes_per_step counts 2 (n-1)/n sums; an edge carries half a sum up and half a sum down.
    half = use.bytes_per_step / (2 * (use.size - 1) / use.size) / together / 2
    return make_flows(np.concatenate([up, down]), np.concatenate([down, up]), half)


def _all_to_all(use: AxisUse, ranks: int, domain: int) -> Flows | None:
    """Return the flows of an all-to-all between fast domains.

    `network_copies` is the share of those bytes that cross the network. Where a token crosses once for all its
    receivers in a domain, it goes to the member at the sender's own position there and on over the fast links
    (DeepSeek-V3, arXiv:2412.19437 section 3.2.2): every NIC sends as much as with a flow to each member, and stays on
    its rail.
    """
    away, together = use.bytes_per_step / (use.size - 1), _members_together(use, domain)
    if use.network_copies >= 1:
        return _flows_between(*_neighbour_pairs(use, range(1, use.size), ranks), away, domain)
    if _tiles_domains(use, ranks, domain):
        pairs = _neighbour_pairs(use, range(together, use.size, together), ranks)
        return _flows_between(*pairs, away * together * use.network_copies, domain)
    return _uneven_flows(use, *_neighbour_pairs(use, range(1, use.size), ranks), ranks, domain)


def _uneven_flows(use: AxisUse, source: Ints, target: Ints, ranks: int, domain: int) -> Flows | None:
    """Return the flows of groups with unequal numbers of members per domain; every domain receives the same bytes."""
    rank = np.arange(ranks)
    group = rank // (use.size * use.stride) * use.stride + rank % use.stride
    cells, cell_of, members = np.unique(group * ranks + rank // domain, return_inverse=True, return_counts=True)
    spans = np.bincount(cells // ranks)  # domains of each group
    leaves = source // domain != target // domain
    source, target = source[leaves], target[leaves]
    crossing = use.bytes_per_step * use.size / (use.size - 1) * use.network_copies
    nbytes = crossing / spans[group[source]] / members[cell_of[target]]
    return make_flows(source, target, nbytes) if leaves.any() else None


def _tiles_domains(use: AxisUse, ranks: int, domain: int) -> bool:
    """Return True if every group fills two or more domains, at the same positions in each."""
    together = _members_together(use, domain)
    tiles = ranks % (use.size * use.stride) == 0 and domain == together * use.stride
    return tiles and together < use.size and use.size % together == 0


def _neighbour_pairs(use: AxisUse, steps: range, ranks: int) -> tuple[Ints, Ints]:
    """Return each member with those `steps` places further in its group; raises UserError for too many flows."""
    if ranks * len(steps) > MOST_FLOWS:
        raise mistake(
            use.axis,
            f"an all-to-all of {use.size:,} among {ranks:,} ranks is more than {MOST_FLOWS:,} flows",
            fix=f"use groups of at most {(MOST_FLOWS // ranks + 1) * steps.step:,}",
        )
    pairs = [group_neighbours(use.size, use.stride, step, ranks) for step in steps]
    source, target = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return source, target


def _flows_between(source: Ints, target: Ints, nbytes: float, domain: int) -> Flows | None:
    leaves = source // domain != target // domain
    return make_flows(source[leaves], target[leaves], nbytes) if leaves.any() and nbytes > 0 else None
