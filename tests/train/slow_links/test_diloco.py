"""diloco and quorum: outer steps on how far the peers' weights have moved."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from local_group import LocalGroup, LocalHub
from peer_trials import Outcome, join_all

from phalanx.peers.harm_votes import Judgement, RoundTrial

PLAIN = 'mode = "diloco"\npeers = 2\nsynchronous_steps = 0\n'
AVERAGE = PLAIN + "outer_learning_rate = 1.0\nouter_momentum = 0.0\n"


def flat(weights) -> np.ndarray:
    return np.concatenate([one.ravel() for _, one in sorted(weights.items())])


def equal(one: Outcome, other: Outcome) -> bool:
    return bool((flat(one.weights) == flat(other.weights)).all())


def train_with_notes(trials, plan, count: int = 2):
    """Outcomes, and what each peer sent in each round."""
    hub, sent = LocalHub(), {}
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(count)]
    for group in groups:
        group.poison = lambda number, vector, group=group: sent.setdefault((number, group.id), vector)
    return join_all([lambda group=group: trials.start(plan, group) for group in groups]), sent


def test_one_inner_step_without_momentum_averages_weights(trials, wide) -> None:
    """With H = 1, outer learning rate 1 and momentum 0 the shared weights are the mean of the peers' weights."""
    peers, sent = train_with_notes(trials, trials.plan(AVERAGE + "inner_steps = 1", steps=3))
    assert equal(*peers)
    shared = flat(peers[0].first)
    for number in (1, 2, 3):  # round 0 is who is present
        own = [shared - sent[number, f"peer-{place}"] for place in range(2)]  # as each peer had stepped to
        shared = (own[0] + own[1]) / 2
    assert np.abs(shared - flat(peers[0].weights)).max() < 1e-12


def test_the_outer_step_is_nesterov(trials, wide) -> None:
    outer = "outer_learning_rate = 0.7\nouter_momentum = 0.9\n"
    peers, sent = train_with_notes(trials, trials.plan(PLAIN + outer + "inner_steps = 2", steps=6))
    shared, momentum = flat(peers[0].first), 0.0
    for number in (1, 2, 3):
        mean = (sent[number, "peer-0"] + sent[number, "peer-1"]) / 2
        momentum = 0.9 * momentum + mean
        shared = shared - 0.7 * (mean + 0.9 * momentum)
    assert np.abs(shared - flat(peers[0].weights)).max() < 1e-12
    assert equal(*peers)


def test_sparse_updates_of_peers_are_added_up(trials) -> None:
    """Most values are sent by one peer: divided by all, they would move the weights by a part of what it went."""
    # All three are awaited: one that came later would begin with what it finds.
    three = PLAIN.replace("peers = 2", "peers = 3")
    plan = trials.plan(three + 'codec = "topk-2bit"\ninner_steps = 2', steps=6)
    peers, sent = train_with_notes(trials, plan, count=3)
    shared = flat(peers[0].first)
    for number in (1, 2, 3):
        shared = shared - sum(sent[number, f"peer-{place}"] for place in range(3))
    assert np.abs(shared - flat(peers[0].weights)).max() < 1e-5
    assert equal(peers[0], peers[2])


def test_a_peer_that_comes_before_the_first_exchange_takes_the_shared_weights(trials) -> None:
    """Not those of the peer that it asks, which has already gone on alone."""
    hub = LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(3)]
    has_met, join = threading.Event(), groups[2].join

    def join_late(*addresses: object, **options: object) -> object:
        assert has_met.wait(60)
        return join(*addresses, **options)

    def note_round(number: int) -> None:
        if number == 1:
            has_met.set()
            assert hub.lock.wait_for(lambda: "peer-2" in hub.members, timeout=60)

    groups[2].join = join_late  # type: ignore[method-assign]
    groups[0].before_round = lambda number: _while_locked(hub, note_round, number)
    plan = trials.plan(PLAIN + "inner_steps = 2", steps=12)
    peers = join_all([lambda group=group: trials.start(plan, group) for group in groups])
    assert equal(peers[0], peers[1])
    assert equal(peers[0], peers[2])


def _while_locked(hub: LocalHub, note, number: int) -> None:
    with hub.lock:
        note(number)


