"""The gradient noise scale: the batch size, in sequences, beyond which larger batches help little.

McCandlish et al. 2018 (arXiv:1812.06162, appendix A). A step's batch of B sequences consists of n chunks: the
sequences of one data rank, or of one micro-batch. With g_i the mean gradient of chunk i and g that of the batch,

    a = Σ w_i |g_i|²,  w_i the chunk's share of the valid tokens,    A = |g|²
    |G|² = (n A − a) / (n − 1)            the gradient without noise
    tr Σ = B (a − A) / (n − 1)            the noise of a single sequence

are unbiased, also for chunks of unequal size: weighted so, a has the expectation |G|² + tr Σ · n / B whatever the
w_i. Their quotient tr Σ / |G|² is the noise scale in sequences; it is taken between running means, because the mean
of quotients is biased.

K chunks of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUMBERS = 4  # numbers that the estimate adds to the one message of a step
DECAY = 0.99  # of the running means, per step: they cover about 100 steps
FIRST = 10  # steps before the quotient is reported
# Steps per estimate if every micro-batch is measured: every step would cost 1.3 % of the step time on an H200
EVERY = 4
SIZE_DECAY = 0.9  # of the running squared norm that normalises each step
# A squared norm this many times the recent one's (4 times in norm) is left out of the means
SPIKE = 16.0


class LocalNorms:
    """Squared norms of this rank's gradients before those of other data ranks are added.

    `counted` are the ids of the parameters that this rank counts: copies that other tensor ranks hold too count once,
    as in the gradient norm.
    """

    def __init__(self, counted: frozenset[int]) -> None:
        self._counted = counted
        self.enabled, self.every = True, 1  # the same on all ranks
        self.on = False  # whether this step is measured
        # Number of the next step: a resumed run measures the same steps
        self.next = 0
        self._calls: dict[object, int] = {}
        self._norms_K: list[list[torch.Tensor]] = []
        self._missed = False

    def begin(self) -> None:
        """Prepare a step, before its first backward."""
        self.on = self.enabled and self.next % self.every == 0
        self.next += 1
        self._calls.clear()
        self._norms_K.clear()
        self._missed = False

    def miss(self) -> None:
        """Note that some gradients of this step were not measured."""
        self._missed = True

    def counts(self, param: torch.Tensor) -> bool:
        """Return whether this rank counts a parameter in this step."""
        return self.on and id(param) in self._counted

    def hear(self, key: object, grads: Sequence[torch.Tensor]) -> None:
        """Add the next chunk's gradients of the parameters identified by `key`; chunks come in order for every key."""
        if not self.on:
            return
        chunk = self._calls[key] = self._calls.get(key, -1) + 1
        while len(self._norms_K) <= chunk:
            self._norms_K.append([])
        self._norms_K[chunk] += norms_of([grad.detach() for grad in grads if grad.numel()])

    def numbers(self, targets_BS: torch.Tensor, *, micro: int, ignored: int, speaks: bool) -> list[torch.Tensor]:
        """Return (Σ |s_i|² / valid tokens of i, chunks, sequences), to be summed over all ranks of the job.

        `targets_BS` are all targets of this data rank; of the ranks with these targets, only the one with the flag
        set counts chunks and sequences. The first number is NaN if chunks cannot be distinguished, because a schedule
        passes on the gradients of several at once.
        """
        valid_B = (targets_BS != ignored).sum(1)
        valid_K = valid_B.view(-1, micro).sum(1)
        calls_per_key = {calls + 1 for calls in self._calls.values()}
        # Once a step: the data rank's sequences are one chunk
        if calls_per_key and calls_per_key <= {1}:
            valid_K = valid_K.sum(0, keepdim=True)
        elif calls_per_key - {len(valid_K)}:
            self._missed = True
        if self._missed:
            # No chunks: the estimate is reported as NaN below.
            valid_K = valid_K[:0]
        zero = torch.zeros((), dtype=torch.float64, device=targets_BS.device)
        if len(valid_K):
            squares = [torch.stack(norms).double().square().sum() if norms else zero for norms in self._norms_K]
            squared_K = torch.stack(squares or [zero] * len(valid_K)).to(targets_BS.device)
            local = torch.where(valid_K > 0, squared_K / valid_K.clamp(min=1), 0.0).sum()
        else:
            local = torch.full_like(zero, math.nan)
        counts = [(valid_K > 0).sum().double(), (valid_B > 0).sum().double()]
        return [local, *(counts if speaks else [zero, zero])]


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norms of tensors in float32 or wider.

    146 tensors on an H200: 1.0 ms in one `_foreach_norm`; one by one 2.4 ms by `vector_norm`, 4.3 by `_foreach_norm`.
    """
    if not tensors:
        return []
    norm_dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return [torch.linalg.vector_norm(tensors[0], dtype=norm_dtype)]
    return list(torch._foreach_norm(list(tensors), 2, dtype=norm_dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The noise estimate of one step: unbiased, but with a large variance."""

    trace: float  # tr Σ of one sequence
    squared: float  # |G|²; below zero if noise exceeds it


