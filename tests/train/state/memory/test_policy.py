"""Whatever the order in which ranks seal and send, what all of them held can be restored; also when a host is lost."""

import random

import pytest
import torch

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import Lineage, ReplicaInfo, RestorePoint, find_restore_points
from phalanx.train.state.in_memory import ReplicaPeer, replica_peer_of
from phalanx.train.state.replica_server import _claim_segment

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


class Patient:
    """A worker that does the next job when it is told to."""

    def __init__(self):
        self.jobs = []

    def do(self, job):
        self.jobs.append(job)

    def close(self, timeout_s=None):
        return True


class Neighbour:
    """A replica without a network: the same choice of buffer, and a copy of the bytes."""

    trouble = ""

    def __init__(self, replica_store, slot):
        self.segments = replica_store.buffers("guest", slot)

    def send(self, segment, needs):
        with _claim_segment(self.segments, needs) as taken:
            assert taken is not None
            header = segment.header()
            taken.wipe()
            taken.reserve(header.end)[: header.end] = segment.view()[: header.end]
            return True


class Cluster:
    """Two hosts, four ranks, and a die that decides who seals or sends next."""

    def __init__(self, kit, seed):
        self.kit, self.rng = kit, random.Random(seed)
        self.stores = {host: ReplicaStore(2) for host in "ab"}
        self.generation, self.step, self.floor, self.held = 0, 0, 0, -1
        self.restored = None
        self.lineage = Lineage()
        self.form()

    def form(self):
        """A new generation, from the newest that there is; ranks change places at will."""
        self.generation += 1
        found = self.restorable("ab")
        self.restored = (found[0].generation, found[0].step) if found else None
        self.lineage = self.lineage.begin(self.generation, source=self.restored)
        self.step = self.floor = found[0].step if found else 0
        self.held = -1
        places = self.rng.sample(sorted(HOSTS), 4)  # rank -> whose seat of old
        self.keepers = []
        seats = {rank: HOSTS[seat] for rank, seat in enumerate(places)}
        for rank, seat in enumerate(places):
            replica_store, peer = self.stores[HOSTS[seat]], replica_peer_of(rank, seats)
            keeper = self.kit.keeper(
                replica_store, rank, 4, generation=self.generation, slot=seat % 2, restored=self.restored
            )
            keeper._sealer.close()
            keeper._sender.close()
            keeper._sealer, keeper._sender = Patient(), Patient()
            keeper._replica = Neighbour(self.stores[seats[peer.rank]], peer.slot)
            self.keepers.append(keeper)

    def restorable(self, hosts):
        return find_restore_points({host: self.stores[host].held() for host in hosts}, lineage=self.lineage)

    def check(self):
        newest = self.restorable("ab")
        assert (newest[0].step if newest else 0) >= max(self.floor, self.held)
        for host in "ab":
            newest = self.restorable(host)
            assert (newest[0].step if newest else -1) >= self.held

    def run_some(self, most):
        """Let up to `most` jobs be done, of any rank."""
        for _ in range(self.rng.randint(0, most)):
            ready = [worker for k in self.keepers for worker in (k._sealer, k._sender) if worker.jobs]
            if ready:
                self.rng.choice(ready).jobs.pop(0)()
                self.check()

    def train(self):
        """One step: its all-reduce, and a snapshot on each rank, with others' jobs in between."""
        self.held = max(self.held, min(keeper.safe_step for keeper in self.keepers))
        self.step += 1
        for rank in self.rng.sample(range(4), 4):
            shards = [self.kit.shard("w", torch.tensor([self.step]), (4,), (rank,))]
            self.keepers[rank].put(self.step, shards, {}, held=self.held)
            self.check()
            self.run_some(3)

    def fall(self):
        """A rank is lost: what the others have copied they complete, what they were sending they give up."""
        lost = self.rng.randrange(4)
        for rank, keeper in enumerate(self.keepers):
            while keeper._sealer.jobs and rank != lost:
                keeper._sealer.jobs.pop(0)()
        self.check()
        self.form()


