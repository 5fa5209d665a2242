"""TOP004's seconds on the wire, where groups and domains do not divide each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.kit import evidence

from phalanx.plan.mapping import RANK_ORDER
from phalanx.plan.plan import Plan
from phalanx.rules.catalog.top004_roles import wire_seconds


def tensor(domain: int) -> Plan:
    """Groups of 8 that send 1 GB; links of 450 GB/s, cards of 50."""
    plan = evidence("parallel.tensor=8").the_plan
    cluster = replace(plan.cluster, domain_devices=domain, link_bytes_per_s=450e9, nic_bytes_per_s=50e9)
    rows = [replace(one, bytes_per_step=1e9) for one in plan.mapping if one.axis == "tensor"]
    return replace(plan, cluster=cluster, mapping=tuple(rows))


@pytest.mark.parametrize(
    ("domain", "rate"),
    [
        (8, 450e9),
        (16, 450e9),
        (12, 4 * 50e9),  # every other group lies in two domains: half of its cards, at worst
        (4, 4 * 50e9),
        (2, 2 * 50e9),
    ],
)
def test_the_rate_of_a_group(domain: int, rate: float) -> None:
    assert wire_seconds(tensor(domain), RANK_ORDER) == pytest.approx(1e9 / rate)
