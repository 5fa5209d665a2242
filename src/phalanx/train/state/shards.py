"""Regions of tensors: overlap, exact coverage, and the description and layout of stored shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from phalanx.errors import mistake
from phalanx.train.parallel.tensor_shard import TensorShard

RESERVED = "__metadata__"  # safetensors reserves this key


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a tensor from `start`, `size` many along each dimension. A scalar has no dimensions."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element of each dimension."""
        return tuple(map(add, self.start, self.size))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that select this region from a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.start, outer.start, self.size, strict=True)
        )


def whole_region(shape: tuple[int, ...]) -> Region:
    """Return the region of a full tensor."""
    return Region((0,) * len(shape), shape)


def shared_region(one: Region, other: Region) -> Region | None:
    """Return the overlap of two regions, or None.

    >>> shared_region(Region((0, 0), (4, 4)), Region((2, 1), (4, 2)))
    Region(start=(2, 1), size=(2, 2))
    """
    start = tuple(map(max, one.start, other.start))
    end = tuple(map(min, one.end, other.end))
    if any(low >= high for low, high in zip(start, end, strict=True)):
        return None
    return Region(start, tuple(high - low for low, high in zip(start, end, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageGap:
    """A region that is covered `times` times instead of once."""

    region: Region
    times: int


# Above this the regions overlap so irregularly that no layout of Phalanx wrote them: 2**22 counts are 16 MiB.
MOST_CELLS = 2**22


def first_coverage_gap(target: Region, regions: Sequence[Region]) -> CoverageGap | None:
    """Return the first place of `target` that `regions`, all inside it, do not cover once; None if they tile it.

    The edges of all regions form a grid of cells; each region adds one to the cells it covers.
    """
    if not target.volume or list(regions) == [target]:
        return None
    grid = []
    for dim in range(len(target.start)):
        edges = [target.start[dim], target.end[dim]]
        edges += [edge for region in regions for edge in (region.start[dim], region.end[dim])]
        grid.append(np.unique(np.array(edges, dtype=np.int64)))
    cells = tuple(len(edges) - 1 for edges in grid)
    if prod(cells) > MOST_CELLS:
        raise OverflowError(f"{len(regions)} shards make {prod(cells):,} cells, more than {MOST_CELLS:,}")
    times = np.zeros(cells, dtype=np.int32)
    for region in regions:
        times[_covered_cells(grid, region)] += 1
    wrong = np.argwhere(times != 1)
    if not len(wrong):
        return None
    start = tuple(int(edges[cell]) for edges, cell in zip(grid, wrong[0], strict=True))
    end = tuple(int(edges[cell + 1]) for edges, cell in zip(grid, wrong[0], strict=True))
    size = tuple(high - low for low, high in zip(start, end, strict=True))
    return CoverageGap(region=Region(start, size), times=int(times[tuple(wrong[0])]))


def _covered_cells(grid: Sequence[npt.NDArray[np.int64]], region: Region) -> tuple[slice, ...]:
    ends = region.end
    return tuple(
        slice(*(int(cell) for cell in np.searchsorted(edges, (region.start[dim], ends[dim]))))
        for dim, edges in enumerate(grid)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDtype:
    """An element type that a checkpoint may hold."""

    torch: torch.dtype
    tag: str  # the name in safetensors
    size_bytes: int


STORED_DTYPES = {
    "float64": StoredDtype(torch=torch.float64, tag="F64", size_bytes=8),
    "float32": StoredDtype(torch=torch.float32, tag="F32", size_bytes=4),
    "float16": StoredDtype(torch=torch.float16, tag="F16", size_bytes=2),
    "bfloat16": StoredDtype(torch=torch.bfloat16, tag="BF16", size_bytes=2),
    "int64": StoredDtype(torch=torch.int64, tag="I64", size_bytes=8),
    "int32": StoredDtype(torch=torch.int32, tag="I32", size_bytes=4),
    "int8": StoredDtype(torch=torch.int8, tag="I8", size_bytes=1),
    "uint8": StoredDtype(torch=torch.uint8, tag="U8", size_bytes=1),
    "bool": StoredDtype(torch=torch.bool, tag="BOOL", size_bytes=1),
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's short name.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShard:
    """A shard as one rank wrote it, in its file or memory segment; `offset` counts from the start of that.

    In memory `sha256` holds eight hexadecimal digits of crc32.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    rank: int
    offset: int
    size_bytes: int
    sha256: str


def owned_shards(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Return the non-empty shards this rank owns, widest elements first so that all are aligned."""
    owned = [shard for shard in shards if shard.owner and shard.tensor.numel()]
    names: set[str] = set()
    for shard in owned:
        _check_shard(shard, names)
        names.add(shard.name)
    return sorted(owned, key=lambda shard: (-shard.tensor.element_size(), shard.name))


def _check_shard(shard: TensorShard, seen: set[str]) -> None:
    dtype, region = dtype_name(shard.tensor.dtype), region_of(shard)
    if dtype not in STORED_DTYPES:
        fix = f"one of {', '.join(STORED_DTYPES)}"
        raise mistake(shard.name, f"is {dtype}, which a checkpoint cannot hold", fix=fix)
    if shard.name in seen or shard.name in ("", RESERVED):
        raise mistake(shard.name or "''", "names two shards of one rank, or is not a name", fix="one shard per tensor")
    if not len(shard.shape) == len(region.start) == len(region.size) or any(map(int.__gt__, region.end, shard.shape)):
        problem = f"starts at {list(shard.start)} with {list(region.size)}, outside the whole {list(shard.shape)}"
        raise mistake(shard.name, problem)


def region_of(shard: TensorShard) -> Region:
    """Return the region of the full tensor that a shard holds."""
    return Region(tuple(shard.start), tuple(shard.tensor.shape))


def shard_bytes(shard: TensorShard) -> int:
    """Return the bytes of the local tensor."""
    return shard.tensor.numel() * shard.tensor.element_size()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row order, little-endian; a copy only if necessary."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def lay_out_shards(
    shards: Sequence[TensorShard], rank: int, *, offset: int = 0, align_bytes: int = 1
) -> tuple[StoredShard, ...]:
    """Place the shards one after the other from `offset`; digests are filled in later."""
    stored = []
    for shard in shards:
        size_bytes = shard_bytes(shard)
        stored.append(
            StoredShard(
                name=shard.name,
                dtype=dtype_name(shard.tensor.dtype),
                shape=tuple(shard.shape),
                region=region_of(shard),
                rank=rank,
                offset=offset,
                size_bytes=size_bytes,
                sha256="",
            )
        )
        offset += -(-size_bytes // align_bytes) * align_bytes
    return tuple(stored)
