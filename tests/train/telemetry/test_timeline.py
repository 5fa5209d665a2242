"""Timelines of real steps over gloo: every collective, its bytes and its axis, as a trace has them."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phalanx.record.account.timeline import measured_spans
from phalanx.train.parallel.dims import ParallelDims, build_meshes
from phalanx.train.telemetry import timeline
from phalanx.train.telemetry.clock import StepPhase
from phalanx.train.telemetry.collective_tap import METHODS, Kernel, TappedCollective, op_of, timed_by
from phalanx.train.telemetry.timeline import Inside, Sample, TimelineSampler, longest_spans, merge_spans
from phalanx.train.tracing.traced_step import trace_rank
from phalanx.train.verify.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
tasks = importlib.import_module("noise_tasks")

LAYOUTS = {
    "fsdp in a pipeline": {"pipeline": 2, "data": 2, "shard": 2, "zero": 2},
    "tensor and data": {"tensor": 2, "data": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_real_step_moves_what_a_trace_says(name, trial):
    made = trial(kind="fp32", steps=1, **LAYOUTS[name])
    found = run_ranks(tasks.sampled, made.settings.layout.devices, made)[0]
    traced = trace_rank(made.shape, made.settings, made.optim, rank=0)
    wanted: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for one in traced.operations:
        wanted[one.kind, one.group.axis] += one.nbytes
        calls[one.kind, one.group.axis] += 1
    assert {(one["op"], one["group"]): one["bytes"] for one in found["collectives"]} == wanted
    assert {(one["op"], one["group"]): one["count"] for one in found["collectives"]} == calls
    assert found["nbytes"] == sum(wanted.values())
    assert found["told"] == []
    spans = measured_spans({"spans": json.loads(json.dumps(found["spans"]))})
    kinds = Counter(span.kind for span in spans)
    micro = made.settings.layout.accumulation
    assert (kinds["forward"], kinds["backward"], kinds["optimizer"], kinds["data"]) == (micro, micro, 1, 1)
    assert found["seconds"] > 0
    forward = next(span for span in spans if span.kind == "forward")
    assert forward.start_s >= 0.75  # where the engine began
    assert all(span.duration_s >= 0 for span in spans)


@pytest.fixture
def meshes(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield build_meshes(ParallelDims(), "cpu", experts=False)
    dist.destroy_process_group()


def _sampler(meshes, told, *, every: int) -> TimelineSampler:
    return TimelineSampler(meshes, torch.device("cpu"), every=every, compiled=False, tell=told.append)


def test_samples_come_early_and_then_seldom(meshes, monkeypatch):
    monkeypatch.setattr(timeline, "SHARE", 1e9)
    for every, first, wanted in ((50, 0, [9, 50, 100]), (50, 45, [50, 54, 100]), (0, 0, [])):
        sampler = _sampler(meshes, [], every=every)
        taken = []
        for step in range(first, 120):
            with sampler.step(step) as samples:
                pass
            taken += [step] if samples else []
        assert taken == wanted


def test_samples_that_would_cost_too_much_are_put_off(meshes, monkeypatch):
    monkeypatch.setattr(timeline, "SHARE", 0.0)
    sampler = _sampler(meshes, [], every=1)
    counts = []
    for step in range(1, 5):
        with sampler.step(step) as samples:
            pass
        counts.append(len(samples))
    assert counts == [1, 0, 0, 0]


def test_a_failure_inside_is_told_once_and_the_step_goes_on(meshes, monkeypatch):
    def broken(*_: object) -> str:
        raise RuntimeError("no such method\nsecond line")

    monkeypatch.setattr("phalanx.train.telemetry.collective_tap._operation_name", broken)
    told: list[str] = []
    sampler, done = _sampler(meshes, told, every=1), []
    for step in range(1, 4):
        with sampler.step(step) as samples:
            dist.all_reduce(torch.ones(1))
            done.append(step)
        assert samples == []
    assert done == [1, 2, 3]
    assert told == ["no more timelines: RuntimeError: no such method"]


def test_a_sample_that_cannot_be_told_is_no_harm(meshes):
    told: list[str] = []
    sampler = _sampler(meshes, told, every=1)
    broken = Sample([_call("send")], 0.0, lambda call: 1 / 0)
    assert sampler.inside([broken], [], data_s=0.0, before_s=0.0) == Inside()
    assert told == ["no more timelines: ZeroDivisionError: division by zero"]


def test_sums_that_cannot_be_had_are_no_harm_and_keys_stay_out_of_the_remark(meshes, monkeypatch):
    class Wrong:
        op, group, nbytes, end_s = "send", "g", 1, 0.0

        @property
        def start_s(self) -> float:
            raise RuntimeError("refused for hf_abcdefgh")

    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    told: list[str] = []
    sampler = _sampler(meshes, told, every=1)
    assert sampler.inside([Sample([Wrong()], 0.0, lambda call: None)], [], data_s=0.0, before_s=0.0) == Inside()
    assert told == ["no more timelines: RuntimeError: refused for [HF_TOKEN]"]
    assert sampler.inside([], [], data_s=0.0, before_s=0.0) == Inside()


def test_what_looking_costs_before_the_step_is_told_apart(meshes, monkeypatch):
    now_s = [100.0]

    class Slow:
        calls = ()

        def __init__(self, *, functional: bool) -> None:
            pass

        @contextmanager
        def listening(self):
            now_s[0] += 5.0
            yield

    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(timeline, "CollectiveTap", Slow)
    sampler = _sampler(meshes, [], every=2)
    found = []
    for step in (2, 3):
        with sampler.step(step):
            found.append(sampler.opening_s)
            now_s[0] += 1.0
        found.append(sampler.opening_s)
    assert found == [5.0, 5.0, 0.0, 0.0]


def test_what_the_step_raises_is_raised_and_nothing_stays_in_place(meshes):
    before = {name: vars(dist.ProcessGroup).get(name) for name in METHODS}
    sampler = _sampler(meshes, [], every=1)
    with pytest.raises(ZeroDivisionError), sampler.step(1):
        raise ZeroDivisionError
    assert {name: vars(dist.ProcessGroup).get(name) for name in METHODS} == before
    dist.all_reduce(torch.ones(1))


def test_tiny_neighbours_become_one_and_the_shortest_are_left_out():
    row = [("collective", "send", n * 1e-5, 1e-6, 8, "pipeline") for n in range(5)]
    (one,) = merge_spans(row)
    assert (one[2], one[4]) == (0.0, 40)
    assert one[3] == pytest.approx(4e-5 + 1e-6)
    far = [("forward", f"forward {n}", float(n), float(n % 3), None, None) for n in range(6)]
    kept, dropped = longest_spans(merge_spans(far), most=4)
    assert [span[1] for span in kept] == ["forward 1", "forward 2", "forward 4", "forward 5"]
    assert dropped == 2


def test_the_batch_is_waited_for_before_the_engine_begins():
    sample = Sample([], 100.0, lambda call: None)
    found = sample.fields([StepPhase(kind="forward", start_s=0.0, duration_s=1.0)], data_s=0.5, before_s=0.75)
    assert found["spans"] == [["data", "batch", 0.25, 0.5, None, None], ["forward", "forward", 0.75, 1.0, None, None]]


def _call(op: str, at_s: float = 0.0) -> TappedCollective:
    return TappedCollective(op=op, nbytes=64, group="g", start_s=at_s, end_s=at_s + 1e-5)


def test_calls_take_the_times_of_their_kernels_in_order():
    kernels = [
        Kernel(op="all-gather", start_s=1.0, duration_s=0.5),
        Kernel(op="all-gather", start_s=2.0, duration_s=0.25),
    ]
    found = timed_by(kernels, [_call("all-gather"), _call("all-gather")], began_s=10.0)
    assert [(call.start_s, call.end_s, call.nbytes) for call in found] == [(11.0, 11.5, 64), (12.0, 12.25, 64)]


def test_kernels_that_fit_no_call_stand_for_themselves():
    """Four sends and receives posted together are one kernel."""
    found = timed_by(
        [Kernel(op="exchange", start_s=1.0, duration_s=0.5)], [_call("send"), _call("receive")] * 2, began_s=0.0
    )
    assert [(call.op, call.nbytes, call.end_s - call.start_s) for call in found][-1] == ("exchange", 0, 0.5)
    assert sum(call.nbytes for call in found) == 256
    assert sum(call.end_s - call.start_s for call in found) == pytest.approx(0.5)


def test_kernels_are_known_by_their_names():
    assert op_of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "all-gather"
    assert op_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "reduce-scatter"
    assert op_of("ncclDevKernel_SendRecv(…)") == "exchange"
    assert op_of("void at::native::vectorized_elementwise_kernel") == ""
