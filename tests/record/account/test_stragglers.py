"""Who is slow: named when it is so, nobody by chance, and not for what the plan gave it to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_run

from phalanx.record.account.rank_places import RankPlaces, rank_places
from phalanx.record.account.rank_work import RankWork, median_of_others
from phalanx.record.account.stragglers import StragglerScores, find_stragglers, score_ranks, straggler_scores
from phalanx.record.archive import history as history_of
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run

FLAT = RankPlaces(layout={"data": 10**6}, hosts={})


def work(own: np.ndarray, held: np.ndarray | None = None) -> RankWork:
    ranks, steps = tuple(range(len(own))), tuple(range(own.shape[1]))
    return RankWork(ranks=ranks, step=steps, own_s=own, wait_s=own * np.nan, held_s=own * 0.0 if held is None else held)


def drawn(ranks: int, steps: int, *, noise: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, noise, (ranks, steps))


def test_the_slow_rank_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60, straggler=2, hosts=2)
    (found,) = find_stragglers(RunHistory.open(run))
    assert (found.rank, found.place, found.host) == (2, "data 1, tensor 0", "host-1")
    assert found.score == pytest.approx(1.5, abs=0.02)
    more = f"{found.score - 1:.0%}"
    said = f"rank 2 (data 1, tensor 0, on host-1) is at work {more} longer than its peers"
    assert found.text == f"{said}: it computes longer"


def rewrite(run: Run, rank: int, **seconds: float) -> None:
    """Other times in every step event of a rank, as a rank writes them that has cores of its own, or has not."""
    lines = [json.loads(line) for line in run.events(rank).read_text().splitlines()]
    for event in lines:
        if event["event"] == "step":
            event |= {"duration_s": 6.0, "wait_s": 6.0 - seconds["compute_s"] - seconds.get("data_s", 0.0), **seconds}
    run.events(rank).write_text("".join(f"{json.dumps(event)}\n" for event in lines))


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"compute_s": 5.0, "cpu_s": 1.0, "core_wait_s": 3.8}, "it waits for the processor: its core is shared"),
        (
            {"compute_s": 5.0, "cpu_s": 1.0, "core_wait_s": 0.1},
            "it stands still without computing: stopped, swapped out or throttled",
        ),
        ({"compute_s": 5.0, "cpu_s": 4.9, "core_wait_s": 0.1}, "it computes longer"),
        ({"compute_s": 1.1, "cpu_s": 1.0, "core_wait_s": 0.1, "data_s": 4.0}, "it waits for data"),
        # A GPU that idles since its host has no core seems to compute; one that is slow itself does not.
        ({"compute_s": 5.0, "core_wait_s": 4.0, "cpu_s": None}, "it waits for the processor: its core is shared"),
        ({"compute_s": 5.0, "core_wait_s": 0.1, "cpu_s": None}, "it computes longer"),
    ],
)
def test_the_reason(tmp_path: Path, times: dict[str, float], reason: str) -> None:
    run = write_run(tmp_path, steps=40, incidents=0)
    for rank in range(4):
        alike = {
            "compute_s": 1.1,
            "cpu_s": 1.0 if times["cpu_s"] is not None else None,
            "core_wait_s": 0.05,
            "data_s": 0,
        }
        rewrite(run, rank, **(times if rank == 2 else alike))
    (found,) = find_stragglers(RunHistory.open(run))
    assert (found.rank, found.reason) == (2, reason)
    assert found.text.endswith(f" longer than its peers: {reason}")
    assert found.text in " ".join(str(run).split())  # lines are folded


def test_ranks_that_share_cores_unevenly_are_not_stragglers_yet() -> None:
    """A third longer for want of a core is what a scheduler does to one of three ranks; twice as long is not."""
    own, held = np.full((3, 50), 1.0), np.full((3, 50), 0.1)
    own[1], held[1] = 1.35, 0.45
    assert score_ranks(work(own, held), FLAT).named == ()
    own[1], held[1] = 2.1, 1.2
    assert [one.rank for one in score_ranks(work(own, held), FLAT).named] == [1]
    own[1], held[1] = 1.35, 0.1  # with a core of its own it is worth naming
    assert [one.rank for one in score_ranks(work(own, held), FLAT).named] == [1]


@pytest.mark.parametrize("ranks", [2, 4, 32, 500])
@pytest.mark.parametrize("steps", [5, 20, 100])
def test_noise_alone_names_nobody(ranks: int, steps: int) -> None:
    for seed in range(10):
        assert score_ranks(work(drawn(ranks, steps, noise=0.2, seed=seed)), FLAT).named == ()


@pytest.mark.parametrize("ranks", [2, 4, 32, 500])
def test_a_slow_rank_is_named_through_noise(ranks: int) -> None:
    own = drawn(ranks, 100, noise=0.1, seed=1)
    own[1] *= 1.3
    assert [one.rank for one in score_ranks(work(own), FLAT).named] == [1]


def test_named_within_a_hundred_steps_of_the_beginning() -> None:
    """In the middle of a long run: once 51 of the last 100 steps were slow."""
    own = drawn(4, 300, noise=0.02, seed=2)
    own[3, 150:] *= 1.5
    first = next(end for end in range(150, 300) if score_ranks(work(own[:, end - 99 : end + 1]), FLAT).named)
    assert first - 150 <= 60


def test_a_pause_is_no_straggling() -> None:
    own = drawn(4, 100, noise=0.02, seed=3)
    own[2, 40:60] *= 50.0
    assert score_ranks(work(own), FLAT).named == ()


def test_stages_are_not_compared() -> None:
    own = drawn(8, 50, noise=0.02, seed=4)
    own[4:] *= 2.0  # the last stage holds the head
    where = RankPlaces(layout={"data": 4, "pipeline": 2}, hosts={})
    assert score_ranks(work(own), where).named == ()
    own[5] *= 1.4
    assert [one.rank for one in score_ranks(work(own), where).named] == [5]


def test_a_rank_that_says_nothing_has_no_score() -> None:
    own = drawn(3, 20, noise=0.02, seed=5)
    own[1] = np.nan
    found = score_ranks(work(own), FLAT)
    assert set(found.score) == {0, 2}
    assert found.named == ()


def test_too_few_steps_name_nobody() -> None:
    own = np.ones((3, 4))
    own[0] = 9.0
    assert score_ranks(work(own), FLAT).named == ()


def test_many_ranks_are_looked_at_more_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many ranks the history draws whole blocks; a pause of a rank in one of them must not name it."""
    monkeypatch.setattr(history_of, "RAW_MESH_STEPS", 8)
    run = write_run(tmp_path, ranks=6, steps=40, incidents=0, straggler=4, hosts=1)
    lines = run.events(1).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    paused = next(event for event in events if event["event"] == "step" and event["step"] == 30)
    paused["duration_s"] += 500.0
    run.events(1).write_text("\n".join(map(json.dumps, events)) + "\n")
    found = straggler_scores(RunHistory.open(run))
    assert found.steps == 40
    assert [one.rank for one in found.named] == [4]
    assert len(found.score) == 6


