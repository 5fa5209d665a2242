"""The two kinds of storage: what differs between a disk and an object store, and what does not."""

import uuid

import fsspec
import pytest
import torch

from phalanx.errors import SystemFailure, UserError
from phalanx.train.state import storage
from phalanx.train.state.async_saver import AsyncSaver
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.paths import parse_location
from phalanx.train.state.reader import newest_checkpoint, verify_checkpoint
from phalanx.train.state.restore import load_shards
from phalanx.train.state.retention import list_commits, remove_drafts
from phalanx.train.state.save import save_checkpoint


@pytest.fixture
def store():
    return fsspec.filesystem("memory")


@pytest.fixture
def url():
    return f"memory://bucket/{uuid.uuid4().hex}"


def shards(kit, value=1.0):
    return [
        [kit.shard("w", torch.full((2, 3), value), (4, 3))],
        [kit.shard("w", torch.full((2, 3), value), (4, 3), (2, 0))],
    ]


def loaded(kit, path):
    target = kit.shard("w", torch.zeros(4, 3))
    load_shards(path, [target])
    return target.tensor.unique().tolist()


def keys(store, url):
    start = "/" + url.partition("://")[2] + "/"
    return sorted(key.removeprefix(start) for key in store.find(start))


def steps(url):
    return [place.name for place in list_commits(url)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/x", "checkpoint.path: no object store is known as 'ftp'\n  a folder, or s3://, gs://, az://, abfs://"),
        ("simplecache::s3://b/x", "no object store is known as 'simplecache::s3'"),
        ("s3://", "'' cannot be a part of it"),
        ("s3://bucket/../other", "'..' cannot be a part of it"),
        ("s3://bucket//x", "'' cannot be a part of it"),
        ("s3://bucket/a?b", "'a?b' cannot be a part of it"),
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_location(text)
    assert message in str(caught.value)


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(UserError) as caught:
        parse_location("s3://AKIA:hidden@bucket/x")
    assert str(caught.value) == (
        "checkpoint.path: s3://… holds credentials\n  it would be written into the run's files\n"
        "  leave it to the environment or the store's own configuration files"
    )


def test_a_url_joins_and_shows_as_a_path_does():
    url = parse_location("s3://bucket/runs/")
    assert str(url) == "s3://bucket/runs"
    assert (str(url / "x"), (url / "x").name, (url / "x").parent) == ("s3://bucket/runs/x", "x", url)


def test_an_object_commit_is_a_manifest_that_names_its_attempt(kit, store, url):
    path = kit.save_all(url, shards(kit), step=1, attempt="a1").path
    parts = [f"step-00000001/a1/rank-{rank:05d}{ending}" for rank in (0, 1) for ending in (".json", ".safetensors")]
    assert keys(store, url) == [*parts, "step-00000001/manifest.json"]
    assert str(path) == f"{url}/step-00000001"
    assert loaded(kit, path) == [1.0]
    assert verify_checkpoint(path).attempt == "a1"


def test_object_commits_are_kept_replaced_and_swept_as_on_a_disk(kit, store, url):
    for step in (1, 2, 3):
        kit.save_all(url, shards(kit, float(step)), step=step, keep=2)
    assert steps(url) == ["step-00000003", "step-00000002"]
    kit.save_all(url, shards(kit, 9.0), step=3, attempt="b")
    assert loaded(kit, newest_checkpoint(url, verify=True).path) == [9.0]
    assert not any("step-00000003/a1" in key for key in keys(store, url))  # the attempt that no longer counts
    save_checkpoint(url, step=4, attempt="dead", shards=shards(kit)[1], meta={}, rank=1, world=2)
    assert steps(url) == ["step-00000003", "step-00000002"]  # half a checkpoint is not listed
    kit.save_all(url, shards(kit), step=5)
    assert any("step-00000004" in key for key in keys(store, url))  # it is young: somebody may be writing it
    kit.save_all(url, shards(kit), step=5, attempt="dead.2", generation=1)
    assert any("step-00000004" in key for key in keys(store, url))  # of one start with ours: a rank is ahead of us
    kit.save_all(url, shards(kit), step=5, attempt="alive.1", generation=2)
    assert not any("step-00000004" in key for key in keys(store, url))
    save_checkpoint(url, step=4, attempt="dead", shards=shards(kit)[1], meta={}, rank=1, world=2)
    remove_drafts(url)
    assert not any("step-00000004" in key for key in keys(store, url))
    assert steps(url) == ["step-00000005", "step-00000003"]


def test_a_damaged_object_is_passed_over_with_the_same_words(kit, store, url):
    for step in (1, 2):
        path = kit.save_all(url, shards(kit, float(step)), step=step).path
    key = f"{path.key}/a1/rank-00001.safetensors"
    data = bytearray(store.cat_file(key))
    data[-3] ^= 4
    store.pipe_file(key, bytes(data))
    found = newest_checkpoint(url, verify=True)
    assert found.step == 1
    assert found.warnings[0].startswith(
        f"{url}/step-00000002/a1/rank-00001.safetensors: holds another w than was written: its digest differs"
    )
    store.rm_file(key)
    with pytest.raises(DamagedCheckpoint) as caught:
        load_shards(path, [kit.shard("w", torch.zeros(4, 3))])
    assert str(caught.value).startswith(f"{path}/a1/rank-00001.safetensors: cannot be read: No such file or directory")
    store.pipe_file(f"{path.key}/manifest.json", b"{")
    assert newest_checkpoint(url).step == 1


def test_a_forged_attempt_leads_nowhere(kit, store, url):
    """The one name an object store takes from a file: it must stay one name below the step."""
    from phalanx.train.state.checkpoint_index import CheckpointManifest, encode_manifest

    path = kit.save_all(url, shards(kit), step=1).path
    forged = CheckpointManifest(
        step=1, world=1, attempt="../step-00000002/a1", code="", meta={}, ranks=verify_checkpoint(path).ranks[:1]
    )
    store.pipe_file(f"{path.key}/manifest.json", encode_manifest(forged))
    with pytest.raises(DamagedCheckpoint, match=r"it belongs to attempt '\.\./step-00000002/a1', generation 0"):
        verify_checkpoint(path)


@pytest.mark.parametrize("point", ["begin", "data", "index", "done", "all", "manifest", "set-aside"])
def test_what_fails_before_the_manifest_leaves_the_commit_before(kit, store, url, point):
    def fail(name):
        if name == point:
            raise OSError(5, "Input/output error")

    kit.save_all(url, shards(kit, 1.0), step=1)
    with pytest.raises(SystemFailure, match="step 1 is not saved: Input/output error"):
        save_checkpoint(url, step=1, attempt="b", shards=shards(kit)[0], meta={}, rank=0, world=1, point=fail)
    assert loaded(kit, newest_checkpoint(url, verify=True).path) == [1.0]
    assert not any("/b/" in key for key in keys(store, url))


def test_a_store_that_cannot_be_listed_is_not_an_empty_one(url, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("EndpointConnectionError: no route")

    monkeypatch.setattr(fsspec.filesystem("memory").__class__, "ls", refuse)
    with pytest.raises(SystemFailure) as caught:
        newest_checkpoint(url)
    assert str(caught.value) == (
        f"{url}: its checkpoints cannot be listed: RuntimeError: EndpointConnectionError: no route\n"
        "  there may be some to go on from"
    )


def test_the_saver_in_the_background_writes_objects(kit, url):
    saver = AsyncSaver(url, attempt="a", rank=0, world=1)
    for step in (1, 2, 3):
        saver.save(step=step, shards=[kit.shard("w", torch.full((4, 3), float(step)))], meta={})
    assert saver.wait().step == 3
    assert loaded(kit, newest_checkpoint(url, verify=True).path) == [3.0]


def test_a_driver_that_is_missing_says_what_to_install(monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError("no module named s3fs")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(UserError) as caught:
        list_commits("s3://bucket/x")
    assert str(caught.value) == "checkpoint.path: s3://bucket/x needs s3fs\n  pip install 'phalanx[s3]'"


def test_a_disk_that_cannot_swap_two_names_renames_twice(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "exchange_names", lambda one, other: False)
    for attempt, value in (("a", 1.0), ("b", 2.0)):
        kit.save_all(tmp_path, shards(kit, value), step=1, attempt=attempt)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded(kit, newest_checkpoint(tmp_path, verify=True).path) == [2.0]


def test_a_commit_set_aside_by_a_process_that_died_is_put_back(kit, tmp_path):
    kit.save_all(tmp_path, shards(kit), step=1)
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001-b.1")
    (tmp_path / ".tmp-step-00000001-b.1").mkdir()
    assert newest_checkpoint(tmp_path) is None
    remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded(kit, newest_checkpoint(tmp_path, verify=True).path) == [1.0]
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001-pruned")  # deleted on purpose
    remove_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == []
