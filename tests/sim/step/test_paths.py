"""What a fabric gives each axis."""

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.fabric_links import NOTHING, BrokenParts
from phalanx.sim.plan_flows import group_neighbours, phase_pairs
from phalanx.sim.step.axis_paths import (
    PathTransport,
    _axis_path,
    axis_paths,
    check_size,
    derived_fabric,
    on_fabric,
    used_axes,
)
from phalanx.sim.step.step_work import ask_plan

SPREAD = "clos2:32x400G/1p/8"  # T0s of four NICs: every stage and ring leaves its T0


def paths(plan, fabric, **transport):
    q = ask_plan(plan)
    axes = used_axes(plan.layout, experts=False)
    return axis_paths(fabric, q.groups, axes, plan.layout.devices, PathTransport(**transport))


def test_neighbours_stay_in_their_group_and_a_pipeline_has_an_end():
    source, target = group_neighbours(4, 2, 1, 16)
    assert (source // 8 == target // 8).all()
    assert (source % 2 == target % 2).all()
    assert sorted(target) == list(range(16))
    source, target = group_neighbours(4, 4, 1, 16, wraps=False)
    assert (target - source == 4).all()
    assert len(source) == 12


def test_a_phase_is_the_next_domain_the_next_stage_or_half_the_group_away():
    def far(axis, **shape):
        source, target = phase_pairs(axis, ranks=64, **shape)
        return set((target - source).tolist())

    assert far("shard", size=8, stride=4, inside=2) == {8, -24}
    assert far("pipeline", size=4, stride=16, inside=1) == {16}
    assert far("expert", size=32, stride=1, inside=8) == {16, -16}


def test_one_switch_gives_everyone_line_rate(sharded):
    found = paths(sharded, derived_fabric(32, 50e9))
    assert {axis: (path.share, path.hops) for axis, path in found.items()} == {"shard": (1.0, 1)}


def test_axes_that_stay_in_a_domain_are_not_on_the_fabric(piped):
    assert piped.layout.data == 8
    assert list(paths(piped, parse_fabric(SPREAD))) == ["pipeline"]


def test_hashing_is_slower_than_spraying_and_oversubscription_slower_still(piped):
    sprayed = paths(piped, parse_fabric(SPREAD))["pipeline"]
    hashed = paths(piped, parse_fabric(SPREAD), edge=False)["pipeline"]
    narrow = paths(piped, parse_fabric("clos2:32x400G/1p/8/3:1"))["pipeline"]
    assert (sprayed.flows, sprayed.crossing, sprayed.hops) == (24, 24, 3)
    assert sprayed.share == pytest.approx(1.0, abs=0.05)
    assert hashed.share < 0.9
    assert narrow.share == pytest.approx(1 / 3, abs=0.05)


def test_a_lost_port_costs_its_plane_and_without_another_plane_everything(piped):
    port = BrokenParts(nics=((0, 0),))
    four = paths(piped, parse_fabric("clos2:32x400G/4p/8"), broken=port)["pipeline"]
    assert (four.share, four.stalled, four.touched) == (pytest.approx(0.75, abs=0.02), 0, 1)
    alone = paths(piped, parse_fabric(SPREAD), broken=port)["pipeline"]
    assert (alone.share, alone.stalled) == (0.0, 1)
    # A conventional QP cannot leave its port, however many planes there are.
    assert paths(piped, parse_fabric("clos2:32x400G/4p/8"), edge=False, broken=port)["pipeline"].stalled == 1


def test_groups_take_the_fabrics_rate_and_hops(piped):
    q, fabric = ask_plan(piped), parse_fabric("clos2:32x800G/1p/8/3:1")
    found = paths(piped, fabric)
    placed = on_fabric(q.groups, found, fabric, nic=0.9)
    assert float(np.max(placed.pipeline.nic_bytes_per_s)) == pytest.approx(100e9 * 0.9 * found["pipeline"].share)
    assert placed.data is q.groups.data
    # Three switches are what the planner's latency stands for.
    assert placed.pipeline.nic_latency_s == pytest.approx(q.groups.pipeline.nic_latency_s)


def test_the_fluid_share_replaces_the_planners_loss_with_size(sharded):
    q, fabric = ask_plan(sharded), parse_fabric(SPREAD)
    found = paths(sharded, fabric)
    placed = on_fabric(q.groups, found, fabric, nic=0.9)
    assert float(np.max(q.groups.shard.network_bytes_per_s)) < float(np.max(q.groups.shard.nic_bytes_per_s))
    assert float(np.max(placed.shard.network_bytes_per_s)) == pytest.approx(50e9 * 0.9 * found["shard"].share)


def test_fewer_nics_than_devices_is_refused():
    with pytest.raises(UserError) as caught:
        check_size(parse_fabric("clos2:16x400G/1p/64"), 32)
    assert str(caught.value) == (
        "fabric clos2:16x400G/1p/64: it has 16 NICs, and the plan has 32 devices with one each\n"
        "  name a fabric of 32 NICs or more, or a cluster of at most 16 devices"
    )


@pytest.mark.parametrize("edge", [False, True])
def test_a_failure_that_takes_nothing_changes_nothing(edge):
    """The same flows are hashed with and without it: rings over domains of eight, of which a third leaves its T0."""
    fabric, ring = parse_fabric("clos2:64x400G/4p/32/4:1"), np.arange(64)
    harmless = BrokenParts(uplinks=((0, 0, 0),), left=1.0)
    whole, broken = (
        _axis_path(fabric, "data", ring, np.roll(ring, -8), PathTransport(edge=edge, broken=one))
        for one in (NOTHING, harmless)
    )
    assert broken.share == whole.share
