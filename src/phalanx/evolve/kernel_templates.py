"""Kernel sources with holes for numbers: what a search over kernels varies. All of them compute RMSNorm.

A candidate file has `OP`, the operation's name, and `kernel(*inputs)`. Only numbers and words of fixed lists are put
into a template, so that its text is ours whatever an archive says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = """OP = "rms-norm"
EPS = 1e-5
"""

TRITON_HEAD = (
    HEAD
    + """
import torch
import triton
import triton.language as tl

"""
)

# One program per row, in blocks: the row is read twice, once for its sum of squares and once for the result.
BLOCKED = (
    TRITON_HEAD
    + """
@triton.jit
def norm_rows(x, weight, out, tokens, width, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    for part in range(ROWS):
        row = tl.program_id(0) * ROWS + part
        if row < tokens:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, width, BLOCK):
                at = start + tl.arange(0, BLOCK)
                values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
                total += values * values
            scale = tl.rsqrt(tl.sum(total, axis=0) / width + eps)
            for start in range(0, width, BLOCK):
                at = start + tl.arange(0, BLOCK)
                values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
                by = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
                tl.store(out + row * width + at, (values * scale * by).to(out.dtype.element_ty), mask=at < width)


def kernel(x, weight):
    x, width = x.contiguous(), x.shape[-1]
    tokens = x.numel() // width
    out = torch.empty_like(x)
    norm_rows[(triton.cdiv(tokens, {rows}),)](
        x, weight.contiguous(), out, tokens, width, EPS, BLOCK={block}, ROWS={rows}, num_warps={warps},
        num_stages={stages},
    )
    return out
"""
)

# One program per few rows, each held whole in registers: every value is read once.
WHOLE_ROW = (
    TRITON_HEAD
    + """
@triton.jit
def norm_rows(x, weight, out, tokens, width, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    by = tl.load(weight + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
    for part in range(ROWS):
        row = tl.program_id(0) * ROWS + part
        if row < tokens:
            values = tl.load(x + row * width + at, mask=at < width, other=0.0, eviction_policy="{evict}").to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
            tl.store(out + row * width + at, (values * scale * by).to(out.dtype.element_ty), mask=at < width)


def kernel(x, weight):
    x, width = x.contiguous(), x.shape[-1]
    tokens = x.numel() // width
    out = torch.empty_like(x)
    norm_rows[(triton.cdiv(tokens, {rows}),)](
        x, weight.contiguous(), out, tokens, width, EPS, BLOCK=triton.next_power_of_2(width), ROWS={rows},
        num_warps={warps}, num_stages={stages},
    )
    return out
"""
)

# Several rows in one tile: more loads under way at once.
TILED = (
    TRITON_HEAD
    + """
@triton.jit
def norm_rows(x, weight, out, tokens, width, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows[:, None] < tokens) & (at[None, :] < width)
    places = rows[:, None].to(tl.int64) * width + at[None, :]
    values = tl.load(x + places, mask=inside, other=0.0, eviction_policy="{evict}").to(tl.float32)
    by = tl.load(weight + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(out + places, (values * scale[:, None] * by[None, :]).to(out.dtype.element_ty), mask=inside)


def kernel(x, weight):
    x, width = x.contiguous(), x.shape[-1]
    tokens = x.numel() // width
    out = torch.empty_like(x)
    norm_rows[(triton.cdiv(tokens, {rows}),)](
        x, weight.contiguous(), out, tokens, width, EPS, BLOCK=triton.next_power_of_2(width), ROWS={rows},
        num_warps={warps}, num_stages={stages},
    )
    return out
"""
)

# As many programs as the device runs at once, each striding over the rows; the weight stays in registers.
PERSISTENT = (
    TRITON_HEAD
    + """
@triton.jit
def norm_rows(x, weight, out, tokens, width, eps, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    by = tl.load(weight + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
    for row in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        places = row.to(tl.int64) * width + at
        values = tl.load(x + places, mask=at < width, other=0.0, eviction_policy="{evict}").to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        tl.store(out + places, (values * scale * by).to(out.dtype.element_ty), mask=at < width)


def kernel(x, weight):
    x, width = x.contiguous(), x.shape[-1]
    tokens = x.numel() // width
    out = torch.empty_like(x)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    norm_rows[(min(tokens, processors * {rows}),)](
        x, weight.contiguous(), out, tokens, width, EPS, BLOCK=triton.next_power_of_2(width), STAGES={stages},
        num_warps={warps},
    )
    return out
"""
)

# Plain PyTorch, some rows at a time, so that what one operation wrote is still in the cache for the next.
CHUNKED = (
    HEAD
    + """
import torch


def kernel(x, weight):
    flat, width = x.contiguous().reshape(-1, x.shape[-1]), x.shape[-1]
    out = torch.empty_like(flat)
    by = weight.to(torch.float32)
    for start in range(0, flat.shape[0], {rows}):
        part = flat[start : start + {rows}].to(torch.float32)
        scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + EPS)
        out[start : start + {rows}] = (part * scale * by).to(x.dtype)
    return out.reshape(x.shape)
"""
)
# The same with one product for the sum of squares, and results written where they belong.
CHUNKED_IN_PLACE = (
    HEAD
    + """
import torch


def kernel(x, weight):
    flat, width = x.contiguous().reshape(-1, x.shape[-1]), x.shape[-1]
    out = torch.empty_like(flat)
    by = weight.to(torch.float32)
    for start in range(0, flat.shape[0], {rows}):
        part = flat[start : start + {rows}].to(torch.float32)
        squares = torch.linalg.vecdot(part, part).unsqueeze(-1)
        scaled = part * torch.rsqrt(squares / width + EPS)
        torch.mul(scaled, by, out=scaled)
        out[start : start + {rows}].copy_(scaled)
    return out.reshape(x.shape)
"""
)

TEMPLATES = {
    "cuda": {"blocked": BLOCKED, "whole-row": WHOLE_ROW, "tiled": TILED, "persistent": PERSISTENT},
    "cpu": {"chunked": CHUNKED, "chunked-in-place": CHUNKED_IN_PLACE},
}
# What goes into the holes, in order; genes that a template does not use stay as they are.
VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "cuda": {
        "block": (64, 128, 256, 512, 1024, 2048, 4096),
        "rows": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3, 4),
        "evict": ("evict_normal", "evict_first", "evict_last"),
    },
    "cpu": {"rows": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)},
}
SEEDS = {
    "cuda": {"template": "blocked", "block": 64, "rows": 1, "warps": 1, "stages": 1, "evict": "evict_normal"},
    "cpu": {"template": "chunked", "rows": 1},
}


def render_source(genome: Mapping[str, Any], device: str) -> str:
    """The source of a candidate; raises ValueError for values that are not of the lists."""
    template = TEMPLATES[device].get(genome.get("template", ""))
    if template is None:
        raise ValueError(f"template is none of {', '.join(TEMPLATES[device])}")
    for name, known in VALUES[device].items():
        value = genome.get(name)
        if isinstance(value, bool) or value not in known:
            raise ValueError(f"{name} is none of {', '.join(map(str, known))}")
        template = template.replace(f"{{{name}}}", str(value))
    return template


def plain_values(genome: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The same kernel with the first value of every list that its template does not use: one kernel, one candidate."""
    template = TEMPLATES[device][genome["template"]]
    unused = {name: known[0] for name, known in VALUES[device].items() if f"{{{name}}}" not in template}
    return {**genome, **unused}
