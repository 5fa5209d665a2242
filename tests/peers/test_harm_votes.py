"""Votes on harmful rounds: what a majority decides, and rounds of real peers from which a liar is excluded."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from crew import Crew, together, until

from phalanx.errors import UserError
from phalanx.peers.harm_votes import AUDIT_EVERY, WARY_ROUNDS, AuditSchedule, Ballots, Judgement, RoundTrial
from phalanx.peers.messages import MOST_ACCUSED, HarmVote, decode_message

PEERS = ("a", "b", "c", "d")
HARMFUL, SOUND = Judgement(harms=True), Judgement(harms=False)


def ballots(votes: dict[str, Judgement], voters: Collection[str] = PEERS) -> Ballots:
    return Ballots(voters=frozenset(voters), votes=votes)


def accuse(*peers: str) -> Judgement:
    return Judgement(harms=True, accused={peer: f"{peer} lies" for peer in peers})


@pytest.mark.parametrize(("harmful", "is_harmful"), [(1, False), (2, False), (3, True), (4, True)])
def test_more_than_half_of_all_voters_discard_a_round(harmful: int, is_harmful: bool) -> None:
    votes = {peer: HARMFUL if place < harmful else SOUND for place, peer in enumerate(PEERS)}
    assert ballots(votes).is_harmful is is_harmful


def test_the_votes_of_others_and_absent_votes_count_for_nothing() -> None:
    assert not ballots({"a": HARMFUL, "b": HARMFUL, "x": HARMFUL, "y": HARMFUL}).is_harmful
    assert not ballots({"a": HARMFUL, "b": HARMFUL, "c": Judgement()}).is_harmful


def test_a_peer_is_excluded_by_a_majority_of_the_others_and_not_by_its_own_vote() -> None:
    assert ballots({"a": accuse("d")}).excluded == {}
    assert ballots({"a": accuse("d"), "d": accuse("d")}).excluded == {}
    assert ballots({"a": accuse("d"), "x": accuse("d")}).excluded == {}
    assert ballots({"a": accuse("d"), "b": accuse("d")}).excluded == {"d": "d lies"}
    assert ballots({"a": accuse("x"), "b": accuse("x")}).excluded == {}
    # Of six, three of the five others are needed: two liars together exclude no honest peer.
    six = ("a", "b", "c", "d", "e", "f")
    assert ballots({"a": accuse("f"), "b": accuse("f")}, six).excluded == {}
    assert ballots({"a": accuse("b"), "b": accuse("a")}, ("a", "b")).excluded == {}


def test_every_member_gives_the_same_reasons_in_the_same_order_whichever_vote_came_first() -> None:
    voters = [f"p{place}" for place in range(9)]
    votes = {
        voter: Judgement(harms=True, accused={peer: f"{voter} accuses {peer}" for peer in voters[6:]})
        for voter in reversed(voters[:6])
    }
    assert list(ballots(votes, voters).excluded.items()) == [(peer, f"p0 accuses {peer}") for peer in voters[6:]]


def test_a_member_that_objects_holds_no_result_for_a_later_view() -> None:
    assert HARMFUL.objects(gathered=False)
    assert not HARMFUL.objects(gathered=True)
    assert accuse("d").objects(gathered=True)
    assert not SOUND.objects(gathered=False)


def test_a_round_waits_only_for_votes_that_can_change_it() -> None:
    sound = dict.fromkeys("ab", SOUND)
    assert not ballots(sound).is_settled(may_discard=True)  # two more could exclude a peer
    assert ballots(dict.fromkeys("abc", SOUND)).is_settled(may_discard=True)
    # One false vote and one silent peer of four hold no round up.
    assert ballots({"a": SOUND, "b": SOUND, "c": HARMFUL}).is_settled(may_discard=True)
    assert not ballots({"a": SOUND, "b": HARMFUL, "c": HARMFUL}).is_settled(may_discard=True)
    assert ballots({"a": SOUND, "b": HARMFUL, "c": HARMFUL}).is_settled(may_discard=False)
    # More than half found it harmful already: the vote that is missing changes nothing.
    assert ballots(dict.fromkeys("abc", HARMFUL)).is_settled(may_discard=True)
    five = (*PEERS, "e")
    assert not ballots({"a": SOUND, "b": accuse("d")}, five).is_settled(may_discard=False)
    assert ballots({"a": SOUND, "b": accuse("d"), "c": SOUND}, five).is_settled(may_discard=False)


def test_audits_come_at_intervals_and_more_often_after_a_liar_has_hidden() -> None:
    schedule, gathered = AuditSchedule(), []
    for _ in range(32):
        gathered.append(schedule.is_due)
        schedule = schedule.after_round(gathered=schedule.is_due, hid=False)
    assert [place for place, due in enumerate(gathered) if due] == [0, 1, 2, 3, 4, 6, 10, 18, 26]
    assert AUDIT_EVERY == 8
    schedule = schedule.after_round(gathered=True, hid=True)
    for _ in range(WARY_ROUNDS):
        assert schedule.is_due
        schedule = schedule.after_round(gathered=True, hid=False)
    assert not schedule.is_due


# ---- real peers ------------------------------------------------------------------------------------------------------

VALUES, HONEST = 9_000, 1.0


class Judge:
    """A peer's judge: the loss is the distance from the mean that honest peers send."""

    def __init__(self) -> None:
        self.trials: list[RoundTrial] = []

    def __call__(self, trial: RoundTrial) -> Judgement:
        self.trials.append(trial)
        harms = bool(trial.mean.mean() < 0.0)
        accused = {}
        if harms and trial.contributions:
            for peer in trial.contributions:
                if trial.mean_without([peer]).mean() > 0.0:
                    accused[peer] = "without it the round does no harm"
        return Judgement(harms=harms, accused=accused)


