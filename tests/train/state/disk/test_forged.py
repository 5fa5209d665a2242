"""A checkpoint from elsewhere is data: whatever it claims, with digests that fit, it is refused."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

from phalanx.errors import PhalanxError
from phalanx.train.state.checkpoint_index import DamagedCheckpoint, encode_json
from phalanx.train.state.reader import newest_checkpoint, verify_checkpoint
from phalanx.train.state.restore import load_shards
from phalanx.train.state.whole_tensors import read_state


def forge_manifest(folder, change):
    """Change the manifest and make its digest fit again, as somebody with bad intent would."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    body["sha256"] = hashlib.sha256(encode_json(body)).hexdigest()
    (folder / "manifest.json").write_bytes(encode_json(body))


def forge_index(folder, change):
    path = folder / "rank-00000.json"
    body = json.loads(path.read_text())
    change(body)
    data = encode_json(body)
    path.write_bytes(data)
    sums = {"index_bytes": len(data), "index_sha256": hashlib.sha256(data).hexdigest()}
    forge_manifest(folder, lambda manifest: manifest["ranks"][0].update(sums))


@pytest.fixture
def folder(kit, tmp_path):
    return kit.save_all(tmp_path, [[kit.shard("w", torch.ones(4, 3)), kit.shard("v", torch.ones(2))]]).path


def refusal(kit, folder):
    with pytest.raises(DamagedCheckpoint) as caught:
        verify_checkpoint(folder)
    with pytest.raises(PhalanxError):
        load_shards(folder, [kit.shard("w", torch.zeros(4, 3)), kit.shard("v", torch.zeros(2))])
    with pytest.raises(DamagedCheckpoint):
        read_state(folder)
    with pytest.raises(DamagedCheckpoint):
        newest_checkpoint(folder.parent, verify=True)
    return str(caught.value)


def row(**changes):
    return lambda body: body["tensors"][1].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (row(offset=0), "lies at byte 0, not at"),
        (row(offset=-8), "offset -8"),
        (row(offset=True), "offset True"),
        (row(shape=[2**62, 2**62]), "has a hole"),
        (row(shape=[4]), "is not inside the shape [4]"),
        (row(start=[1, 0]), "is not inside the shape [4, 3]"),
        (row(start=[0, -1]), "[0, -1] is not a list of whole numbers"),
        (row(local=[0, 3], bytes=0), "do not hold [0, 3] of float32"),
        (row(bytes=10**15), "1000000000000000 bytes do not hold"),
        (row(dtype="object"), "has dtype 'object'"),
        (row(dtype=["float32"]), "unhashable"),
        (row(name="v"), "it names a tensor twice"),
        (row(name=None), "None has dtype"),
        (row(sha256="0" * 64), "holds another w than was written"),
        (lambda body: body["tensors"].pop(), "it lists 1 tensors, and the manifest counts 2"),
        (lambda body: body.update(tensors={"w": 1}), "is not a valid index"),
        (lambda body: body.update(tensors=None), "is not a valid index"),
        (lambda body: body.update(rank=1), "it is not the index of rank 0"),
        (lambda body: body["header"].update(bytes=10**10), "lies at byte"),
        (lambda body: body["header"].update(sha256=None), "is not the header of its tensors"),
        (lambda body: body["header"].update(bytes=-8), "it is not the index of rank 0"),
        (lambda body: body["header"].update(bytes=2**80), "it is not the index of rank 0"),
        (lambda body: body.update(meta=None), "it is not the index of rank 0"),
        (row(shape=[10**400]), "is not a valid index"),
        (row(shape=[2**63, 3]), "is not a list of whole numbers"),
        (row(shape=[[4], 3]), "is not a list of whole numbers"),
        (row(shape=[1] * 17, start=[0] * 17, local=[1] * 17), "is not inside the shape"),
    ],
)
def test_a_forged_index_is_refused(kit, folder, change, message):
    forge_index(folder, change)
    assert message in refusal(kit, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format="zip"), "it does not say format phalanx-checkpoint"),
        (lambda body: body.update(version=2), "it has version 2, and this Phalanx reads version 1"),
        (lambda body: body.update(world=10**9), "it lists 1 rank for step 100 of a world size of 1000000000"),
        (lambda body: body.update(world=0, ranks=[]), "it lists 0 ranks"),
        (lambda body: body.update(step="100"), "it lists 1 rank for step '100'"),
        (lambda body: body.update(ranks=7), "is not a valid manifest"),
        (lambda body: body["ranks"][0].update(path="../../etc/passwd"), "unexpected keyword argument 'path'"),
        (lambda body: body["ranks"][0].update(index_bytes=-1), "an entry of ranks is not two sizes, a digest"),
        (lambda body: body["ranks"][0].update(index_bytes=10**12), "its digest differs"),
        (lambda body: body["ranks"][0].update(tensors=1), "it lists 2 tensors, and the manifest counts 1"),
        (lambda body: body["ranks"][0].update(data_bytes=10**12), "its tensors end at byte"),
        (lambda body: body.pop("meta"), "it has no 'meta'"),
        (lambda body: body.update(meta=[]), "it lists 1 rank"),
    ],
)
def test_a_forged_manifest_is_refused(kit, folder, change, message):
    forge_manifest(folder, change)
    assert message in refusal(kit, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"format": 1, "format": 2}', "it has the same key twice"),
        (b'{"step": NaN}', "it holds NaN"),
        (b"\xff\xfe\x00", "is not a valid manifest"),
        (b"[]", "it does not say format"),
        (b"7" * 5000, "is not a valid manifest"),
    ],
)
def test_a_manifest_that_is_hard_to_read_is_refused(kit, folder, text, message):
    (folder / "manifest.json").write_bytes(text)
    assert message in refusal(kit, folder)


