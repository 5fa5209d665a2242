"""Which large tensors a step of our trainer never holds whole: asked by the trainer and by the planner, which counts.

The logits of a micro-batch are made, used and dropped part by part (`train/kernels/linear_cross_entropy.py`), and the
product of a gated MLP is made again in backward from its two factors (`train/kernels/swiglu.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import Floats

LEAST_LOGITS = 2**26  # fewer (128 MiB in 16 bit) are held: nothing is gained
CHUNK_LOGITS = 4.3e8  # at once: 0.8 GiB in 16 bit, about 3,300 tokens of a vocabulary of 128,256
GROUP_LOGITS = 2.2e9  # in fp8, whose tokens the weight's gradient sums over at once: 2 GiB, about 16,000 tokens
CHUNK_UNIT = 256  # tokens: what tiles of matrix products divide
LEAST_PRODUCT = 2**24  # elements of an MLP's product; a smaller one is kept


def drops_logits(
    tokens: float | Floats, vocab: float | Floats, *, tensor: float | Floats, pipeline: float | Floats
) -> NDArray[np.bool_]:
    """Whether the loss goes over the tokens of a micro-batch in parts.

    Not where the vocabulary is split over tensor ranks, nor in a pipeline, whose schedules take loss and head apart.
    """
    return np.asarray((np.asarray(tokens) * vocab >= LEAST_LOGITS) & (np.asarray(tensor) == 1) & (pipeline == 1))


def loss_chunk(tokens: float | Floats, vocab: float | Floats) -> Floats:
    """Tokens whose logits are there at once: parts of nearly the same size.

    >>> int(loss_chunk(16_384, 128_256)), int(loss_chunk(1_000, 32_000))
    (3328, 1000)
    """
    count = np.asarray(tokens, dtype=np.float64)
    parts = np.maximum(np.ceil(count * vocab / CHUNK_LOGITS), 1.0)
    return np.asarray(np.minimum(count, np.ceil(count / parts / CHUNK_UNIT) * CHUNK_UNIT))


def group_tokens(chunk: float | Floats, vocab: float | Floats) -> Floats:
    """Tokens over which an fp8 head's weight gradient is summed at once: whole parts of `loss_chunk`.

    >>> int(group_tokens(3_328, 128_256))
    16640
    """
    return np.asarray(np.maximum(np.floor(GROUP_LOGITS / vocab / chunk), 1.0) * chunk)


def drops_product(
    tokens: float | Floats, ffn: float | Floats, *, tensor: float | Floats, splits_backward: bool | NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Whether a gated MLP without experts, fp8 or recompute makes its product again in backward.

    Not where a schedule splits backward in two: it would be made again in both halves.
    """
    large = np.asarray(tokens) * ffn >= LEAST_PRODUCT
    return np.asarray(large & (np.asarray(tensor) == 1) & ~np.asarray(splits_backward))
