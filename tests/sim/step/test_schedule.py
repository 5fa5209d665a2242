"""Orders of work in a pipeline."""

import pytest

from phalanx.sim.step.step_timeline import task_order


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_pass_once_and_forward_before_backward(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    for stage in range(4):
        tasks = task_order(schedule, stage, stages=4, chunks=chunks, micros=8)
        assert len(set(tasks)) == len(tasks) == 2 * 8 * chunks
        for task in tasks:
            if task.kind == "B":
                twin = next(one for one in tasks if (one.kind, one.micro, one.chunk) == ("F", task.micro, task.chunk))
                assert tasks.index(twin) < tasks.index(task)


def test_1f1b_holds_as_many_micro_batches_as_stages_follow():
    def most_held(schedule, stage):
        held = most = 0
        for task in task_order(schedule, stage, stages=4, chunks=1, micros=12):
            held += 1 if task.kind == "F" else -1
            most = max(most, held)
        return most

    assert [most_held("1f1b", stage) for stage in range(4)] == [4, 3, 2, 1]
    assert most_held("gpipe", 3) == 12
