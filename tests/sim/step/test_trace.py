"""The timeline as trace events."""

import json
from itertools import pairwise

import pytest

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.step.report import step_report
from phalanx.sim.step.trace import trace_json


@pytest.fixture(scope="module")
def traced(piped):
    report = step_report(piped, parse_fabric("clos2:32x400G/1p/8"))
    return report, json.loads(trace_json(report))


def test_events_have_the_fields_of_the_format(traced):
    report, trace = traced
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(report.timeline.spans)
    for event in complete:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    assert trace["displayTimeUnit"] == "ms"
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(report.step_s * 1e6, abs=0.01)


def test_one_track_per_stage_and_network_tier_each_in_order(traced):
    _, trace = traced
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {process for process, _ in names} == {1, 2, 3, 4}
    assert set(names.values()) == {"device", "pipeline sends", "NIC, behind compute"}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["stage 0", "stage 1", "stage 2", "stage 3"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for track in names:
        mine = [event for event in complete if (event["pid"], event["tid"]) == track]
        assert mine
        # A rounding of a nanosecond each; slices that overlapped would not open as one track.
        assert all(one["ts"] + one["dur"] <= two["ts"] + 0.003 for one, two in pairwise(mine))
