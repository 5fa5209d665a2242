"""Tokenizers: a byte-level BPE, trained here or loaded from a file, and the digest that identifies it."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.files import read_bounded
from phalanx.job.dataset import LEAST_VOCAB as LEAST_VOCAB
from phalanx.job.dataset import MOST_TOKENIZER_BYTES

END_OF_TEXT = "<|endoftext|>"
# End-of-document tokens of released tokenizers: GPT-2 and Qwen, Llama 2, Llama 3, Gemma, BERT.
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")
MOST_VOCAB = 2**20
# Longer texts are encoded in pieces split at line ends: one of 16 MiB took 2.0 GB inside the tokenizer, in pieces
# 0.6 GB.
PIECE_CHARACTERS = 1 << 16


class TextTokenizer:
    """A loaded tokenizer.json; special tokens written in a document are encoded as ordinary text."""

    def __init__(self, text: str, *, where: str, end_of_text: str = "") -> None:
        self.text = text
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        try:
            self._inner = _tokenizers_library().Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            reason = str(error).splitlines()[0][:120] if str(error) else ""
            fix = "name a tokenizer.json of the tokenizers library"
            raise mistake(where, "is not a tokenizer", why=reason, fix=fix) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        # The largest number counts: some vocabularies have gaps, and the embedding must reach the last.
        self.vocab = 1 + int(max(self._inner.get_vocab(with_added_tokens=True).values()))
        self.end_of_text = _end_number(self._inner, end_of_text, where)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each text, without end-of-text tokens; uses every core."""
        pieces_of_texts = [text_pieces(text) for text in texts]
        encoded = self._inner.encode_batch_fast(
            [piece for pieces in pieces_of_texts for piece in pieces], add_special_tokens=False
        )
        ids = iter(encoding.ids for encoding in encoded)
        return [
            [token for _ in pieces for token in next(ids)] if len(pieces) > 1 else next(ids)
            for pieces in pieces_of_texts
        ]

    def decode(self, tokens: Sequence[int] | NDArray[np.int64]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._inner.decode([int(token) for token in tokens]))


def text_pieces(text: str) -> list[str]:
    """Split a text after line ends, or else spaces, so that no piece exceeds PIECE_CHARACTERS."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1
        end = end or text.rfind(" ", start + 1, start + PIECE_CHARACTERS) or start + PIECE_CHARACTERS
        end = end if end > start else start + PIECE_CHARACTERS
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def load_tokenizer(path: Path, *, end_of_text: str = "") -> TextTokenizer:
    """Load a tokenizer from its file; raise UserError if it cannot be read."""
    try:
        text = read_bounded(path, MOST_TOKENIZER_BYTES).decode()
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise mistake(str(path), problem, fix="name a tokenizer.json") from error
    return TextTokenizer(text, where=str(path), end_of_text=end_of_text)


def train_tokenizer(texts: Iterable[str], vocab: int) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocab` tokens; number 0 is the end of text."""
    library = _tokenizers_library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in text_pieces(text)), trainer)
    return TextTokenizer(inner.to_str(pretty=False), where="the tokenizer trained just now")


class HashSample:
    """The texts with the smallest hashes that fit in `most_bytes`, the same set in any order of adding."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._heap: list[tuple[int, str]] = []
        self._bytes = 0

    def show(self, text: str) -> None:
        """Consider a text for the sample."""
        size = len(text.encode())
        rank = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"sample").digest(), "big")
        if self._bytes + size > self._most_bytes and self._heap and rank >= -self._heap[0][0]:
            return
        heapq.heappush(self._heap, (-rank, text))
        self._bytes += size
        while self._bytes > self._most_bytes and len(self._heap) > 1:
            self._bytes -= len(heapq.heappop(self._heap)[1].encode())

    def texts(self) -> list[str]:
        """Return the sample, smallest hash first."""
        return [text for _, text in sorted(self._heap, key=lambda item: (-item[0], item[1]))]


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        problem = "building data needs the tokenizers library"
        raise UserError(Problem(where="", what=problem, fix="pip install 'phalanx[train]'")) from error
    return tokenizers


def _end_number(inner: Any, wanted: str, where: str) -> int:
    for name in (wanted,) if wanted else KNOWN_ENDS:
        number = inner.token_to_id(name)
        if number is not None:
            return int(number)
    names = f'"{wanted}"' if wanted else ", ".join(KNOWN_ENDS)
    reason = "documents are separated by it"
    raise mistake(where, f"has no token {names}", why=reason, fix="name its end-of-text token with --end-of-text")
