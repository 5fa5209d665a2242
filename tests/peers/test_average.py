"""Averaging among peers with real connections: means, equal bytes, byte counts, updates that are left out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from crew import Crew, together, until

from phalanx.errors import UserError
from phalanx.network.slow_codecs import CODECS, GATHERED_CODECS, copies_per_share, encoded_bytes
from phalanx.peers import messages as say
from phalanx.peers.aggregation import AGGREGATIONS
from phalanx.peers.attempt import Attempt
from phalanx.peers.codecs import Sender, decode, encode
from phalanx.peers.facts import Bandwidth, PeerProgress, RoundResult
from phalanx.peers.group import PeerGroup

Vectors = list[np.ndarray]


def draw(count: int, values: int, kind: Any = np.float64) -> Vectors:
    return [np.random.default_rng(seed).standard_normal(values).astype(kind) for seed in range(count)]


def average(
    groups: list[PeerGroup],
    vectors: Vectors,
    weights: list[float],
    codec: Any = "fp64",
    round_number: int = 0,
    **more: Any,
) -> list[RoundResult]:
    codecs = codec if isinstance(codec, list) else [codec] * len(groups)
    calls = [
        lambda group=group, vector=vector, weight=weight, one=one: group.average(
            round_number, vector, weight, one, **{"timeout_s": 25.0, **more}
        )
        for group, vector, weight, one in zip(groups, vectors, weights, codecs, strict=True)
    ]
    return together(calls)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_average_is_the_weighted_mean(count: int) -> None:
    vectors, weights = draw(count, 70_001), [1.0, 2.5, 0.25, 7.0][:count]
    with Crew(4) as crew:
        groups = crew.join_all(count)
        for number in range(2):
            results = average(groups, vectors, weights, round_number=number)
            wanted = sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)
            for result in results:
                assert result.committed, result.reason
                assert result.vector is not None
                assert np.max(np.abs(result.vector - wanted)) < 1e-12
                assert result.members_counted == groups[0].view().ids
                assert list(result.weights.values()) == weights
        assert groups[0].view().next_round == 2


def test_all_peers_get_the_same_bytes_with_every_codec_and_bytes_are_the_formula() -> None:
    values, vectors = 100_003, draw(3, 100_003, np.float32)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for number, codec in enumerate(CODECS):
            results = average(groups, vectors, [1.0, 2.0, 3.0], codec, number)
            assert all(result.committed for result in results), [result.reason for result in results]
            assert len({result.vector.tobytes() for result in results}) == 1  # type: ignore[union-attr]
            whole = encoded_bytes(codec, values)
            # Each value is sent to n - 1 others twice, or what n - 1 wrote to n others once.
            total = 3 * 2 * whole if codec in GATHERED_CODECS else 2 * 2 * whole
            assert sum(result.bytes_sent for result in results) == total
            for group, result in zip(groups, results, strict=True):
                own = round(result.shares.get(group.id, 0.0) * values)
                part = whole - encoded_bytes(codec, values - own) if own % 4096 == 0 else encoded_bytes(codec, own)
                assert result.bytes_sent == whole + copies_per_share(codec, 3) * part
                assert result.bytes_received == (2 * whole if codec in GATHERED_CODECS else result.bytes_sent)


def test_sparse_updates_are_averaged_without_choosing_again() -> None:
    values, weights = 30_000, [1.0, 2.0, 5.0]
    vectors = draw(3, values, np.float32)
    sent = [decode("topk-2bit", encode("topk-2bit", vector), values) for vector in vectors]
    with Crew(4) as crew:
        results = average(crew.join_all(3), vectors, weights, "topk-2bit")
    wanted = sum(weight * one for weight, one in zip(weights, sent, strict=True)) / sum(weights)
    assert np.count_nonzero(wanted) > 2 * np.count_nonzero(sent[0])
    for result in results:
        assert result.committed, result.reason
        assert np.allclose(result.vector, wanted, atol=1e-6)


def test_shares_follow_bandwidth_and_a_client_only_peer_owns_nothing() -> None:
    speeds = [80.0, 10.0, 10.0, 10.0]
    settings = [{"bandwidth": Bandwidth(up_mbps=one, down_mbps=one)} for one in speeds]
    settings[3]["client_only"] = True
    vectors = draw(4, 50_000)
    with Crew(4) as crew:
        groups = crew.join_all(4, settings)
        results = average(groups, vectors, [1.0] * 4)
        for result in results:
            assert result.committed, result.reason
            assert result.shares == {groups[0].id: 1.0}
            assert np.allclose(result.vector, np.mean(vectors, axis=0), atol=1e-12)
        assert results[3].bytes_sent == 8 * 50_000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_dropped_and_named(bad: float) -> None:
    vectors = draw(3, 9_000)
    vectors[1][4_321] = bad
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for result in average(groups, vectors, [1.0] * 3):
            assert result.committed
            assert result.dropped == {groups[1].id: "its update is not finite (NaN or infinity)"}
            assert np.allclose(result.vector, (vectors[0] + vectors[2]) / 2)
        named = [event for event in crew.events[2] if event.kind == "dropped"]
        assert [(event.peer, event.name) for event in named] == [(groups[1].id, crew.people[1].name)]


def test_a_claim_counts_no_more_than_what_its_peer_was_dealt_and_is_named() -> None:
    vectors = draw(4, 9_000)
    with Crew(4) as crew:
        groups = crew.join_all(4)
        dealt = dict(zip((group.id for group in groups), [64.0, 32.0, 0.0], strict=False))  # the last is new
        for result in average(groups, vectors, [64.0, 2880.0, 64.0, 64.0], weight_limits=dealt):
            assert result.committed, result.reason
            assert result.weights == {groups[0].id: 64.0, groups[1].id: 32.0}
            assert result.capped == {
                groups[1].id: "it claims a weight of 2880, and was dealt 32",
                groups[2].id: "it claims a weight of 64, and was dealt 0",
                groups[3].id: "it claims a weight of 64, and was dealt 0",
            }
            assert result.present == (groups[2].id, groups[3].id)
            assert not result.dropped
            assert np.allclose(result.vector, (2 * vectors[0] + vectors[1]) / 3)
        named = [event.peer for event in crew.events[0] if event.kind == "capped"]
        assert sorted(named) == sorted(group.id for group in groups[1:4])


def test_a_round_without_any_weight_is_committed_and_has_no_vector() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for result in average(groups, draw(3, 9_000), [0.0] * 3):
            assert result.committed, result.reason
            assert result.vector is None
            assert result.present == groups[0].view().ids
        assert all(result.committed for result in average(groups, draw(3, 9_000), [1.0] * 3, round_number=1))


@pytest.mark.parametrize("kind", AGGREGATIONS[1:])
def test_a_minority_with_a_reversed_update_does_not_steer_the_result_and_bytes_are_equal(kind: str) -> None:
    values, rng = 70_001, np.random.default_rng(7)
    common = rng.standard_normal(values)
    vectors = [(common + 0.1 * rng.standard_normal(values)).astype(np.float32) for _ in range(4)]
    vectors[2] *= -9.0
    with Crew(4, aggregation=kind) as crew:
        groups = crew.join_all(4)
        for number, codec in enumerate(CODECS):
            results = average(groups, vectors, [1.0, 2.0, 90.0, 3.0], codec, number)
            assert all(result.committed for result in results), [result.reason for result in results]
            assert len({result.vector.tobytes() for result in results}) == 1  # type: ignore[union-attr]
            used = "clipped-mean" if codec in GATHERED_CODECS else kind
            assert {result.aggregation for result in results} == {used}
            along = float(results[0].vector @ common / (common @ common))
            # 3 % of the values are sent in topk-2bit, and honest updates alone bring it to 0.18.
            assert along > (0.15 if codec in GATHERED_CODECS else 0.9), (codec, along)


def test_two_peers_fall_back_to_the_clipped_mean_with_a_printed_reason_and_equal_bytes() -> None:
    vectors = draw(2, 30_000)
    vectors[1] *= -5.0
    with Crew(4, aggregation="median") as crew:
        groups = crew.join_all(2)
        results = average(groups, vectors, [1.0, 90.0])
        norms = [float(np.linalg.norm(vector)) for vector in vectors]
        assert len({result.vector.tobytes() for result in results}) == 1  # type: ignore[union-attr]
        assert np.allclose(results[0].vector, (vectors[0] + vectors[1] * norms[0] / norms[1]) / 2)
        for place in range(2):
            texts = [event.text for event in crew.events[place] if event.kind == "aggregation"]
            assert texts == ['two updates have no majority: "median" becomes "clipped-mean"']


def test_a_member_refuses_a_plan_of_another_aggregation_than_its_own() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(2, [{"aggregation": "mean"}, {"aggregation": "clipped-mean"}])
        results = average(groups, draw(2, 9_000), [1.0, 1.0], timeout_s=1.0)
        assert groups[1].view().leader == groups[0].id
        assert not results[1].committed
        refusals = [event.text for event in crew.events[1] if event.kind == "refused"]
        assert refusals[0].endswith('its aggregation is "mean", here it is "clipped-mean"')


def test_a_member_refuses_a_plan_that_gives_a_peer_more_than_it_was_dealt() -> None:
    with Crew(4) as crew:
        leader, other = crew.join_all(2)
        generous, exact = dict.fromkeys((leader.id, other.id), 90.0), dict.fromkeys((leader.id, other.id), 1.0)
        calls = [
            lambda group=group, limits=limits, weight=weight: group.average(
                0, draw(1, 9_000)[0], weight, "fp64", timeout_s=1.0, weight_limits=limits
            )
            for group, limits, weight in ((leader, generous, 90.0), (other, exact, 1.0))
        ]
        assert not together(calls)[1].committed
        refusals = [event.text for event in crew.events[1] if event.kind == "refused"]
        assert refusals[0].endswith(f"it gives {leader.id} a weight of 90, and 1 was dealt")


def test_a_poisoned_update_is_dropped_and_named() -> None:
    vectors = draw(4, 9_000)
    vectors[2] *= 1e4
    with Crew(4) as crew:
        groups = crew.join_all(4)
        for result in average(groups, vectors, [1.0] * 4):
            assert list(result.dropped) == [groups[2].id]
            assert "times the round's median" in result.dropped[groups[2].id]
            assert np.allclose(result.vector, (vectors[0] + vectors[1] + vectors[3]) / 3)


def test_a_peer_that_understates_its_norm_is_found_by_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = draw(3, 60_000)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        liar = groups[1].id
        honest = Attempt.encode_piece

        def poisoned(self: Attempt, start: int) -> bytes:
            if self.me == liar and self.outgoing is not None:
                self.outgoing = self.outgoing * 50.0
            return honest(self, start)

        monkeypatch.setattr(Attempt, "encode_piece", poisoned)
        for result in average(groups, vectors, [1.0] * 3):
            assert result.committed
            assert "larger norm than" in result.dropped[liar]
            assert np.allclose(result.vector, (vectors[0] + vectors[2]) / 2)


def test_a_peer_that_sends_nonsense_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = draw(3, 60_000)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        liar, honest = groups[2].id, Attempt.encode_piece
        monkeypatch.setattr(
            Attempt, "encode_piece", lambda self, start: b"x" * 12 if self.me == liar else honest(self, start)
        )
        for place, result in enumerate(average(groups, vectors, [1.0] * 3)):
            assert result.committed, (place, result.reason)
            assert "no fp64 vector" in result.dropped[liar]


def test_the_loss_screen_sees_whole_shares_and_its_reason_is_kept() -> None:
    vectors = draw(3, 60_000)

    def screen(peer: str, vector: np.ndarray) -> str | None:
        seen.append((peer, int(np.count_nonzero(vector))))
        return "the loss rises with it" if peer == bad else None

    seen: list[tuple[str, int]] = []
    with Crew(4) as crew:
        bad = crew.people[2].id
        groups = crew.join_all(3, [{"screen": screen}, {}, {}])
        for result in average(groups, vectors, [1.0] * 3):
            assert result.dropped == {bad: "the loss rises with it"}
            assert np.allclose(result.vector, (vectors[0] + vectors[1]) / 2)
        own = round(result.shares[groups[0].id] * 60_000)
        assert {count for _, count in seen} >= {own}


def test_nothing_is_committed_when_every_update_is_bad() -> None:
    vectors = [np.full(5_000, np.nan) for _ in range(3)]
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for result in average(groups, vectors, [1.0] * 3):
            assert not result.committed
            assert result.vector is None
            assert "no update could be counted" in result.reason
        good = average(groups, draw(3, 5_000), [1.0] * 3)
        assert all(result.committed and result.round_number == 0 for result in good)


def test_a_quorum_begins_without_a_late_peer_which_gets_the_same_result() -> None:
    vectors = draw(3, 9_000)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        early = average(groups[:2], vectors[:2], [1.0, 3.0], quorum=2, grace_s=0.05)
        late = groups[2].average(0, vectors[2], 1.0, "fp64", timeout_s=20.0)
        assert late.committed
        assert late.members_counted == (groups[0].id, groups[1].id)
        assert np.array_equal(late.vector, early[0].vector)  # type: ignore[arg-type]
        again = average(groups, vectors, [1.0] * 3, round_number=1)
        assert all(len(result.members_counted) == 3 for result in again)


def test_weight_zero_takes_the_result_and_adds_nothing() -> None:
    vectors = draw(3, 9_000)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for result in average(groups, vectors, [1.0, 0.0, 1.0]):
            assert result.members_counted == (groups[0].id, groups[2].id)
            assert np.allclose(result.vector, (vectors[0] + vectors[2]) / 2)


def test_a_round_that_not_everybody_joins_is_discarded_and_can_be_called_again() -> None:
    vectors = draw(3, 9_000)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        for result in average(groups[:2], vectors[:2], [1.0, 1.0], timeout_s=0.5):
            assert not result.committed
            assert not result.behind
        assert all(group.view().next_round == 0 for group in groups)
        # The leader's word that the first call is over may come late, in the middle of the second.
        late = say.Discard(view_number=groups[1].view().number, round_number=0, call=0, reason="late")

        def call_again() -> RoundResult:
            with ThreadPoolExecutor(1) as pool:
                called = pool.submit(groups[1].average, 0, vectors[1], 1.0, "fp64", timeout_s=25.0)
                until(lambda: groups[1]._node.rounds.pending is not None)
                groups[1]._loop.call_soon_threadsafe(groups[1]._node.rounds.on_message, groups[0].id, late)
                others = average([groups[0], groups[2]], [vectors[0], vectors[2]], [1.0] * 2)
                assert all(result.committed for result in others)
                return called.result()

        assert call_again().committed


@pytest.mark.parametrize("codec", ["int4", "topk-2bit"])
def test_what_a_codec_loses_is_carried_to_later_rounds(codec: str) -> None:
    vectors = draw(3, 40_000, np.float32)
    wanted = np.mean(vectors, axis=0)
    with Crew(4) as crew:
        groups = crew.join_all(3)
        senders = [Sender(codec, feedback=1.0, top_share=0.2) for _ in groups]
        total = np.zeros_like(wanted)
        for number in range(6):
            results = average(groups, vectors, [1.0] * 3, senders, number)
            assert all(result.committed for result in results), [result.dropped for result in results]
            total += results[0].vector
        plain = average(groups, vectors, [1.0] * 3, [Sender(codec, 0.0, 0.2) for _ in groups], 6)[0].vector
    carried, alone = np.linalg.norm(total / 6 - wanted), np.linalg.norm(plain - wanted)
    assert carried < 0.7 * alone


def test_progress_rides_on_heartbeats_and_a_claim_that_cannot_be_is_named() -> None:
    with Crew(4, samples_per_s=1000.0) as crew:
        groups = crew.join_all(2)
        groups[1].report(PeerProgress(step=3, samples=500))
        until(lambda: groups[0].progress().get(groups[1].id) == PeerProgress(step=3, samples=500))
        groups[1].report(PeerProgress(step=4, samples=9_000_000))
        crew.wait_for(lambda: "doubtful-progress" in [event.kind for event in crew.events[0]])
        (event,) = [event for event in crew.events[0] if event.kind == "doubtful-progress"]
        assert event.peer == groups[1].id
        assert "8,999,500 samples in a time that allows" in event.text


def test_a_peer_that_is_started_again_is_not_doubted_for_beginning_anew() -> None:
    with Crew(4, samples_per_s=1000.0) as crew:
        first, second = crew.join_all(2)
        second.report(PeerProgress(step=50, samples=0))
        until(lambda: second.id in first.progress() and first.progress()[second.id].step == 50)
        second.close()
        crew.wait_for(lambda: len(first.view().members) == 1)
        again = crew.start(1)
        again.join([first.address], timeout_s=20.0)
        again.report(PeerProgress(step=1, samples=0))
        until(lambda: second.id in first.progress() and first.progress()[second.id].step == 1)
        assert "doubtful-progress" not in [event.kind for event in crew.events[0]]


def test_calls_that_make_no_sense_are_refused() -> None:
    with Crew(4) as crew:
        group = crew.start(0)
        with pytest.raises(UserError) as caught:
            group.average(0, np.zeros(3), 1.0)
        assert "has not joined" in str(caught.value)
        group.join()
        for arguments, text in [
            ((0, np.zeros((2, 2)), 1.0), "2 dimensions"),
            ((0, np.zeros(3, dtype=np.int64), 1.0), "int64"),
            ((0, np.zeros(3), float("nan")), "a weight of nan"),
        ]:
            with pytest.raises(UserError) as caught:
                group.average(*arguments)
            assert text in str(caught.value)
