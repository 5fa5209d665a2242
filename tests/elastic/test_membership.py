"""Who takes part next, from the slots that are alive."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from phalanx.elastic.membership import HostMembership, HostSlot, Membership, next_membership, replace_slots
from phalanx.elastic.replica_ring import ReplicaTable
from phalanx.elastic.restore_point import ReplicaInfo, find_whole_step, fold_held
from phalanx.plan.layout import Layout

LAYOUT = Layout(
    data=4, shard=4, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=3, sequence_parallel=False,
    micro_batch=2, accumulation=2, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
SEQUENCES = 16


def slots(*names: str) -> tuple[HostSlot, ...]:
    """`a0` is slot 0 of host a."""
    return tuple(HostSlot(name[0], int(name[1:])) for name in names)


def named(membership: Membership | None) -> list[str] | None:
    return [f"{slot.host}{slot.slot}" for slot in membership.slots] if membership is not None else None


def following(
    alive: str, *, before: str = "", policy: str = "auto", planned: Layout = LAYOUT, **more: Any
) -> Membership | None:
    old = slots(*before.split())
    layout = replace(planned, data=len(old), shard=len(old)) if old else planned
    return next_membership(
        generation=7,
        planned=planned,
        sequences=SEQUENCES,
        reproducible=False,
        policy=policy,
        before=Membership(generation=6, layout=layout, slots=old) if old else None,
        alive=slots(*alive.split()),
        fallen=slots(*str(more.get("fallen", "")).split()),
    )


def test_the_first_membership_takes_the_first_slots() -> None:
    assert named(following("a0 a1 a2 b0 b1 b2")) == ["a0", "a1", "a2", "b0"]


def test_survivors_keep_their_ranks() -> None:
    assert named(following("a0 a1 a2 a3 a4", before="a3 a1 a0 a2")) == ["a3", "a1", "a0", "a2"]


def test_a_lost_rank_goes_to_a_slot_of_its_own_host_if_it_can() -> None:
    found = following("a0 a1 a2 b0 b1 b3", before="a0 a1 b0 b2")
    assert named(found) == ["a0", "a1", "b0", "b1"]
    assert named(following("a0 a1 a2 b0", before="a0 a1 b0 b1")) == ["a0", "a1", "b0", "a2"]


@pytest.mark.parametrize(("policy", "world"), [("auto", 3), ("shrink", 3), ("replace", None)])
def test_too_few_slots(policy: str, world: int | None) -> None:
    found = following("a0 a1 a3", before="a0 a1 a2 a3", policy=policy)
    assert (found.world if found is not None else None) == world


def test_under_shrink_only_survivors_count() -> None:
    found = following("a0 a1 a2 a3 a4", before="a0 a1 a2 a3", policy="shrink", fallen="a1")
    assert named(found) == ["a0", "a2", "a3"]


def test_a_smaller_layout_keeps_what_splits_the_model() -> None:
    planned = replace(LAYOUT, data=2, shard=2, tensor=2)
    found = following("a0 a1 a2", before="", policy="auto", planned=planned)
    assert found is not None
    assert (found.world, found.layout.tensor, found.layout.data) == (2, 2, 1)
    assert following("a0", planned=planned) is None


def test_nobody_is_left() -> None:
    assert following("", before="a0 a1 a2 a3") is None


def test_a_membership_as_json_and_back() -> None:
    membership = following("a0 a1 b0 b1")
    assert membership is not None
    assert Membership.from_json(membership.to_json()) == membership
    assert (membership.rank_at(HostSlot("b", 1)), membership.rank_at(HostSlot("b", 2))) == (3, None)
    assert (membership.ranks_on("b"), membership.hosts) == ({0: 2, 1: 3}, ("a", "b"))
    with pytest.raises(ValueError, match="3 slots for 4 ranks"):
        Membership(generation=1, layout=LAYOUT, slots=membership.slots[:3])


def test_many_ranks_are_few_words() -> None:
    """Of 131,072 ranks a host is told eight, and the whole is known by its digest; no message grows with the hosts."""
    hosts = 512
    layout = replace(LAYOUT, data=8 * hosts, shard=8 * hosts)
    places = tuple(HostSlot(f"host-{host:05d}", slot) for host in range(hosts) for slot in range(8))
    one = Membership(generation=3, layout=layout, slots=places)
    assert Membership.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert len(one.runs) == hosts
    told = json.dumps({**one.summary(), **one.share_of("host-00511")})
    assert len(told) < 700
    share = HostMembership.from_json(json.loads(told))
    assert (share.generation, share.world, share.ranks[7]) == (3, 4096, 4095)
    moved = Membership(generation=4, layout=layout, slots=(*places[1:], places[0]))
    assert len({one.digest, one.renumbered(4).digest, moved.digest}) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_table_of_peers_taken_over_is_the_one_built_anew(seed: int) -> None:
    """Hosts that come, go, listen elsewhere or have other ranks, some of them on one machine, in racks or not."""
    rng = random.Random(seed)
    names = [f"h{number}" for number in range(rng.randint(1, 7))]
    machines = {name: f"m{rng.randint(0, 2)}" for name in names if rng.random() < 0.3}
    rack_hosts, ports = rng.randint(1, 2), dict.fromkeys(names, 8000)
    table: ReplicaTable | None = None
    for generation in range(1, 9):
        if table is None or rng.random() < 0.6:
            here = rng.sample(names, rng.randint(1, len(names)))
            places = [HostSlot(name, slot) for name in here for slot in range(rng.randint(1, 2))]
            if rng.random() < 0.3:
                rng.shuffle(places)
        for name in rng.sample(names, rng.randint(0, 1)):
            ports[name] += 1
        layout = replace(LAYOUT, data=len(places), shard=len(places))
        membership = Membership(generation=generation, layout=layout, slots=tuple(places))
        listening = {name: (name, {"0": [1, ports[name]], "1": [1, ports[name] + 100]}) for name in membership.hosts}
        whole = ReplicaTable.build(membership, listening, machines=machines, rack_hosts=rack_hosts)
        table = ReplicaTable.build(membership, listening, machines=machines, rack_hosts=rack_hosts, before=table)
        assert table.peers == whole.peers


def test_what_did_not_change_is_taken_over() -> None:
    places = [HostSlot(f"h{number}", 0) for number in range(8)]
    layout = replace(LAYOUT, data=8, shard=8)
    one = Membership(generation=1, layout=layout, slots=tuple(places))
    two = Membership(generation=2, layout=layout, slots=(*places[:3], HostSlot("spare", 0), *places[4:]))
    tables = list[ReplicaTable]()
    for membership in (one, two):
        listening = {name: (name, {"0": [1, 8000]}) for name in membership.hosts}
        before = tables[-1] if tables else None
        tables.append(ReplicaTable.build(membership, listening, machines={}, rack_hosts=1, before=before))
    first, second = tables
    built = [name for name, peers in second.peers.items() if peers is not first.peers.get(name)]
    assert sorted(built) == ["h2", "spare"], "who gave to the lost host, and who is in its place"


def test_a_step_is_whole_whether_all_ranks_wrote_or_some_did() -> None:
    """In messages, writers that are all of the ranks are left out."""

    def held(ranks: list[int], tensors: int) -> list[Any]:
        infos = [
            ReplicaInfo(
                rank=rank,
                world=4,
                generation=2,
                step=7,
                slot=rank,
                kind="own",
                buffer=0,
                tensors=tensors if rank != 3 else 1,
                size_bytes=1,
            )
            for rank in ranks
        ]
        return json.loads(json.dumps([one.to_json() for one in fold_held(infos)]))

    assert held([0, 1], 1)[0][4] is None
    for tensors, writers in ((1, [[0, 3]]), (0, [[3, 3]])):
        point = find_whole_step([*held([0, 1], tensors), *held([2, 3], tensors), *held([1, 2], tensors)])
        assert point is not None
        assert (point.step, point.ranks.to_json(), point.writers.to_json()) == (7, [[0, 3]], writers)


def test_ranks_that_move_give_the_membership_that_all_slots_give() -> None:
    """The coordinator of very many hosts goes through the lost ranks alone: the result is to the last slot the same."""
    draw = random.Random(5)
    for _ in range(200):
        every = [HostSlot(host, slot) for host in "abcd" for slot in range(3)]
        before = Membership(generation=6, layout=LAYOUT, slots=tuple(draw.sample(every, 4)))
        alive = sorted(draw.sample(every, draw.randint(4, len(every))))
        expected = next_membership(
            generation=7, planned=LAYOUT, sequences=SEQUENCES, reproducible=False,
            policy="auto", before=before, alive=alive,
        )  # fmt: skip
        lost = [rank for rank, one in enumerate(before.slots) if one not in alive]
        others = [one for one in alive if one not in before.slots]
        found = before.with_moved(7, replace_slots(before, lost, others))
        assert expected is not None
        assert (found, found.hosts, found.digest) == (expected, expected.hosts, expected.digest)
        assert [found.ranks_on(host) for host in "abcd"] == [expected.ranks_on(host) for host in "abcd"]
