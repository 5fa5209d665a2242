"""The timeline as trace events."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.step import trace_file as tracing
from phalanx.sim.step.step_report import step_report
from phalanx.sim.step.step_timeline import simulate_timeline
from phalanx.sim.step.trace_file import trace_json

from .conftest import by_hand

KEYS = {  # of the trace event format, by phase; all that we write
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}


@pytest.fixture(scope="module")
def traced(piped):
    report = step_report(piped, parse_fabric("clos2:32x400G/1p/8"))
    return report, json.loads(trace_json(report))


def nanoseconds(microseconds):
    assert microseconds == pytest.approx(round(microseconds * 1e3) / 1e3, abs=0)  # a whole number of nanoseconds
    return round(microseconds * 1e3)


def by_track(trace):
    tracks = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            span = (start, start + nanoseconds(event["dur"]), event["name"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    return tracks


def check_strictly(trace):
    """What Perfetto's JSON importer wants, or drops a slice or an arrow without it."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert event.keys() == KEYS[event["ph"]]
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert min(event["pid"], event["tid"]) >= 1  # 0 is the idle task
        assert event["ts"] >= 0
    _named(events)
    tracks = by_track(trace)
    for spans in tracks.values():
        assert all(end > start for start, end, _ in spans)
        assert all(one[1] <= two[0] for one, two in pairwise(spans)), "slices of a track overlap"
    _paired(events, tracks)


def _named(events):
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(set(processes)) == len(processes)
    assert len(set(threads)) == len(threads)
    assert {event["pid"] for event in events} == set(processes)
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} == set(threads)


def _paired(events, tracks):
    """Every arrow has one start and one end, in that order, each within a slice, and joins a send with its pass."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert Counter(event["ph"] for event in events)["s"] == len(starts)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        assert end["bp"] == "e"
        sent, used = (_slice_at(tracks[event["pid"], event["tid"]], event["ts"]) for event in (start, end))
        # A chunk's number follows the point: the next chunk of a stage takes up what the last stage sent.
        assert sent.partition(".")[0] == f"send {used.partition('.')[0]}"


def _slice_at(spans, microseconds):
    at = nanoseconds(microseconds)
    return next(name for start, end, name in spans if start <= at < end)


def test_a_trace_is_what_the_format_says(traced):
    report, trace = traced
    check_strictly(trace)
    last_ns = max(end for spans in by_track(trace).values() for _, end, _ in spans)
    assert last_ns == pytest.approx(report.step_s * 1e9, abs=2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_hands_over_each_micro_batch_once_per_boundary(traced, schedule):
    chunks = 2 if schedule == "interleaved" else 1
    # Thirds of a nanosecond: ends and starts must round to the same nanosecond.
    work = by_hand(stages=4, chunks=chunks, schedule=schedule, micros=8, send_s=1e-3 / 3, send_exposed=0.3)
    timeline = simulate_timeline(work)
    trace = json.loads(trace_json(replace(traced[0], timeline=timeline, step_s=timeline.step_s)))
    check_strictly(trace)
    assert Counter(event["ph"] for event in trace["traceEvents"])["s"] == 2 * 8 * (4 * chunks - 1)


def test_one_track_per_stage_and_network_tier(traced):
    _, trace = traced
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {process for process, _ in names} == {1, 2, 3, 4}
    assert set(names.values()) == {"device", "pipeline sends", "NIC, behind compute"}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["stage 0", "stage 1", "stage 2", "stage 3"]


def test_a_device_is_never_without_a_slice_and_their_kinds_are_the_lines_of_the_step(traced):
    """Work, traffic that no compute hides, and bubbles: of every stage they fill the step."""
    report, trace = traced
    for stage in range(4):
        mine = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == stage + 1]
        device = [event for event in mine if event["tid"] == 1]
        assert sum(event["dur"] for event in device) == pytest.approx(report.step_s * 1e6, rel=1e-6)
        idle = sum(event["dur"] for event in device if event["cat"] == "bubble,idle")
        assert idle == pytest.approx(report.timeline.device_s[stage]["bubble_s"] * 1e6, rel=1e-6)
        assert {event["cat"].split(",")[1] for event in mine} == {"work", "exposed", "idle", "wire"}


def test_a_cut_trace_keeps_whole_arrows(traced, monkeypatch):
    monkeypatch.setattr(tracing, "MOST_EVENTS", 100)
    trace = json.loads(trace_json(traced[0]))
    check_strictly(trace)
    assert Counter(event["ph"] for event in trace["traceEvents"])["X"] <= 100
