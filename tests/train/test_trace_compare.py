"""Logs that would hang are told from logs that would not, and the message names who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.train.tracing.hang_check import find_hang
from phalanx.train.tracing.log import MemoryPeak, RankTrace, TracedOperation, TraceGroup, message_rows

PAIR = TraceGroup(axis="pipeline", ranks=(0, 1))
DATA = {0: TraceGroup(axis="data", ranks=(0, 2)), 1: TraceGroup(axis="data", ranks=(1, 3))}
WORLD = TraceGroup(axis="world", ranks=(0, 1, 2, 3))
PEAK = MemoryPeak(nbytes=1, phase="forward", parts_bytes={}, rest_bytes=0, host_bytes=0)


def collective(group, nbytes=1000, kind="all-reduce"):
    return TracedOperation(kind=kind, nbytes=nbytes, dtype="float32", group=group, phase="backward")


def message(kind, peer, *, batch, nbytes=64):
    return TracedOperation(
        kind=kind, nbytes=nbytes, dtype="bfloat16", group=PAIR, phase="forward", peer=peer, batch=batch
    )


def trace(rank, *operations, stage=None):
    place = {"pipeline": (rank, 2)}
    stages = (rank if stage is None else stage,)
    return RankTrace(rank=rank, place=place, stages=stages, layers=(0,), operations=operations, flops={}, peak=PEAK)


def pair():
    """A stage that sends forward and waits for the gradient, and its neighbour; both reduce and agree."""
    first = [message("send", 1, batch=1), message("receive", 1, batch=2), collective(DATA[0]), collective(WORLD)]
    second = [message("receive", 0, batch=1), message("send", 0, batch=2), collective(DATA[1]), collective(WORLD)]
    return first, second


def test_ranks_that_meet():
    first, second = pair()
    assert find_hang([trace(0, *first), trace(1, *second)]) is None


def test_a_missing_send_is_named_with_the_rank_that_left():
    first, second = pair()
    hang = find_hang([trace(0, *first), trace(1, *(one for one in second if one.kind != "send"))])
    assert hang is not None
    assert hang.render() == (
        "rank 0 waits for rank 1 in receive of 64 B from rank 1 on axis pipeline (forward), operation 1\n"
        "  rank 1 waits in all-reduce of 1.00 kB float32 on axis world (4 ranks from 0, backward), operation 2"
    )


def test_a_message_nobody_receives():
    first, second = pair()
    hang = find_hang([trace(0, message("send", 1, batch=0), *first), trace(1, *second)])
    assert hang is not None
    assert "never receives it" in hang.render()


def test_collectives_of_another_size_or_kind():
    first, second = pair()
    for changed in (collective(WORLD, 999), collective(WORLD, kind="all-gather"), replace(first[3], dtype="float64")):
        hang = find_hang([trace(0, *first), trace(1, *second[:3], changed)])
        assert hang is not None
        assert {hang.rank, hang.waits_for} == {0, 1}
        assert "axis world" in hang.render()


def test_two_ranks_that_both_receive_first_wait_in_a_circle():
    ranks = [
        trace(rank, message("receive", 1 - rank, batch=1), collective(DATA[rank]), message("send", 1 - rank, batch=2))
        for rank in (0, 1)
    ]
    hang = find_hang(ranks)
    assert hang is not None
    assert "waits in receive" in hang.render()


def test_a_batch_of_messages_is_posted_at_once():
    """The same order, but posted together: torch's schedules do so."""
    ranks = [trace(rank, message("receive", 1 - rank, batch=1), message("send", 1 - rank, batch=1)) for rank in (0, 1)]
    assert find_hang(ranks) is None


def test_collectives_in_another_order():
    both = TraceGroup(axis="tensor", ranks=(0, 1))
    other = TraceGroup(axis="context", ranks=(0, 1))
    hang = find_hang([trace(0, collective(both), collective(other)), trace(1, collective(other), collective(both))])
    assert hang is not None
    assert "axis context" in hang.render()
    assert "axis tensor" in hang.render()


def test_twins_of_one_stage_must_run_one_program():
    """Ranks 0 and 5 share no group here; both stand on stage 0."""
    first, _ = pair()
    alone = [replace(one, peer=9) if one.is_message else one for one in first[:3]]
    other = [*alone[:2], collective(TraceGroup(axis="data", ranks=(5, 7)))]
    assert find_hang([trace(0, *alone), trace(5, *other, stage=0)]) is None
    hang = find_hang([trace(0, *alone), trace(5, *other[:2], stage=0)])
    assert hang is not None
    assert hang.render() == (
        "rank 0 waits for rank 5 in all-reduce of 1.00 kB float32 on axis data (2 ranks from 0, backward), "
        "operation 2\n"
        "  rank 5 (of the same stage) is done by then"
    )


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-reduce", 1500.0), ("all-gather", 750.0), ("reduce-scatter", 750.0), ("all-to-all", 750.0)]
)
def test_bytes_on_the_wire_of_a_ring_of_four(kind, sent):
    assert collective(WORLD, kind=kind).sent_bytes == sent


def test_a_table_adds_up_by_axis_kind_and_phase():
    first, _ = pair()
    table = message_rows(trace(0, *first, first[0]))
    assert [(row.axis, row.kind, row.calls, row.nbytes) for row in table] == [
        ("pipeline", "receive", 1, 64),
        ("pipeline", "send", 2, 128),
        ("data", "all-reduce", 1, 1000),
        ("world", "all-reduce", 1, 1000),
    ]
