"""The judge of a drill of peers believes a good record, and each verdict falls on its own kind of lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phalanx.train.drill.faults import PEER_FAULTS, parse_faults
from phalanx.train.drill.firings import Firing
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.peer_drill import draw_peer_faults
from phalanx.train.drill.peer_judge import PeerRecord, judge_loss, judge_named, judge_peers, peer_outcomes

SEQUENCE, BATCH, ROUNDS = 16, 6, 8
IDS = ("a", "b", "c")
FAULTS = parse_faults(["kill:peer=3,step=3", "nan:peer=2,step=5"], kinds=PEER_FAULTS)
SHOTS = [
    Firing(id=0, kind="kill", t_s=3.1, monotonic_s=0.0, rank=3, step=3),
    Firing(id=1, kind="nan", t_s=4.9, monotonic_s=0.0, rank=2, step=5, note="round 5"),
]


def story() -> dict[str, list[dict[str, Any]]]:
    """Three peers take a step a second; c is killed after round 3, and the update of b in round 5 is not finite.

    What b was dealt in round 5 is done by a in round 6, of the same step.
    """
    told: dict[str, list[dict[str, Any]]] = {peer: [{"event": "ready", "t": -1.0}] for peer in IDS}
    credit: dict[str, int] = {}
    for number in range(ROUNDS):
        members = ["a", "b", "c"] if number < 4 else ["a", "b"]
        counts = dict.fromkeys(members, BATCH // len(members))
        dropped = {}
        if number == 5:
            counts, dropped, members = {"a": 3}, {"b": "its update is not finite"}, ["a"]
        elif number == 6:
            counts, members = {"a": 3, "b": 0}, ["a", "b"]
        credit = {peer: credit.get(peer, 0) + counts.get(peer, 0) for peer in {*credit, *counts}}
        event = {
            "event": "exchange",
            "t": float(number),
            "step": number if number < 6 else number - 1,
            "round": number,
            "kind": "gradient",
            "members": members,
            "weights": {peer: float(count * SEQUENCE) for peer, count in counts.items()},
            "dropped": dropped,
            "digest": f"digest {number}",
            "credit": dict(credit),
        }
        for peer in IDS if number < 4 else IDS[:2]:
            told[peer].append(copy.deepcopy(event))
    told["a"].insert(5, {"event": "peer", "t": 3.4, "kind": "lost", "peer": "c"})
    return told


def records(told: dict[str, list[dict[str, Any]]]) -> list[PeerRecord]:
    return [PeerRecord(number=at, id=peer, events=told[peer]) for at, peer in enumerate(IDS, 1)]


def verdicts(told: dict[str, list[dict[str, Any]]], **more: Any) -> dict[str, Verdict]:
    read = records(told)
    found = judge_peers(read, sequence=SEQUENCE, batches=dict.fromkeys(range(ROUNDS), BATCH))
    outcomes = peer_outcomes(read, FAULTS, SHOTS)
    found.append(judge_named(read, outcomes, **{"dead_after_s": 1.0, "end_s": 60.0, "lasting": {}, **more}))
    return {verdict.name: verdict for verdict in found}


def test_a_good_record_is_believed() -> None:
    found = verdicts(story())
    assert [verdict for verdict in found.values() if not verdict.ok] == []
    assert found["one digest per round"].evidence == "8 rounds, 20 digests, 8 rounds recorded by several peers"
    kill, nan = peer_outcomes(records(story()), FAULTS, SHOTS)
    assert (kill.noticed_s, kill.stalled_s, kill.members, kill.back_s) == (
        pytest.approx(0.3),
        pytest.approx(0.9),
        2,
        None,
    )
    assert (nan.noticed_s, nan.members) == (pytest.approx(0.1), 1)


def test_a_pause_that_nobody_noticed_is_not_charged_with_a_later_fault() -> None:
    faults = parse_faults(["hang:peer=3,step=1,for_s=0.4"], kinds=PEER_FAULTS)
    told = story()
    told["a"] = [event for event in told["a"] if event["event"] != "peer"]  # c is gone from round 4 on all the same
    shot = Firing(id=0, kind="hang", t_s=0.5, monotonic_s=0.0, rank=3, step=1)
    (found,) = peer_outcomes(records(told), faults, [shot])
    assert (found.noticed_s, found.stalled_s, found.members, found.back_s) == (None, 0.5, 3, None)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_claim_of_too_many_samples_may_count_what_was_dealt_where_it_is_named(is_named: bool) -> None:
    faults = parse_faults(["liar:peer=2,step=2"], kinds=PEER_FAULTS)
    shots = [Firing(id=0, kind="liar", t_s=1.9, monotonic_s=0.0, rank=2, step=2, note="round 2")]
    told = story()
    for peer in IDS:
        exchange(told, peer, 2)["capped"] = {"b": "it claims more"} if is_named else {}
    for peer in IDS[:2]:
        exchange(told, peer, 5)["dropped"] = {}
    outcomes = peer_outcomes(records(told), faults, shots)
    verdict = judge_named(records(told), outcomes, dead_after_s=1.0, end_s=60.0, lasting={})
    assert verdict.ok == is_named
    assert is_named or "liar:peer=2,step=2: round 2 counts it" in verdict.evidence


def exchange(told: dict[str, list[dict[str, Any]]], peer: str, number: int) -> dict[str, Any]:
    return next(one for one in told[peer] if one["event"] == "exchange" and one["round"] == number)


def split(told: Any) -> None:
    exchange(told, "b", 7)["digest"] = "another"


def other_side(told: Any) -> None:
    exchange(told, "b", 7)["members"] = ["b"]


def gap(told: Any) -> None:
    for peer in IDS:
        told[peer] = [one for one in told[peer] if one.get("round") != 2]


def jump(told: Any) -> None:
    told["b"] = [one for one in told["b"] if one.get("round") != 2]


def lost(told: Any) -> None:
    exchange(told, "b", 7)["credit"]["c"] -= 2


def repeated(told: Any) -> None:
    for peer in IDS[:2]:
        exchange(told, peer, 5)["weights"]["a"] *= 2


def counted(told: Any) -> None:
    for peer in IDS[:2]:
        exchange(told, peer, 5)["dropped"] = {}
        exchange(told, peer, 5)["weights"]["b"] = 48.0


def silent(told: Any) -> None:
    told["a"] = [one for one in told["a"] if one["event"] != "peer"]


def capped(told: Any) -> None:
    for peer in IDS:
        exchange(told, peer, 2)["capped"] = {"a": "its claim"}


def innocent(told: Any) -> None:
    for peer in IDS:
        exchange(told, peer, 2)["dropped"] = {"a": "its norm"}


@pytest.mark.parametrize(
    ("lie", "name", "said"),
    [
        (split, "one digest per round", "round 7: peers 1 and 2 differ in digest"),
        (other_side, "one digest per round", "round 7: peers 1 and 2 differ in members"),
        (gap, "no round is missing", "round 2 to 2 recorded by nobody"),
        (jump, "no round is missing", "peer 2: round 3 after 1"),
        (lost, "nothing committed is lost", "round 7: peer 2 counts other samples"),
        (repeated, "every sample counts once", "step 5 counted 9 of 6 samples"),
        (silent, "dropped peers are named", "kill:peer=3,step=3 was named by nobody"),
        (counted, "dropped peers are named", "nan:peer=2,step=5: round 5 counts it"),
        (capped, "dropped peers are named", "round 2 named peer 1, which did nothing wrong"),
        (innocent, "dropped peers are named", "round 2 named peer 1, which did nothing wrong"),
    ],
)
def test_every_lie_falls_on_its_verdict(lie: Callable[[Any], None], name: str, said: str) -> None:
    told = story()
    lie(told)
    found = verdicts(told)
    assert not found[name].ok
    assert said in found[name].evidence


def test_a_peer_that_took_the_state_of_others_may_miss_rounds() -> None:
    told = story()
    told["b"] = [one for one in told["b"] if one.get("round") not in (2, 3)]
    told["b"].insert(3, {"event": "peer", "t": 3.5, "kind": "caught-up"})
    assert verdicts(told)["no round is missing"].ok


def test_what_is_drawn_leaves_a_majority_and_is_the_same_for_the_same_seed() -> None:
    drawn = draw_peer_faults(peers=8, rate_per_min=12.0, minutes=30.0, seed=3, dead_after_s=5.0)
    assert drawn == draw_peer_faults(peers=8, rate_per_min=12.0, minutes=30.0, seed=3, dead_after_s=5.0)
    assert {fault.kind for fault in drawn} >= {"kill", "hang", "leave", "partition", "nan", "poison", "liar"}
    spans = [(fault.at_s or 0.0, (fault.at_s or 0.0) + fault.for_s, set(fault.peer)) for fault in drawn if fault.for_s
             and fault.kind != "slow-link"]  # fmt: skip
    for begin, _, _ in spans:
        away = [whom for start, end, whom in spans if start <= begin < end]
        assert sum(map(len, away)) == len(set().union(*away)) < 4  # nobody twice, and fewer than half


LIE = parse_faults(["lie:peer=3,kind=reversed,step=3"], kinds=PEER_FAULTS)
LIE_SHOT = Firing(id=0, kind="lie", t_s=2.9, monotonic_s=0.0, rank=3, step=3, note="round 3")


def judge_lie(told: dict[str, list[dict[str, Any]]]) -> Verdict:
    read = records(told)
    outcomes = peer_outcomes(read, LIE, [LIE_SHOT])
    return judge_named(read, outcomes, dead_after_s=1.0, end_s=60.0, lasting={})


def excluded(peer: str) -> dict[str, Any]:
    return {"event": "peer", "t": 3.4, "kind": "excluded", "peer": peer, "text": "it lies"}


def test_a_liar_must_be_excluded_and_no_other_peer_may_be() -> None:
    told = story()
    for event in told["a"] + told["b"]:
        event.pop("dropped", None)
    assert "named by nobody" in judge_lie(told).evidence  # it was lost, and not excluded
    told["b"].insert(5, excluded("c"))
    assert judge_lie(told).ok
    (outcome,) = peer_outcomes(records(told), LIE, [LIE_SHOT])
    assert (outcome.noticed_s, outcome.members) == (pytest.approx(0.5), 2)
    told["a"].append(excluded("b"))
    assert "peer 2, which did nothing wrong, was excluded" in judge_lie(told).evidence


def ending(losses: dict[int, float], *, noise: float = 0.001, sequences: int = 64) -> list[PeerRecord]:
    """Peers that end with these losses, and with `noise` by sequence that two calls with other losses do not share."""
    found = []
    for number, loss in losses.items():
        drawn = np.random.default_rng(round(1000 * loss)).normal(loss, noise, sequences)
        by_sequence = (drawn + loss - drawn.mean()).tolist()
        event = {"event": "evaluate", "t": 1.0, "loss": loss, "sequence_losses": by_sequence}
        found.append(PeerRecord(number=number, id=str(number), events=[event]))
    return found


def test_the_loss_of_honest_peers_is_held_against_the_run_without_lies() -> None:
    honest = ending({1: 2.0, 2: 2.0, 3: 2.0})
    found = judge_loss(ending({1: 2.019, 2: 2.019, 3: 9.0}), honest, {3})
    assert found.ok
    assert found.evidence == "2.0190 nats, +0.0190 ± 0.0002 over 2.0000 without lies"
    assert not judge_loss(ending({1: 2.019, 2: 2.021, 3: 2.0}), honest, {3}).ok
    assert judge_loss(ending({1: 1.5}), honest, {3}).ok
    assert not judge_loss(ending({3: 2.0}), honest, {3}).judged


def test_a_loss_on_too_few_sequences_is_not_judged() -> None:
    noisy = {"noise": 0.1, "sequences": 64}
    found = judge_loss(ending({1: 2.01}, **noisy), ending({1: 2.0}, **noisy), {3})
    assert not found.ok
    assert not found.judged
    assert "64 held-out sequences cannot tell: set train.evaluate_sequences higher" in found.evidence
    assert judge_loss(ending({1: 2.01}, noise=0.1, sequences=2000), ending({1: 2.0}, noise=0.1, sequences=2000), {3}).ok