@pytest.mark.parametrize("seed", range(12))
def test_what_all_held_is_never_lost(kit, seed):
    cluster = Cluster(kit, seed)
    for _ in range(25):
        cluster.train()
        if cluster.rng.random() < 0.15:
            cluster.fall()
    assert cluster.step > 5
    for replica_store in cluster.stores.values():
        replica_store.close()


def test_the_peer_is_on_the_next_host():
    three = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    assert [replica_peer_of(rank, three) for rank in three] == [
        ReplicaPeer(rank=2, slot=0),
        ReplicaPeer(rank=3, slot=1),
        ReplicaPeer(rank=4, slot=0),
        ReplicaPeer(rank=5, slot=1),
        ReplicaPeer(rank=0, slot=0),
        ReplicaPeer(rank=1, slot=1),
    ]
    assert replica_peer_of(1, {0: "a", 1: "a"}) is None
    assert replica_peer_of(0, {0: "a"}) is None


def test_no_two_ranks_share_a_place_and_work_is_even():
    rng = random.Random(1)
    for _ in range(200):
        hosts = {rank: f"host{rng.randrange(rng.randint(1, 5))}" for rank in range(rng.randint(1, 16))}
        taken = {}
        for rank, host in hosts.items():
            peer = replica_peer_of(rank, hosts)
            if peer is None:
                assert len(set(hosts.values())) == 1
                continue
            assert hosts[peer.rank] != host
            place = (hosts[peer.rank], peer.slot)
            assert place not in taken
            taken[place] = peer.rank
        for host in set(hosts.values()):
            loads = [list(taken.values()).count(rank) for rank in hosts if hosts[rank] == host]
            assert max(loads) - min(loads) <= 1


def held(rank, *, step=5, generation=1, world=2, slot=0, kind="own"):
    return ReplicaInfo(
        rank=rank,
        world=world,
        generation=generation,
        step=step,
        slot=slot,
        kind=kind,
        buffer=0,
        tensors=1,
        size_bytes=8,
    )


def test_only_a_step_that_every_rank_has_is_a_choice():
    found = find_restore_points(
        {"a": [held(0), held(0, step=6)], "b": [held(1), held(1, step=7), held(0, kind="guest")]}
    )
    assert [(one.generation, one.step) for one in found] == [(1, 5)]
    assert [(place.host, place.kind) for place in found[0].places[0]] == [("a", "own"), ("b", "guest")]
    assert RestorePoint.from_json(found[0].to_json()) == found[0]
    assert find_restore_points({"a": [held(0)]}) == []
    assert find_restore_points({}) == []


def test_snapshots_of_two_generations_make_no_whole():
    assert find_restore_points({"a": [held(0, generation=1), held(1, generation=2)]}) == []
    assert find_restore_points({"a": [held(0, world=2), held(1, world=3)]}) == []


def test_the_newest_generation_comes_first_and_steps_that_were_undone_not_at_all():
    old, new = [held(0, step=9), held(1, step=9)], [held(0, step=8, generation=2), held(1, step=8, generation=2)]
    everything = {"a": [*old, *new]}
    assert [(one.generation, one.step) for one in find_restore_points(everything)] == [(2, 8), (1, 9)]
    line = Lineage().begin(1, source=None).begin(2, source=(1, 7))
    assert [(one.generation, one.step) for one in find_restore_points(everything, lineage=line)] == [(2, 8)]
    assert find_restore_points({"a": old}, lineage=line) == []
    assert find_restore_points(everything, at_most=7) == []
    assert [one.step for one in find_restore_points(everything, at_most=8)] == [8]


def test_a_lineage_goes_through_every_generation_the_run_came_from():
    line = Lineage().begin(1, source=None).begin(2, source=(1, 10)).begin(3, source=(1, 8)).begin(5, source=(3, 20))
    assert [line.allows(*place) for place in ((1, 8), (1, 9), (2, 9), (3, 20), (3, 21), (4, 20), (5, 99))] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert not line.begin(6, source=None).allows(5, 21)  # from disk: nothing in memory precedes it
    assert Lineage.from_json(line.to_json()) == line
