"""Blocks of tokens: what was compared is what is used, damage is named, and so is a token beyond the vocabulary."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.job.dataset import FORMAT, read_manifest, verify_dataset
from phalanx.train.data import token_blocks
from phalanx.train.data.batches import Batches, BatchPlan, Stage
from phalanx.train.data.token_samples import TokenDataset, check_dataset

SHARD = "000-train-00001.bin"


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    """A dataset a test may damage."""
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def as_of_06(folder: Path) -> None:
    """The same dataset as 0.6 wrote it."""
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for name in ("sha256", "block_bytes"):
        del raw[name]
    raw["format"] = 1
    for source in raw["sources"]:
        for shard in source["shards"]:
            del shard["blocks_sha256"]
    (folder / "manifest.json").write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in folder.glob("*.blocks"):
        path.unlink()


def read_all(folder: Path, *, vocab: int = 0) -> list[int]:
    opened = TokenDataset.open(folder, "train", vocab=vocab)
    return [token for run in opened.tokens(opened.num_tokens) for token in run.tolist()]


def test_every_flipped_bit_of_tokens_digests_and_manifest_is_caught(copy: Path) -> None:
    """Seeded; benchmarks/bit_flips.py does it a thousand times for each."""
    draw = random.Random(22)
    names = [path.name for path in copy.iterdir() if "train" in path.name and path.suffix != ".idx"]
    for name in [*names, "manifest.json"] * 6:
        path = copy / name
        bit = draw.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(UserError) as caught:
            read_all(copy)
        flip(path, bit)
        assert str(path) in str(caught.value), (name, bit)
        assert "phalanx data" in str(caught.value) or "use the Phalanx that made it" in str(caught.value)
    assert len(read_all(copy)) == read_manifest(copy).total("tokens", "train")


def test_what_was_compared_is_what_is_used(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is kept is used as it was compared; one that was let go is compared again."""
    opened = TokenDataset.open(copy, "train")
    first = opened.sample(0, 64).tolist()
    flip(copy / "000-train-00000.bin", 0)
    assert opened.sample(0, 64).tolist() == first
    monkeypatch.setattr(opened._sources[0][1]._reader, "_room", 0)
    opened.sample(500, 64)  # of another block
    with pytest.raises(UserError, match="are not what was written"):
        opened.sample(0, 64)


def test_a_file_that_is_cut_while_it_is_read(copy: Path) -> None:
    opened = TokenDataset.open(copy, "train")
    opened.sample(0, 64)
    path = copy / "000-train-00000.bin"
    path.write_bytes(path.read_bytes()[:16_384])
    with pytest.raises(UserError, match="is truncated: it ends at byte 16,384 of "):
        read_all_samples(opened)


def read_all_samples(opened: TokenDataset) -> None:
    for index in range(opened.num_samples(64)):
        opened.sample(index, 64)


def test_data_of_06_trains_and_gets_digests_from_checksum(copy: Path) -> None:
    before = TokenDataset.open(copy, "train").digest
    as_of_06(copy)
    opened = TokenDataset.open(copy, "train")
    assert opened.digest == before, "a checkpoint of such a run knows its data again"
    (warning,) = check_dataset(opened, model_vocab=400, sequence=64)
    assert warning.render() == (
        f"{copy}: has no digests of its blocks, as before 0.7: damaged tokens would go unnoticed\n"
        f"  add them: phalanx data checksum {copy}"
    )
    tokens = read_all(copy)
    found = verify_dataset(copy)
    assert (found.manifest.format, len(found.written), found.trouble) == (FORMAT, len(found.manifest.shards), "")
    assert read_manifest(copy) == found.manifest
    assert TokenDataset.open(copy, "train").digest == before
    assert read_all(copy) == tokens
    assert check_dataset(TokenDataset.open(copy, "train"), model_vocab=400, sequence=64) == ()
    assert verify_dataset(copy).written == ()


def test_checksum_makes_damaged_block_digests_again(copy: Path) -> None:
    blocks = copy / SHARD.replace(".bin", ".blocks")
    good = blocks.read_bytes()
    flip(blocks, 5)
    with pytest.raises(UserError, match=rf"make it again: phalanx data checksum {copy}"):
        read_all(copy)
    assert verify_dataset(copy).written == (blocks.name,)
    assert blocks.read_bytes() == good
    blocks.unlink()
    with pytest.raises(UserError, match=rf"{blocks}: is missing"):
        TokenDataset.open(copy, "train")
    assert verify_dataset(copy).written == (blocks.name,)


def test_tokens_that_differ_are_not_given_new_digests(copy: Path) -> None:
    as_of_06(copy)
    flip(copy / SHARD, 100)
    with pytest.raises(UserError, match="has changed: its digest is"):
        verify_dataset(copy)
    assert not list(copy.glob("*.blocks"))


def beyond(folder: Path, position: int, token: int) -> None:
    as_of_06(folder)
    data = np.fromfile(folder / SHARD, dtype="<u2")
    data[position] = token
    data.tofile(folder / SHARD)


def test_a_token_beyond_the_vocabulary_is_named(copy: Path) -> None:
    beyond(copy, 1234, 60_000)
    assert max(read_all(copy)) == 60_000
    with pytest.raises(UserError) as caught:
        read_all(copy, vocab=400)
    assert str(caught.value) == (
        f"{copy / SHARD}: token 1,234 is 60,000, and the model has a vocabulary of 400\n"
        "  the embedding has no row for it\n"
        f"  compare the file with what was built (phalanx data checksum {copy}); where it has changed, build it "
        "again, else set model.vocab = 60032 or more"
    )


def test_a_batch_with_such_a_token_is_refused(copy: Path) -> None:
    """The thread that reads ahead hands the error to the loop, as the user's."""
    beyond(copy, 0, 401)
    opened = TokenDataset.open(copy, "train", vocab=401)
    plan = BatchPlan(stages=(Stage(first_step=0, first_sequence=0, sequences=4),), steps=1, sequence=64)
    steps = opened.num_samples(64) // 4
    batches = Batches(opened, opened.sampler(64, 0), plan, sequence=64, data_rank=0, data_ranks=1)
    with pytest.raises(UserError, match="token 0 is 401, and the model has a vocabulary of 401"):
        list(map(batches.get, range(steps)))
    batches.close()


def test_few_blocks_are_kept(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_blocks, "MOST_READ_BYTES", 1 << 15)
    opened = TokenDataset.open(dataset, "train")
    reader = opened._sources[0][1]._reader
    monkeypatch.setattr(reader, "_room", 1 << 15)
    opened.tokens(opened.num_tokens)
    assert len(reader._blocks) == 4
