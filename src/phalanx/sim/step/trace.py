"""A timeline in the trace-event format that Perfetto and chrome://tracing open.

One process per stage; its threads are the device and the wires. Complete events ("X") with times in microseconds
(Trace Event Format, Google, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from phalanx.sim.step.lanes import BACKGROUND, DEVICE, SENDS, Span
from phalanx.sim.step.report import StepReport

TRACKS = (DEVICE, "link", "nic", SENDS, BACKGROUND)
FIRST = 1  # Perfetto takes process and thread 0 for the idle task
MOST_EVENTS = 500_000  # about 70 MB, which Perfetto still opens at once


def trace_json(report: StepReport, *, link: str = "NVLink") -> str:
    """The whole step as text; of a longer one the first MOST_EVENTS spans."""
    names = {
        DEVICE: "device",
        "link": link,
        "nic": "NIC",
        SENDS: "pipeline sends",
        BACKGROUND: "NIC, behind compute",
    }
    spans = report.timeline.spans[:MOST_EVENTS]
    events = [*_heads(spans, names), *(_event(span) for span in spans)]
    other = {"job": report.job, "layout": report.layout, "fabric": report.fabric.name, "step_s": report.step_s}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":"))


def _heads(spans: tuple[Span, ...], names: dict[str, str]) -> Iterator[dict[str, object]]:
    """Names of processes and threads; only tracks that are used."""
    used = sorted({(span.stage, TRACKS.index(span.track)) for span in spans})
    for stage in sorted({stage for stage, _ in used}):
        yield _meta("process_name", stage, 0, {"name": f"stage {stage}"})
        yield _meta("process_sort_index", stage, 0, {"sort_index": stage})
    for stage, track in used:
        yield _meta("thread_name", stage, track, {"name": names[TRACKS[track]]})
        yield _meta("thread_sort_index", stage, track, {"sort_index": track})


def _meta(name: str, stage: int, track: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": stage + FIRST, "tid": track + FIRST, "ts": 0, "args": args}


def _event(span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.part.removesuffix("_s"),
        "pid": span.stage + FIRST,
        "tid": TRACKS.index(span.track) + FIRST,
        "ts": round(span.start_s * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
    }
