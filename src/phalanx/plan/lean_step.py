"""The large tensors that a step of our trainer never holds whole; used by the trainer and the memory model.

The logits of a micro-batch are computed, used and freed chunk by chunk (`train/kernels/linear_cross_entropy.py`), and
the product of a gated MLP is recomputed in backward from its two factors (`train/kernels/swiglu.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import Floats

LEAST_LOGITS = 2**26  # fewer logits (128 MiB in 16 bit) are held whole: chunks would save too little
CHUNK_LOGITS = 4.3e8  # held at once: 0.8 GiB in 16 bit, about 3,300 tokens of a vocabulary of 128,256
# With an fp8 head, the logits whose tokens the weight's gradient sums at once: 2 GiB, about 16,000 tokens.
GROUP_LOGITS = 2.2e9
CHUNK_UNIT = 256  # tokens: a multiple of the tile sizes of matrix products
LEAST_PRODUCT = 2**24  # elements of an MLP's product; a smaller one is kept


def drops_logits(
    tokens: float | Floats, vocab: float | Floats, *, tensor: float | Floats, pipeline: float | Floats
) -> NDArray[np.bool_]:
    """Return whether the loss processes the tokens of a micro-batch in chunks.

    It does not where the vocabulary is split over tensor ranks, nor in a pipeline, whose schedules run loss and head
    separately.
    """
    return np.asarray((np.asarray(tokens) * vocab >= LEAST_LOGITS) & (np.asarray(tensor) == 1) & (pipeline == 1))


def loss_chunk(tokens: float | Floats, vocab: float | Floats) -> Floats:
    """Return the number of tokens whose logits exist at once; the chunks are nearly equal.

    >>> int(loss_chunk(16_384, 128_256)), int(loss_chunk(1_000, 32_000))
    (3328, 1000)
    """
    count = np.asarray(tokens, dtype=np.float64)
    parts = np.maximum(np.ceil(count * vocab / CHUNK_LOGITS), 1.0)
    return np.asarray(np.minimum(count, np.ceil(count / parts / CHUNK_UNIT) * CHUNK_UNIT))


def group_tokens(chunk: float | Floats, vocab: float | Floats) -> Floats:
    """Return the tokens over which an fp8 head's weight gradient is summed at once: whole chunks of `loss_chunk`.

    >>> int(group_tokens(3_328, 128_256))
    16640
    """
    return np.asarray(np.maximum(np.floor(GROUP_LOGITS / vocab / chunk), 1.0) * chunk)


def drops_product(
    tokens: float | Floats, ffn: float | Floats, *, tensor: float | Floats, splits_backward: bool | NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return whether a gated MLP without experts, fp8 or recompute computes its product again in backward.

    It does not where a schedule splits backward in two, because both halves would compute it.
    """
    large = np.asarray(tokens) * ffn >= LEAST_PRODUCT
    return np.asarray(large & (np.asarray(tensor) == 1) & ~np.asarray(splits_backward))
