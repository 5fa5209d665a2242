"""The element types a checkpoint may hold, under torch's names, with safetensors' names and sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One element type."""

    torch: torch.dtype
    tag: str  # safetensors' name
    size_bytes: int


KINDS = {
    "float64": Kind(torch=torch.float64, tag="F64", size_bytes=8),
    "float32": Kind(torch=torch.float32, tag="F32", size_bytes=4),
    "float16": Kind(torch=torch.float16, tag="F16", size_bytes=2),
    "bfloat16": Kind(torch=torch.bfloat16, tag="BF16", size_bytes=2),
    "int64": Kind(torch=torch.int64, tag="I64", size_bytes=8),
    "int32": Kind(torch=torch.int32, tag="I32", size_bytes=4),
    "int8": Kind(torch=torch.int8, tag="I8", size_bytes=1),
    "uint8": Kind(torch=torch.uint8, tag="U8", size_bytes=1),
    "bool": Kind(torch=torch.bool, tag="BOOL", size_bytes=1),
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own short name.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
