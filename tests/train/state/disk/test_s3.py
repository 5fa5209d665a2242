"""Checkpoints in S3, against a server that speaks its protocol over HTTP in a process of its own."""

import json
import os
import re
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch

from phalanx.errors import SystemFailure
from phalanx.train.state import object_store as objects_module
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.paths import parse_location
from phalanx.train.state.reader import list_commits, newest_checkpoint, verify_checkpoint
from phalanx.train.state.restore import load_shards
from phalanx.train.state.retention import remove_drafts
from phalanx.train.state.save import save_checkpoint

pytest.importorskip("s3fs")
pytest.importorskip("moto.server", reason="moto[server] is a real S3 server for tests")

pytestmark = pytest.mark.slow

ROWS, RANKS = 16, 4

# Four processes save each step of a list, each its rows; rank 0 may die at a save point. A line for each list, with how
# they ended; one process for all lists, since importing torch takes longer than everything else here.
DRIVER = """
import json, os, signal, sys
import torch, s3fs
from phalanx.train.state.save import save_checkpoint
from phalanx.train.parallel.tensor_shard import TensorShard

def rank_of(rank, root, world, rows, lives):
    for step, value, attempt, stop in lives:
        def point(name):
            if rank == 0 and name == stop:
                os.kill(os.getpid(), signal.SIGKILL)
        part = rows // world
        mine = torch.full((part, 8), float(value))
        shard = TensorShard(name="w", tensor=mine, shape=(rows, 8), start=(rank * part, 0),
                            replicas=1, owner=True, groups={})
        save_checkpoint(root, step=step, attempt=attempt, shards=[shard], meta={"value": value}, rank=rank, world=world,
                        keep=2, timeout_s=60, point=point)

def run(root, lives, world, rows):
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                rank_of(rank, root, world, rows, lives)
            except BaseException:
                import traceback; traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]

world, rows, runs = json.loads(sys.argv[1])
for root, lives in runs:
    print(json.dumps(run(root, lives, world, rows)), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server that starts empty, and an environment that leads to it."""
    log = tmp_path_factory.mktemp("s3") / "log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = said(log, r"Running on (http://127\.0\.0\.1:\d+)")
        keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
        with patch.dict(os.environ, {**keys, "AWS_ENDPOINT_URL": address, "AWS_EC2_METADATA_DISABLED": "true"}):
            yield address
    finally:
        process.kill()
        process.wait()


def said(log, pattern):
    """What a process writes to its log sooner or later."""
    for _ in range(600):
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.1)
    pytest.fail(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def store(server):
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False)


@pytest.fixture
def root(store, request):
    """A bucket of this test's own, with a prefix in it."""
    bucket = re.sub(r"[^a-z0-9-]", "-", request.node.name.lower())[:60].strip("-")
    store.mkdir(bucket)
    return f"s3://{bucket}/runs/first"


RUNS = {
    "all": [(1, 1, "a", ""), (2, 2, "b", ""), (3, 3, "c", "")],
    **{stop: [(1, 1, "a", ""), (2, 2, "b", stop)] for stop in ("done", "set-aside", "commit")},
}


