"""The learning rate as a function of tokens seen, so that a change of batch size does not move it."""

from __future__ import annotations

import math

from phalanx.job.schema import Optim


def learning_rate(optim: Optim, *, tokens_seen: int, total_tokens: int) -> float:
    """Return the rate of the step after which `tokens_seen` of `total_tokens` have been seen.

    So the first step of a warm-up already has a rate above zero and the last step of the run has the final rate.
    Linear warm-up to the peak, then "wsd" (stable, and a decay over the last `decay` share of all tokens) or "cosine"
    down to `final_lr` of the peak. Past the end it stays there.

    >>> [learning_rate(Optim(lr=1.0), tokens_seen=seen, total_tokens=100) for seen in (0, 79, 100, 200)]
    [1.0, 1.0, 0.1, 0.1]
    """
    if tokens_seen < optim.warmup_tokens:
        return optim.lr * tokens_seen / optim.warmup_tokens
    shape = _wsd_share if optim.schedule == "wsd" else _cosine_share
    remaining_share = shape(optim, tokens_seen, total_tokens)
    return optim.lr * (optim.final_lr + (1.0 - optim.final_lr) * remaining_share)


def _wsd_share(optim: Optim, seen: int, total: int) -> float:
    """Return the share of the way from the final rate up to the peak: 1 - sqrt of the progress of the decay.

    Hägele et al. 2024 (arXiv:2405.18392) found 1-sqrt better than a linear decay, and this schedule as good as
    cosine.
    """
    begin = max(optim.warmup_tokens, total - optim.decay * total)
    return 1.0 - math.sqrt(_share_done(seen, begin, total))


def _cosine_share(optim: Optim, seen: int, total: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * _share_done(seen, optim.warmup_tokens, total)))


def _share_done(seen: float, begin: float, end: float) -> float:
    """Return the share of the way from `begin` to `end`; 0 if it is empty, so that `decay = 0` keeps the peak."""
    return min(1.0, max(0.0, (seen - begin) / (end - begin))) if end > begin else 0.0
