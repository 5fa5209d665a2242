"""TOP004: the axes with the most traffic run on the fastest links."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations

from phalanx.plan.mapping import RANK_ORDER
from phalanx.plan.plan import Plan
from phalanx.rules.catalog.com_messages import damaged_traffic, sane
from phalanx.rules.catalog.shared import without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds

# Rows of the mapping that are parts of the data axis.
INSIDE_DATA = ("data", "shard", "replica")
EXPERTS = ("expert", "expert data")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """An axis of the mesh, or a part of one; neighbouring members are `stride` ranks apart."""

    name: str
    size: int
    stride: int


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the seconds on the wire in the plan's order of axes with those of the best order."""
    plan = evidence.the_plan
    if (damaged := damaged_traffic(plan)) is not None:
        return damaged
    carried = [group for group in plan.mapping if group.size > 1 and group.bytes_per_step > 0]
    if plan.layout.devices <= plan.cluster.domain_devices:
        return exempt("the job stays inside one domain: all links are alike")
    if len(_used_axes(plan)) < 2:
        return exempt("one axis: there is nothing to exchange")
    if (missing := without_measurement(evidence, "the time of traffic")) is not None:
        return missing
    plan_order = tuple(plan.rank_order) if sorted(plan.rank_order) == sorted(RANK_ORDER) else RANK_ORDER
    times = {order: wire_seconds(plan, order) for order in _possible_orders(plan, plan_order)}
    best = min(times, key=lambda order: (times[order], order != plan_order))
    ratio = times[plan_order] / times[best] if times[best] > 0 else 1.0
    max_ratio = limits.number("most_ratio")
    formula = (
        *(
            f"{group.axis} {group.size:,}: {group.bytes_per_step / 1e9:,.3g} GB a step on {group.tier}"
            for group in carried
        ),
        f"T({_order_text(plan, plan_order)}) = {format_seconds(times[plan_order])}, T({_order_text(plan, best)}) = "
        f"{format_seconds(times[best])}: {ratio:.2f}, at most {max_ratio:.2f}",
    )
    if ratio <= max_ratio:
        statement = f"traffic takes {ratio:.2f}x the time of the best order of axes"
        return passed(statement, formula=formula, value=ratio, threshold=max_ratio, unit="x")
    shown_s = sum(group.shown_s for group in carried)
    return failed(
        f"traffic takes {ratio:.2f}x the time it would with {_order_text(plan, best)} nearest first",
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        unit="x",
        at="plan:mapping",
        impact=evidence.loses(
            (1 - 1 / ratio) * shown_s / max(plan.prediction.step_s, 1e-30), "of the traffic that shows in the step"
        ),
        fix=f"choose degrees so that {_moved_axis(plan, plan_order, best)} fits inside a domain of "
        f"{plan.cluster.domain_devices:,} devices, or order the ranks as {_order_text(plan, best)}",
    )


def _axis_sizes(plan: Plan) -> dict[str, int]:
    layout = plan.layout
    return {"tensor": layout.tensor, "context": layout.context, "data": layout.data, "pipeline": layout.pipeline}


def _used_axes(plan: Plan) -> list[str]:
    return [name for name, size in _axis_sizes(plan).items() if size > 1]


def _order_text(plan: Plan, order: tuple[str, ...]) -> str:
    return ", ".join(name for name in order if name in _used_axes(plan))


def _moved_axis(plan: Plan, ours: tuple[str, ...], best: tuple[str, ...]) -> str:
    """Return the first axis that the best order places nearer."""
    before, after = ([name for name in order if name in _used_axes(plan)] for order in (ours, best))
    return next((new for old, new in zip(before, after, strict=True) if old != new), after[0])


