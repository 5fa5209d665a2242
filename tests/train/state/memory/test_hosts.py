"""Two hosts: each keeps a copy of the other's state, and either can be lost."""

import os
import signal
import threading
import time

import pytest

from phalanx.elastic.channel import connect
from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import RestorePoint, find_restore_points
from phalanx.errors import Problem, SystemFailure
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.in_memory import ReplicaAddress, replica_peer_of
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.train.state.restore import load_shards

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def wait_for(condition, what):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def newest(replica_store, slot):
    """The newest step that a host holds of its own."""
    return max((one.step for one in replica_store.held() if (one.kind, one.slot) == ("own", slot)), default=-1)


@pytest.fixture
def stores():
    made = {host: ReplicaStore(2) for host in "ab"}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture
def job(kit, stores, serve):
    """Starts the four keepers of a generation; they end with the test."""
    servers = {host: serve(replica_store, host) for host, replica_store in stores.items()}
    keepers = []

    def start(generation=1, restored=None):
        for keeper in keepers:
            keeper.close()
        for server in servers.values():
            server.admit(generation)
        keepers[:] = []
        for rank, host in HOSTS.items():
            peer = replica_peer_of(rank, HOSTS)
            where = ReplicaAddress(host="127.0.0.1", port=servers[HOSTS[peer.rank]].port, slot=peer.slot)
            keepers.append(
                kit.keeper(stores[host], rank, 4, generation=generation, slot=rank % 2, peer=where, restored=restored)
            )
        return keepers

    start.servers = servers
    yield start
    for keeper in keepers:
        keeper.close()


def put(kit, keepers, step, held):
    for keeper, shards in zip(keepers, kit.cut(kit.state(step), 4), strict=True):
        keeper.put(step, shards, {"step": step}, held=held)
    wait_for(lambda: all(k.safe_step == step for k in keepers), [(k.safe_step, k.trouble) for k in keepers])


def restored(kit, source, step, world=3):
    right = kit.cut(kit.state(step), world)
    for rank, (expected, shards) in enumerate(zip(right, kit.emptied(right), strict=True)):
        load_shards(source, shards, rank=rank, world=world)
        assert all(kit.same_bits(a.tensor, b.tensor) for a, b in zip(expected, shards, strict=True))


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_host_that_is_left_has_everything(kit, stores, job, lost):
    keepers = job()
    for step in (1, 2, 3):
        put(kit, keepers, step, held=step - 1)
    left = "ab".replace(lost, "")
    (newest, *_) = find_restore_points({left: stores[left].held()})
    assert (newest.step, newest.world) == (3, 4)
    assert [place.kind for places in newest.places.values() for place in places] == (
        ["guest", "guest", "own", "own"] if lost == "a" else ["own", "own", "guest", "guest"]
    )
    source = ReplicaSource(newest, replica_store=stores[left], local_host=left, peers={}, secret=kit.SECRET)
    restored(kit, source, 3)


def test_a_rank_reads_the_other_hosts_snapshots_over_the_network(kit, stores, job):
    put(kit, job(), 1, held=-1)
    # Without its own memory, as on a host that has just joined.
    held = {host: replica_store.held() for host, replica_store in stores.items()}
    choice = RestorePoint.from_json(find_restore_points(held)[0].to_json())
    peers = {host: ("127.0.0.1", server.port) for host, server in job.servers.items()}
    fresh = ReplicaStore(1)
    source = ReplicaSource(choice, replica_store=fresh, local_host="c", peers=peers, secret=kit.SECRET)
    restored(kit, source, 1)
    assert source.meta == {"step": 1}
    fresh.close()


