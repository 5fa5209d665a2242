"""The arena: one block of memory shared by the judge and a candidate's process, with inputs, guard bands and results.

The judge writes inputs into it and reads results out of it, and never asks the candidate's process about either. On
the CPU it is an anonymous file in memory, on a GPU an allocation of the judge's process that the other process maps.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADER_BYTES = 512 * 1024  # at its beginning: the candidate's source, and the notes of its process
NOTES_AT, NOTES_BYTES = 384 * 1024, 4096
BAND_BYTES = 4096  # filled with the case's poison byte, before and after each tensor
ALIGN = 256
POISON = 0xFF  # as every byte: NaN in fp64, fp32, bf16, fp16, e5m2 and e4m3, -1 in integers

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a tensor in the arena."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without its bands."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPES[self.dtype].itemsize

    def to_json(self) -> list[Any]:
        """Return the place as a JSON list, for messages."""
        return [self.offset, self.dtype, list(self.shape)]


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a dense tensor."""
    return tensor.numel() * tensor.dtype.itemsize


def place_tensors(kinds: Sequence[tuple[str, Sequence[int]]], start: int = HEADER_BYTES) -> tuple[list[Place], int]:
    """Lay out tensors of (dtype, shape) one after the other with bands between them; return places and the end."""
    places, offset = [], start
    for dtype, shape in kinds:
        offset = _aligned(offset + BAND_BYTES)
        place = Place(offset, dtype, tuple(shape))
        places.append(place)
        offset += place.num_bytes
    return places, _aligned(offset + BAND_BYTES)


def _aligned(offset: int) -> int:
    """Round an offset up to a multiple of `ALIGN`."""
    return -(-offset // ALIGN) * ALIGN


def view_place(data: Tensor, place: Place) -> Tensor:
    """Return the tensor at a place as a view of the arena's bytes."""
    place_bytes = data[place.offset : place.offset + place.num_bytes]
    return place_bytes.view(DTYPES[place.dtype]).view(place.shape)


class HostBlock:
    """Shared memory on the host: the arena on a CPU, and the header of every arena."""

    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create("phalanx-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.file, num_bytes)
        self.map = mmap.mmap(self.file, num_bytes)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def write_source(self, text: bytes) -> None:
        """Write the candidate's source for its process to run, and clear the notes of an earlier process."""
        self.map[0:8] = len(text).to_bytes(8, "little")
        self.map[8 : 8 + len(text)] = text
        self.map[NOTES_AT : NOTES_AT + NOTES_BYTES] = bytes(NOTES_BYTES)

    def read_notes(self) -> str:
        """Return the candidate's forbidden actions that its process noted; the candidate may have overwritten them."""
        raw = bytes(self.map[NOTES_AT : NOTES_AT + NOTES_BYTES])
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def close(self) -> None:
        """Release the memory; views of it must be gone."""
        del self.data
        os.close(self.file)


def share_cuda(tensor: Tensor) -> list[Any]:
    """Return the handle by which another process maps a GPU allocation, as JSON values instead of a pickle."""
    items = tensor.untyped_storage()._share_cuda_()
    return [item.hex() if isinstance(item, bytes) else item for item in items]


def map_cuda(parts: Sequence[Any]) -> Tensor:
    """Map the allocation that `share_cuda` of another process described, as bytes."""
    torch.cuda.init()  # mapping crashes without an initialized CUDA context, and does not create one
    device, handle, size, offset, counter, counter_offset, event, event_needed = parts
    storage = torch.UntypedStorage._new_shared_cuda(
        device, bytes.fromhex(handle), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event),
        event_needed,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
