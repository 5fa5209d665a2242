"""Numbers from a peer: none makes this side reserve memory, count for long, or fail with anything but a refusal."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from crew import Crew, together
from test_round_leader import IDS, Stage, ready

from phalanx.errors import SystemFailure
from phalanx.peers import messages as say
from phalanx.peers.attempt import NORM_TOLERANCE, Attempt, BadUpdate, check_plan
from phalanx.peers.facts import Bandwidth, Member, MemberView, PeerProgress, PeerState
from phalanx.peers.messages import decode_message, encode_message
from phalanx.peers.node_settings import MOST_VALUES
from phalanx.peers.state_transfer import BLOCK_BYTES, BadState, _receive_state, check_tensors

LONG = 2**30


def plan(values: int, ids: Any = IDS, **changes: Any) -> say.RoundPlan:
    facts: dict[str, Any] = {
        "view_number": 2,
        "round_number": 0,
        "attempt": 1,
        "values": values,
        "codec": "fp64",
        "top_share": 0.1,
        "segment": 4096,
        "weights": dict.fromkeys(ids[:2], 1.0),
        "norms": dict.fromkeys(ids[:2], 1.0),
        "owners": {ids[1]: (0, values)},
        "dropped": {},
    }
    return say.RoundPlan(**(facts | changes))


def view() -> MemberView:
    members = tuple(Member(id=one, name=one, address=("h", 1), instance="i") for one in IDS)
    return MemberView(number=2, members=members, next_round=0)


def is_taken(message: say.PeerMessage) -> bool:
    try:
        return decode_message(encode_message(message)) == message
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"values": LONG + 1}, "no vector of this run has more than 1,073,741,824"),
        ({"dropped": {"f" * 16: ""}}, "peers that are not in the view"),
        ({"paces": {"f" * 16: 1.0}}, "peers that are not in the view"),
        ({}, ""),
    ],
)
def test_a_plan_that_is_larger_than_the_run_is_refused(changes: dict[str, Any], text: str) -> None:
    assert text in check_plan(plan(**({"values": LONG} | changes)), view(), most_values=LONG)
    if not text:
        assert check_plan(plan(LONG), view(), most_values=LONG) == ""
        assert check_plan(plan(2 * MOST_VALUES), view())


def test_a_plan_of_many_segments_takes_no_more_memory_than_its_message() -> None:
    tracemalloc.start()
    try:
        attempt = Attempt(plan(LONG), IDS[1])
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert not attempt.is_whole
    assert not attempt.has_summed_its_share
    assert not attempt.take_mean(IDS[1], 1, b"")
    assert not attempt.take_mean(IDS[1], LONG, b"")


def test_shares_that_end_within_a_segment_are_cut_where_they_end() -> None:
    values = 3 * 4096 + 5
    owners = {IDS[0]: (8192, values), IDS[1]: (0, 8192), IDS[2]: (values, values)}
    shared = plan(values, owners=owners, segment=8192, weights={IDS[0]: 1.0}, norms={IDS[0]: 1e3})
    vector = np.arange(values) / values
    owner, other = Attempt(shared, IDS[0], outgoing=vector), Attempt(shared, IDS[1])
    assert [list(owner.segments_of(one)) for one in IDS[:3]] == [[8192], [0], []]
    assert [start for start, _ in other.take_piece(IDS[0], 0, owner.encode_piece(0))] == [0]
    assert [start for start, _ in owner.take_own_pieces()] == [8192]
    assert other.has_summed_its_share
    late = Attempt(shared, IDS[2])
    assert not late.take_mean(IDS[1], 4096, bytes(8 * 4096))
    assert not late.means()  # no segment starts there
    assert not other.take_mean(IDS[1], 8192, owner.mean_for(IDS[1], 8192))  # of another's share
    assert other.take_mean(IDS[0], 8192, owner.mean_for(IDS[1], 8192))
    assert np.array_equal(other.result(), vector)


def test_a_long_plan_of_the_leader_is_refused_by_who_knows_the_model() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(2)
        leader, other = groups
        other.expect_values(9_000)
        together([lambda one=one: one.average(0, np.ones(9_000), 1.0, timeout_s=25.0) for one in groups])
        ids, number = leader.view().ids, other.view().number
        alone = {ids[0]: 1.0}  # whoever is counted itself knows its own vector too
        long = say.Begin(plan=plan(9_001, ids, view_number=number, round_number=1, weights=alone, norms=alone))
        leader._loop.call_soon_threadsafe(leader._node.links.post, ids[1], long)
        crew.wait_for(lambda: "refused" in [event.kind for event in crew.events[1]])
        assert "no vector of this run has more than 9,000" in crew.events[1][-1].text
        calls = [lambda one=one: one.average(1, np.ones(9_000), 1.0, timeout_s=25.0) for one in groups]
        assert all(len(result.members_counted) == 2 for result in together(calls))


# ---- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "taken"), [(say.MOST_NORM, True), (1e150, False), (1e300, False)])
def test_a_norm_whose_square_is_no_number_is_refused(norm: float, taken: bool) -> None:
    assert is_taken(msgspec.structs.replace(ready(), norm=norm)) == taken
    assert is_taken(say.Begin(plan=plan(4096, norms=dict.fromkeys(IDS[:2], norm)))) == taken


def test_the_largest_norm_is_compared() -> None:
    attempt = Attempt(plan(4096, norms=dict.fromkeys(IDS[:2], say.MOST_NORM)), IDS[1])
    most = np.zeros(4096)
    most[0] = NORM_TOLERANCE * say.MOST_NORM
    assert list(attempt.take_piece(IDS[0], 0, most.tobytes())) == []
    assert is_taken(say.UpdateNorms(key=(2, 0, 1), squares=attempt.squares))
    with pytest.raises(BadUpdate) as caught:
        list(attempt.take_piece(IDS[1], 0, (2 * most).tobytes()))
    assert "larger norm than the 1e+149" in caught.value.reason


def test_a_leader_compares_the_largest_norm() -> None:
    stage = Stage(3)
    stage.leader.on_view()
    stage.sent.clear()
    for peer in IDS[:3]:
        stage.leader.on_message(peer, msgspec.structs.replace(ready(), norm=say.MOST_NORM))
    stage.have(0)
    stage.have(1)
    stage.norms(say.MOST_NORM**2 / 3)
    assert stage.is_committed


def test_a_diverged_update_is_left_out_and_keeps_its_link() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(3)
        vectors = [np.ones(100), np.ones(100), np.full(100, 1e150)]
        calls = [
            lambda one=one, vector=vector: one.average(0, vector, 1.0, "fp64", timeout_s=25.0)
            for one, vector in zip(groups, vectors, strict=True)
        ]
        for result in together(calls):
            assert result.committed, result.reason
            assert dict(result.dropped) == {groups[2].id: "its update is not finite (NaN or infinity)"}
        assert "lost" not in crew.kinds(0)


# ---- other messages --------------------------------------------------------------------------------------------------


def test_a_codec_that_nobody_knows_never_reaches_a_plan() -> None:
    stage = Stage(2)
    for changes in ({"codec": "zip"}, {"codec": "topk-2bit", "top_share": 0.0}):
        with pytest.raises(ValueError):
            stage.leader.on_message(IDS[1], msgspec.structs.replace(ready(), values=2**53, **changes))
    stage.leader.tick()


@pytest.mark.parametrize(
    "change",
    [
        {"address": ("h", 10**30)},
        {"address": ("h", -1)},
        {"address": ("h" * 254, 1)},
        {"bandwidth": Bandwidth(up_mbps=0.0, down_mbps=1.0)},
        {"bandwidth": Bandwidth(up_mbps=1.0, down_mbps=1e300)},
    ],
)
def test_impossible_members_are_refused(change: dict[str, Any]) -> None:
    good = view()
    bad = replace(good, members=(replace(good.members[0], **change),))
    assert is_taken(say.Install(proposal=say.NextView(view=good)))
    assert not is_taken(say.Install(proposal=say.NextView(view=bad)))
    assert not is_taken(say.Install(proposal=say.NextView(view=replace(good, next_round=10**30))))


# ---- the state -------------------------------------------------------------------------------------------------------


def facts(**sizes: int) -> list[say.TensorFacts]:
    return [say.TensorFacts(name=name, size=size, sha256="0" * 64) for name, size in sizes.items()]


@pytest.mark.parametrize(
    ("offered", "text"),
    [
        (facts(w=11, o=5), "w has 11 bytes, in this job at most 10"),
        (facts(w=10, x=5), "not those of this job (o is in one of them alone)"),
        (facts(w=10), "not those of this job (o is in one of them alone)"),
        (facts(w=10, o=5, x=0), "not those of this job (x is in one of them alone)"),
        ([*facts(w=10, o=5), *facts(w=10)], "impossible"),
        (facts(w=2**40, o=1), "impossible"),
    ],
)
def test_a_state_of_other_tensors_is_refused_by_its_list(offered: list[say.TensorFacts], text: str) -> None:
    with pytest.raises(BadState) as caught:
        check_tensors(offered, {"w": 10, "o": 5})
    assert text in str(caught.value)
    assert check_tensors(facts(w=9, o=5), {"w": 10, "o": 5}) == 14


def test_a_state_that_is_too_large_is_not_received() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(2)
        groups[0].serve_state(lambda: PeerState(round_number=-1, tensors={"w": b"12345678"}))
        found: dict[str, bytes] = {}
        with pytest.raises(SystemFailure) as caught:
            groups[1].fetch_state(found.__setitem__, most_bytes={"w": 7})
        assert "w has 8 bytes, in this job at most 7" in str(caught.value)
        assert not found
        assert groups[1].fetch_state(found.__setitem__, most_bytes={"w": 8}) == -1
        assert found == {"w": b"12345678"}


@pytest.mark.parametrize("sent", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_blocks_of_a_state_are_whole(sent: int) -> None:
    """A byte in half a minute is no progress."""
    listed = msgspec.json.encode(facts(w=3 * BLOCK_BYTES))
    answers = [(say.Manifest(round_number=0, tensors=1), listed), (say.StateBlock(), bytes(sent))]

    class Connection:
        async def send(self, message: say.PeerMessage) -> None: ...

        async def receive(self) -> tuple[say.PeerMessage, bytes]:
            return answers.pop(0)

    connection: Any = Connection()
    with pytest.raises(BadState) as caught:
        asyncio.run(_receive_state(connection, lambda name, data: None, least_round=0, most_bytes=None))
    assert "other bytes than it announced" in str(caught.value)


@pytest.mark.parametrize(("times", "taken"), [((-1e8, -2.5), True), ((1e9, 0.0), True), ((float("inf"), 0.0), False)])
def test_a_clock_that_is_wrong_ends_no_link(times: tuple[float, float], taken: bool) -> None:
    """Times are of the sender's own clock, and come back to it: only what is no number is refused."""
    heartbeat = say.PeerHeartbeat(
        view_number=1,
        history="h",
        sent_at=times[0],
        echo=times[1],
        held_s=0.1,
        progress=PeerProgress(),
        syncing=False,
        suspects=[],
        list_version=1,
        committed=-1,
    )
    assert is_taken(heartbeat) == taken
