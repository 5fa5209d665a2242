"""The spans inside a step, as the plan predicts them and as a rank measured them, in one form for drawing.

Both come from files that may have been edited: invalid spans are skipped, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.io.values import at, finite, integer, number

KINDS = ("data", "forward", "backward", "collective", "optimizer", "other")
MOST_SPANS = 2_000
# Drawn one by one; beyond, neighbours share a span.
MOST_MICRO_BATCHES = 128
MOST_TEXT = 80

# The parts of plan.json's breakdown that every forward and backward shares, and the axis of those that are traffic. A
# backward does twice the arithmetic of its forward (two matrix products for one), and recomputes.
FORWARD_SHARE = 1 / 3
WORK = ("matmul_s", "attention_s", "elementwise_s", "head_s", "launch_s")
AGAIN = "recompute_s"
TRAFFIC = {
    "tensor_s": ("tensor traffic", "tensor"),
    "context_s": ("context traffic", "context"),
    "expert_s": ("expert traffic", "expert"),
    "shard_s": ("ZeRO-3 traffic", "data"),
    "pipeline_send_s": ("pipeline sends", "pipeline"),
}
# Parts that come once, after the last backward.
CLOSING = (
    ("gradient_s", "collective", "gradient traffic", "data"),
    ("optimizer_s", "optimizer", "optimizer", None),
    ("overhead_s", "other", "host overhead", None),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """A part of a step, in seconds from the step's begin."""

    kind: str  # one of KINDS
    name: str
    start_s: float
    duration_s: float
    bytes: int | None = None
    group: str | None = None  # the axis of a collective

    def to_json(self) -> dict[str, Any]:
        """Return the span as JSON values for the web page."""
        return {
            "kind": self.kind,
            "name": self.name,
            "start_s": self.start_s,
            "duration_s": self.duration_s,
            "bytes": self.bytes,
            "group": self.group,
        }


def measured_spans(event: Mapping[str, Any]) -> list[StepSpan]:
    """Return the spans of a `timeline` event, sorted by start; invalid ones are skipped."""
    rows = event.get("spans")
    spans = [_read_span(row) for row in rows[:MOST_SPANS]] if isinstance(rows, list) else []
    return sorted((span for span in spans if span is not None), key=lambda span: span.start_s)


def _read_span(row: object) -> StepSpan | None:
    if not isinstance(row, list) or len(row) < 4 or not isinstance(row[0], str) or not isinstance(row[1], str):
        return None
    start_s, duration_s = finite(row[2]), finite(row[3])
    if start_s is None or duration_s is None or duration_s < 0:
        return None
    nbytes = finite(row[4]) if len(row) > 4 else None
    group = row[5] if len(row) > 5 else None
    return StepSpan(
        kind=row[0] if row[0] in KINDS else "other",
        name=row[1][:MOST_TEXT],
        start_s=start_s,
        duration_s=duration_s,
        bytes=int(nbytes) if nbytes is not None and nbytes >= 0 else None,
        group=group[:MOST_TEXT] if isinstance(group, str) else None,
    )


def predicted_spans(plan: Mapping[str, Any], rank: int = 0) -> list[StepSpan]:
    """Return the predicted spans of a rank's step; they follow each other and end at `prediction.step_s`.

    The plan knows the busiest stage and adds up over the step: micro-batches are drawn with equal lengths, and
    communication hidden behind computation is not drawn. A pipeline's bubble lies where 1F1B has it on the rank's
    stage, whatever the schedule.
    """
    prediction = at(plan, "prediction")
    step_s = number(prediction, "step_s")
    if step_s is None or step_s <= 0:
        return []
    parts = {str(name): finite(value) or 0.0 for name, value in at(prediction, "breakdown_s").items()}
    parts = {name: value for name, value in parts.items() if value > 0}
    spans = [
        *_micro_batch_spans(plan, parts, rank),
        *(
            StepSpan(kind=kind, name=name, start_s=0.0, duration_s=parts.get(part_name, 0.0), group=group)
            for part_name, kind, name, group in CLOSING
        ),
    ]
    known_s = sum(span.duration_s for span in spans)
    if known_s < step_s * (1 - 1e-9):
        spans.append(StepSpan(kind="other", name="not broken down", start_s=0.0, duration_s=step_s - known_s))
    scale = min(1.0, step_s / known_s) if known_s > 0 else 1.0
    return _in_a_row(spans, scale, _traffic_bytes(plan))


