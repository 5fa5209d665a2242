"""What a model must beat: unigram and bigram of the same tokens, fitted on training text, scored on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.train.data.token_samples import TokenDataset, Tokens

# Counting pairs sorts them: 16 million took 2.7 s. More would hardly move a bigram of a few thousand words.
MOST_TRAIN_TOKENS = 20_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Unigram:
    """Token frequencies with half a count added to each token of the vocabulary."""

    nats_V: np.ndarray[tuple[int, ...], np.dtype[np.float64]]

    @classmethod
    def fit(cls, runs: list[Tokens], vocab: int) -> Unigram:
        """Count."""
        counts_V = sum((np.bincount(run, minlength=vocab) for run in runs), start=np.zeros(vocab)) + 0.5
        return cls(nats_V=-np.log(counts_V / counts_V.sum()))

    def nats(self, runs: list[Tokens]) -> float:
        """The surprise of some text."""
        return float(sum(self.nats_V[run].sum() for run in runs))


class Bigram:
    """Interpolated Kneser-Ney of order two (Chen and Goodman 1998), the strongest that looks at one token before."""

    def __init__(self, runs: list[Tokens], vocab: int) -> None:
        pairs = np.concatenate([run[:-1] * vocab + run[1:] for run in runs])
        self._pairs, counts = np.unique(pairs, return_counts=True)
        before, after = np.divmod(self._pairs, vocab)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        seen_V = np.bincount(before, weights=counts, minlength=vocab)  # how often a token came before another
        kinds_V = np.bincount(before, minlength=vocab)  # how many different tokens followed it
        self._share = (counts - discount) / seen_V[before]
        with np.errstate(invalid="ignore"):
            self._rest_V = np.where(seen_V > 0, discount * kinds_V / np.maximum(seen_V, 1), 1.0)
        # The lower order counts how many different tokens a token followed; half a count keeps unseen ones possible.
        follows_V = np.bincount(after, minlength=vocab) + 0.5
        self._lower_V = follows_V / follows_V.sum()
        self._vocab = vocab

    def nats(self, run: Tokens) -> float:
        """The surprise of a text but for its first token."""
        pair = run[:-1] * self._vocab + run[1:]
        place = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        high = np.where(self._pairs[place] == pair, self._share[place], 0.0)
        return float(-np.log(high + self._rest_V[run[:-1]] * self._lower_V[run[1:]]).sum())


def count_baselines(dataset: TokenDataset | Path) -> dict[str, float]:
    """Bits per byte of the whole held-out text, ends of text paid for: {"unigram": ..., "bigram": ...}."""
    folders = dataset.folders if isinstance(dataset, TokenDataset) else (dataset,)
    train, heldout = TokenDataset.open(folders, "train"), TokenDataset.open(folders, "heldout")
    fit = [run for run in train.tokens(MOST_TRAIN_TOKENS) if len(run) > 1]
    score = [run for run in heldout.tokens(heldout.num_tokens) if len(run)]
    unigram = Unigram.fit(fit, train.vocab)
    bigram = Bigram(fit, train.vocab)
    # The first token of a run has none before it: the unigram pays for it.
    pairs = sum(bigram.nats(run) + float(unigram.nats_V[run[0]]) for run in score)
    bits = math.log(2) * heldout.num_bytes
    return {"unigram": unigram.nats(score) / bits, "bigram": pairs / bits}
