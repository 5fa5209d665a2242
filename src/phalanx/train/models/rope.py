"""Rotary positions (arXiv:2104.09864) with the stretchings long-context models use.

S sequence, N heads, H head, R = H / 2 rotated pairs. Pairs are (i, i + H/2), as Hugging Face lays them out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.job.model import ModelShape

# YaRN's band of rotations within the original length, arXiv:2309.00071 section 3.2 ("alpha = 1, beta = 32").
YARN_SLOW, YARN_FAST = 1.0, 32.0


class Rope:
    """Tables of one forward pass.

    Neither a tuple nor a dataclass: FSDP2 looks into those for tensors to cast, and a bfloat16 cosine keeps 8 bits.
    """

    def __init__(self, *, cos_SR: Tensor, sin_SR: Tensor) -> None:
        self.cos_SR = cos_SR
        self.sin_SR = sin_SR

    def turn(self, x_BSNH: Tensor) -> Tensor:
        """Rotate every pair of every head by its position's angle."""
        cos_S1R, sin_S1R = self.cos_SR[:, None, :], self.sin_SR[:, None, :]
        left, right = x_BSNH.chunk(2, dim=-1)
        turned = torch.cat((left * cos_S1R - right * sin_S1R, right * cos_S1R + left * sin_S1R), dim=-1)
        return turned.to(x_BSNH.dtype)


def rope_tables(shape: ModelShape, positions_S: Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines for these positions, in float32 or wider.

    Angles are formed in float64: position 100,000 times a float32 frequency is off by up to 0.006 radians.
    """
    frequency_R = frequencies(shape, positions_S.device)
    angle_SR = positions_S.to(torch.float64)[:, None] * frequency_R[None, :]
    factor = _yarn_attention(shape.rope_factor) if shape.rope_scaling == "yarn" else 1.0
    wide = torch.promote_types(dtype, torch.float32)
    return Rope(cos_SR=(angle_SR.cos() * factor).to(wide), sin_SR=(angle_SR.sin() * factor).to(wide))


def frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Radians per position of each pair, stretched as the shape says; float64."""
    exponent_R = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    frequency_R = shape.rope_theta**-exponent_R
    match shape.rope_scaling:
        case "linear":
            return frequency_R / shape.rope_factor
        case "llama3":
            return _llama3(shape, frequency_R)
        case "yarn":
            return _yarn(shape, frequency_R)
        case _:
            return frequency_R


def _llama3(shape: ModelShape, frequency_R: Tensor) -> Tensor:
    """Llama 3.1: slow pairs are stretched, fast ones kept, others mixed by their turns in the original length."""
    low, high = shape.rope_low_factor, shape.rope_high_factor
    turns_R = shape.rope_original_positions * frequency_R / (2 * math.pi)
    kept_R = ((turns_R - low) / (high - low)).clamp(0.0, 1.0)
    return frequency_R * kept_R + frequency_R / shape.rope_factor * (1.0 - kept_R)


def _yarn(shape: ModelShape, frequency_R: Tensor) -> Tensor:
    """YaRN: as llama3, but the mix is linear in the index of the pair."""

    def pair_that_turns(times: float) -> float:
        ratio = shape.rope_original_positions / (times * 2 * math.pi)
        return shape.head_dim * math.log(ratio) / (2 * math.log(shape.rope_theta))

    first = max(math.floor(pair_that_turns(YARN_FAST)), 0)
    last = min(math.ceil(pair_that_turns(YARN_SLOW)), shape.head_dim - 1)
    index_R = torch.arange(shape.head_dim // 2, device=frequency_R.device, dtype=frequency_R.dtype)
    stretched_R = ((index_R - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequency_R * (1.0 - stretched_R) + frequency_R / shape.rope_factor * stretched_R


def _yarn_attention(factor: float) -> float:
    """YaRN's temperature on q·k, put on the tables: arXiv:2309.00071 eq. 22."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