def test_runs_without_steps_or_ranks(tmp_path: Path) -> None:
    assert straggler_scores(RunHistory.open(Run(path=tmp_path))) == StragglerScores(score={}, named=(), steps=0)
    run = write_run(tmp_path, ranks=1, steps=20, incidents=0, hosts=1)
    assert straggler_scores(RunHistory.open(run)).named == ()


def test_places_come_from_the_newest_formation() -> None:
    told = [
        {"event": "epoch", "layout": {"data": 4}, "members": [{"rank": 0, "host": "a"}]},
        {"event": "epoch", "layout": {"data": 2, "tensor": 2}, "members": [{"rank": 0, "host": "b\x1b"}, "x", {}]},
    ]
    found = rank_places({"layout": {"data": 4}}, told)
    assert (found.place(3), found.host(0), found.host(9)) == ("data 1, tensor 1", "b ", "")
    assert rank_places({"layout": {"data": 3}}, []).place(2) == "data 2"


def test_the_median_of_the_others() -> None:
    own = np.array([[1.0, 5.0], [2.0, np.nan], [4.0, 6.0], [8.0, np.nan]])
    assert median_of_others(own)[:, 0].tolist() == [4.0, 4.0, 2.0, 2.0]
    assert median_of_others(own)[[0, 2], 1].tolist() == [6.0, 5.0]
    assert np.isnan(median_of_others(np.array([[1.0]]))).all()
