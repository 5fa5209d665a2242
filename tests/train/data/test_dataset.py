"""Tokens as samples: exact windows, and every kind of damage named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.job.dataset import read_manifest, verify_dataset
from phalanx.train.data import token_blocks
from phalanx.train.data.token_samples import TokenDataset, check_dataset

from .conftest import Make, write_lines


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    """A dataset a test may damage."""
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def stream(dataset: TokenDataset) -> list[int]:
    return [token for run in dataset.tokens(dataset.num_tokens) for token in run.tolist()]


def test_samples_are_windows_of_one_stream_over_all_shards(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_blocks, "MOST_FILES", 2)
    monkeypatch.setattr(token_blocks, "MOST_READ_BYTES", 1 << 14)
    opened = TokenDataset.open(dataset, "train")
    whole = stream(opened)
    assert len(whole) == opened.num_tokens
    for length in (1, 7, 64, 5000, 30_000):
        count = opened.num_samples(length)
        assert count == (len(whole) - 1) // length
        for index in {0, 1, count // 2, count - 1} & set(range(count)):
            row = opened.sample(index, length)
            assert row.dtype == np.int64
            assert row.tolist() == whole[index * length : index * length + length + 1]


def test_a_sample_that_does_not_exist(dataset: Path) -> None:
    opened = TokenDataset.open(dataset, "train")
    for index in (-1, opened.num_samples(64)):
        with pytest.raises(IndexError):
            opened.sample(index, 64)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_rows_are_the_samples(dataset: Path, wanted: list[int]) -> None:
    opened = TokenDataset.open(dataset, "heldout")
    indices = np.asarray(wanted) % opened.num_samples(16)
    rows = opened.samples(indices, 16)
    assert all((row == opened.sample(int(index), 16)).all() for row, index in zip(rows, indices, strict=True))


def test_several_sources_keep_their_own_streams(tmp_path: Path, make: Make) -> None:
    one, two = write_lines(tmp_path / "a.jsonl", range(50)), write_lines(tmp_path / "b.jsonl", range(50, 90))
    make(tmp_path / "out", one, (two, 2.0))
    opened = TokenDataset.open(tmp_path / "out", "train")
    assert opened.source_names == ("a.jsonl", "b.jsonl")
    first, second = opened.source_samples(32)
    runs = opened.tokens(opened.num_tokens)
    assert opened.sample(first, 32).tolist() == runs[1][:33].tolist(), "no sample runs from one source into the next"
    order = opened.sampler(32, seed=1).indices(0, first + 2 * second)
    assert np.bincount(order).tolist() == [1] * first + [2] * second


def message(damage: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        TokenDataset.open(damage, split)  # type: ignore[arg-type]
    return str(caught.value)


def test_missing_and_truncated_files_are_all_named(copy: Path) -> None:
    (copy / "000-train-00000.bin").unlink()
    shard = copy / "000-train-00001.bin"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-10])
    (copy / "tokenizer.json").unlink()
    rebuild = "  build it again with phalanx data build, or copy it again from where it is whole"
    assert message(copy).splitlines() == [
        f"{copy}/000-train-00000.bin: is missing",
        "  the manifest lists it",
        rebuild,
        f"{shard}: is truncated: {size - 10:,} bytes where the manifest says {size:,}",
        "  every sample behind it would be another",
        rebuild,
        f"{copy}/tokenizer.json: is missing",
        "  the manifest lists it",
        rebuild,
    ]


def test_a_flipped_bit_is_found_by_verify(copy: Path) -> None:
    shard = copy / "000-train-00001.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    opened = TokenDataset.open(copy, "train")  # sizes agree
    with pytest.raises(UserError, match="bytes 0 to 8,191 are not what was written: their digest differs"):
        stream(opened)
    with pytest.raises(UserError) as caught:
        verify_dataset(copy)
    wanted = read_manifest(copy).shards
    digest = next(one.sha256 for one in wanted if one.file == shard.name)
    assert f"{shard}: has changed: its digest is " in str(caught.value)
    assert f"the manifest says {digest[:12]}…\n  training on it would not repeat\n" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON: "),
        (
            '{"format": 99}',
            "has format 99, and this Phalanx reads 1 and 2\n  use the Phalanx that made it, or build it again",
        ),
        ("[]", "has format None, and this Phalanx reads 1 and 2"),
        ('{"format": 1, "sources": []}', "has changed or is damaged: it lacks the key "),
        ('{"format": 1, "sources": [3]}', "has changed or is damaged: a value is of another kind than it should be"),
        ('{"format": 1, "sources": [], "wehght": 1}', "has changed or is damaged: nobody knows its key 'wehght'"),
        ('{"format": 1, "sources": [{}]}', "has changed or is damaged: it lacks the key 'tally'"),
    ],
)
def test_a_damaged_manifest(copy: Path, text: str, expected: str) -> None:
    (copy / "manifest.json").write_text(text)
    assert message(copy).startswith(f"{copy}/manifest.json: {expected}")


def test_no_dataset(tmp_path: Path) -> None:
    assert message(tmp_path / "x") == (
        f"{tmp_path}/x: is no folder\n  make it with phalanx data build {tmp_path}/x SOURCE..."
    )
    assert message(tmp_path).startswith(
        f"{tmp_path}: is not a dataset: it has no manifest.json\n"
        "  the manifest is written last, so a folder without one was never finished\n"
    )


def test_no_heldout_text(tmp_path: Path, make: Make, lines: Path) -> None:
    make(tmp_path / "out", lines)
    assert message(tmp_path / "out", "heldout") == (
        f"{tmp_path}/out: has no heldout text\n"
        "  build it with a larger --heldout, or with more documents (--split-on blank cuts a text in paragraphs)"
    )


def test_datasets_of_different_tokenizers(tmp_path: Path, make: Make, dataset: Path, lines: Path) -> None:
    make(tmp_path / "out", lines, vocab=270)
    with pytest.raises(UserError) as caught:
        TokenDataset.open([dataset, tmp_path / "out"], "train")
    assert str(caught.value) == (
        f"{tmp_path}/out: was made with another tokenizer than {dataset}\n"
        "  the same number would mean two words\n"
        f"  build it again with --tokenizer {dataset}/tokenizer.json"
    )


def test_a_model_too_small_and_a_sequence_too_long(dataset: Path) -> None:
    opened = TokenDataset.open(dataset, "heldout")
    tokens = opened.num_tokens
    with pytest.raises(UserError) as caught:
        check_dataset(opened, model_vocab=256, sequence=tokens)
    assert str(caught.value) == (
        f"{dataset}: the data has a vocabulary of {opened.vocab:,}, larger than the model's 256\n"
        "  token ids beyond the last row of the embedding cannot be looked up\n"
        f"  set model.vocab = {-(-opened.vocab // 64) * 64} or more (matrix products are fastest with multiples "
        f"of 64), "
        "as no data has fewer than 257 tokens: all bytes and the end of text\n"
        f"{dataset}: data.sequence = {tokens:,} is longer than its heldout text of {tokens:,} tokens\n"
        "  a sample is that many tokens and one more from one source\n"
        f"  use data.sequence = {tokens - 1:,} or less, or build from more text"
    )
    assert check_dataset(opened, model_vocab=opened.vocab, sequence=tokens - 1) == ()
    with pytest.raises(UserError, match="is longer than its heldout text"):
        opened.sampler(tokens, 0)


def test_a_source_too_short_is_left_out_with_a_warning(tmp_path: Path, make: Make) -> None:
    long, short = write_lines(tmp_path / "a.jsonl", range(50)), write_lines(tmp_path / "b.jsonl", range(50, 51))
    make(tmp_path / "out", long, (short, 2.0))
    opened = TokenDataset.open(tmp_path / "out", "train")
    (warning,) = check_dataset(opened, model_vocab=300, sequence=256)
    assert warning.render() == "b.jsonl: is shorter than one sequence of 256 and is left out"
    samples = opened.num_samples(256)
    assert sorted(opened.sampler(256, 0).indices(0, samples).tolist()) == list(range(samples))


def test_the_digest_names_the_tokens(tmp_path: Path, make: Make, lines: Path) -> None:
    make(tmp_path / "a", lines)
    make(tmp_path / "b", lines)
    make(tmp_path / "c", (lines, 2.0))
    a, b, c = (TokenDataset.open(tmp_path / name, "train").digest for name in "abc")
    assert a == b != c
