"""Baselines that a model must beat: unigram and bigram over the same tokens, fitted on training text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.train.data.token_samples import TokenDataset, Tokens

# Counting pairs sorts them: 16 million took 2.7 s. More would hardly change a bigram of a few thousand words.
MOST_TRAIN_TOKENS = 20_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Unigram:
    """Token frequencies with half a count added to each token of the vocabulary."""

    nats_V: np.ndarray[tuple[int, ...], np.dtype[np.float64]]

    @classmethod
    def fit(cls, runs: list[Tokens], vocab: int) -> Unigram:
        """Count the tokens of all runs."""
        counts_V = sum((np.bincount(run, minlength=vocab) for run in runs), start=np.zeros(vocab)) + 0.5
        return cls(nats_V=-np.log(counts_V / counts_V.sum()))

    def nats(self, runs: list[Tokens]) -> float:
        """Return the negative log-likelihood of some text, in nats."""
        return float(sum(self.nats_V[run].sum() for run in runs))


class Bigram:
    """Interpolated Kneser-Ney of order two (Chen and Goodman 1998).

    It is the strongest model that uses only the previous token.
    """

    def __init__(self, runs: list[Tokens], vocab: int) -> None:
        pairs = np.concatenate([run[:-1] * vocab + run[1:] for run in runs])
        self._pairs, counts = np.unique(pairs, return_counts=True)
        first_tokens, second_tokens = np.divmod(self._pairs, vocab)
        num_once, num_twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = num_once / (num_once + 2 * num_twice) if num_once and num_twice else 0.5
        # Count of each token as the first of a pair
        count_V = np.bincount(first_tokens, weights=counts, minlength=vocab)
        # Number of different tokens that followed it
        kinds_V = np.bincount(first_tokens, minlength=vocab)
        self._share = (counts - discount) / count_V[first_tokens]
        with np.errstate(invalid="ignore"):
            self._rest_V = np.where(count_V > 0, discount * kinds_V / np.maximum(count_V, 1), 1.0)
        # The lower order counts how many different tokens a token followed; half a count keeps unseen tokens
        # possible.
        follows_V = np.bincount(second_tokens, minlength=vocab) + 0.5
        self._lower_V = follows_V / follows_V.sum()
        self._vocab = vocab

    def nats(self, run: Tokens) -> float:
        """Return the negative log-likelihood of a text without its first token, in nats."""
        pairs = run[:-1] * self._vocab + run[1:]
        place = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        pair_share = np.where(self._pairs[place] == pairs, self._share[place], 0.0)
        return float(-np.log(pair_share + self._rest_V[run[:-1]] * self._lower_V[run[1:]]).sum())


def count_baselines(dataset: TokenDataset | Path) -> dict[str, float]:
    """Return bits per byte of the held-out text, end-of-text tokens included: {"unigram": ..., "bigram": ...}."""
    folders = dataset.folders if isinstance(dataset, TokenDataset) else (dataset,)
    train, heldout = TokenDataset.open(folders, "train"), TokenDataset.open(folders, "heldout")
    train_runs = [run for run in train.tokens(MOST_TRAIN_TOKENS) if len(run) > 1]
    heldout_runs = [run for run in heldout.tokens(heldout.num_tokens) if len(run)]
    unigram = Unigram.fit(train_runs, train.vocab)
    bigram = Bigram(train_runs, train.vocab)
    # The first token of a run has no predecessor: the unigram scores it.
    pairs = sum(bigram.nats(run) + float(unigram.nats_V[run[0]]) for run in heldout_runs)
    nats_per_unit = math.log(2) * heldout.num_bytes
    return {"unigram": unigram.nats(heldout_runs) / nats_per_unit, "bigram": pairs / nats_per_unit}