def test_where_one_copy_is_damaged_the_other_is_taken(kit, stores, job):
    put(kit, job(), 1, held=-1)
    held = {host: replica_store.held() for host, replica_store in stores.items()}
    choice = find_restore_points(held)[0]
    peers = {"b": ("127.0.0.1", job.servers["b"].port)}

    def source():
        return ReplicaSource(choice, replica_store=stores["a"], local_host="a", peers=peers, secret=kit.SECRET)

    entry = source().index(1).shards[0]
    stores["a"].segment("own", 1, 0).view()[entry.offset] ^= 4
    restored(kit, source(), 1)
    stores["b"].segment("guest", 1, 0).view()[entry.offset] ^= 4
    with pytest.raises(DamagedCheckpoint) as caught:
        restored(kit, source(), 1)
    assert f"no intact copy of {entry.name} of rank 1: a: {entry.name} is not what was written" in str(caught.value)
    assert f"; b: {entry.name} is not what was written" in str(caught.value)


def test_a_host_that_is_gone_is_named(kit, stores, job):
    put(kit, job(), 1, held=-1)
    choice = find_restore_points({host: replica_store.held() for host, replica_store in stores.items()})[0]
    fresh = ReplicaStore(1)
    source = ReplicaSource(choice, replica_store=fresh, local_host="c", peers={}, secret=kit.SECRET)
    with pytest.raises(DamagedCheckpoint, match="a: that host has left; b: that host has left"):
        restored(kit, source, 1)
    fresh.close()


def test_a_copy_of_an_older_generation_is_refused(kit, stores, job):
    old = job(generation=1)
    put(kit, old, 1, held=-1)
    job.servers["b"].admit(2)
    shards = kit.cut(kit.state(2), 4)[0]
    old[0].put(2, shards, {}, held=1)
    wait_for(lambda: old[0].trouble, "a fenced rank hears of it")
    assert old[0].trouble == "a replica of generation 1 came after generation 2 had begun"
    assert old[0].safe_step == 1
    assert {one.step for one in stores["b"].held() if one.kind == "guest"} == {1}


def test_a_newer_generations_copy_is_never_overwritten_by_an_older_one(kit, stores, job):
    """The server's process may not have heard of the new generation: what lies in memory tells it."""
    put(kit, job(generation=5), 1, held=-1)
    job.servers["b"]._generation = -1
    zombie = kit.keeper(
        stores["a"],
        0,
        4,
        generation=4,
        slot=0,
        peer=ReplicaAddress(host="127.0.0.1", port=job.servers["b"].port, slot=0),
    )
    zombie.put(9, kit.cut(kit.state(9), 4)[0], {}, held=-1)
    wait_for(lambda: zombie.trouble, "a fenced rank hears of it")
    assert zombie.trouble == "a replica of generation 4 came after generation 5 had begun"
    zombie.close()


def test_the_next_generation_begins_from_what_the_lost_host_had_sent(kit, stores, job):
    keepers = job(generation=1)
    for step in (1, 2):
        put(kit, keepers, step, held=step - 1)
    keepers = job(generation=2, restored=(1, 2))
    for step in (3, 4):
        put(kit, keepers, step, held=-1)  # nobody has agreed on anything yet
    for host in "ab":  # either may be lost now: step 2 can still be restored, and so can 3 and 4
        found = find_restore_points({host: stores[host].held()})
        assert [(one.generation, one.step) for one in found] == [(2, 4), (2, 3), (1, 2)]
        source = ReplicaSource(found[-1], replica_store=stores[host], local_host=host, peers={}, secret=kit.SECRET)
        restored(kit, source, 2)


def test_a_peer_that_is_away_for_a_while_gets_every_step(kit, stores, job, serve):
    keepers = job()
    put(kit, keepers, 1, held=-1)
    port = job.servers["b"].port
    job.servers["b"].close()
    for step in (2, 3, 4, 5):  # put waits for nobody, and leaves out what would push out the step that all hold
        for keeper, shards in zip(keepers, kit.cut(kit.state(step), 4), strict=True):
            keeper.put(step, shards, {"step": step}, held=1)
    assert [keeper.skipped for keeper in keepers] == [2, 2, 2, 2]
    wait_for(lambda: keepers[0].trouble and keepers[1].trouble, "they notice")
    assert keepers[0].trouble.startswith("127.0.0.1 does not take a copy: ")
    wait_for(lambda: [keeper.safe_step for keeper in keepers] == [1, 1, 3, 3], "the others go on")
    wait_for(lambda: newest(stores["a"], 0) == 3, "its own host to have it")
    back = serve(stores["b"], "b")
    for keeper in keepers[:2]:
        keeper._replica._peer = ReplicaAddress(host="127.0.0.1", port=back.port, slot=keeper._rank)
    wait_for(lambda: all(keeper.safe_step == 3 for keeper in keepers), "they catch up")
    assert port != back.port
    assert not keepers[0].trouble


