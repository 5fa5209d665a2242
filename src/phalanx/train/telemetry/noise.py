"""The gradient noise scale: how many sequences a batch needs before its gradient says more than chance.

McCandlish et al. 2018 (arXiv:1812.06162, appendix A). A step's batch of B sequences is made of n chunks: what each data
rank, or each micro-batch, learnt from. With g_i the mean gradient of chunk i and g that of the whole batch,

    a = Σ w_i |g_i|²,  w_i the chunk's share of the valid tokens,    A = |g|²
    |G|² = (n A − a) / (n − 1)            the gradient without noise
    tr Σ = B (a − A) / (n − 1)            the noise of a single sequence

are free of bias, also for chunks of unequal size: weighted so, a expects |G|² + tr Σ · n / B whatever the w_i. Their
quotient tr Σ / |G|² is the noise scale in sequences; it is taken between running means, because the mean of quotients
is biased.

K chunks of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUMBERS = 4  # that the estimate adds to the one message of a step
DECAY = 0.99  # of the running means, a step: they look back on about 100
FIRST = 10  # steps before the quotient is told
EVERY = 4  # steps of one estimate where every micro-batch is measured: 1.3 % of an H200's step otherwise
SIZE_DECAY = 0.9  # of the squared norm that each step is weighed by
SPIKE = 16.0  # a squared norm so many times the recent one's (4 times in norm) is left out of the means


class LocalNorms:
    """Squared norms of this rank's gradients as they were before any other data rank's were added to them.

    `counted` are the parameters (by id) that this rank speaks for: copies that another tensor rank holds too count
    once, as in the gradient norm.
    """

    def __init__(self, counted: frozenset[int]) -> None:
        self._counted = counted
        self.enabled, self.every = True, 1  # on all ranks alike
        self.on = False  # in this step
        self.next = 0  # number of the next step: a run that is taken up again measures the same steps
        self._calls: dict[object, int] = {}
        self._norms_K: list[list[torch.Tensor]] = []
        self._missed = False

    def begin(self) -> None:
        """Before the first backward of a step."""
        self.on = self.enabled and self.next % self.every == 0
        self.next += 1
        self._calls.clear()
        self._norms_K.clear()
        self._missed = False

    def miss(self) -> None:
        """Some gradients of this step came unheard."""
        self._missed = True

    def counts(self, param: torch.Tensor) -> bool:
        """Whether this rank speaks for a parameter."""
        return self.on and id(param) in self._counted

    def hear(self, key: object, grads: Sequence[torch.Tensor]) -> None:
        """Take the next chunk's gradients of the parameters behind `key`; chunks come in order for every key."""
        if not self.on:
            return
        chunk = self._calls[key] = self._calls.get(key, -1) + 1
        while len(self._norms_K) <= chunk:
            self._norms_K.append([])
        self._norms_K[chunk] += norms_of([grad.detach() for grad in grads if grad.numel()])

    def numbers(self, targets_BS: torch.Tensor, *, micro: int, ignored: int, speaks: bool) -> list[torch.Tensor]:
        """(Σ |s_i|² / valid tokens of i, chunks, sequences) to be summed over all ranks of the job.

        `targets_BS` are all the targets of this data rank; one rank of each `speaks` for the counts. Not a number where
        chunks cannot be told apart: a schedule that hands gradients over in lumps.
        """
        valid_B = (targets_BS != ignored).sum(1)
        valid_K = valid_B.view(-1, micro).sum(1)
        heard = {calls + 1 for calls in self._calls.values()}
        if heard and heard <= {1}:  # once a step: the whole data rank is one chunk
            valid_K = valid_K.sum(0, keepdim=True)
        elif heard - {len(valid_K)}:
            self._missed = True
        if self._missed:
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
    """In float32 or wider.

    146 tensors on an H200: 1.0 ms in one `_foreach_norm`; one by one 2.4 ms by `vector_norm`, 4.3 by `_foreach_norm`.
    """
    if not tensors:
        return []
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return [torch.linalg.vector_norm(tensors[0], dtype=wide)]
    return list(torch._foreach_norm(list(tensors), 2, dtype=wide))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What one step says: unbiased, and for a single step far off."""

    trace: float  # tr Σ of one sequence
    squared: float  # |G|²; below zero when noise drowns it


def estimate_noise(*, local: float, total: float, chunks: float, samples: float) -> Noise | None:
    """From a (`local`) and A (`total`) of the head of this file; None where there is nothing to compare.

    >>> estimate_noise(local=5.0, total=2.0, chunks=4, samples=8)
    Noise(trace=8.0, squared=1.0)
    """
    if chunks < 2 or not math.isfinite(local) or not math.isfinite(total):
        return None
    return Noise(trace=samples * (local - total) / (chunks - 1), squared=(chunks * total - local) / (chunks - 1))


def noise_of_step(numbers: Sequence[float], *, valid: float, factor: float) -> Noise | None:
    """The noise of a step's gradient in the unit of its norm, from `NoiseListener.own_numbers` of all ranks."""
    if not numbers:
        return None
    local, total, chunks, sequences = numbers
    unit = factor * factor
    return estimate_noise(local=local * unit * valid, total=total * unit, chunks=chunks, samples=sequences)


class NoiseScale:
    """Running means of both sides of the quotient. They depend only on numbers that all ranks have agreed on.

    Gradients shrink a hundredfold in the first steps of a run, and a single spike is as large as thousands of them:
    each step is divided by the squared norm that was usual before it, which biases neither side, and spikes are left
    out.
    """

    def __init__(self, *, every: int = 1, decay: float = DECAY, first: int = FIRST) -> None:
        self._decay, self._first = decay**every, -(-first // every)
        self._trace = self._squared = self._size = 0.0
        self._steps = 0

    def take(self, noise: Noise | None, grad_norm: float) -> None:
        """Add a step and the norm of its gradient; None adds nothing."""
        size = grad_norm * grad_norm
        if noise is None or not size > 0.0:
            return
        usual = self._size or size
        kept, is_spike = SIZE_DECAY, size > SPIKE * usual
        self._size = kept * usual + (1 - kept) * min(size, SPIKE * usual)
        if is_spike:
            return
        self._trace = self._decay * self._trace + (1 - self._decay) * noise.trace / usual
        self._squared = self._decay * self._squared + (1 - self._decay) * noise.squared / usual
        self._steps += 1

    @property
    def samples(self) -> float | None:
        """The noise scale in sequences; None while too little is known, or noise drowns the gradient's mean."""
        # Both means lack the same weight of steps that never were, so the quotient needs no correction for it.
        if self._steps < self._first or self._squared <= 0.0 or self._trace <= 0.0:
            return None
        return self._trace / self._squared

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the mean goes on where it was."""
        return {"trace": self._trace, "squared": self._squared, "size": self._size, "steps": self._steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._trace, self._squared = float(state["trace"]), float(state["squared"])
        self._size, self._steps = float(state["size"]), int(state["steps"])
