"""One block of memory that the judge and a candidate's process share: inputs with bands around them, and results.

The judge writes inputs into it and reads results out of it; whatever the candidate's process says about either is not
asked. On the CPU it is an anonymous file in memory, on a GPU an allocation of the judge's that the other process maps.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADER_BYTES = 512 * 1024  # at its beginning: the candidate's text, and what its process noted
NOTES_AT, NOTES_BYTES = 384 * 1024, 4096
BAND_BYTES = 4096  # of not-a-number before and after each tensor
ALIGN = 256
POISON = 0xFF  # as every byte: not-a-number in fp64, fp32, bf16, fp16, e5m2 and e4m3, -1 in whole numbers

DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the arena."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensor alone."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPES[self.dtype].itemsize

    def to_json(self) -> list[Any]:
        """As a message carries it."""
        return [self.offset, self.dtype, list(self.shape)]


def tensor_bytes(tensor: Tensor) -> int:
    """Of a dense tensor."""
    return tensor.numel() * tensor.dtype.itemsize


def place_tensors(kinds: Sequence[tuple[str, Sequence[int]]], start: int = HEADER_BYTES) -> tuple[list[Place], int]:
    """Places one behind the other with bands between them, from (dtype, shape); and where the last band ends."""
    found, offset = [], start
    for dtype, shape in kinds:
        offset = _aligned(offset + BAND_BYTES)
        place = Place(offset, dtype, tuple(shape))
        found.append(place)
        offset += place.num_bytes
    return found, _aligned(offset + BAND_BYTES)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def view_place(data: Tensor, place: Place) -> Tensor:
    """The tensor at a place, a view of the arena's bytes."""
    part = data[place.offset : place.offset + place.num_bytes]
    return part.view(DTYPES[place.dtype]).view(place.shape)


class HostBlock:
    """Shared memory of the machine: the arena on a CPU, and the header of every arena."""

    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create("phalanx-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.file, num_bytes)
        self.map = mmap.mmap(self.file, num_bytes)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def write_source(self, text: bytes) -> None:
        """The candidate's text, for its process to run; notes of an earlier process are cleared."""
        self.map[0:8] = len(text).to_bytes(8, "little")
        self.map[8 : 8 + len(text)] = text
        self.map[NOTES_AT : NOTES_AT + NOTES_BYTES] = bytes(NOTES_BYTES)

    def read_notes(self) -> str:
        """What the candidate's process noted that the candidate tried; its process can change it, so it only adds."""
        raw = bytes(self.map[NOTES_AT : NOTES_AT + NOTES_BYTES])
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def close(self) -> None:
        """Give the memory back; views of it must be gone."""
        del self.data
        os.close(self.file)


def share_cuda(tensor: Tensor) -> list[Any]:
    """What another process needs to map an allocation of the GPU: numbers and texts, no pickle."""
    parts = tensor.untyped_storage()._share_cuda_()
    return [one.hex() if isinstance(one, bytes) else one for one in parts]


def map_cuda(parts: Sequence[Any]) -> Tensor:
    """The allocation that `share_cuda` of another process described, as bytes."""
    torch.cuda.init()  # mapping does not do it, and crashes without
    device, handle, size, offset, counter, counter_offset, event, event_needed = parts
    storage = torch.UntypedStorage._new_shared_cuda(
        device, bytes.fromhex(handle), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event),
        event_needed,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