def test_synchronous_steps_come_first_and_equal_one_process(trials, wide) -> None:
    alone = trials.start(trials.plan(), None)
    plan = trials.plan('mode = "diloco"\npeers = 2\nsynchronous_steps = 6\n')
    peers = trials.train(plan, 2)
    assert np.abs(flat(peers[0].weights) - flat(alone.weights)).max() < 1e-10
    plan = trials.plan('mode = "diloco"\npeers = 2\nsynchronous_steps = 2\ninner_steps = 2\n')
    kinds = [one["kind"] for one in trials.train(plan, 2)[0].events("exchange")]
    assert kinds == ["meet", "gradient", "gradient", "weights", "weights"]


def test_fragments_cover_all_weights_once_in_every_period(trials) -> None:
    peers, sent = train_with_notes(trials, trials.plan(PLAIN + "inner_steps = 3\nfragments = 3", steps=6))
    lengths = [len(sent[number, "peer-0"]) for number in range(1, 9)]
    order = [one["fragment"] for one in peers[0].events("exchange")]
    assert order == [None, 0, 1, 2, 0, 1, 0, 1, 2]  # all of them after the last step
    assert sum(lengths[:3]) == len(flat(peers[0].weights))
    assert equal(*peers)


@pytest.mark.parametrize(
    "more", ["delay_steps = 1", "delay_steps = 2\nlocal_share = 0.5", "fragments = 2\ndelay_steps = 1"]
)
def test_delayed_and_mixed_results_end_in_the_same_weights(trials, more: str) -> None:
    peers = trials.train(trials.plan(PLAIN + f"inner_steps = 4\n{more}", steps=9), 2)
    assert [one.state for one in peers] == ["done", "done"]
    assert equal(*peers)
    assert np.isfinite(peers[0].loss)


def test_muon_inside(trials) -> None:
    peers = trials.train(trials.plan(PLAIN + "inner_steps = 2", steps=4, optimizer="muon"), 2)
    assert equal(*peers)


@pytest.mark.parametrize(
    ("more", "steps", "stop"),
    [
        ("", 8, 6),  # between two exchanges: each peer goes on from its own weights and the shared ones
        # With what the codec has lost of one fragment, and an update of the other under way.
        ('delay_steps = 1\nfragments = 2\ncodec = "topk-2bit"\ntop_share = 0.1', 9, 5),
    ],
    ids=["plain", "feedback and delay"],
)
def test_resumed_is_uninterrupted(trials, more: str, steps: int, stop: int) -> None:
    inner = 4 if "fragments" in more else 3
    sync = f'mode = "diloco"\npeers = 2\nsynchronous_steps = 1\ninner_steps = {inner}\n{more}'
    plan = trials.plan(sync, steps=steps)
    whole = trials.train(plan, 2)
    first = trials.train(plan, 2, stop_after=stop)
    assert [one.step for one in first] == [stop, stop]
    second = trials.train(plan, 2, runs=[one.run for one in first])
    assert equal(second[0], whole[0])
    assert equal(second[1], whole[1])
    # In between, too: the weights of both runs part for a while where only the last exchange is the same.
    losses = [[one["loss"] for one in run.events("step") if one["step"] >= stop] for run in (second[0], whole[0])]
    assert losses[0] == losses[1]


def test_a_late_joiner_takes_the_shared_state(trials) -> None:
    plan, hub, late = trials.plan(PLAIN + "inner_steps = 2", steps=8), LocalHub(), threading.Event()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(3)]

    def let_in(number: int) -> None:
        if number == 2:
            late.set()
        if number == 3:
            with hub.lock:
                assert hub.lock.wait_for(lambda: "peer-2" in hub.active, timeout=60)

    def joins() -> Outcome:
        assert late.wait(60)
        return trials.start(plan, groups[2], addresses=[("local", 1)])

    groups[0].before_round = let_in
    first, second, third = join_all([*(lambda g=g: trials.start(plan, g) for g in groups[:2]), joins])
    assert equal(first, second)
    assert equal(first, third)
    assert third.peers.credit["peer-2"] > 0


