"""What the planner can count but the trainer cannot train yet, said before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.errors import Problem, UserError
from phalanx.job.model import ModelShape


def refuse_untrainable(shape: ModelShape) -> None:
    """Raises UserError with everything of this shape the trainer lacks."""
    problems = list(_problems(shape))
    if problems:
        raise UserError(problems)


def _problems(shape: ModelShape) -> Iterator[Problem]:
    where = f"model {shape.name}"
    if shape.module:
        yield Problem(
            where=where,
            what=f'module = "{shape.module}" is a network of your own, which cannot be built here as our decoder',
            why="the keys of the shape only tell the planner its size",
        )
    if shape.is_mla:
        yield Problem(
            where=where,
            what=f"multi-head latent attention (kv_lora_rank = {shape.kv_lora_rank}) is not trained yet",
            why="the planner and the simulator know it; the trainer has grouped-query attention only",
            fix="set kv_lora_rank = 0 and give heads, kv_heads and head_dim",
        )
    if shape.positions == "alibi":
        yield Problem(
            where=where,
            what='positions = "alibi" are not trained yet',
            why="the fused attention kernels take no bias per head",
            fix='use positions = "rope" or "learned"',
        )
    if shape.positions == "rope" and not shape.is_mla and shape.head_dim % 2:
        yield Problem(
            where=where,
            what=f"head_dim = {shape.head_dim} is odd",
            why="rotary positions turn pairs",
            fix=f"use {shape.head_dim + 1}",
        )
    if shape.is_moe and shape.bias:
        yield Problem(where=where, what="biases inside experts are not trained", fix="set bias = false")
    if shape.balance == "bias" and not shape.router_bias:
        yield Problem(
            where=where,
            what='balance = "bias" needs the bias it moves',
            fix="set router_bias = true",
        )
