"""Vocabulary sizes by the names of tokenizers, and their padding by trainers."""

from __future__ import annotations

import re
from collections.abc import Mapping

# From the published tokenizer.json and config.json of each; the first matching pattern decides.
SIZES: tuple[tuple[str, int], ...] = (
    (r"bigscience/tokenizer|bigscience/bloom|oscar_13_languages|bloom-?tokenizer", 250_680),
    (r"llama-?3|meta-llama-3|llama3", 128_256),
    (r"llama-?2|codellama|llama-?7b|llama-?13b|llama-?65b|mistral-7b|mixtral|llama2tokenizer", 32_000),
    (r"qwen-?3|qwen3", 151_669),
    (r"qwen-?2(\.5)?|qwen2", 151_665),
    (r"deepseek-?v3|deepseek-?r1", 128_815),
    (r"deepseek-?v2", 100_002),
    (r"gemma", 256_000),
    (r"mistral-nemo|tekken", 131_072),
    (r"gpt-?neox-?20b|pythia|hftokenizer-20b", 50_277),
    (r"t5-small|google/t5", 32_100),
    (r"bert-large-uncased|bertwordpiecelowercase", 30_522),
    (r"gpt2bpetokenizer|gpt2-vocab|openai-gpt|(^|[/ ])gpt-?2($|[ /])|gpt2tokenizer", 50_257),
)


def vocabulary_of(words: Mapping[str, str]) -> int | None:
    """Return the vocabulary size of a tokenizer with these names; None if none is known.

    >>> vocabulary_of({"tokenizer_type": "GPT2BPETokenizer"}), vocabulary_of({"tokenizer_model": "my.model"})
    (50257, None)
    """
    # A path identifies the tokenizer better than its type, which often belongs to a library.
    for name in ("tokenizer_name_or_path", "tokenizer_model", "vocab_file", "tokenizer_type"):
        text = words.get(name, "").lower()[:300]
        for pattern, size in SIZES:
            if text and re.search(pattern, text):
                return size
    return None


def padded_size(size: int, unit: int) -> int:
    """Return the next multiple of `unit`.

    >>> padded_size(50257, 128 * 8)
    51200
    """
    unit = max(1, unit)
    return -(-size // unit) * unit
