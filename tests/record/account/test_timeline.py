"""Predicted and measured steps as spans: in order, complete, and unmoved by what strangers write."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.record.account.timeline import KINDS, MOST_SPANS, StepSpan, _stage_order, measured_spans, predicted_spans

PARTS = {
    "matmul_s": 0.3, "attention_s": 0.15, "elementwise_s": 0.1, "head_s": 0.05, "recompute_s": 0.06, "launch_s": 0.0,
    "tensor_s": 0.04, "context_s": 0.0, "expert_s": 0.0, "pipeline_send_s": 0.02, "bubble_s": 0.2, "shard_s": 0.0,
    "gradient_s": 0.03, "optimizer_s": 0.02, "overhead_s": 0.03,
}  # fmt: skip


def plan(*, pipeline: int = 2, accumulation: int = 4, parts: object = None, step_s: object = None) -> dict[str, object]:
    found = dict(PARTS) if parts is None else parts
    total = sum(found.values()) if step_s is None else step_s
    return {
        "layout": {"pipeline": pipeline, "data": 2, "tensor": 2, "context": 1, "accumulation": accumulation},
        "prediction": {"step_s": total, "breakdown_s": found},
        "mapping": [{"axis": "tensor", "bytes_per_step": 1600}, {"axis": "data", "bytes_per_step": 700}],
    }


def test_the_spans_follow_each_other_and_end_with_the_step():
    for rank in (0, 4, 7):
        spans = predicted_spans(plan(), rank)
        now_s = 0.0
        for span in spans:
            assert span.start_s == pytest.approx(now_s)
            now_s += span.duration_s
        assert now_s == pytest.approx(sum(PARTS.values()))
        assert {span.kind for span in spans} <= set(KINDS)


def test_every_micro_batch_is_there_and_the_parts_add_up():
    spans = predicted_spans(plan(), 0)
    names = [span.name for span in spans if span.kind in ("forward", "backward")]
    assert sorted(names) == [f"{kind} {n}" for kind in ("backward", "forward") for n in range(1, 5)]
    assert sum(s.duration_s for s in spans if s.name == "pipeline bubble") == pytest.approx(0.2)
    assert sum(s.duration_s for s in spans if s.name == "tensor traffic") == pytest.approx(0.04)
    assert sum(s.bytes or 0 for s in spans if s.group == "tensor") == pytest.approx(1600, abs=16)
    assert [s.name for s in spans[-3:]] == ["gradient traffic", "optimizer", "host overhead"]


def test_the_first_stage_begins_at_once_and_the_last_waits_for_it():
    first, last = predicted_spans(plan(pipeline=4), 0), predicted_spans(plan(pipeline=4), 12)
    assert (first[0].kind, last[0].name) == ("forward", "pipeline bubble")
    kinds = [span.kind for span in last if span.kind in ("forward", "backward")]
    assert kinds == ["forward", "backward"] * 4  # 1F1B on the last stage
    assert [span.kind for span in first if span.kind in ("forward", "backward")][:4] == ["forward"] * 4


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (1, 4), (8, 4), (4, 8), (2, 2)])
def test_every_stage_does_each_micro_batch_once_in_order_and_idles_alike(count, stages):
    for stage in range(stages):
        order = _stage_order(count, stages, stage)
        for kind in ("forward", "backward"):
            assert [number for what, number in order if what == kind] == list(range(count))
        done: set[float] = set()
        for what, number in order:  # no backward before its forward
            if what == "forward":
                done.add(number)
            assert what != "backward" or number in done
        if count >= stages > 1:  # (p − 1) forwards and backwards of idling, on every stage
            assert sum(length for what, length in order if what == "idle") == pytest.approx(3.0 * (stages - 1))


def test_thousands_of_micro_batches_share_spans():
    spans = predicted_spans(plan(accumulation=4096), 0)
    assert len(spans) <= MOST_SPANS
    assert spans[0].name == "forward 1-32"
    assert spans[-1].start_s + spans[-1].duration_s == pytest.approx(sum(PARTS.values()))


def test_what_the_plan_does_not_break_down_is_said():
    spans = predicted_spans(plan(step_s=2.0), 0)
    assert spans[-1].name == "not broken down"
    assert spans[-1].duration_s == pytest.approx(2.0 - sum(PARTS.values()))
    less = predicted_spans(plan(step_s=0.5), 0)  # parts that claim more than the whole are drawn smaller
    assert less[-1].start_s + less[-1].duration_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"prediction": None},
        {"prediction": {"step_s": "1"}},
        {"prediction": {"step_s": math.nan}},
        {"prediction": {"step_s": -1.0}},
        {"prediction": {"step_s": 10**400}},
    ],
)
def test_without_a_step_time_there_is_nothing_to_draw(broken):
    assert predicted_spans(broken, 0) == []


def test_a_damaged_plan_is_drawn_as_far_as_it_goes():
    for layout in (None, {"pipeline": "x", "accumulation": -3, "data": True}, {"pipeline": 10**12}):
        damaged = plan(parts={"matmul_s": 1.0, "bubble_s": math.inf, "head_s": None, 7: 2.0}, step_s=1.0)
        damaged["layout"], damaged["mapping"] = layout, [None, {"axis": 3}, {"axis": "data", "bytes_per_step": "x"}]
        spans = predicted_spans(damaged, -5)
        assert spans[-1].start_s + spans[-1].duration_s == pytest.approx(1.0)


def test_a_measured_step_reads_back():
    rows = [
        ["backward", "backward 1", 0.5, 0.25, None, None],
        ["collective", "all-gather", 0.1, 0.05, 1024, "data"],
        ["nonsense", "x" * 500, 0.9, 0.05],
    ]
    assert measured_spans({"spans": rows}) == [
        StepSpan(kind="collective", name="all-gather", start_s=0.1, duration_s=0.05, bytes=1024, group="data"),
        StepSpan(kind="backward", name="backward 1", start_s=0.5, duration_s=0.25),
        StepSpan(kind="other", name="x" * 80, start_s=0.9, duration_s=0.05),
    ]
    assert measured_spans({"spans": rows})[0].to_json()["bytes"] == 1024


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_nothing_a_stranger_writes_breaks_it(value):
    for span in measured_spans({"spans": value}) + measured_spans({"spans": [value]}):
        json.dumps(span.to_json(), allow_nan=False)
    predicted_spans({"prediction": {"step_s": 1.0, "breakdown_s": value}, "layout": value, "mapping": value}, 3)