def estimate_noise(*, local: float, total: float, chunks: float, samples: float) -> Noise | None:
    """Estimate the noise from a (`local`) and A (`total`) of this module's docstring.

    Returns None if there are fewer than 2 chunks.

    >>> estimate_noise(local=5.0, total=2.0, chunks=4, samples=8)
    Noise(trace=8.0, squared=1.0)
    """
    if chunks < 2 or not math.isfinite(local) or not math.isfinite(total):
        return None
    return Noise(trace=samples * (local - total) / (chunks - 1), squared=(chunks * total - local) / (chunks - 1))


def noise_of_step(numbers: Sequence[float], *, valid: float, factor: float) -> Noise | None:
    """Return the noise of a step's gradient in the unit of its norm, from the summed `NoiseListener.own_numbers`."""
    if not numbers:
        return None
    local, total, chunks, sequences = numbers
    unit = factor * factor
    return estimate_noise(local=local * unit * valid, total=total * unit, chunks=chunks, samples=sequences)


class NoiseScale:
    """Running means of numerator and denominator of the noise scale, from numbers that all ranks have summed.

    Gradients shrink a hundredfold in the first steps of a run, and a single spike is as large as thousands of them:
    each step is divided by the squared norm that was usual before it, which biases neither side, and spikes are left
    out.
    """

    def __init__(self, *, every: int = 1, decay: float = DECAY, first: int = FIRST) -> None:
        self._decay, self._first = decay**every, -(-first // every)
        self._trace = self._squared = self._size = 0.0
        self._steps = 0

    def take(self, noise: Noise | None, grad_norm: float) -> None:
        """Add the estimate and the gradient norm of a step; None adds nothing."""
        size = grad_norm * grad_norm
        if noise is None or not size > 0.0:
            return
        usual_size = self._size or size
        decay, is_spike = SIZE_DECAY, size > SPIKE * usual_size
        self._size = decay * usual_size + (1 - decay) * min(size, SPIKE * usual_size)
        if is_spike:
            return
        self._trace = self._decay * self._trace + (1 - self._decay) * noise.trace / usual_size
        self._squared = self._decay * self._squared + (1 - self._decay) * noise.squared / usual_size
        self._steps += 1

    @property
    def samples(self) -> float | None:
        """The noise scale in sequences; None after too few steps, or if noise exceeds the mean gradient."""
        # Both means lack the same weight of missing earlier steps, so the quotient needs no correction for it.
        if self._steps < self._first or self._squared <= 0.0 or self._trace <= 0.0:
            return None
        return self._trace / self._squared

    def state(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"trace": self._trace, "squared": self._squared, "size": self._size, "steps": self._steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the values that `state` returned."""
        self._trace, self._squared = float(state["trace"]), float(state["squared"])
        self._size, self._steps = float(state["size"]), int(state["steps"])
