"""Templates of RMSNorm kernel sources with placeholders for numbers: the space of the kernel search.

A candidate file has `OP`, the operation's name, and `kernel(*inputs)`. Only values of the fixed lists in `VALUES` are
put into a template, so the source text stays the one in this file whatever an archive contains.
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

# One program per row, in blocks: it reads the row twice, once for its sum of squares and once for the result.
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

# One program per few rows, each kept entirely in registers: every value is read once.
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

# Several rows in one tile: more loads in flight at once.
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

# As many programs as the device runs at once, each looping over rows; the weight stays in registers.
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

# Plain PyTorch, some rows at a time, so that the result of one operation is still in the cache for the next.
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
# The same with a dot product for the sum of squares, and results written in place.
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
# Legal values of each placeholder, in order; genes that a template does not use are ignored.
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
    """Return the source of a candidate; raise ValueError for a value that is not in the template's lists."""
    template = TEMPLATES[device].get(genome.get("template", ""))
    if template is None:
        raise ValueError(f"template is none of {', '.join(TEMPLATES[device])}")
    for name, legal_values in VALUES[device].items():
        value = genome.get(name)
        if isinstance(value, bool) or value not in legal_values:
            raise ValueError(f"{name} is none of {', '.join(map(str, legal_values))}")
        template = template.replace(f"{{{name}}}", str(value))
    return template


def plain_values(genome: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the genome with every gene that its template ignores set to its first value: one genome per kernel."""
    template = TEMPLATES[device][genome["template"]]
    unused = {name: legal_values[0] for name, legal_values in VALUES[device].items() if f"{{{name}}}" not in template}
    return {**genome, **unused}
