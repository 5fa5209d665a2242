"""The baselines against the same sums done slowly, and against what must hold of any language model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from phalanx.train.data.baselines import Bigram, Unigram, count_baselines
from phalanx.train.data.token_samples import TokenDataset


def test_probabilities_add_up_to_one() -> None:
    run = np.random.default_rng(0).integers(0, 12, 400)
    vocab = 15  # three tokens never seen, as word before or behind
    unigram = Unigram.fit([run], vocab)
    assert np.exp(-unigram.nats_V).sum() == pytest.approx(1)
    bigram = Bigram([run], vocab)
    for before in range(vocab):
        total = sum(math.exp(-bigram.nats(np.asarray([before, after]))) for after in range(vocab))
        assert total == pytest.approx(1), before


def test_bits_per_byte_by_hand(dataset: Path) -> None:
    """Both models written again with dictionaries."""
    train, heldout = TokenDataset.open(dataset, "train"), TokenDataset.open(dataset, "heldout")
    (fit,), (score,) = train.tokens(10**7), heldout.tokens(10**7)
    fit, score = fit.tolist(), score.tolist()
    counts = Counter(fit)
    total = len(fit) + 0.5 * train.vocab
    single = {token: (counts[token] + 0.5) / total for token in range(train.vocab)}
    pairs = Counter(itertools.pairwise(fit))
    kinds = Counter(pairs.values())
    discount = kinds[1] / (kinds[1] + 2 * kinds[2])
    seen, different, follows = Counter(fit[:-1]), Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    lower = {token: (follows[token] + 0.5) / (len(pairs) + 0.5 * train.vocab) for token in range(train.vocab)}

    def double(a: int, b: int) -> float:
        high = (pairs[a, b] - discount) / seen[a] if pairs[a, b] else 0.0
        return high + (discount * different[a] / seen[a] if seen[a] else 1.0) * lower[b]

    text_bytes = sum(shard.text_bytes for shard in heldout.shards)
    bits = -sum(math.log2(single[token]) for token in score)
    more = -math.log2(single[score[0]]) - sum(math.log2(double(a, b)) for a, b in itertools.pairwise(score))
    found = count_baselines(train)
    assert found["unigram"] == pytest.approx(bits / text_bytes, rel=1e-9)
    assert found["bigram"] == pytest.approx(more / text_bytes, rel=1e-9)
    assert found["bigram"] < found["unigram"]
    assert count_baselines(dataset) == found
