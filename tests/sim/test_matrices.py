"""Traffic matrices, and the collectives of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.plan.make import make_plan
from phalanx.plan.mapping import AxisUse
from phalanx.sim import fluid, plan_flows, routes, simulate, traffic_matrix

FABRIC = parse_fabric("clos2:64x100G/1p/16")


@pytest.mark.parametrize("name", traffic_matrix.TRAFFIC)
def test_traffic_touches_everyone_evenly(name: str) -> None:
    flows = traffic_matrix.named_traffic(name, FABRIC, 1e6)
    assert set(flows.source) == set(flows.target) == set(range(64))
    assert flows.source.min() >= 0
    assert flows.target.max() < 64


def test_shapes_of_traffic() -> None:
    assert len(traffic_matrix.all_to_all(16, 15.0)) == 240
    assert traffic_matrix.all_to_all(16, 15.0).nbytes[0] == 1.0
    assert len(traffic_matrix.tree(16, 1.0)) == 30
    assert np.bincount(traffic_matrix.tree(16, 1.0).target, minlength=16).max() == 3  # a parent and two children
    assert (traffic_matrix.hierarchical(64, 1.0).target - traffic_matrix.hierarchical(64, 1.0).source)[0] == 8


# Who hosts 0 and 20 of 64 send to (20 as one of many: stage 2 of 8, server 2 of 8, a node of the tree with two
# children), and how many bytes are sent in all when each transfer has one, but for the parts of an all-to-all.
NEIGHBOURS = {
    "shift": ([32], [52], 64.0),
    "all-to-all": (list(range(1, 64)), [n for n in range(64) if n != 20], 64.0),
    "ring": ([1], [21], 64.0),
    "tree": ([1, 2], [9, 41, 42], 2 * 63.0),
    "hierarchical": ([8], [28], 64.0),
    "pipeline": ([8], [12, 28], 2 * 56.0),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_and_bytes_of_every_kind(name: str) -> None:
    made = traffic_matrix.named_traffic(name, FABRIC, 1.0)
    first, other, total = NEIGHBOURS[name]
    assert sorted(made.target[made.source == 0].tolist()) == first
    assert sorted(made.target[made.source == 20].tolist()) == other
    assert made.nbytes.sum() == pytest.approx(total)


def test_a_permutation_has_each_host_once_on_either_side() -> None:
    made = traffic_matrix.named_traffic("permutation", FABRIC, 1.0, seed=3)
    assert sorted(made.source.tolist()) == sorted(made.target.tolist()) == list(range(64))
    assert made.nbytes.sum() == 64
    crowd = traffic_matrix.named_traffic("incast", FABRIC, 1.0)
    assert np.bincount(crowd.target).max() == 7
    assert np.bincount(crowd.source).max() == 1  # the victim shares its NIC with nobody
    assert crowd.nbytes.sum() == 8


@pytest.mark.parametrize(
    ("name", "hosts", "nbytes", "text"),
    [
        ("permutaton", 8, 1.0, "use permutation"),
        ("ring", 8, 0.0, "0 bytes"),
        ("ring", 8, float("nan"), "nan bytes"),
        ("ring", 8, 1e30, "at most 1e+15"),
        ("incast", 9, 1.0, "use a fabric of at least 10 hosts"),
        ("ring", 1, 1.0, "1 host: too few"),
        ("all-to-all", 131_072, 1.0, "use at most"),
    ],
)
def test_bad_traffic_is_refused(name: str, hosts: int, nbytes: float, text: str) -> None:
    with pytest.raises(UserError) as caught:
        traffic_matrix.named_traffic(name, replace(parse_fabric("clos2:8x100G/1p/16"), hosts=hosts), nbytes)
    assert text in str(caught.value)


def test_sizes_from_anywhere_have_a_limit() -> None:
    for nbytes in (1e30, float("inf")):
        with pytest.raises(UserError, match="hours long at any speed"):
            traffic_matrix.make_flows([0, 1], [1, 2], [1.0, nbytes])


def use(**changes: object) -> AxisUse:
    base = AxisUse(
        axis="data",
        size=8,
        stride=4,
        tier="",
        operation="all-gather",
        algorithm="Ring",
        next_best="",
        bytes_per_step=8e6,
        wire_s=1.0,
        shown_s=0.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_ring_uses_the_nics_of_all_members_of_a_domain() -> None:
    flows = plan_flows.axis_flows(use(), ranks=64, domain=8)  # two members in each domain of 8: half each
    assert flows is not None
    assert len(flows) == 64
    assert flows.nbytes[0] == 4e6
    assert flows.target[:4].tolist() == [8, 9, 10, 11]
    assert flows.target[flows.source == 31].tolist() == [7]  # the group's end goes round
    assert plan_flows.axis_flows(use(size=2), ranks=64, domain=8) is None


def test_ring_attention_crosses_only_at_the_edge_of_a_domain() -> None:
    flows = plan_flows.axis_flows(use(operation="ring send", algorithm="p2p"), ranks=64, domain=8)
    assert flows is not None
    assert len(flows) == 32  # one of the two members in a domain; the other passes over NVLink
    assert flows.nbytes[0] == 8e6


def test_trees_have_edges_whether_a_switch_sums_first_or_not() -> None:
    summed = plan_flows.axis_flows(use(operation="all-reduce", algorithm="NVLSTree"), 64, 8)
    tree = plan_flows.axis_flows(use(operation="all-reduce", algorithm="Tree"), 64, 8)
    assert summed is not None
    assert tree is not None
    assert summed.source.tolist() == tree.source.tolist()
    assert summed.nbytes.tolist() == tree.nbytes.tolist()
    # Four domains make three edges of two trees; each of 2 groups' 8 places carries its part of half the sum both ways.
    assert len(tree) == 2 * 2 * 3 * 8 * 2
    assert tree.nbytes[0] == pytest.approx(8e6 / (2 * 7 / 8) / 2 / 2)
    assert set((tree.source // 8 - tree.target // 8).tolist()) <= {-1, 1, -2, 2}
    assert (tree.source % 8 == tree.target % 8).all()


def test_pipeline_and_all_to_all_stay_out_of_the_domain() -> None:
    stages = plan_flows.axis_flows(use(operation="send", algorithm="p2p", size=4, stride=16), 64, 8)
    assert stages is not None
    assert len(stages) == 2 * 48
    everyone = plan_flows.axis_flows(use(operation="all-to-all", algorithm="direct", size=16, stride=1), 64, 8)
    assert everyone is not None
    assert len(everyone) == 64 * 8  # the eight in the other domain
    assert everyone.nbytes[0] == pytest.approx(8e6 / 15)


@pytest.mark.parametrize("domains", [2, 3, 4, 5, 8, 13])
def test_no_nic_of_a_double_tree_sends_more_than_two_sums(domains: int) -> None:
    tree = plan_flows.axis_flows(use(operation="all-reduce", algorithm="Tree", size=domains, stride=8), 8 * domains, 8)
    assert tree is not None
    whole = 8e6 / (2 * (domains - 1) / domains)
    sent, received = (np.bincount(side, weights=tree.nbytes) / whole for side in (tree.source, tree.target))
    assert 1 - 1e-9 <= sent.max() <= 2 + 1e-9
    assert sent.tolist() == pytest.approx(received.tolist())
    assert sent.sum() == pytest.approx(8 * 2 * (domains - 1))


def test_a_token_crosses_once_for_all_in_a_domain_and_stays_on_its_rail() -> None:
    expert = use(operation="all-to-all", algorithm="direct", size=32, stride=1)
    every, once = (plan_flows.axis_flows(replace(expert, network_copies=copies), 64, 8) for copies in (1.0, 0.25))
    assert every is not None
    assert once is not None
    assert len(once) == 64 * 3  # a NIC in each of the other domains
    assert (once.source % 8 == once.target % 8).all()
    assert once.nbytes.sum() == pytest.approx(every.nbytes.sum() / 4)
    assert np.ptp(np.bincount(once.source, weights=once.nbytes)) == pytest.approx(0)


def test_groups_that_straddle_domains_send_a_domain_as_much_whether_few_or_many_are_there() -> None:
    # Groups of 12 on domains of 8: 8 + 4, 4 + 8, 8 + 4, 4 + 8.
    expert = use(operation="all-to-all", algorithm="direct", size=12, stride=1)
    every, once = (plan_flows.axis_flows(replace(expert, network_copies=copies), 48, 8) for copies in (1.0, 0.5))
    assert every is not None
    assert once is not None
    assert len(once) == len(every)
    sent = np.bincount(once.source, weights=once.nbytes)
    assert sent.tolist() == pytest.approx([0.5 * 8e6 * 12 / 11 / 2] * 48)
    assert sorted(set(once.nbytes.round().tolist())) == [round(sent[0] / 8), round(sent[0] / 4)]
    inside = plan_flows.axis_flows(replace(expert, size=4, network_copies=0.5), 48, 8)
    assert inside is None


EXPERTS = """\
name = "experts"
[model]
preset = "mixtral-8x7b"
[data]
sequence = 4096
tokens = "2B"
[batch]
global_sequences = 64
micro = 1
[parallel]
mode = "fixed"
tensor = 1
context = 1
pipeline = 2
data = 16
expert = 8
zero = 1
recompute = "full"
[cluster]
spec = "4xH100:8"
"""


def test_no_axis_of_a_plan_puts_more_on_a_nic_than_its_time_allows(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EXPERTS)
    made = make_plan(str(path))
    line = made.cluster.nic_bytes_per_s
    sent = {one.axis: one for one in plan_flows.plan_collectives(made)}
    for one in sent.values():
        assert one.flows is not None, one.axis
        assert one.wire_s >= np.bincount(one.flows.source, weights=one.flows.nbytes).max() / line, one.axis
    # Two of eight experts in two domains: 1.5 of 2 copies cross, half of them to the other domain.
    use = next(one for one in made.mapping if one.axis == "expert")
    assert use.network_copies == pytest.approx(0.75)
    assert sent["expert"].flows is not None
    assert sent["expert"].flows.nbytes.sum() == pytest.approx(0.75 * use.bytes_per_step * 4 / 7 * 32)


def test_ring_on_a_full_fabric_takes_the_time_of_its_bytes() -> None:
    fabric = parse_fabric("clos2:64x400G/1p/16/8r")
    flows = plan_flows.axis_flows(use(), 64, 8)
    assert flows is not None
    done = fluid.complete_flows(fabric, flows, routing=routes.spray_routing(64), wire=fluid.IDEAL)
    assert done.tail_s == pytest.approx(4e6 * 8 / 400e9, rel=0.05)


def test_simulate_by_name_and_its_mistakes() -> None:
    fabric = parse_fabric("clos2:64x800G/8p/16")
    found = simulate.simulate(fabric, "permutation", spread="adaptive", failed=["transceiver:3", "t1:0/2"])
    assert found["stalled_flows"] == 2
    assert found["paths"] == 128
    assert 0 < float(str(found["rate_mean"])) <= 1
    ideal = simulate.simulate(fabric, "permutation")
    assert ideal["rate_slowest"] == pytest.approx(1.0)
    for call, text in (
        ({"failed": ["plug:1"]}, '"plug:1" names no part'),
        ({"failed": ["nic:9/9"]}, "there is no plane 9, host 9"),
        ({"spread": "adaptve"}, "use adaptive"),
        ({"wire": "x"}, "use mrc, htsim, ideal"),
        ({"left": 2.0}, "2 of the capacity"),
        ({"paths": -4, "spread": "qp"}, "-4 paths"),
        ({"paths": 64}, "use --routing adaptive"),
        ({"recovery": "none"}, "use --routing adaptive"),
    ):
        with pytest.raises(UserError) as caught:
            simulate.simulate(fabric, "ring", **call)
        assert text in str(caught.value)
