"""From a number of parameters to a shape that hardware likes: whole tiles, heads that split over 8 devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.job.model import ModelShape
from phalanx.job.parameter_counts import count_parameters

ASPECT = 110.0  # hidden over layers: Llama 3 has 128 (8B), 102 (70B) and 130 (405B), arXiv:2407.21783 table 3
MOST_ASPECT_DISTANCE = math.log(2.2)
ASPECT_PRICE = 0.03  # of a factor e in the aspect, in units of relative distance from the wanted size


def counted_params(shape: ModelShape, counted: str) -> int:
    """Parameters of a shape in the count of a law; what the law does not state is taken as all of them."""
    counts = count_parameters(shape)
    if counted == "no-embedding":
        return counts.total - counts.embedding + (counts.embedding if shape.tied else 0)
    if counted == "no-embedding-no-head":
        return counts.total - counts.embedding - counts.head
    return counts.active if counted == "active" else counts.total


def nearest_shape(params: float, *, counted: str, vocab: int, name: str = "scaled") -> ModelShape:
    """The Llama-like shape whose parameters, so counted, come nearest, at an aspect that is known to train well.

    >>> shape = nearest_shape(8.03e9, counted="total", vocab=128256)
    >>> shape.hidden % 256, shape.heads % 8, abs(counted_params(shape, "total") / 8.03e9 - 1) < 0.02
    (0, 0, True)
    """
    best, least = None, math.inf
    for shape in _candidate_shapes(params, vocab=vocab, name=name):
        size = math.log(counted_params(shape, counted) / params)
        # Small models are relatively deeper: 64 wide has 4 to 6 layers, 1,024 about 16.
        aspect = math.log(shape.hidden / shape.layers / min(ASPECT, 16.0 + shape.hidden / 20.0))
        cost = abs(size) + ASPECT_PRICE * abs(aspect) + _depth_price(shape.layers)
        if abs(aspect) < MOST_ASPECT_DISTANCE and cost < least:
            best, least = shape, cost
    if best is None:  # smaller than any with this vocabulary
        return next(_candidate_shapes(params, vocab=vocab, name=name))
    return best


def _depth_price(layers: int) -> float:
    """Depths that pipelines split evenly are worth a few per cent of size, which cost next to no loss."""
    return 0.0 if layers % 8 == 0 else 0.01 if layers % 4 == 0 else 0.04


def _candidate_shapes(params: float, *, vocab: int, name: str) -> Iterator[ModelShape]:
    """Shapes around a size; widths in whole tiles of 256 from 2,048 on, of 128 from 512 on, of 64 or 32 below."""
    middle = (params * ASPECT / 12.0) ** (1.0 / 3.0)  # 12·layers·hidden² parameters
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
            ffn = max(tile, round(3.5 * hidden / tile) * tile)  # grouped queries leave room for a wider MLP (Llama 3)
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