def vector_of(value: float) -> np.ndarray:
    return np.full(VALUES, value, dtype=np.float32)


def send(crew: Crew, values: list[float], round_number: int) -> list[object]:
    def call(place: int, value: float) -> object:
        try:
            return crew.groups[place].average(round_number, vector_of(value), 1.0, "int8", timeout_s=25.0)
        except UserError as error:
            return error

    return together([lambda place=place, value=value: call(place, value) for place, value in enumerate(values)])


def audit_later(crew: Crew) -> None:
    for group in crew.groups:
        group._node.leader._audit = AuditSchedule(interval=AUDIT_EVERY, wary=0)


@pytest.mark.parametrize("liar", [3, 1, 0])  # an ordinary member; also the leader, who owns the run
def test_a_harmful_round_is_not_committed_and_its_cause_is_excluded(liar: int) -> None:
    judges = [Judge() for _ in range(4)]
    with Crew(4) as crew:
        groups = crew.join_all(4, [{"judge": judge} for judge in judges])
        audit_later(crew)
        values = [-5.0 if place == liar else HONEST for place in range(4)]
        results = send(crew, values, 0)
        honest = [place for place in range(4) if place != liar]
        for place in honest:
            result = results[place]
            assert result.committed, result.reason
            assert np.allclose(result.vector, HONEST, atol=0.02)
            assert groups[liar].id not in result.weights
            assert groups[place].excluded == {groups[liar].id: "without it the round does no harm"}
        error = results[liar]
        assert isinstance(error, UserError)
        assert "excluded by a vote of the others" in str(error) or "revoked by the run's owner" in str(error)
        until(lambda: all(groups[liar].id not in groups[place].view().ids for place in honest))
        # Contributions were kept apart only after the vote had found harm.
        assert not judges[honest[0]].trials[0].contributions
        assert set(judges[honest[0]].trials[1].contributions) == set(judges[honest[0]].trials[0].weights)
        if liar != 0:  # the owner of the run is the first: its list has the exclusion for good
            fingerprint = crew.people[liar].fingerprint
            until(lambda: all(fingerprint in groups[place]._node.transport.allowed.revoked for place in honest))
        later = [result for place, result in enumerate(send(crew, values, 1)) if place != liar]
        assert all(result.committed for result in later)


@pytest.mark.parametrize("harms", [True, False])
def test_a_member_that_objects_to_a_round_does_not_offer_it_to_the_next_view(harms: bool) -> None:
    is_released = threading.Event()

    def wait(trial: RoundTrial) -> Judgement:
        assert is_released.wait(20.0)
        return SOUND

    def vote(trial: RoundTrial) -> Judgement:
        return Judgement(harms=harms and not trial.contributions)

    with Crew(4) as crew:
        groups = crew.join_all(3, [{"judge": judge} for judge in (wait, vote, vote)])
        audit_later(crew)
        with ThreadPoolExecutor(1) as pool:
            results = pool.submit(send, crew, [HONEST] * 3, 0)
            leader = groups[0]._node.leader
            try:
                until(lambda: {group.id for group in groups[1:]} <= set(leader._haves))
                held = [group._node.rounds.accepted is not None for group in groups[1:]]
            finally:
                is_released.set()
            assert all(result.committed for result in results.result(30.0))
        assert held == [not harms] * 2


def test_votes_from_the_wire_are_bounded() -> None:
    key, peer = [1, 1, 1], "ab" * 8

    def decode(accused: dict[str, str]) -> object:
        return decode_message(json.dumps(["harm", key, accused]).encode())

    assert decode({peer: "it lies"}) == HarmVote(key=(1, 1, 1), accused={peer: "it lies"})
    for wrong in (
        {peer: "x" * 501},
        {"../peer": "it lies"},
        {f"{place:016x}": "" for place in range(MOST_ACCUSED + 1)},
    ):
        with pytest.raises(ValueError, match="not a message of a peer"):
            decode(wrong)


