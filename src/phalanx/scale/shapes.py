"""Find a model shape of a given size that suits hardware: whole tiles, heads that split over 8 devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.job.model import ModelShape
from phalanx.job.parameter_counts import count_parameters

# Hidden size over layers: Llama 3 has 128 (8B), 102 (70B) and 130 (405B), arXiv:2407.21783 table 3.
ASPECT = 110.0
MOST_ASPECT_DISTANCE = math.log(2.2)
# Cost of a factor e in the aspect ratio, as a relative distance from the wanted size.
ASPECT_PRICE = 0.03


def counted_params(shape: ModelShape, counted: str) -> int:
    """Return the parameters of a shape as a law counts them; a law that does not state its count takes all."""
    counts = count_parameters(shape)
    if counted == "no-embedding":
        return counts.total - counts.embedding + (counts.embedding if shape.tied else 0)
    if counted == "no-embedding-no-head":
        return counts.total - counts.embedding - counts.head
    return counts.active if counted == "active" else counts.total


def nearest_shape(params: float, *, counted: str, vocab: int, name: str = "scaled") -> ModelShape:
    """Return the Llama-like shape of nearest parameter count, at an aspect ratio that is known to train well.

    >>> shape = nearest_shape(8.03e9, counted="total", vocab=128256)
    >>> shape.hidden % 256, shape.heads % 8, abs(counted_params(shape, "total") / 8.03e9 - 1) < 0.02
    (0, 0, True)
    """
    best, least = None, math.inf
    for shape in _candidate_shapes(params, vocab=vocab, name=name):
        size = math.log(counted_params(shape, counted) / params)
        # Small models are relatively deeper: hidden size 64 has 4 to 6 layers, 1,024 about 16.
        aspect = math.log(shape.hidden / shape.layers / min(ASPECT, 16.0 + shape.hidden / 20.0))
        cost = abs(size) + ASPECT_PRICE * abs(aspect) + _depth_price(shape.layers)
        if abs(aspect) < MOST_ASPECT_DISTANCE and cost < least:
            best, least = shape, cost
    # The size is smaller than that of any shape with this vocabulary.
    if best is None:
        return next(_candidate_shapes(params, vocab=vocab, name=name))
    return best


def _depth_price(layers: int) -> float:
    """Return the cost of a depth: even pipeline stages are worth a few per cent of size, which cost almost no loss."""
    return 0.0 if layers % 8 == 0 else 0.01 if layers % 4 == 0 else 0.04


def _candidate_shapes(params: float, *, vocab: int, name: str) -> Iterator[ModelShape]:
    """Yield shapes around a size; widths are whole tiles of 256 from 2,048 on, 128 from 512 on, 32 below."""
    middle = (params * ASPECT / 12.0) ** (1.0 / 3.0)  # a model has 12·layers·hidden² parameters
    widths = [*range(32, 512, 32), *range(512, 2048, 128), *range(2048, 65537, 256)]
    for hidden in widths:
        if not middle / 8 <= hidden <= middle * 4 and hidden != widths[0]:
            continue
        head = 128 if hidden >= 1024 else 64 if hidden >= 256 else 32
        if hidden % head:
            continue
        heads = hidden // head
        if heads >= 16 and heads % 8:  # whole heads on each of 8 tensor ranks
            continue
        kv_heads = 8 if heads >= 16 and heads % 8 == 0 else heads
        tile = 256 if hidden >= 1024 else 32
        ffn = max(tile, round(8 * hidden / 3 / tile) * tile)
        if heads >= 16:
            # Grouped queries leave room for a wider MLP (Llama 3).
            ffn = max(tile, round(3.5 * hidden / tile) * tile)
        for layers in range(2, 201):
            yield ModelShape(
                name=name,
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head,
                ffn=ffn,
                vocab=vocab,
            )