def _micro_batch_spans(plan: Mapping[str, Any], parts: Mapping[str, float], rank: int) -> Iterator[StepSpan]:
    """Yield forwards and backwards in the order of 1F1B, with the bubble in between."""
    layout = at(plan, "layout")
    stages = _axis_size(layout, "pipeline")
    count = _axis_size(layout, "accumulation")
    drawn = min(count, MOST_MICRO_BATCHES)
    # Ranks of a stage have consecutive numbers, the first stage first.
    each = _axis_size(layout, "data") * _axis_size(layout, "context") * _axis_size(layout, "tensor")
    order = _stage_order(drawn, stages, min(max(rank, 0) // each, stages - 1))
    work_s = sum(parts.get(name, 0.0) for name in WORK)
    forward_s = work_s * FORWARD_SHARE / drawn
    backward_s = (work_s * (1 - FORWARD_SHARE) + parts.get(AGAIN, 0.0)) / drawn
    idle = sum(weight for kind, weight in order if kind == "idle")
    for kind, weight in order:
        if kind == "idle":
            name, length_s = "pipeline bubble", parts.get("bubble_s", 0.0) * weight / idle if idle else 0.0
            yield StepSpan(kind="other", name=name, start_s=0.0, duration_s=length_s)
            continue
        name = f"{kind} {_micro_batch_numbers(int(weight), drawn, count)}" if count > 1 else kind
        yield StepSpan(kind=kind, name=name, start_s=0.0, duration_s=forward_s if kind == "forward" else backward_s)
        for part_name, (traffic, axis) in TRAFFIC.items():
            yield StepSpan(
                kind="collective",
                name=traffic,
                start_s=0.0,
                duration_s=parts.get(part_name, 0.0) / drawn / 2,
                group=axis,
            )


def _stage_order(count: int, stages: int, stage: int) -> list[tuple[str, float]]:
    """Return (forward or backward, micro-batch) and (idle, length in forwards) pairs of 1F1B on a stage.

    >>> _stage_order(2, 2, 0)
    [('forward', 0), ('forward', 1), ('idle', 2.0), ('backward', 0), ('idle', 1.0), ('backward', 1)]
    >>> _stage_order(2, 1, 0)
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    later_stages = stages - 1 - stage
    ahead = min(count, later_stages + 1)  # forwards before the first backward
    # A backward takes as long as two forwards. The stage idles while the pipeline fills, until the first backward
    # arrives, and while it drains.
    order: list[tuple[str, float]] = [("idle", 1.0 * stage)] if stage else []
    order += [("forward", place) for place in range(ahead)]
    order += [("idle", 2.0 * later_stages)] if later_stages else []
    for place in range(count):
        order.append(("backward", place))
        if ahead + place < count:
            order.append(("forward", ahead + place))
        elif later_stages and place < count - 1:
            order.append(("idle", later_stages / max(1, ahead - 1)))
    return [*order, ("idle", 2.0 * stage)] if stage else order


def _in_a_row(spans: Sequence[StepSpan], scale: float, nbytes: Mapping[str, float]) -> list[StepSpan]:
    """Place spans one after the other, without empty ones; bytes of each axis are shared by duration."""
    shown_s: dict[str, float] = {}
    for span in spans:
        if span.group:
            shown_s[span.group] = shown_s.get(span.group, 0.0) + span.duration_s
    placed, now_s = [], 0.0
    for span in spans:
        length_s = span.duration_s * scale
        if length_s <= 0:
            continue
        group = span.group or ""
        share = span.duration_s / shown_s[group] if shown_s.get(group) else 0.0
        moved = int(nbytes[group] * share) if group in nbytes else None
        placed.append(replace(span, start_s=now_s, duration_s=length_s, bytes=moved))
        now_s += length_s
    return placed


def _traffic_bytes(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes that a step moves on each axis."""
    axis_bytes: dict[str, float] = {}
    rows = plan.get("mapping")
    for row in rows if isinstance(rows, list) else ():
        axis, nbytes = at(row).get("axis"), number(at(row), "bytes_per_step")
        if isinstance(axis, str) and nbytes is not None and nbytes >= 0:
            axis_bytes[axis] = axis_bytes.get(axis, 0.0) + nbytes
    return axis_bytes


def _micro_batch_numbers(place: int, drawn: int, count: int) -> str:
    """Return the numbers, from 1, of the micro-batches that one drawn micro-batch represents.

    >>> _micro_batch_numbers(1, 4, 4), _micro_batch_numbers(1, 128, 512)
    ('2', '5-8')
    """
    first, last = place * count // drawn, (place + 1) * count // drawn - 1
    return f"{first + 1}" if first >= last else f"{first + 1}-{last + 1}"


def _axis_size(layout: Mapping[str, Any], axis: str) -> int:
    value = integer(layout, axis)
    return value if value is not None and 1 <= value <= 2**30 else 1