def test_meta_that_is_nested_beyond_measure_is_refused(kit, folder):
    deep = []
    for _ in range(600):  # read by the parser, too deep for the writer
        deep = [deep]
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"meta": {}', f'"meta": {{"a": {deep}}}'))
    assert "is not a valid manifest" in refusal(kit, folder)


def test_an_index_that_says_one_thing_twice_is_refused(kit, folder):
    path = folder / "rank-00000.json"
    data = path.read_bytes().replace(b'"name":"w"', b'"name":"x","name":"w"')
    path.write_bytes(data)
    sums = {"index_bytes": len(data), "index_sha256": hashlib.sha256(data).hexdigest()}
    forge_manifest(folder, lambda manifest: manifest["ranks"][0].update(sums))
    assert "is not a valid index: it has the same key twice" in refusal(kit, folder)


@pytest.mark.parametrize("name", ["../../../escape", "/absolute", "a\x00b", "__metadata__", "#rank-00000/x"])
def test_names_of_tensors_are_never_names_of_files(kit, folder, name):
    before = sorted(folder.parent.parent.rglob("*"))
    forge_index(folder, row(name=name))
    assert "is not the header of its tensors" in refusal(kit, folder)
    assert sorted(folder.parent.parent.rglob("*")) == before


def forge_header(folder, header):
    """Another header, with digests that fit."""
    path = folder / "rank-00000.safetensors"
    old = json.loads((folder / "rank-00000.json").read_text())["header"]["bytes"]
    path.write_bytes(header + path.read_bytes()[old:])
    grown = len(header) - old

    def change(body):
        body["header"] = {"bytes": len(header), "sha256": hashlib.sha256(header).hexdigest()}
        for entry in body["tensors"]:
            entry["offset"] += grown

    forge_index(folder, change)
    forge_manifest(folder, lambda body: body["ranks"][0].update(data_bytes=body["ranks"][0]["data_bytes"] + grown))


@pytest.mark.parametrize(
    "header",
    [
        (10**10).to_bytes(8, "little") + b"{}      ",  # a length of 10 GB
        (2**64 - 1).to_bytes(8, "little") + b"{}      ",
        (8).to_bytes(8, "little") + b"{}      ",  # no tensors at all
        (24).to_bytes(8, "little") + b"[" * 24,
        b"",
    ],
)
def test_a_forged_safetensors_header_is_refused(kit, folder, header):
    forge_header(folder, header)
    assert "that is not the header of its tensors\n  other programs would read something else" in refusal(kit, folder)


def test_a_folder_that_is_a_link_is_refused(kit, folder):
    folder.rename(folder.parent.parent / folder.name)
    folder.symlink_to(folder.parent.parent / folder.name)
    assert "cannot be read: its folder is a link" in refusal(kit, folder)


# Reads what others made, in four gigabytes beside torch itself: what wants to allocate by a number from a file, 10 GB
# at least, dies here. One is too little for torch itself on arm64, whose allocator (mimalloc, since torch 2.10)
# reserves addresses by the gigabyte.
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from phalanx.errors import PhalanxError
from phalanx.train.state.restore import load_shards
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.reader import verify_checkpoint
from phalanx.train.state.whole_tensors import read_state
from phalanx.train.parallel.tensor_shard import TensorShard

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**32,) * 2)
for folder in map(Path, sys.argv[1:]):
    shard = TensorShard(name="w", tensor=torch.zeros(4, 3), shape=(4, 3), start=(0, 0),
                        replicas=1, owner=True, groups={})
    for read in (verify_checkpoint, read_state, lambda folder: load_shards(folder, [shard])):
        try:
            read(folder)
            print("read")
        except PhalanxError as error:
            print(type(error).__name__)
"""

GREEDY = {
    "shape": lambda folder: forge_index(folder, row(shape=[2**31, 2**31])),
    "box": lambda folder: forge_index(folder, row(shape=[2**40], start=[0], local=[2**40], bytes=2**42)),
    "world": lambda folder: forge_manifest(folder, lambda body: body.update(world=2**40)),
    "tensors": lambda folder: forge_manifest(folder, lambda body: body["ranks"][0].update(tensors=2**40)),
    "sizes": lambda folder: forge_manifest(folder, lambda body: body["ranks"][0].update(index_bytes=2**40)),
    "header": lambda folder: forge_header(folder, (10**10).to_bytes(8, "little") + b"{}      "),
    "long manifest": lambda folder: os.truncate(folder / "manifest.json", 10**10),
    "long index": lambda folder: os.truncate(folder / "rank-00000.json", 10**10),
    "long data": lambda folder: os.truncate(folder / "rank-00000.safetensors", 10**10),
    "nested": lambda folder: (folder / "manifest.json").write_bytes(b"[" * 10**6),
}


@pytest.mark.slow
def test_numbers_of_a_stranger_allocate_nothing(kit, tmp_path):
    folders = []
    for name, forge in GREEDY.items():
        folders.append(
            kit.save_all(tmp_path / name, [[kit.shard("v", torch.ones(2)), kit.shard("w", torch.ones(4, 3))]]).path
        )
        forge(folders[-1])
    command = [sys.executable, "-c", LIMITED, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    told = done.stdout.split()
    assert len(told) == 3 * len(GREEDY)
    assert {"DamagedCheckpoint", "UserError"} >= set(told), list(
        zip(GREEDY, zip(*[iter(told)] * 3, strict=True), strict=True)
    )


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_ten_gigabytes_are_not_read_into_memory(kit, folder, name):
    with (folder / name).open("r+b") as stream:
        stream.truncate(10 * 10**9)  # takes no room on the disk
    assert "10,000,000,000 bytes" in refusal(kit, folder)