def test_a_peer_without_memory_says_so(kit, stores, job, monkeypatch):
    keepers = job()
    guests = stores["b"].buffers("guest", 0)
    for segment in guests:
        monkeypatch.setattr(segment, "reserve", no_memory)
    keepers[0].put(1, kit.cut(kit.state(1), 4)[0], {}, held=-1)
    wait_for(lambda: keepers[0].trouble, "it hears of it")
    assert keepers[0].trouble == "no memory there"
    assert (newest(stores["a"], 0), keepers[0].safe_step) == (1, -1)
    monkeypatch.undo()
    wait_for(lambda: keepers[0].safe_step == 1, "it tries again")


def no_memory(size_bytes):
    raise SystemFailure(Problem(where="", what="no memory there"))


def test_closing_does_not_wait_for_a_peer_that_hangs(kit, stores, monkeypatch):
    """A stopped process: its sockets take what they can and answer nothing."""
    monkeypatch.setattr("phalanx.train.state.in_memory.ANSWER_S", 3600.0)
    reading, writing = os.pipe()

    def hang():
        from phalanx.train.state.replica_server import ReplicaServer

        server = ReplicaServer(stores["b"], secret=kit.SECRET, address="127.0.0.1")
        os.write(writing, server.port.to_bytes(4, "little"))
        time.sleep(600)

    child = kit.fork(hang)
    try:
        port = int.from_bytes(os.read(reading, 4), "little")
        peer = ReplicaAddress(host="127.0.0.1", port=port, slot=0)
        keeper = kit.keeper(stores["a"], 0, 1, slot=0, peer=peer)
        shards = kit.cut(kit.state(1), 1)[0]
        keeper.put(1, shards, {}, held=-1)
        wait_for(lambda: keeper.safe_step == 1, keeper.trouble)
        os.kill(child, signal.SIGSTOP)
        keeper.put(2, shards, {}, held=1)
        wait_for(lambda: newest(stores["a"], 0) == 2, "it is sealed here")
        closing = threading.Thread(target=keeper.close, daemon=True)
        closing.start()
        closing.join(300)
        assert not closing.is_alive(), "it waits for the answer"
        assert keeper.safe_step == 1
    finally:
        os.kill(child, signal.SIGKILL)
        kit.reap(child)
        os.close(reading)
        os.close(writing)


def test_strangers_get_nothing(kit, stores, serve):
    server = serve(stores["a"])
    with pytest.raises(ConnectionError):
        connect(("127.0.0.1", server.port), b"x" * 32, {}, timeout_s=5)
    channel = connect(("127.0.0.1", server.port), kit.SECRET, {}, timeout_s=5)
    channel.send({"op": "list"})
    assert channel.wait(60) == {"op": "held", "held": []}
    channel.close()
    for nonsense in (
        {"op": "explode"},
        {},
        {"op": "read", "kind": "own", "slot": 99, "buffer": 0},
        {"op": "read", "kind": "../etc", "slot": 0, "buffer": 0},
        {"op": "put", "slot": 0, "needs": {}, "header": {}},
    ):
        channel = connect(("127.0.0.1", server.port), kit.SECRET, {}, timeout_s=5)
        channel.send(nonsense)
        with pytest.raises(ConnectionError):
            channel.wait(5)
        channel.close()
    honest = connect(("127.0.0.1", server.port), kit.SECRET, {}, timeout_s=5)
    honest.send({"op": "list"})
    assert honest.wait(60)["op"] == "held"
    honest.close()
