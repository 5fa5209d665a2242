"""Shapes of a sweep: models of a wanted size in the proportions of another model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from phalanx.errors import Problem, UserError, mistake
from phalanx.job.model import ModelShape
from phalanx.job.parameter_counts import count_parameters
from phalanx.units import all_divisors, format_count

HEAD_DIMS = (16, 32, 64, 128)
FFN_MULTIPLE = 16
MOST_LAYERS, MOST_HEADS = 256, 256
# Largest factor between a shape and the wanted size. Points of a law have their true size, so this only spaces the
# grid.
FARTHEST = 1.35
# Width over depth of public models grows slowly with size: 64 in GPT-2 small, 128 in GPT-3 175B and Llama 3 405B
# (Kaplan et al. 2020, section 3.1: within a factor of four of the best ratio the loss is within 1 %).
ASPECT_EXPONENT = 0.1
# Half the head width, or half as many query heads per key-value head, counts as much as a size 16 % off.
HEAD_WEIGHT = 0.15
# An aspect ratio 2 times off counts as much as a size 35 % off: the law is of one family of shapes.
ASPECT_WEIGHT = 0.3
# One layer cannot copy from context (induction takes two): it would be another family of models.
LEAST_LAYERS = 2


def refuse_unscalable(shape: ModelShape) -> None:
    """Raise UserError for models that cannot be made smaller by changing width and depth alone."""
    for is_unscalable, key, reason in (
        (bool(shape.module), "model.module", "a network of your own can only be scaled down by its author"),
        (shape.is_moe, "model.experts", "a sweep makes dense models: sizes of experts follow laws of their own"),
        (shape.is_mla, "model.kv_lora_rank", "latent attention is planned but not trained"),
    ):
        if is_unscalable:
            raise mistake(key, reason, fix="sweep a dense model of the same family")


def shape_near(wanted: float, like: ModelShape, *, taken: Collection[int] = ()) -> ModelShape:
    """Return the shape of about `wanted` parameters in the proportions of `like`, whose size is not in `taken`.

    All parameters count. Width is a whole number of heads; depth, heads and the width of a head are chosen; ffn /
    hidden, the ratio of query to key-value heads, vocabulary and everything else stay. Raises UserError where no
    shape is near.

    >>> llama = ModelShape(
    ...     name="l", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=512, tied=True
    ... )
    >>> small = shape_near(100_000, llama)
    >>> small.hidden, small.layers, count_parameters(small).total
    (64, 2, 131392)
    """
    size = count_parameters(like).total
    aspect = like.hidden / like.layers * (wanted / size) ** ASPECT_EXPONENT

    def distance(shape: ModelShape) -> float:
        log_ratio = abs(math.log(count_parameters(shape).total / wanted))
        groups = shape.heads / shape.kv_heads / (like.heads / like.kv_heads)
        heads = abs(math.log2(shape.head_dim / like.head_dim)) + abs(math.log2(groups))
        return log_ratio + ASPECT_WEIGHT * abs(math.log2(shape.hidden / shape.layers / aspect)) + HEAD_WEIGHT * heads

    candidates = [
        shape
        for shape in _candidate_shapes(wanted, like)
        if (total := count_parameters(shape).total) not in taken and 1 / FARTHEST <= total / wanted <= FARTHEST
    ]
    best = min(candidates, key=distance, default=None)
    if best is None and is_too_large(wanted, like):
        widest = f"{MOST_LAYERS} layers of {MOST_HEADS} heads of {like.head_dim}"
        raise mistake(
            "--budgets",
            f"asks for a model of {format_count(wanted)} parameters, more than a sweep makes in these proportions",
            why=f"the largest, {widest}, has {format_count(_largest_params(like))}",
            fix="lower the budgets, or sweep a job with a larger model.head_dim",
        )
    if best is None:
        least = count_parameters(
            _made_shape(like, head_dim=min(HEAD_DIMS[0], like.head_dim), heads=1, layers=min(LEAST_LAYERS, like.layers))
        ).total
        raise UserError(
            [
                Problem(
                    where="--budgets",
                    what=f"asks for a model of {format_count(wanted)} parameters, but no shape comes close",
                    why=f"with a vocabulary of {like.vocab:,} the smallest has {format_count(least)}",
                    fix="raise the budgets, or use a smaller vocabulary",
                )
            ]
        )
    return best


def is_too_large(wanted: float, like: ModelShape) -> bool:
    """Return True if every shape in these proportions has fewer than `wanted` parameters."""
    return wanted > _largest_params(like)


def _largest_params(like: ModelShape) -> int:
    widest = _made_shape(like, head_dim=max(like.head_dim, HEAD_DIMS[0]), heads=MOST_HEADS, layers=MOST_LAYERS)
    return count_parameters(widest).total


def _candidate_shapes(wanted: float, like: ModelShape) -> Iterator[ModelShape]:
    """Yield shapes near the wanted size: for each head width and number of heads, the two nearest depths."""
    least = min(LEAST_LAYERS, like.layers)
    head_dims = sorted({*HEAD_DIMS, like.head_dim})
    for head_dim in (width for width in head_dims if width <= like.head_dim):
        for heads in range(1, MOST_HEADS + 1):
            single_layer = _made_shape(like, head_dim=head_dim, heads=heads, layers=1)
            two_layer_params = count_parameters(replace(single_layer, layers=2)).total
            per_layer = two_layer_params - count_parameters(single_layer).total
            fixed_params = two_layer_params - 2 * per_layer
            if fixed_params > wanted * FARTHEST:
                break
            near = (wanted - fixed_params) / per_layer
            for layers in {max(least, math.floor(near)), max(least, math.ceil(near))}:
                if layers <= MOST_LAYERS:
                    yield replace(single_layer, layers=layers)


def _made_shape(like: ModelShape, *, head_dim: int, heads: int, layers: int) -> ModelShape:
    hidden = heads * head_dim
    group = like.heads / like.kv_heads
    kv_heads = min(all_divisors(heads), key=lambda count: abs(math.log(heads / count / group)))
    ffn = max(FFN_MULTIPLE, round(hidden * like.ffn / like.hidden / FFN_MULTIPLE) * FFN_MULTIPLE)
    return replace(like, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, layers=layers)


def distinct_shapes(wanted: Sequence[float], like: ModelShape) -> list[ModelShape]:
    """Return one distinct shape per wanted size, smallest first; raises UserError where sizes would share a shape."""
    shapes: dict[int, ModelShape] = {}
    for size in wanted:
        try:
            shape = shape_near(size, like, taken=shapes)
        except UserError:
            if not shapes or is_too_large(size, like):
                # Not even one shape fits, or asking for fewer sizes would not help.
                raise
            continue
        shapes[count_parameters(shape).total] = shape
    if len(shapes) < len(wanted):
        raise mistake(
            "--sizes",
            f"{len(wanted)} sizes between {format_count(min(wanted))} and {format_count(max(wanted))} parameters "
            f"come to {len(shapes)} different shapes",
            why="width is a whole number of heads and depth a whole number of layers",
            fix="ask for fewer sizes, or raise the budgets",
        )
    return [shapes[size] for size in sorted(shapes)]
