"""A rank that dies while it puts: what it reported as safe is there, whole, for the process that takes its place."""

import json
import subprocess
import sys

import pytest

# As the agent does: makes the replica store, forks ranks, kills them after a while, and looks at what they left. Every
# element of a step is the number of the step, so that a mixture of two would show. One process for all lives: importing
# torch takes longer than everything else here. Prints a line a life.
DRIVER = """
import json, os, random, signal, sys, time
import torch
from phalanx.train.state.restore import load_shards
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.elastic.restore_point import find_restore_points
from phalanx.train.state.in_memory import InMemoryCheckpointer
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.elastic.replica_store import ReplicaStore

torch.set_num_threads(1)
NAMES = [f"w{place}" for place in range(3)]

def shard(name, value):
    tensor = torch.full((400, 500), float(value))  # 0.8 MB each: about 1 ms of copying a put, and 1 ms of sums
    return TensorShard(name=name, tensor=tensor, shape=tensor.shape, start=(0, 0), replicas=1, owner=True, groups={})

def rank(replica_store, generation, found, report):
    restored = None if found is None else (found.generation, found.step)
    keeper = InMemoryCheckpointer(replica_store, slot=0, rank=0, world=1, generation=generation, secret=b"s" * 32,
                                  peer=None, restored=restored)
    step = 0 if found is None else found.step
    while True:
        step += 1
        keeper.put(step, [shard(name, step) for name in NAMES], {"step": step}, held=keeper.safe_step)
        os.write(report, keeper.safe_step.to_bytes(8, "little", signed=True))

def newest(replica_store):
    found = find_restore_points({"here": replica_store.held()})
    if not found:
        return None, 0
    source = ReplicaSource(found[0], replica_store=replica_store, local_host="here", peers={}, secret=b"")
    shards = [shard(name, -1) for name in NAMES]
    load_shards(source, shards)
    values = {float(value) for one in shards for value in one.tensor.aminmax()}
    assert values == {float(found[0].step)} and source.meta == {"step": found[0].step}, values
    return found[0], len(found)

def live(replica_store, generation, puts, seconds):
    found = next(iter(find_restore_points({"here": replica_store.held()})), None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rank(replica_store, generation, found, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        safe = [told.read(8) for _ in range(puts)]
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        safe = [int.from_bytes(data, "little", signed=True) for data in (*safe, *iter(lambda: told.read(8), b""))]
    left, sets = newest(replica_store)
    before = found.step if found else 0
    print(json.dumps({"signal": os.WTERMSIG(status), "before": before, "safe": max(safe, default=-1),
                      "left": left.step if left else 0, "sets": sets}), flush=True)

replica_store, rng = ReplicaStore(1), random.Random(int(sys.argv[1]))
for generation in range(1, int(sys.argv[2]) + 1):
    live(replica_store, generation, rng.choice((0, 1, 1, 2, 3, 5)), rng.uniform(0.0, 0.004))
"""


