"""The step beside the plan."""

from itertools import pairwise

import pytest

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.step.step_report import step_report
from phalanx.sim.step.step_text import step_text
from phalanx.sim.step.step_timeline import simulate_timeline
from phalanx.sim.step.step_work import ask_plan, plan_work

from .conftest import make


def test_with_the_plans_own_rates_the_timeline_is_close_to_the_plan(piped):
    """Two models of one step: formulas, and events. They share seconds of compute, not how these follow each other."""
    report = step_report(piped, None)
    assert report.derived
    assert report.step_s == pytest.approx(piped.prediction.step_s, rel=0.05)
    compute = report.lines[0]
    assert compute.name == "compute"
    assert compute.exposed_s == pytest.approx(compute.plan_s)


def test_wires_carry_what_the_plans_mapping_says(piped):
    q = ask_plan(piped)
    wires = simulate_timeline(plan_work(q, q.groups)).wire_s[0]
    mapped = {use.axis: use.wire_s for use in piped.mapping}
    assert wires["gradient_s"] == pytest.approx(mapped["data"])
    # The first stage of four sends forward only, half of what one in the middle does.
    assert wires["pipeline_send_s"] == pytest.approx(mapped["pipeline"] / 2)


@pytest.mark.parametrize("fabric", [None, "clos2:32x400G/1p/8", "clos2:32x400G/1p/8/3:1"])
def test_lines_add_up_to_the_step_and_explain_it(piped, fabric):
    report = step_report(piped, parse_fabric(fabric) if fabric else None)
    assert sum(line.exposed_s for line in report.lines) == pytest.approx(report.step_s)
    assert sum(line.plan_s for line in report.lines) == pytest.approx(report.plan_step_s)
    for line in report.lines:
        assert line.plan_s + line.order_s + line.network_s == pytest.approx(line.exposed_s)
        assert line.hidden_s <= line.wire_s
        assert line.why


def test_a_slower_network_shows_in_the_network_column_only(sharded):
    def line(fabric):
        report = step_report(sharded, parse_fabric(fabric))
        return next(one for one in report.lines if one.part == "shard_s")

    fast, slow = line("clos2:32x400G/1p/8"), line("clos2:32x10G/1p/8")
    assert slow.order_s == fast.order_s
    assert slow.network_s > fast.network_s
    assert slow.wire_s > 3 * fast.wire_s  # the rest is latency, which is the same


def test_copies_of_a_shard_agree_over_the_network(tmp_path):
    report = step_report(make(tmp_path, pipeline=1, zero=3, shard=8), None)
    lines = {line.part: line for line in report.lines}
    assert [path.axis for path in report.paths] == ["replica"]
    assert lines["gradient_s"].wire_s > lines["gradient_s"].exposed_s > 0
    assert lines["gradient_s"].hidden_s > 0
    assert "inside a fast domain" in lines["shard_s"].why


def test_ring_attention_waits_for_the_hop_that_leaves_the_domain(tmp_path):
    """Eight of sixteen context ranks share a domain; the planner prices the hops inside it."""
    report = step_report(make(tmp_path, pipeline=1, zero=1, shard=32, context=16), parse_fabric("clos2:32x400G/1p/8"))
    line = next(one for one in report.lines if one.part == "context_s")
    assert line.network_s > 0
    assert line.why.startswith("every hop waits for the one that crosses domains. ")


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_other_schedules_stay_near_their_formula(tmp_path, schedule):
    made = make(tmp_path, schedule=schedule)
    assert step_report(made, None).step_s == pytest.approx(made.prediction.step_s, rel=0.1)


def test_stages_hold_all_layers(piped, sharded):
    for plan in (piped, sharded):
        q = ask_plan(plan)
        layers = plan_work(q, q.groups).layers
        assert (len(layers), sum(layers)) == (plan.layout.pipeline, 12)
        assert all(one >= two for one, two in pairwise(layers))


def test_the_page(piped):
    page = step_text(step_report(piped, None))
    assert page.startswith("small: TP1·CP1·PP4·DP8")
    assert "unspecified: one non-blocking plane, 400 Gb/s per device (choose one with --fabric)" in page
    assert "WHERE THE TIME GOES (milliseconds of the busiest stage; exposed = plan + order + network)" in page
    assert "\n  pipeline bubble " in page
    named = step_text(step_report(piped, parse_fabric("clos2:32x400G/1p/8/3:1")))
    assert "32 NICs of 400 Gb/s, 1 plane, 2 tiers, packets over 256 paths" in named
    assert "slowest flow at 0.3" in named
