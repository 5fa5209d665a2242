"""A timeline in the trace-event format, which Perfetto and chrome://tracing open.

One process per stage; its threads are the device and the wires. Complete events ("X") have times in microseconds;
flow events ("s", "f") lead from a send to the pass that uses it (Trace Event Format, Google, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from phalanx.sim.step.step_report import SimulatedStep
from phalanx.sim.step.step_timeline import BACKGROUND, BUBBLE, DEVICE, SENDS, Handover, Span

TRACKS = (DEVICE, "link", "nic", SENDS, BACKGROUND)
FIRST = 1  # Perfetto treats process and thread 0 as the idle task
# About 70 MB, which Perfetto still opens without delay.
MOST_EVENTS = 500_000
# Parts in which a device works; during other parts it waits.
WORK = ("compute_s", "optimizer_s", "overhead_s")


def trace_json(report: SimulatedStep, *, link: str = "NVLink") -> str:
    """Return the step as JSON text; at most the first MOST_EVENTS spans."""
    names = {
        DEVICE: "device",
        "link": link,
        "nic": "NIC",
        SENDS: "pipeline sends",
        BACKGROUND: "NIC, behind compute",
    }
    spans = report.timeline.spans[:MOST_EVENTS]
    last_s = spans[-1].start_s if len(spans) < len(report.timeline.spans) else report.step_s
    drawn = (handover for handover in report.timeline.handovers if handover.used_s < last_s)
    events = [*_track_heads(spans, names), *_span_events(spans), *_send_arrows(drawn)]
    metadata = {"job": report.job, "layout": report.layout, "fabric": report.fabric.name, "step_s": report.step_s}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}, separators=(",", ":"))


def _track_heads(spans: tuple[Span, ...], names: dict[str, str]) -> Iterator[dict[str, object]]:
    """Yield the names of processes and threads, for tracks in use."""
    used = sorted({(span.stage, TRACKS.index(span.track)) for span in spans})
    for stage in sorted({stage for stage, _ in used}):
        yield _meta_event("process_name", stage, 0, {"name": f"stage {stage}"})
        yield _meta_event("process_sort_index", stage, 0, {"sort_index": stage})
    for stage, track in used:
        yield _meta_event("thread_name", stage, track, {"name": names[TRACKS[track]]})
        yield _meta_event("thread_sort_index", stage, track, {"sort_index": track})


def _meta_event(name: str, stage: int, track: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": stage + FIRST, "tid": track + FIRST, "ts": 0, "args": args}


def _span_events(spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    """Yield spans in whole nanoseconds without overlap.

    Perfetto drops a slice that overlaps the next one of its track by a nanosecond.
    """
    free: dict[tuple[int, str], int] = {}
    for span in spans:
        start = max(_whole_nanoseconds(span.start_s), free.get((span.stage, span.track), 0))
        end = max(start, _whole_nanoseconds(span.end_s))
        free[span.stage, span.track] = end
        if end > start:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": f"{span.part.removesuffix('_s')},{_span_kind(span)}",
                "pid": span.stage + FIRST,
                "tid": TRACKS.index(span.track) + FIRST,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
            }


def _span_kind(span: Span) -> str:
    """Return the category of a span; traffic on the device's own track is exposed, as no compute hides it."""
    if span.track != DEVICE:
        return "wire"
    if span.part in WORK:
        return "work"
    return "idle" if span.part == BUBBLE else "exposed"


def _send_arrows(handovers: Iterable[Handover]) -> Iterator[dict[str, object]]:
    """Yield an arrow from each send to the pass that uses it, after all slices: an arrow needs an existing slice."""
    for number, handover in enumerate(handovers):
        yield _arrow_event("s", number, handover.source, SENDS, handover.sent_s)
        yield {**_arrow_event("f", number, handover.target, DEVICE, handover.used_s), "bp": "e"}


def _arrow_event(phase: str, number: int, stage: int, track: str, at_s: float) -> dict[str, object]:
    return {
        "ph": phase,
        "name": "handover",
        "cat": "pipeline",
        "id": number,
        "pid": stage + FIRST,
        "tid": TRACKS.index(track) + FIRST,
        "ts": _whole_nanoseconds(at_s) / 1e3,
    }


def _whole_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