@pytest.mark.slow
def test_killed_at_random_forty_times():
    command = [sys.executable, "-c", DRIVER, "7", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == 40
    for life in lives:
        assert life["signal"] == 9
        assert life["left"] >= max(life["before"], life["safe"])  # nothing that was safe is lost
    assert sum(life["left"] > life["before"] for life in lives) > 12  # they did live for a while
    # Some died before their first snapshot was complete: the one they began from was still whole.
    assert any(life["left"] == life["before"] for life in lives)


# Two hosts of two ranks, as two agents with a replica store each; the ranks step together and agree on what is held as
# the training does. After a while all processes of one host are killed, and the agent of the other looks at what it
# has.
HOSTS = """
import json, os, random, signal, sys, tempfile, time
from datetime import timedelta
from mmap import mmap
import torch
import torch.distributed as dist
from phalanx.train.state.restore import load_shards
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.in_memory import replica_peer_of
from phalanx.elastic.restore_point import find_restore_points
from phalanx.train.state.in_memory import InMemoryCheckpointer
from phalanx.train.state.in_memory import ReplicaAddress
from phalanx.train.state.replica_server import ReplicaServer
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.elastic.replica_store import ReplicaStore

torch.set_num_threads(1)
WHERE, SECRET = {0: "a", 1: "a", 2: "b", 3: "b"}, b"s" * 32

def shard(rank, value, rows=100):
    tensor = torch.full((rows, 500), float(value))
    return TensorShard(name="w", tensor=tensor, shape=(400, 500), start=(100 * rank, 0),
                       replicas=1, owner=True, groups={})

def run_rank(replica_store, rank, meeting, told):
    server = ReplicaServer(replica_store, secret=SECRET, address="127.0.0.1", host=WHERE[rank])
    store = dist.FileStore(meeting, 4)
    store.set(f"replica_store{rank}", str(server.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=20))
    peer = replica_peer_of(rank, WHERE)
    port = int(store.get(f"replica_store{peer.rank}"))
    keeper = InMemoryCheckpointer(replica_store, slot=rank % 2, rank=rank, world=4, generation=1, secret=SECRET,
                    peer=ReplicaAddress(host="127.0.0.1", port=port, slot=peer.slot))
    step, held = 0, -1
    try:
        while True:
            safe = torch.tensor([keeper.safe_step])
            dist.all_reduce(safe, dist.ReduceOp.MIN)  # the end of a step
            held, step = int(safe), step + 1
            told[8 * rank : 8 * rank + 8] = held.to_bytes(8, "little", signed=True)
            keeper.put(step, [shard(rank, step)], {"step": step}, held=held)
    except RuntimeError:
        keeper.close()  # a peer is gone; what is copied is completed

def start(ranks, meeting, told, replica_store):
    children = []
    for rank in ranks:
        child = os.fork()
        if not child:
            try:
                run_rank(replica_store, rank, meeting, told)
            finally:
                os._exit(0)
        children.append(child)
    return children

def live(seconds, lost, folder):
    told, meeting = mmap(-1, 64), os.path.join(folder, "store")
    told[:32] = (-1).to_bytes(8, "little", signed=True) * 4
    stores = {"a": ReplicaStore(2), "b": ReplicaStore(2)}
    ranks = {host: [rank for rank in WHERE if WHERE[rank] == host] for host in "ab"}
    children = {host: start(ranks[host], meeting, told, stores[host]) for host in "ab"}
    while told[:8] == (-1).to_bytes(8, "little", signed=True):
        time.sleep(0.001)
    time.sleep(seconds)
    for child in children[lost]:
        os.kill(child, signal.SIGKILL)
    for child in children["a"] + children["b"]:
        os.waitpid(child, 0)
    stores.pop(lost)
    (left, replica_store), = stores.items()
    held = max(int.from_bytes(told[8 * rank : 8 * rank + 8], "little", signed=True) for rank in range(4))
    found = find_restore_points({left: replica_store.held()})[0]
    source = ReplicaSource(found, replica_store=replica_store, local_host=left, peers={}, secret=SECRET)
    whole = shard(0, -1, rows=400)
    load_shards(source, [whole])
    low, high = whole.tensor.aminmax()
    assert low == high == found.step, (low, high, found.step)
    print(json.dumps({"held": held, "found": found.step}), flush=True)

rng = random.Random(int(sys.argv[1]))
for number in range(int(sys.argv[2])):
    with tempfile.TemporaryDirectory() as folder:
        live(rng.uniform(0.0, 0.1), "ab"[number % 2], folder)
"""


@pytest.mark.slow
def test_a_lost_host_takes_no_step_with_it_that_all_held():
    command = [sys.executable, "-c", HOSTS, "3", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == 6
    assert all(life["found"] >= life["held"] >= 0 for life in lives), lives
    assert max(life["held"] for life in lives) > 0  # they did live for a while