def _possible_orders(plan: Plan, ours: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the plan's own order, and the orders that keep tensor groups inside a domain (TOP002)."""
    sizes, domain = _axis_sizes(plan), plan.cluster.domain_devices
    orders = [
        order
        for order in permutations(RANK_ORDER)
        if math.prod(max(1, sizes[name]) for name in order[: order.index("tensor") + 1]) <= domain
    ]
    return list(dict.fromkeys((ours, *orders)))


def wire_seconds(plan: Plan, order: tuple[str, ...]) -> float:
    """Return the seconds on the wire, summed over axes, when ranks fill domains in this order of axes, nearest
    first.
    """
    axes, stride = [], 1
    for name in order:
        size = max(1, _axis_sizes(plan)[name])
        axes.append(_Part(name=name, size=size, stride=stride))
        stride *= size
    rates = (
        (group, _group_rate(plan, _group_parts(plan, group.axis, axes), chain=group.axis == "pipeline"))
        for group in plan.mapping
    )
    return sum(group.bytes_per_step / rate for group, rate in rates if group.size > 1)


def _group_parts(plan: Plan, axis: str, axes: list[_Part]) -> list[_Part]:
    """Return the parts of the mesh that a row of the mapping runs over, nearest first."""
    layout = plan.layout
    if axis in EXPERTS:
        near_parts, far_parts = _split_parts([part for part in axes if part.name != "pipeline"], layout.expert)
        return near_parts if axis == "expert" else far_parts
    # Gradients are shared by data and context ranks together.
    if axis in INSIDE_DATA:
        gradient_parts = [part for part in axes if part.name in ("data", "context")]
        near_parts, far_parts = _split_parts(
            gradient_parts, layout.shard if axis != "data" else layout.data * layout.context
        )
        return far_parts if axis == "replica" else near_parts
    return [part for part in axes if part.name == axis]


def _split_parts(parts: list[_Part], count: int) -> tuple[list[_Part], list[_Part]]:
    """Split a group into its nearest `count` ranks and the strided groups over the rest."""
    near_parts, far_parts = [], []
    for part in parts:
        near_size = math.gcd(part.size, max(1, count))
        count //= near_size
        near_parts.append(replace(part, size=near_size))
        far_parts.append(replace(part, size=part.size // near_size, stride=part.stride * near_size))
    return near_parts, far_parts


def _group_rate(plan: Plan, group: list[_Part], *, chain: bool) -> float:
    """Return the bytes per second of one device: a ring over domains shares the network cards of its members.

    A chain of pipeline stages does not: the stage at the edge of a domain sends everything through its own card.
    """
    cluster = plan.cluster
    used_parts = [part for part in group if part.size > 1]
    ranks = math.prod(part.size for part in used_parts)
    domain, link = max(1, cluster.domain_devices), sane(cluster.link_bytes_per_s)
    inside = math.prod(max(1, min(part.size, domain // part.stride)) for part in used_parts)
    span = max((part.size * part.stride for part in used_parts), default=1)
    # Some groups straddle two domains.
    if 1 < span <= domain and domain % span:
        inside = max(1, ranks // 2)
    cards = 1 if chain else inside
    return link if inside >= ranks else min(link, cards * sane(cluster.nic_bytes_per_s))


RULE = Rule(
    id="TOP004",
    slug="roles-follow-links",
    severity="warning",
    requires="JP",
    requirement="The axes with the most traffic run on the fastest links.",
    why="""
Links inside a domain are about ten times as fast as a device's share of the network, and an axis that leaves the domain
runs at the slower rate. Groups on slow links are the stragglers of a healthy machine: Greyhound (ATC'25) moves the
roles of ranks for that reason, and a group more than 1.1 times slower than the ideal is what the OSDI'25 study of
stragglers counts as one.
""",
    how="""
With the bytes that each axis sends per step (from the plan), the time on the wire of the plan's order of axes is at
most 1.10 times that of the best order of tensor, context, data and pipeline (24, less those that would take tensor
groups out of their domain). An axis whose ranks share a domain runs at link speed, else at
`min(link, ranks per domain × card)`; stages of a pipeline, which send to one neighbour, at that of one card.
""",
    limits={
        "most_ratio": Limit(
            value=1.10, unit="x", note="time over that of the best order: S of the straggler study, OSDI'25"
        ),
    },
    bad="""
[parallel]          # on 8 nodes of 8: data ranks fill the node, and stages send far more between nodes
tensor = 1
pipeline = 8
virtual_pipeline = 4
schedule = "interleaved"
zero = 1
""",
    good="""
[parallel]
tensor = 1
pipeline = 1
zero = 3
""",
    fix="Degrees that let the heaviest axis fit inside a domain; ranks are ordered tensor, context, data, pipeline.",
    waive="Traffic that is hidden entirely (see the plan's shown seconds).",
    references=(
        Reference(text="Greyhound, USENIX ATC 2025", mark="secondary"),
        Reference(text="stragglers in LLM training, arXiv:2505.05713 (OSDI 2025)", mark="secondary"),
    ),
    check=check,
)