@pytest.fixture(scope="module")
def runs(store):
    """The root of each run, and how its four processes ended."""
    store.mkdir("four-ranks")
    roots = [f"s3://four-ranks/{name}" for name in RUNS]
    work = [RANKS, ROWS, list(zip(roots, RUNS.values(), strict=True))]
    command = [sys.executable, "-c", DRIVER, json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    ended = map(json.loads, done.stdout.splitlines())
    return {name: (root, end, done.stderr) for name, root, end in zip(RUNS, roots, ended, strict=True)}


def values(kit, path, world=1):
    """What ranks of another world load, put together."""
    found = set()
    for rank in range(world):
        size = -(-ROWS // world)
        rows = min(size, ROWS - rank * size)
        target = kit.shard("w", torch.zeros(rows, 8), (ROWS, 8), (rank * size, 0))
        load_shards(path, [target], rank=rank, world=world)
        found |= set(target.tensor.flatten().tolist())
    return found


def test_four_processes_save_and_three_load(kit, store, runs):
    root, ended, errors = runs["all"]
    assert ended == [0] * RANKS, errors
    assert [place.name for place in list_commits(root)] == ["step-00000003", "step-00000002"]  # keep 2
    found = newest_checkpoint(root, verify=True)
    assert (found.step, found.world, found.meta, found.warnings) == (3, RANKS, {"value": 3}, ())
    assert values(kit, found.path, world=3) == {3.0}
    key = parse_location(root).key
    kept = [f"step-{step:08d}/{attempt}/rank-{rank:05d}{ending}" for step, attempt in ((2, "b"), (3, "c"))
            for rank in range(RANKS) for ending in (".json", ".safetensors")]  # fmt: skip
    kept += ["step-00000002/manifest.json", "step-00000003/manifest.json"]
    assert sorted(store.find(key)) == sorted(f"{key}/{name}" for name in kept)  # no notes, nothing of step 1


@pytest.mark.parametrize("stop", ["done", "set-aside", "commit"])
def test_rank_0_dies_between_part_and_manifest(kit, runs, stop):
    root, ended, _ = runs[stop]
    assert ended[0] == 9
    found = newest_checkpoint(root, verify=True)
    assert (found.step, found.warnings) == ((2 if stop == "commit" else 1), ())
    assert values(kit, found.path) == {float(found.step)}
    remove_drafts(root)
    assert [place.name for place in list_commits(root)][-1] == "step-00000001"  # a sweep takes no commit
    save_checkpoint(
        root, step=2, attempt="c", shards=[kit.shard("w", torch.full((ROWS, 8), 7.0))], meta={}, rank=0, world=1
    )
    assert values(kit, newest_checkpoint(root, verify=True).path) == {7.0}


def test_damaged_and_missing_objects_fall_back(kit, store, root):
    for step in (1, 2):
        path = kit.save_all(root, [[kit.shard("w", torch.full((ROWS, 8), float(step)))]], step=step).path
    key = f"{path.key}/a1/rank-00000.safetensors"
    data = bytearray(store.cat_file(key))
    data[-1] ^= 1
    store.pipe_file(key, bytes(data))
    assert newest_checkpoint(root, verify=True).step == 1
    with pytest.raises(DamagedCheckpoint) as caught:
        values(kit, path)
    assert str(caught.value).startswith(f"{path}/a1/rank-00000.safetensors: holds another w than was written")
    store.pipe_file(key, bytes(data[:-8]))
    with pytest.raises(DamagedCheckpoint, match="bytes instead of"):
        verify_checkpoint(path)
    store.rm_file(key)
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        verify_checkpoint(path)
    with pytest.raises(DamagedCheckpoint, match="cannot be read: No such file or directory"):
        values(kit, path)
    assert values(kit, newest_checkpoint(root, verify=True).path) == {1.0}


def test_large_tensors_go_up_in_parts_and_come_down_in_ranges(kit, store, root, monkeypatch):
    monkeypatch.setattr(objects_module, "CHUNK_BYTES", 5 * 2**20)  # the smallest part S3 allows
    large = torch.randn(3, 2**20)  # 12 MB
    path = kit.save_all(root, [[kit.shard("w", large)]]).path
    target = kit.shard("w", torch.zeros(1, 2**20), large.shape, (1, 0))
    load_shards(path, [target])
    assert torch.equal(target.tensor, large[1:2])


def test_an_upload_that_fails_leaves_no_parts_behind(store, root, monkeypatch):
    monkeypatch.setattr(objects_module, "CHUNK_BYTES", 5 * 2**20)
    place = parse_location(root) / "half"

    def fail():
        with objects_module.ObjectWriter(store, place, 2**24) as writer:
            writer.write(memoryview(bytes(11 * 2**20)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not store.exists(place.key)
    assert store.list_multipart_uploads(place.names[0]) == []


def test_a_bucket_that_is_not_there_is_an_error_of_the_save(kit, server):
    with pytest.raises(SystemFailure) as caught:
        kit.save_all("s3://no-such-bucket/x", [[kit.shard("w", torch.ones(2))]])
    assert str(caught.value).startswith("s3://no-such-bucket/x/step-00000100/a1: step 100 is not saved: ")


def test_a_server_that_is_not_there_is_not_an_empty_store(server, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SystemFailure, match=r"its checkpoints cannot be listed: .*127\.0\.0\.1:9"):
        newest_checkpoint("s3://bucket/x")
    s3fs.S3FileSystem.clear_instance_cache()
