"""From the recorders of all ranks to the sentence: which collective, and who did not enter it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.record.account.flight_records import Flight, find_culprit, flight_of, read_flights
from phalanx.record.run import Run

WORLD = {"0": {"label": "world", "ranks": [0, 1, 2, 3]}}
PAIRS = {"1": {"label": "tensor", "ranks": [0, 1]}, "2": {"label": "tensor", "ranks": [2, 3]}}


def entry(number: int, *, group: str = "0", op: str = "all_reduce", done: bool = True, **more: object) -> dict:
    return {"group": group, "op": op, "number": number, "is_done": done, "sizes": "[[8]]", **more}


def flight(rank: int, *entries: dict, groups: dict | None = None) -> Flight:
    mine = {name: one for name, one in {**WORLD, **(groups or {})}.items() if rank in one["ranks"]}
    return flight_of({"groups": mine, "entries": list(entries)}, rank=rank)


def test_a_rank_that_left_no_record_is_who_the_others_wait_for() -> None:
    """SIGSTOP and SIGKILL: nothing was written by that rank."""
    given_up = [flight(1, entry(40), entry(41, done=True))]
    found = find_culprit([*given_up, *(flight(rank, entry(40), entry(41, done=False)) for rank in (0, 3))])
    assert found is not None
    assert found.culprits == (2,)
    assert found.sentence == (
        "all_reduce number 41 of group world (ranks 0–3, sizes [[8]]): ranks 0, 1, 3 entered it, "
        "rank 2 left no record of entering it"
    )


def test_a_rank_one_behind_is_named_with_how_far_it_came() -> None:
    waiting = [flight(rank, entry(40), entry(41, done=False)) for rank in (0, 1, 3)]
    found = find_culprit([*waiting, flight(2, entry(39), entry(40))])
    assert found is not None
    assert found.culprits == (2,)
    assert found.sentence.endswith("ranks 0, 1, 3 entered it, rank 2 did not: came to number 40")


def test_who_waits_elsewhere_is_not_the_culprit() -> None:
    """Rank 1 is missing in the world's all-reduce because it waits for rank 0's tensor group; rank 0 for nobody."""
    found = find_culprit(
        [
            flight(0, entry(9, group="1"), groups=PAIRS),
            flight(1, entry(10, group="1", op="all_gather", done=False), groups=PAIRS),
            flight(2, entry(5, done=False), groups=PAIRS),
            flight(3, entry(5, done=False), groups=PAIRS),
        ]
    )
    assert found is not None
    assert found.culprits == (0,)
    assert "rank 1" not in found.sentence.partition(", rank 0")[2]


def test_different_calls_under_one_number_are_told_apart() -> None:
    same = [flight(rank, entry(7, done=False)) for rank in (0, 1, 3)]
    other = find_culprit([*same, flight(2, entry(7, op="all_gather", done=False))])
    assert other is not None
    assert other.culprits == (2,)
    assert (
        "number 7 of group world is all_reduce [[8]] on ranks 0, 1, 3 and all_gather [[8]] on rank 2" in other.sentence
    )
    sizes = find_culprit([*same, flight(2, entry(7, done=False, sizes="[[9]]"))])
    assert sizes is not None
    assert "all_reduce [[9]] on rank 2" in sizes.sentence
    uneven = [flight(rank, entry(7, op="all_to_all", done=False, sizes=f"[[{rank}]]")) for rank in range(4)]
    told = find_culprit(uneven)
    assert told is not None
    assert "every rank entered it and none came out" in told.sentence


def test_messages_of_a_pipeline_name_the_silent_stage() -> None:
    message = {"op": "recv", "is_message": True, "peer": 1}
    found = find_culprit([flight(0, entry(3)), flight(2, entry(12, done=False, **message)), flight(3, entry(3))])
    assert found is not None
    assert found.culprits == (1,)
    assert found.sentence == ("rank 2 waits for a message from rank 1 (number 12 of group world), which left no record")


def test_a_circle_and_nothing_at_all() -> None:
    circle = find_culprit(
        [
            flight(0, entry(1, group="1", done=False), groups={"1": {"label": "a", "ranks": [0, 1]}}),
            flight(1, entry(1, done=False), groups={"1": {"label": "a", "ranks": [0, 1]}}),
            flight(2, entry(1, done=False)),
            flight(3, entry(1, done=False)),
        ]
    )
    assert circle is not None
    assert circle.culprits == ()
    assert circle.sentence.startswith("ranks wait for each other")
    assert find_culprit([flight(rank, entry(5)) for rank in range(4)]) is None
    assert find_culprit([]) is None


def test_files_of_another_formation_or_of_strangers_are_left_alone(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    assert read_flights(run, 2) == []
    (tmp_path / "flight").mkdir()
    good = {"groups": WORLD, "entries": [entry(1, done=False), "no entry", {"number": "x"}]}
    run.flight(2, 0).write_text(json.dumps(good))
    run.flight(1, 3).write_text(json.dumps(good))
    run.flight(2, 1).write_text("{not json")
    run.flight(2, 2).write_text('{"groups": {"0": {"ranks": ["a"]}}, "entries": 5}')
    (tmp_path / "flight" / "epoch-2-rank-9.json.tmp").write_text("{}")
    found = read_flights(run, 2)
    assert [(one.rank, len(one.entries)) for one in found] == [(0, 1), (2, 0)]
    assert read_flights(run, 2, most=1) == []


@pytest.mark.parametrize("text", ["[]", "null", '{"groups": null}', '{"entries": {"a": 1}}'])
def test_no_shape_of_a_file_breaks_the_reader(tmp_path: Path, text: str) -> None:
    run = Run(path=tmp_path)
    (tmp_path / "flight").mkdir()
    run.flight(1, 0).write_text(text)
    assert find_culprit(read_flights(run, 1)) is None
