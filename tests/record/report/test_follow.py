"""Progress: what one line says while a run goes."""

from __future__ import annotations

from pathlib import Path

from phalanx.record.events import EventWriter
from phalanx.record.report.live import Follower, remark_of_rank
from phalanx.record.run import Run


def test_progress_and_remarks(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    follower = Follower(run, steps=100, since_s=500.0)
    assert (follower.read(), follower.progress) == ([], None)
    old = EventWriter(run.events(0), rank=0, clock=lambda: 100.0)
    old.write("checkpoint", step=1)
    old.close()
    writer = EventWriter(run.events(0), rank=0, clock=lambda: 600.0)
    writer.write("run_start", steps=50)
    writer.write("ready", seconds=2.0, step=7, warnings=["step-00000009: is damaged"])
    for step in range(30):
        writer.write("step", step=step, loss=4.25, tokens=1000, duration_s=10.0 if step < 10 else 0.5, lr=1e-3)
    writer.write("evaluate", step=30, loss=4.0, bits_per_byte=2.125)
    writer.write("checkpoint", step=30, seconds=None, blocked_s=0.002)
    writer.write("checkpoint", step=30, seconds=0.25, bytes=2e6)
    assert follower.read() == [
        "warning: step-00000009: is damaged",
        "ranks ready after 2.00 s, continuing at step 7",
        "step 30: held-out loss 4.0000, 2.125 bits per byte",
        "step 30: checkpoint taken, training waited 2.00 ms",
        "step 30: checkpoint saved (2.00 MB of rank 0, 250 ms)",
    ]
    assert follower.progress is not None
    assert follower.progress.line() == "step 30/50  loss 4.2500  2.00k tokens/s  10.0 s left  lr 1.00e-03"
    writer.write("step", step=49, loss=None, tokens=1000, duration_s=0.5, memory_bytes=3e9)
    writer.flush()
    follower.read()
    assert follower.progress.line() == "step 50/50  2.00k tokens/s  3.00 GB"


def test_skipped_steps_a_roll_back_and_what_it_deletes_are_printed(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    writer = EventWriter(run.events(0), rank=0, clock=lambda: 600.0)
    for step, skipped in ((19, False), (20, True), (21, True)):
        writer.write("step", step=step, loss=4.0, tokens=10, duration_s=1.0, skipped=skipped)
    writer.write("remark", step=25, text="step 25: the checkpoints of step 22 are deleted", is_told=True)
    writer.flush()
    supervisor = EventWriter(run.supervisor, rank=-1, clock=lambda: 600.0)
    supervisor.write("rollback", epoch=1, step=22, target=20, reason="not finite", set_aside=[21, 1022])
    supervisor.write("rollback", epoch=2, step=32, target=30, reason="not finite", set_aside=[])
    supervisor.flush()
    assert Follower(run, steps=100, since_s=500.0).read() == [
        "step 22: roll-back to step 20; checkpoints of step 21, 1,022 are set aside",
        "step 32: roll-back to step 30",
        "step 20: skipped, since the gradient was not finite or far too large; no weight changed",
        "step 21: skipped, since the gradient was not finite or far too large; no weight changed",
        "step 25: the checkpoints of step 22 are deleted",
    ]


def test_copies_in_memory_that_fail() -> None:
    known = {"event": "memory", "step": 1200, "trouble": "", "is_skipped": False}
    assert remark_of_rank(known) == ["step 1,200: in-memory checkpoints have replicas again"]
    assert remark_of_rank(known | {"trouble": "host b\x1b"}) == [
        "step 1,200: in-memory checkpoint without a replica: host b "
    ]
    (told,) = remark_of_rank(known | {"is_skipped": True})
    assert told == "step 1,200: in-memory checkpoint skipped: the last one is not safe yet"


def test_a_capped_claim_and_the_aggregation_of_updates_are_printed() -> None:
    event = {"event": "peer", "step": 7, "name": "south", "text": "it claims 90, and was dealt 1"}
    assert remark_of_rank({**event, "kind": "capped"}) == ["step 7: south: it claims 90, and was dealt 1"]
    assert remark_of_rank({**event, "kind": "aggregation"}) == ["step 7: it claims 90, and was dealt 1"]
