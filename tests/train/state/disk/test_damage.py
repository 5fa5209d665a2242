"""Nothing that was changed after it was written is ever loaded."""

import os
import random
import shutil

import pytest

from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.reader import newest_checkpoint, sound_checkpoints, verify_checkpoint
from phalanx.train.state.restore import load_shards


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def assert_refused(kit, folder):
    """Refused by verify, by a load of everything, and by newest_checkpoint, which says so and takes the one before."""
    with pytest.raises(DamagedCheckpoint) as caught:
        verify_checkpoint(folder)
    shards = [kit.shard(name, value.zero_()) for name, value in kit.some_tensors().items()]
    loaded = False
    try:
        load_shards(folder, shards)
        loaded = True
    except DamagedCheckpoint:
        assert not any(shard.tensor.any() for shard in shards)
    found = newest_checkpoint(folder.parent, verify=True)
    assert found.step == 100
    assert found.warnings[0].splitlines()[0] in str(caught.value)
    return str(caught.value), loaded


def test_every_single_flipped_bit_is_refused(kit, saved):
    rng, folder = random.Random(1), saved / "step-00000200"
    files = sorted(folder.iterdir())
    assert len(files) == 9
    sizes = [path.stat().st_size for path in files]
    for place in range(240):
        path = files[place % 9] if place < 180 else rng.choices(files, sizes)[0]
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        try:
            _, loaded = assert_refused(kit, folder)
            assert not loaded, (path.name, bit)
        finally:
            flip(path, bit)
    verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.json", "rank-00002.safetensors"])
def test_truncation_at_any_length_is_refused(kit, saved, name):
    path = saved / "step-00000200" / name
    data, rng = path.read_bytes(), random.Random(2)
    for length in [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(10))]:
        path.write_bytes(data[:length])
        message, loaded = assert_refused(kit, path.parent)
        assert name in message
        assert not loaded
    path.write_bytes(data + b"\n")
    assert not assert_refused(kit, path.parent)[1]


@pytest.mark.parametrize("ending", [".json", ".safetensors"])
def test_two_swapped_files_are_refused(kit, saved, ending):
    folder = saved / "step-00000200"
    one, two = folder / f"rank-00000{ending}", folder / f"rank-00003{ending}"
    other = two.read_bytes()
    two.write_bytes(one.read_bytes())
    one.write_bytes(other)
    message, loaded = assert_refused(kit, folder)
    assert "rank-00000" in message
    assert not loaded


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.json", "rank-00002.safetensors"])
def test_a_missing_file_is_refused(kit, saved, name):
    (saved / "step-00000200" / name).unlink()
    message, loaded = assert_refused(kit, saved / "step-00000200")
    assert name in message
    assert not loaded


@pytest.mark.parametrize("make", ["link", "pipe", "folder"])
def test_something_else_under_the_name_is_refused_at_once(kit, saved, make):
    path = saved / "step-00000200" / "rank-00001.safetensors"
    path.rename(saved / "elsewhere")
    {"link": lambda: path.symlink_to(saved / "elsewhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        make
    ]()
    message, loaded = assert_refused(kit, path.parent)
    assert f"{path}: cannot be read: " in message
    assert not loaded


def test_a_sound_index_with_another_name_in_it_is_refused(kit, saved):
    [path] = [path for path in (saved / "step-00000200").glob("*.json") if b'"name":"scale"' in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b'"name":"scale"', b'"name":"scald"'))
    message, loaded = assert_refused(kit, path.parent)
    assert f"{path}: is not what the manifest says was written: its digest differs" in message
    assert not loaded


def test_an_extra_file_is_refused(kit, saved):
    folder = saved / "step-00000200"
    (folder / ".nfs000123").touch()  # network file systems keep deleted open files under such names
    verify_checkpoint(folder)
    shutil.copy(folder / "rank-00001.json", folder / "rank-00004.json")
    message, _ = assert_refused(kit, folder)  # it is read by nobody, so that loading may go on
    assert message == f"{folder / 'rank-00004.json'}: does not belong to this checkpoint\n  move it away"


def test_the_manifest_of_another_step_is_refused(kit, saved):
    shutil.copy(saved / "step-00000100" / "manifest.json", saved / "step-00000200" / "manifest.json")
    message, loaded = assert_refused(kit, saved / "step-00000200")
    assert "is the manifest of step 100, in the folder step-00000200\n  it vouches for other files" in message
    assert not loaded


def test_a_renamed_folder_is_refused(saved):
    (saved / "step-00000200").rename(saved / "step-00000300")
    found = newest_checkpoint(saved)
    assert found.step == 100
    assert "is the manifest of step 200, in the folder step-00000300" in found.warnings[0]


def test_all_damaged_is_an_error_and_none_at_all_is_none(saved, tmp_path):
    assert newest_checkpoint(tmp_path / "nothing") is None
    for folder in saved.iterdir():
        (folder / "manifest.json").unlink()
    assert list(sound_checkpoints(saved)) == []
    with pytest.raises(DamagedCheckpoint) as caught:
        newest_checkpoint(saved)
    assert len(caught.value.problems) == 2


def test_candidates_are_newest_first_and_have_a_manifest(saved):
    flip(saved / "step-00000200" / "rank-00000.safetensors", 500)
    assert [found.step for found in sound_checkpoints(saved)] == [200, 100]
    flip(saved / "step-00000200" / "manifest.json", 300)
    assert [found.step for found in sound_checkpoints(saved)] == [100]
