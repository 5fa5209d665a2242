"""The tokenizer: lossless, repeatable, and deaf to special tokens written in a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.train.data.tokenizer import (
    PIECE_CHARACTERS,
    HashSample,
    TextTokenizer,
    load_tokenizer,
    text_pieces,
    train_tokenizer,
)

from .conftest import story


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer([story(number) for number in range(200)], 400)


@pytest.mark.parametrize(
    "text", ["the ship sailed", "naïve 😀 \x00 \r\n\t  two", " lead and trail \n\n", "<|endoftext|>"]
)
def test_what_is_encoded_is_decoded(tokenizer: TextTokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert max(ids) < tokenizer.vocab <= 400


def test_the_same_texts_give_the_same_tokenizer(tokenizer: TextTokenizer) -> None:
    assert train_tokenizer([story(number) for number in range(200)], 400).sha256 == tokenizer.sha256


def test_long_texts_are_encoded_in_pieces_and_stay_whole(tokenizer: TextTokenizer) -> None:
    text = "".join(story(number) + "\n" for number in range(1000))
    assert len(text) > 2 * PIECE_CHARACTERS
    long, short = tokenizer.encode([text, "the ship"])
    assert tokenizer.decode(long) == text
    assert tokenizer.decode(short) == "the ship"


@given(st.text(alphabet="ab \n", max_size=50), st.integers(1, 9))
def test_pieces_join_to_the_text(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.train.data.tokenizer.PIECE_CHARACTERS", size)
        found = text_pieces(text)
    assert "".join(found) == text
    assert all(len(piece) <= size for piece in found)


def test_a_sample_does_not_depend_on_the_order() -> None:
    texts = [story(number) for number in range(300)]
    forth, back = HashSample(20_000), HashSample(20_000)
    for text in texts:
        forth.show(text)
    for text in reversed(texts):
        back.show(text)
    assert forth.texts() == back.texts()
    size = sum(len(text.encode()) for text in forth.texts())
    assert 19_000 < size <= 20_000


def test_bad_tokenizers(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(UserError, match=r"nothing\.json: cannot be read: No such file"):
        load_tokenizer(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text('{"model": 1}')
    with pytest.raises(UserError, match=r"bad\.json: is not a tokenizer\n"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text(tokenizer.text.replace("<|endoftext|>", "<|fin|>"))
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path / "other.json")
    assert str(caught.value).splitlines()[1:] == [
        "  documents are separated by it",
        "  name its end-of-text token with --end-of-text",
    ]
    assert load_tokenizer(tmp_path / "other.json", end_of_text="<|fin|>").end_of_text == 0
