"""The oracle believes a good record, and each verdict falls on its own kind of lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.record.events import MOST_PENDING_BYTES
from phalanx.train.drill.judge import FullDisk, Verdict, judge_ending, judge_history
from phalanx.train.drill.step_history import DrillHistory, build_history, layout_sequence

Story = Any  # conftest.Story: a record that can be told, and lied about
BATCH = 8


def history(story: Story) -> DrillHistory:
    return build_history(story.supervisor, story.ranks)


def expected(step: int) -> Sequence[int]:
    return range(BATCH * step, BATCH * (step + 1))


def verdicts(story: Story, replay: Story | None = None) -> dict[str, Verdict]:
    found = judge_history(history(story), expected=expected, replay=history(replay) if replay else None)
    return {verdict.name: verdict for verdict in found}


def test_a_survived_fault_is_believed(survived: Story, replayed: Story) -> None:
    found = verdicts(survived, replayed)
    assert [verdict for verdict in found.values() if not verdict.ok] == []
    assert found["equal to a fault-free replay"].evidence.startswith("8 steps, 30 digests compared, loss ")
    assert found["steps in order"].evidence == "3 generations, 9 steps done, 1 undone"
    assert found["every restore was committed"].evidence == "2 from memory, 1 from start"


def test_a_commit_whose_teller_died_is_believed(survived: Story) -> None:
    """Rank 0 was killed between the commit of step 3 and its line; a rank that had no part in it explains nothing."""
    find(survived, "restore", epoch=2)["source"] = "disk"
    find(survived, "checkpoint", epoch=1)["path"] = None
    assert not verdicts(survived)["every restore was committed"].ok
    find(survived, "incident", epoch=1)["rank"] = 0
    assert verdicts(survived)["every restore was committed"].ok
    find(survived, "restore", epoch=2)["step"] = 5
    assert not verdicts(survived)["every restore was committed"].ok


def test_the_chain_is_what_restores_left(survived: Story) -> None:
    told = history(survived)
    assert [(one.step, one.generation) for one in told.chain] == [
        *((step, 1) for step in range(3)),
        (3, 2),
        (4, 2),
        (5, 3),
        (6, 3),
        (7, 3),
    ]
    assert [(one.step, one.generation) for one in told.undone] == [(3, 1)]
    assert [one.step for one in told.chain if one.skipped] == [6]
    assert [(one["from_step"], one["layout"]["data"]) for one in layout_sequence(told)] == [(0, 4), (3, 3), (5, 4)]


def find(story: Story, event: str, **wanted: object) -> dict:
    return next(
        one
        for one in [*story.ranks, *story.supervisor]
        if one["event"] == event and all(one.get(key) == value for key, value in wanted.items())
    )


def other_bits_when_redone(story: Story) -> None:
    """Step 3 was done by four ranks again, and gave something else."""
    story.ranks = [one for one in story.ranks if one["epoch"] != 3]
    story.supervisor = [one for one in story.supervisor if one["epoch"] != 3]
    for one in story.supervisor:
        if one["event"] == "epoch" and one["epoch"] == 2:
            one["layout"] = {"data": 4, "tensor": 1}


def lost_step(story: Story) -> None:
    story.ranks = [one for one in story.ranks if not (one["event"] == "step" and one["step"] == 1)]


def unlogged_restore(story: Story) -> None:
    story.supervisor = [one for one in story.supervisor if not (one["event"] == "restore" and one["epoch"] == 2)]


def restore_from_nowhere(story: Story) -> None:
    find(story, "restore", epoch=2)["source"] = "disk"
    find(story, "checkpoint", epoch=1)["path"] = None


def restore_of_the_future(story: Story) -> None:
    find(story, "restore", epoch=2)["step"] = 5


def restore_behind_what_was_held(story: Story) -> None:
    find(story, "restore", epoch=2)["step"] = 2


def sample_twice(story: Story) -> None:
    find(story, "step", epoch=2, step=4, rank=1)["samples"][0] = 32


def sample_left_out(story: Story) -> None:
    find(story, "step", epoch=2, step=4, rank=1)["samples"].pop()


def sample_unknown(story: Story) -> None:
    del find(story, "step", epoch=2, step=4, rank=1)["samples"]


def zombie(story: Story) -> None:
    late = find(story, "epoch", epoch=3)["t"] + 2.0
    story.ranks.append({**find(story, "step", epoch=1, step=2, rank=1), "t": late})


def zombie_commits(story: Story) -> None:
    find(story, "checkpoint", epoch=1)["t"] = find(story, "restore", epoch=2)["t"] + 2.0


@pytest.mark.parametrize(
    ("lie", "name", "words"),
    [
        (other_bits_when_redone, "one digest per step", "step 3, rank 0: "),
        (lost_step, "steps in order", "generation 1, rank 0: steps 0, 2, 3 after 0"),
        (unlogged_restore, "steps in order", "generation 2 trained without a logged restore"),
        (restore_from_nowhere, "every restore was committed", "restored step 3, which was never on the disk"),
        (restore_of_the_future, "every restore was committed", "restored step 5, but only 4 were done"),
        (restore_behind_what_was_held, "every restore was committed", "step 2 from memory, which held 3"),
        (sample_twice, "every sample in one step", "step 4: 1 sample repeated or not of this step, such as 32"),
        (sample_left_out, "every sample in one step", "step 4: 1 sample of the batch missing, such as 37"),
        (sample_unknown, "every sample in one step", "step 4: rank 1 did not record its samples"),
        (zombie, "old generations are fenced", "rank 1 of generation 1 wrote step 2."),
        (zombie_commits, "old generations are fenced", "rank 0 of generation 1 committed a checkpoint 2.00 s after"),
    ],
)
def test_every_lie_is_found(lie: Callable[[Story], None], name: str, words: str, survived: Story) -> None:
    story = survived
    lie(story)
    found = verdicts(story)[name]
    assert not found.ok
    assert words in found.evidence


def test_other_bits_than_the_replay(survived: Story, replayed: Story) -> None:
    replay = replayed
    find(replay, "step", step=5, rank=2)["digest"] = "f" * 64
    found = verdicts(survived, replay)["equal to a fault-free replay"]
    assert not found.ok
    assert "step 5, rank 2: " in found.evidence
    assert "ffffffffffff (generation 3)" in found.evidence


def test_a_replay_may_be_longer_only_of_a_run_that_was_cut_short(survived: Story, replayed: Story) -> None:
    replayed.step(8)
    assert not verdicts(survived, replayed)["equal to a fault-free replay"].ok
    find(survived, "end")["state"] = "stopped"
    assert verdicts(survived, replayed)["equal to a fault-free replay"].ok


def test_a_replay_with_other_members_proves_nothing(survived: Story, story: Story) -> None:
    replay = story
    replay.epoch(4, step=0, source="start")
    for step in range(8):
        replay.step(step, skipped=step == 6)
    found = verdicts(survived, replay)["equal to a fault-free replay"]
    assert not found.ok
    assert "step 3: the replay reached it from another state" in found.evidence


def test_a_record_without_digests_proves_nothing(survived: Story, replayed: Story) -> None:
    story, replay = survived, replayed
    for one in [*story.ranks, *replay.ranks]:
        one.pop("digest", None)
    found = verdicts(story, replay)
    assert not found["one digest per step"].ok
    assert "there is no digest to compare" in found["equal to a fault-free replay"].evidence


def test_a_step_done_twice_from_another_state_may_differ(story: Story) -> None:
    """Lineage: step 4 on four ranks after step 3 on three is not step 4 on four ranks after step 3 on four."""
    story.epoch(4, step=0, source="start")
    for step in range(5):
        story.step(step)
    story.incident(1)
    story.epoch(3, step=3, source="disk")
    story.step(3)
    story.epoch(4, step=4, source="memory")
    story.step(4)
    assert verdicts(story)["one digest per step"].ok


def test_what_a_killed_rank_did_not_write_is_forgiven_and_told(survived: Story) -> None:
    story = survived
    find(story, "restore", epoch=2)["step"] = 4  # step 3 stays, though rank 2 never wrote that it did it
    story.ranks = [
        one for one in story.ranks if not (one["epoch"] == 2 and one["event"] == "step" and one["step"] == 3)
    ]
    found = verdicts(story)["every sample in one step"]
    assert found.ok
    assert "of 1 step a killed rank left no list" in found.evidence


def test_tensor_ranks_learn_from_the_same_samples(story: Story) -> None:
    story.epoch(2, step=0, source="start")
    story.step(0)
    story.supervisor[0]["layout"] = {"data": 1, "tensor": 2}
    for one in story.ranks:
        one["samples"] = list(expected(0))
    assert verdicts(story)["every sample in one step"].ok
    story.ranks[1]["samples"] = [0]
    assert not verdicts(story)["every sample in one step"].ok


def test_a_rollback_of_wrong_numbers_may_go_behind_memory(survived: Story) -> None:
    story = survived
    restore_behind_what_was_held(story)
    find(story, "incident", epoch=1)["cause"] = {"kind": "Astray"}
    assert verdicts(story)["every restore was committed"].ok


def test_the_end(survived: Story) -> None:
    assert judge_ending(history(survived), state="done", wanted=("done",)).ok
    found = judge_ending(history(survived), state="stuck", wanted=("done",), message="no step for 90 s")
    assert (found.ok, found.evidence) == (
        False,
        "the run is stuck after 8 steps: it should be done; no step for 90 s; its record says done",
    )
    survived.supervisor.pop()
    assert judge_ending(history(survived), state="done", wanted=("done",)).evidence.endswith("its record says no end")


def test_the_order_of_files_does_not_matter(survived: Story) -> None:
    story = survived
    shuffled = copy.deepcopy(story)
    shuffled.ranks.sort(key=lambda one: one["rank"])
    assert [one.lineage for one in history(shuffled).chain] == [one.lineage for one in history(story).chain]


def test_an_epoch_that_never_came_to_be_undoes_nothing(survived: Story) -> None:
    """A rank fell before all had answered: the generation is announced, and nothing is restored in it."""
    story = survived
    announced = dict(find(story, "epoch", epoch=3))
    for one in [*story.ranks, *story.supervisor]:
        if one["epoch"] == 3 and one["event"] != "epoch":
            one["epoch"] = 4
    story.supervisor.insert(story.supervisor.index(find(story, "restore", epoch=4)), {**announced, "epoch": 4})
    found = verdicts(story)
    assert [verdict for verdict in found.values() if not verdict.ok] == []
    assert len(history(story).chain) == 8


def test_a_killed_rank_takes_along_what_a_full_disk_refused(story: Story) -> None:
    """Not only its last two steps; but only those of the time when its disk was full, and if none was written after."""
    story.epoch(4, step=0, source="start")
    began_s: dict[int, float] = {}
    for step in range(8):
        began_s[step] = story.t
        story.step(step, ranks=[0, 1, 2, 3] if step < 3 else [0, 1, 3])
        story.t += 1.0
    story.incident(2)
    story.epoch(4, step=8, source="memory")
    story.step(8)
    story.end()
    past = history(story)
    pid = next(one.pid for one in past.generations[0].members if one.rank == 2)

    def samples(begin_s: float, end_s: float, pid: int = pid) -> Verdict:
        full = [FullDisk(pid=pid, begin_s=begin_s, end_s=end_s)]
        return next(one for one in judge_history(past, full=full) if one.name == "every sample in one step")

    whole = samples(began_s[3], story.t)
    assert whole.ok
    assert whole.evidence.endswith("of 5 steps a killed rank left no list (covered by the replay)")
    assert samples(began_s[3], began_s[6] - 0.5).ok, "it was killed within the two steps after the disk had room again"
    assert "step 3: rank 2 did not record" in samples(began_s[4], story.t).evidence, "its disk was not full yet"
    assert "step 3: rank 2 did not record" in samples(began_s[3], began_s[5] - 0.5).evidence, (
        "it lived when there was room"
    )
    assert not samples(began_s[3], story.t, pid + 1).ok
    story.write("checkpoint", rank=2, step=7, error="No space left on device")
    story.ranks[-1] |= {"epoch": 1, "t": began_s[6]}
    past = history(story)
    assert not samples(began_s[3], story.t).ok, "a later line came through, so those before it must have"
    story.ranks.pop()
    for event in story.ranks:
        if event["event"] == "step" and event["step"] == 4:
            event["samples_of_all"] = "x" * MOST_PENDING_BYTES
    past = history(story)
    assert "step 3: rank 2 did not record" in samples(began_s[3], story.t).evidence, "more than it could keep"
    find(story, "incident", epoch=1)["rank"] = 1  # it lives: what its disk refused comes later
    past = history(story)
    assert not samples(began_s[3], story.t).ok


def test_what_a_full_disk_refused_may_wait_for_the_next_membership(story: Story) -> None:
    """The process is killed there, before it could write."""
    story.epoch(4, step=0, source="start")
    began_s = story.t
    story.step(0, ranks=[0, 1, 3])
    story.step(1, ranks=[0, 1, 3])
    story.step(2, ranks=[0, 1, 3])
    story.step(3, ranks=[0, 1, 3])
    story.incident(1)
    story.epoch(4, step=4, source="memory")
    for member in story.supervisor[-2]["members"]:
        member["pid"] = 100 + member["rank"]  # all but rank 1 are the processes from before
    story.step(4, ranks=[0, 1, 3])
    story.incident(2)
    story.epoch(4, step=5, source="memory")
    story.step(5)
    story.end()
    full = FullDisk(pid=102, begin_s=began_s, end_s=story.t)
    found = next(one for one in judge_history(history(story), full=[full]) if one.name == "every sample in one step")
    assert found.ok, found.evidence
