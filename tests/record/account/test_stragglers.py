"""Who is slow: named when it is so, nobody by chance, and not for what the plan gave it to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_run

from phalanx.record.account.stragglers import Places, Scores, Work, judge, median_of_others, places, scores, stragglers
from phalanx.record.archive import history as history_of
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run

FLAT = Places(layout={"data": 10**6}, hosts={})


def work(own: np.ndarray) -> Work:
    return Work(ranks=tuple(range(len(own))), step=tuple(range(own.shape[1])), own_s=own, wait_s=own * np.nan)


def drawn(ranks: int, steps: int, *, noise: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, noise, (ranks, steps))


def test_the_slow_rank_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60, straggler=2, hosts=2)
    (found,) = stragglers(RunHistory.open(run))
    assert (found.rank, found.place, found.host) == (2, "data 1, tensor 0", "host-1")
    assert found.score == pytest.approx(1.5, abs=0.02)
    more = f"{found.score - 1:.0%}"
    assert found.text == f"rank 2 (data 1, tensor 0, on host-1) is at work {more} longer than its peers"


@pytest.mark.parametrize("ranks", [2, 4, 32, 500])
@pytest.mark.parametrize("steps", [5, 20, 100])
def test_noise_alone_names_nobody(ranks: int, steps: int) -> None:
    for seed in range(10):
        assert judge(work(drawn(ranks, steps, noise=0.2, seed=seed)), FLAT).named == ()


@pytest.mark.parametrize("ranks", [2, 4, 32, 500])
def test_a_slow_rank_is_named_through_noise(ranks: int) -> None:
    own = drawn(ranks, 100, noise=0.1, seed=1)
    own[1] *= 1.3
    assert [one.rank for one in judge(work(own), FLAT).named] == [1]


def test_named_within_a_hundred_steps_of_the_beginning() -> None:
    """In the middle of a long run: once 51 of the last 100 steps were slow."""
    own = drawn(4, 300, noise=0.02, seed=2)
    own[3, 150:] *= 1.5
    first = next(end for end in range(150, 300) if judge(work(own[:, end - 99 : end + 1]), FLAT).named)
    assert first - 150 <= 60


def test_a_pause_is_no_straggling() -> None:
    own = drawn(4, 100, noise=0.02, seed=3)
    own[2, 40:60] *= 50.0
    assert judge(work(own), FLAT).named == ()


def test_stages_are_not_compared() -> None:
    own = drawn(8, 50, noise=0.02, seed=4)
    own[4:] *= 2.0  # the last stage holds the head
    where = Places(layout={"data": 4, "pipeline": 2}, hosts={})
    assert judge(work(own), where).named == ()
    own[5] *= 1.4
    assert [one.rank for one in judge(work(own), where).named] == [5]


def test_a_rank_that_says_nothing_has_no_score() -> None:
    own = drawn(3, 20, noise=0.02, seed=5)
    own[1] = np.nan
    found = judge(work(own), FLAT)
    assert set(found.score) == {0, 2}
    assert found.named == ()


def test_too_few_steps_name_nobody() -> None:
    own = np.ones((3, 4))
    own[0] = 9.0
    assert judge(work(own), FLAT).named == ()


def test_many_ranks_are_looked_at_more_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many ranks the history draws whole blocks; a pause of a rank in one of them must not name it."""
    monkeypatch.setattr(history_of, "RAW_MESH_STEPS", 8)
    run = write_run(tmp_path, ranks=6, steps=40, incidents=0, straggler=4, hosts=1)
    lines = run.events(1).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    paused = next(event for event in events if event["event"] == "step" and event["step"] == 30)
    paused["duration_s"] += 500.0
    run.events(1).write_text("\n".join(map(json.dumps, events)) + "\n")
    found = scores(RunHistory.open(run))
    assert found.steps == 40
    assert [one.rank for one in found.named] == [4]
    assert len(found.score) == 6


def test_runs_without_steps_or_ranks(tmp_path: Path) -> None:
    assert scores(RunHistory.open(Run(path=tmp_path))) == Scores(score={}, named=(), steps=0)
    run = write_run(tmp_path, ranks=1, steps=20, incidents=0, hosts=1)
    assert scores(RunHistory.open(run)).named == ()


def test_places_come_from_the_newest_formation() -> None:
    told = [
        {"event": "epoch", "layout": {"data": 4}, "members": [{"rank": 0, "host": "a"}]},
        {"event": "epoch", "layout": {"data": 2, "tensor": 2}, "members": [{"rank": 0, "host": "b\x1b"}, "x", {}]},
    ]
    found = places({"layout": {"data": 4}}, told)
    assert (found.place(3), found.host(0), found.host(9)) == ("data 1, tensor 1", "b ", "")
    assert places({"layout": {"data": 3}}, []).place(2) == "data 2"


def test_the_median_of_the_others() -> None:
    own = np.array([[1.0, 5.0], [2.0, np.nan], [4.0, 6.0], [8.0, np.nan]])
    assert median_of_others(own)[:, 0].tolist() == [4.0, 4.0, 2.0, 2.0]
    assert median_of_others(own)[[0, 2], 1].tolist() == [6.0, 5.0]
    assert np.isnan(median_of_others(np.array([[1.0]]))).all()
