"""The step as events, against what the schedules' papers say."""

from dataclasses import replace
from itertools import pairwise

import pytest

from phalanx.errors import UserError
from phalanx.sim.step.step_timeline import BACKGROUND, DEVICE, check_spans, simulate_timeline
from phalanx.sim.step.step_work import Inner, LayerPass

from .conftest import by_hand, sharing


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks", "weight_s", "idle_s"),
    [
        ("gpipe", 1, 0.0, 3.0),
        ("1f1b", 1, 0.0, 3.0),  # (p-1)(F+B), arXiv:2104.04473
        ("interleaved", 2, 0.0, 3.0),  # 1/v of the stage's 6 s
        ("interleaved", 4, 0.0, 3.0),
        ("zero-bubble", 1, 1.0, 1.0),  # ZB-H1: (p-1)(F+B-W), arXiv:2401.10241
    ],
)
def test_bubble_is_that_of_the_papers(schedule, chunks, weight_s, idle_s, stages):
    done = simulate_timeline(
        by_hand(stages=stages, schedule=schedule, chunks=chunks, micros=2 * stages, weight_s=weight_s)
    )
    assert done.step_s == pytest.approx(2 * stages * 3.0 * chunks + (stages - 1) * idle_s)
    assert all(parts["bubble_s"] == pytest.approx((stages - 1) * idle_s) for parts in done.device_s)


def test_zero_bubble_holds_no_more_than_1f1b_on_its_first_stage():
    done = simulate_timeline(by_hand(stages=4, micros=12, schedule="zero-bubble", weight_s=1.0))
    for stage in range(4):
        held = most = 0
        for span in done.spans:
            if (span.stage, span.track) == (stage, DEVICE):
                held += {"F": 1, "B": 0, "W": -1}.get(span.name[0], 0)
                most = max(most, held)
        assert most <= 4 + 1  # the pass that makes room is the next one


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_device_seconds_add_up_and_tracks_do_one_thing_at_a_time(schedule):
    inner = (Inner(part="tensor_s", tier="link", wire_s=0.3, exposed_s=0.2),)
    work = by_hand(
        stages=4,
        micros=8,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        forward=LayerPass(compute_s=1.0, inner=inner),
        backward=LayerPass(compute_s=2.0, inner=inner),
        weight_s=0.7 if schedule == "zero-bubble" else 0.0,
        send_s=0.25,
        send_exposed=0.4,
        head_forward_s=0.1,
        head_backward_s=0.2,
        host_micro_s=0.05,
        optimizer_s=0.5,
        host_step_s=0.1,
        shared=sharing(reduce_s=1.5, gather_s=0.8),
    )
    done = simulate_timeline(work)
    for stage in range(4):
        assert sum(done.device_s[stage].values()) == pytest.approx(done.step_s)
        for track in {span.track for span in done.spans}:
            mine = [span for span in done.spans if (span.stage, span.track) == (stage, track)]
            assert all(one.end_s <= two.start_s + 1e-9 for one, two in pairwise(mine)), track
    computed = sum(parts["compute_s"] for parts in done.device_s)
    assert computed == pytest.approx(8 * (4 * work.chunks * 3.0 + 0.3))


def test_chunks_of_the_last_stage_make_room_for_the_head():
    work = by_hand(stages=2, chunks=2, schedule="interleaved", layers=(4, 2), head_forward_s=2.0, head_backward_s=1.0)
    assert [work.chunk_layers(0, chunk) for chunk in range(2)] == [2.0, 2.0]
    assert [work.chunk_layers(1, chunk) for chunk in range(2)] == [1.5, 0.5]  # the head is as long as a layer
    even = replace(work, balanced=False)
    assert [even.chunk_layers(1, chunk) for chunk in range(2)] == [1.0, 1.0]
    assert simulate_timeline(work).step_s < simulate_timeline(even).step_s


def test_traffic_hides_behind_compute_but_not_behind_more_than_there_is():
    def shown(wire_s):
        inner = (Inner(part="expert_s", tier="nic", wire_s=wire_s, exposed_s=0.5 * wire_s),)
        work = by_hand(stages=1, micros=1, forward=LayerPass(compute_s=1.0, inner=inner))
        return simulate_timeline(work).device_s[0]["expert_s"]

    assert shown(1.0) == pytest.approx(0.5)
    assert shown(10.0) == pytest.approx(9.0)


def test_a_send_delays_the_next_stage_and_blocks_the_sender_only_in_part():
    quiet, late = (
        simulate_timeline(by_hand(micros=1)),
        simulate_timeline(by_hand(micros=1, send_s=0.5, send_exposed=0.2)),
    )
    assert quiet.step_s == pytest.approx(6.0)
    assert late.step_s == pytest.approx(7.0)  # one there, one back
    assert late.device_s[0]["pipeline_send_s"] == pytest.approx(0.1)


def test_gradients_of_later_stages_hide_in_the_drain():
    """Stage 1 is done with backward 2 s before stage 0: its reduction costs nothing, that of stage 0 does."""
    shared = sharing(reduce_s=1.0, overlap=0.5)
    done = simulate_timeline(by_hand(shared=shared))
    plain = simulate_timeline(by_hand())
    # Half may hide behind backward; one layer is one bucket, which is ready only at its end.
    assert done.step_s - plain.step_s == pytest.approx(1.0)
    only_last = simulate_timeline(replace(by_hand(), sharing=(sharing(), shared)))
    assert only_last.step_s == pytest.approx(plain.step_s)


def test_zero2_reduces_every_micro_batch_behind_the_next():
    cheap = simulate_timeline(by_hand(stages=1, shared=sharing(reduce_s=0.5, again_s=0.5)))
    assert cheap.wire_s[0]["gradient_s"] == pytest.approx(3 * 0.5 + 0.5)
    assert cheap.step_s == pytest.approx(12.5)
    dear = simulate_timeline(by_hand(stages=1, shared=sharing(reduce_s=5.0, again_s=5.0)))
    assert dear.step_s > 3 * 5.0


def test_gather_of_parameters_hides_behind_the_first_forward():
    done = simulate_timeline(by_hand(stages=1, shared=sharing(gather_s=0.8, gather_overlap=0.75)))
    assert done.device_s[0]["gradient_s"] == pytest.approx(0.2)


def test_zero3_waits_for_the_first_layer_and_for_the_slower_of_compute_and_traffic():
    def sharded(gather_s):
        return simulate_timeline(
            by_hand(
                stages=1,
                layers=(10,),
                micros=2,
                shared=sharing(layer_gather_s=gather_s, layer_scatter_s=gather_s),
            )
        )

    quick = sharded(0.1)
    # In the open: the first gather of each of four directions, and the last scatter of each of two micro-batches.
    assert quick.device_s[0]["shard_s"] == pytest.approx(6 * 0.1)
    slow = sharded(5.0)
    assert slow.step_s == pytest.approx(2 * 10 * 3 * 5.0, rel=0.02)
    assert {span.track for span in slow.spans} == {DEVICE, BACKGROUND}


def test_a_step_too_long_is_refused_before_it_starts(piped):
    check_spans(piped.layout, 12)
    endless = replace(piped.layout, accumulation=1_000_000)
    with pytest.raises(UserError) as caught:
        check_spans(endless, 12)
    assert str(caught.value) == (
        "phalanx sim: 1,000,000 micro-batches make 8,000,000 passes, more than 200,000\n"
        "  they take minutes and gigabytes, and one micro-batch is like another\n"
        "  simulate a smaller batch: --set batch.global_sequences=200000"
    )
