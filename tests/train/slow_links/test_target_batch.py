"""target-batch: equal to one process with large batches, whoever comes and goes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from local_group import LocalGroup, LocalHub
from peer_trials import Outcome, join_all

from phalanx.errors import SystemFailure
from phalanx.record.events import read_events
from phalanx.train.slow_links import peer_exchange

SYNC = 'mode = "target-batch"\npeers = 3'


class Killed(Exception):
    """A peer is gone without a word."""


def distance(one, other) -> float:
    """The norm of the difference against that of the tensor, of the worst tensor: as `phalanx verify` holds float32."""
    assert one.keys() == other.keys()
    return max(float(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])) for name in one)


def test_three_peers_equal_one_process_in_float64(trials, wide) -> None:
    alone = trials.start(trials.plan(), None)
    peers = trials.train(trials.plan(SYNC), 3)
    for peer in peers:
        assert peer.state == "done"
        assert distance(peer.weights, alone.weights) < 1e-10
    assert all((peers[0].weights[name] == peers[1].weights[name]).all() for name in alone.weights)


def test_three_peers_equal_one_process_in_float32(trials) -> None:
    alone = trials.start(trials.plan(), None)
    for peer in trials.train(trials.plan(SYNC), 3):
        assert distance(peer.weights, alone.weights) < 1e-5
        assert peer.loss == pytest.approx(alone.loss, abs=1e-5)
        assert peer.peers.credit == {f"peer-{place}": 12 for place in range(3)}  # 6 steps of 2 sequences each


def test_a_fast_peer_learns_from_more_and_the_step_is_the_same(trials, wide) -> None:
    alone = trials.start(trials.plan(), None)
    plan, hub = trials.plan(SYNC), LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(3)]
    for group, pace in zip(groups, (40.0, 10.0, 10.0), strict=True):
        group.pace = pace
    for peer in join_all([lambda group=group: trials.start(plan, group) for group in groups]):
        assert distance(peer.weights, alone.weights) < 1e-10
        assert peer.peers.credit == {"peer-0": 24, "peer-1": 6, "peer-2": 6}
        weights = [list(one["weights"].values()) for one in peer.events("exchange") if one["kind"] == "gradient"]
        assert weights == [[64.0, 16.0, 16.0]] * 6  # tokens that each gathered: what its gradient counts
    assert groups[0]._said.samples_per_s > 0.0  # and each says how fast it was itself


def test_a_kill_and_a_late_joiner_change_nothing(trials, wide) -> None:
    """What the lost peer did not deliver is done by the others in the same step, so every step has its whole batch."""
    alone = trials.start(trials.plan(), None)
    plan, hub, late = trials.plan(SYNC), LocalHub(), threading.Event()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(4)]

    def die(number: int) -> None:
        if number == 3:
            hub.remove("peer-1")
            raise Killed

    groups[1].before_round = die

    def killed():
        with pytest.raises(Killed):
            trials.start(plan, groups[1])

    def joins():
        assert late.wait(60)
        return trials.start(plan, groups[3], addresses=[("local", 1)])

    def let_in(number: int) -> None:
        if number == 3:
            late.set()
        if number == 7:  # the last step is taken with the newcomer
            with hub.lock:
                assert hub.lock.wait_for(lambda: "peer-3" in hub.active, timeout=60)

    groups[0].before_round = let_in
    calls = [lambda: trials.start(plan, groups[0]), killed, lambda: trials.start(plan, groups[2]), joins]
    first, _, second, newcomer = join_all(calls)
    for peer in (first, second, newcomer):
        assert peer.state == "done"
        assert distance(peer.weights, alone.weights) < 1e-10
    assert sum(first.peers.credit.values()) == 36  # every sample of the six steps, once
    rounds = first.events("exchange")
    assert len([one for one in rounds if one["kind"] == "gradient"]) == 7  # one step took two: the lost peer's samples
    assert [one["kind"] for one in newcomer.events("peer")] == ["behind", "caught-up"]


def test_an_update_that_is_not_finite_is_dropped_named_and_done_again(trials, wide) -> None:
    alone = trials.start(trials.plan(), None)
    plan, hub = trials.plan(SYNC), LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(3)]
    groups[2].poison = lambda number, vector: vector * np.nan if number == 2 else vector
    peers = join_all([lambda group=group: trials.start(plan, group) for group in groups])
    assert distance(peers[0].weights, alone.weights) < 1e-10
    dropped = [one["dropped"] for one in peers[0].events("exchange") if one["dropped"]]
    assert dropped == [{"peer-2": "its update is not finite"}]


def test_resumed_is_uninterrupted(trials) -> None:
    plan = trials.plan(SYNC)
    whole = trials.train(plan, 3)
    first = trials.train(plan, 3, stop_after=3)
    assert [one.state for one in first] == ["stopped"] * 3
    second = trials.train(plan, 3, runs=[one.run for one in first])
    assert all((second[1].weights[name] == whole[1].weights[name]).all() for name in whole[1].weights)
    for peers in (1, 2):  # of three: the others may train on where nobody reaches them
        hub = LocalHub()
        calls = [
            lambda place=place, hub=hub: trials.start(
                plan, LocalGroup(hub, f"peer-{place}"), run=first[place].run, patience_s=1.0
            )
            for place in range(peers)
        ]
        if peers == 1:
            with pytest.raises(SystemFailure, match="1 of the 3 peers of the last round came within 1 s"):
                join_all(calls)
        else:
            assert [one.state for one in join_all(calls)] == ["done"] * 2


def exchanges_since_stop(peer: Outcome) -> dict[int, tuple[str, str]]:
    """Kind and digest of each round, by its number, of a run that was stopped once."""
    events = read_events(peer.run.events(0))[0]
    stop = next(place for place, event in enumerate(events) if event["event"] == "stop")
    return {one["round"]: (one["kind"], one["digest"]) for one in events[stop:] if one["event"] == "exchange"}


@pytest.mark.parametrize("is_awaited", [True, False], ids=["awaited", "fetches first"])
@pytest.mark.parametrize("founder", [0, 1])
@pytest.mark.parametrize("mode", ["target-batch", "diloco"])
def test_peers_that_stopped_a_step_apart_meet(trials, mode: str, founder: int, is_awaited: bool) -> None:
    """One takes the state of the other, and every round that both are in is of the same kind for both."""
    sync = f'mode = "{mode}"' + ("\nsynchronous_steps = 0\ninner_steps = 2" if mode == "diloco" else "")
    plan, hub = trials.plan(sync + "\npeers = 2", steps=10), LocalHub()
    first = join_all(
        [
            lambda place=place: trials.start(plan, LocalGroup(hub, f"peer-{place}"), stop_after=3 + place)
            for place in range(2)
        ]
    )
    assert [one.step for one in first] == [3, 4]
    hub = LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(2)]
    has_founded, found, join = threading.Event(), groups[founder].join, groups[1 - founder].join
    groups[1 - founder].is_awaited = is_awaited

    def join_second(*addresses, **options):
        assert has_founded.wait(60)
        return join(*addresses, **options)

    def join_first(*addresses, **options):
        view = found(*addresses, **options)
        has_founded.set()
        return view

    groups[founder].join, groups[1 - founder].join = join_first, join_second
    second = join_all(
        [lambda place=place: trials.start(plan, groups[place], run=first[place].run) for place in range(2)]
    )
    assert [(one.state, one.step) for one in second] == [("done", 10)] * 2
    assert all((second[0].weights[name] == second[1].weights[name]).all() for name in second[0].weights)
    rounds = [exchanges_since_stop(one) for one in second]
    shared = sorted({*rounds[0]} & {*rounds[1]})
    assert [rounds[0][number] for number in shared] == [rounds[1][number] for number in shared]
    assert rounds[0][shared[0]][0] == "meet" or not is_awaited
    behind = [one["text"] for one in second[1 - founder].events("peer") if one["kind"] == "behind"]
    assert behind == ["this peer is new"]  # its state was taken once


def test_a_peer_that_is_stopped_while_it_waits_for_another_leaves(trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the round of who is present, in an exchange, and in the exchange that comes first after a resume."""
    monkeypatch.setattr(peer_exchange, "LEAVE_S", 0.1)
    plan = trials.plan('mode = "diloco"\npeers = 2\nsynchronous_steps = 0\ninner_steps = 2', steps=10)
    run = None
    for waits_in, last_step in ((1, 0), (2, 2), (2, 2), (1, 2)):  # the first or second round of this process
        hub, asked, rounds = LocalHub(), threading.Event(), []
        group = LocalGroup(hub, "peer-0")

        def stop_in(number: int, hub=hub, asked=asked, rounds=rounds, waits_in=waits_in) -> None:
            rounds.append(number)
            if len(rounds) == waits_in:
                hub.active.add("peer-1")  # which never calls
                asked.set()

        group.before_round = stop_in
        outcome = trials.start(plan, group, run=run, stop=asked.is_set, patience_s=0.01)
        assert (outcome.state, outcome.step, len(rounds)) == ("stopped", last_step, waits_in)
        run = outcome.run if last_step else None