def test_one_false_vote_changes_nothing() -> None:
    def lie(trial: RoundTrial) -> Judgement:
        others = [peer for peer in trial.weights if peer != liar_id]
        return Judgement(harms=True, accused={others[0]: "a lie"})

    with Crew(4) as crew:
        groups = crew.join_all(4, [{"judge": Judge() if place != 2 else lie} for place in range(4)])
        liar_id = groups[2].id
        results = send(crew, [HONEST] * 4, 0)
        assert all(result.committed and len(result.weights) == 4 for result in results)
        assert all(group.excluded == {} for group in groups)
        assert all("harmful" not in crew.kinds(place) for place in (0, 1, 3))


def test_harm_without_a_single_cause_ends_no_run() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(4, [{"judge": Judge()} for _ in range(4)])
        results = send(crew, [-1.0] * 4, 0)
        assert all(result.committed and len(result.weights) == 4 for result in results)
        assert all(group.excluded == {} for group in groups)


def test_accusations_that_no_majority_shares_do_not_hold_a_round_up() -> None:
    def accuse_next(place: int) -> object:
        def judge(trial: RoundTrial) -> Judgement:
            ids = sorted(trial.weights)
            return Judgement(harms=False, accused={ids[(place + 1) % len(ids)]: "a mistake"})

        return judge

    with Crew(4) as crew:
        groups = crew.join_all(4, [{"judge": accuse_next(place)} for place in range(4)])
        results = send(crew, [HONEST] * 4, 0)
        assert all(result.committed and len(result.weights) == 4 for result in results)
        assert all(group.excluded == {} for group in groups)


def test_contributions_are_kept_apart_while_a_liar_that_hid_may_come_back() -> None:
    judges = [Judge() for _ in range(4)]

    def hide(trial: RoundTrial) -> Judgement:
        judgement = judges[0](trial)
        return judgement if trial.contributions else Judgement(harms=True)

    with Crew(4) as crew:
        crew.join_all(4, [{"judge": hide} for _ in range(4)])
        audit_later(crew)
        assert all(result.committed for result in send(crew, [HONEST] * 4, 0))
        judges[0].trials.clear()
        assert all(result.committed for result in send(crew, [HONEST] * 4, 1))
        assert judges[0].trials
        assert all(trial.contributions for trial in judges[0].trials)


def test_the_first_judged_rounds_are_audited() -> None:
    judges = [Judge() for _ in range(4)]
    with Crew(4) as crew:
        crew.join_all(4, [{"judge": judge} for judge in judges])
        for number in range(6):
            assert all(result.committed for result in send(crew, [HONEST] * 4, number))
        audited = [[bool(trial.contributions) for trial in judge.trials] for judge in judges]
        assert audited == [[True] * 5 + [False]] * 4


def test_causes_are_sought_in_the_weighted_mean_of_a_robust_aggregation() -> None:
    draw = np.random.default_rng(0)
    common = draw.normal(1.0, 0.1, VALUES).astype(np.float32)
    means: list[tuple[float, float, float]] = []

    def judge(trial: RoundTrial) -> Judgement:
        removed = trial.mean_without([max(trial.contributions, key=lambda peer: -trial.contributions[peer].mean())])
        means.append((float(trial.mean.mean()), float(trial.mean_without(()).mean()), float(removed.mean())))
        return Judgement(harms=False)

    with Crew(4) as crew:
        groups = crew.join_all(4, [{"judge": judge, "aggregation": "clipped-mean"} for _ in range(4)])
        calls = [
            lambda group=group, sign=sign: group.average(0, sign * common, 1.0, "fp32", timeout_s=25.0)
            for group, sign in zip(groups, (1.0, -1.0, 1.0, 1.0), strict=True)
        ]
        assert all(result.committed for result in together(calls))
    assert len(means) == 4
    for result, everyone, others in means:
        assert result == pytest.approx(1.0, abs=0.01)  # the reversed update is left out of the result
        assert everyone == pytest.approx(0.5, abs=0.01)
        assert others == pytest.approx(1.0, abs=0.01)


def test_an_excluded_peer_does_not_come_back() -> None:
    with Crew(4) as crew:
        for place in range(3):
            excluded = {crew.people[3].id: "it lied"}
            crew.start(place, excluded=excluded).join([crew.groups[0].address] if place else (), timeout_s=20.0)
        with pytest.raises(UserError, match="excluded by a vote: it lied"):
            crew.start(3).join([crew.groups[0].address], timeout_s=10.0)