def test_a_quorum_goes_on_without_a_late_peer(trials) -> None:
    """Two of three are enough; the third hears of the round when it is over, and its own work is dropped."""
    sync = 'mode = "quorum"\npeers = 3\nquorum = 2\ngrace_s = 0\nsynchronous_steps = 0\ninner_steps = 2\n'
    for late in ("drop", "count"):
        plan, hub = trials.plan(sync + f'late = "{late}"', steps=6), LocalHub()
        groups = [LocalGroup(hub, f"peer-{place}") for place in range(3)]

        def wait(number: int, hub: LocalHub = hub) -> None:
            with hub.lock:
                assert number != 1 or hub.lock.wait_for(lambda: 1 in hub.committed, timeout=60)

        def wait_for_late(step: int, hub: LocalHub = hub) -> None:
            """Before the step of the next exchange: a peer that knows a quorum there brings what it has by then."""
            with hub.lock:
                assert step != 3 or hub.lock.wait_for(lambda: "peer-2" in hub.calls.get(2, {}), timeout=60)

        groups[2].before_round = wait
        holds = [wait_for_late, wait_for_late, None]
        peers = join_all(
            [
                lambda group=group, hold=hold, plan=plan: trials.start(plan, group, at_step=hold)
                for group, hold in zip(groups, holds, strict=True)
            ]
        )
        assert [one.state for one in peers] == ["done"] * 3
        rounds = [one["weights"] for one in peers[2].events("exchange") if one["kind"] == "weights"]
        assert sorted(rounds[0]) == ["peer-0", "peer-1"]
        assert rounds[1]["peer-2"] == {"drop": 64, "count": 128}[late]  # 2 steps of 2 sequences of 16 tokens, or 4


def test_a_round_is_judged_before_its_commit_and_the_liar_is_found(trials) -> None:
    sync = 'mode = "diloco"\npeers = 4\nsynchronous_steps = 8\ninner_steps = 8'
    plan, hub = trials.plan(sync, steps=24), LocalHub()
    groups = [LocalGroup(hub, f"peer-{place}") for place in range(4)]
    sent: dict[int, dict[str, np.ndarray]] = {}
    found: dict[str, list[Judgement]] = {"honest": [], "liar": [], "mean": []}

    def trial_of(number: int, vectors: dict[str, np.ndarray], *, apart: bool) -> RoundTrial:
        def mean_without(removed) -> np.ndarray:
            return np.mean([vector for peer, vector in vectors.items() if peer not in removed], axis=0)

        weights = dict.fromkeys(vectors, 96.0)
        contributions = vectors if apart else {}
        return RoundTrial(
            round_number=number,
            weights=weights,
            mean=mean_without(()),
            contributions=contributions,
            mean_without=mean_without,
        )

    def look(place: int, number: int, vector: np.ndarray) -> np.ndarray:
        vectors = sent.setdefault(number, {})
        vectors[f"peer-{place}"] = vector
        if len(vectors) == 4 and len(vector) > 1:  # the last one to call: the others wait
            judge = groups[place].training.judge_round
            if groups[place].training._sent_fragment is not None:
                before = {one.name: one.tensor.clone() for one in groups[place].training._engine.shards}
                turned = {**vectors, "peer-2": -4.0 * vectors["peer-2"]}
                found["honest"].append(judge(trial_of(number, vectors, apart=True)))
                found["liar"].append(judge(trial_of(number, turned, apart=True)))
                found["mean"].append(judge(trial_of(number, turned, apart=False)))
                for shard in groups[place].training._engine.shards:
                    assert torch.equal(shard.tensor, before[shard.name])
        return vector

    for place, group in enumerate(groups):
        group.poison = lambda number, vector, place=place: look(place, number, vector)
    peers = join_all([lambda group=group: trials.start(plan, group) for group in groups])
    assert all(peer.state == "done" for peer in peers)
    assert [len(one) for one in found.values()] == [2, 2, 2]
    assert all(one.harms is False and not one.accused for one in found["honest"])
    assert all(set(one.accused) == {"peer-2"} for one in found["liar"])
    assert found["mean"][0].harms is True  # in the second round, momentum makes up for the liar
    assert not any(one.accused for one in found["mean"])
