"""Sums of what lies in memory: cheap enough to compare weights and moments between every two updates.

The sum of a tensor's 64-bit words, and of the bytes behind the last whole one, modulo 2^64. One changed bit always
changes it. Several may cancel, and words that change places do: sums stand between digests, not in their place. They
are whole numbers, so neither the order of addition nor the device shows in them.

A GPU adds up all tensors in one kernel, at the speed of its memory, and keeps the sums: the host hears one number of
them, with the others of the step, and waits for nothing. Tensors that are offloaded to the host's memory are added up
by a thread while the GPU computes, in steps whose digests are compared alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from phalanx.train.parallel.tensor_shard import TensorShard

WORD = 8  # bytes
ALIGNED = 16  # bytes: what one load of a GPU's thread takes
CHUNK_WORDS = 1 << 15  # that one block of a GPU's threads adds up: 256 KiB
STEPS_WITHOUT_KERNEL = 2
HOST = torch.device("cpu")
FEW_WORDS = 1 << 17  # of host memory: below it, numpy on one core is as fast as torch on several


class MemorySums:
    """Remembers the sums of some tensors, and says whether they are still the same, in a tensor on `device`.

    `in_background`: those in host memory are added up by a thread. By default where a GPU computes meanwhile.
    """

    def __init__(self, device: torch.device, *, in_background: bool | None = None) -> None:
        self._device = device
        self._in_background = device.type == "cuda" if in_background is None else in_background
        self._chunks: dict[torch.device, ChunkTable] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._resting: _Resting | None = None
        self._kept: _Sums | None = None
        self._changed: Callable[[], list[tuple[str, int]]] = list
        self._remembered = 0

    @property
    def is_known(self) -> bool:
        """Whether there is something to compare with."""
        return self._kept is not None

    def remember(self, shards: Sequence[TensorShard], *, offloaded: bool = True) -> None:
        """Keep their sums. The caller may go on at once, and must not change them before `compare`.

        Without `offloaded`, those in host memory are left out where a GPU computes: a host takes 40 times as long.
        """
        self._remembered += 1
        tensors = [shard.tensor for shard in shards]
        if self._resting is None or not self._resting.holds(tensors):
            self._resting = _Resting.of([shard.name for shard in shards], tensors)
        leave_out = self._device.type == "cuda" and not offloaded
        places = tuple(one for one in self._resting.places if one.type == "cuda" or not leave_out)
        self._kept = self._add_up(self._resting, places, wait=False)

    def forget(self) -> None:
        """They are about to change."""
        self._kept = None

    def compare(self) -> torch.Tensor:
        """1 where some tensor is no longer what `remember` saw, else 0; forgets it. Nobody waits for a device."""
        kept, self._kept, self._changed = self._kept, None, list
        if kept is None:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        now = self._add_up(kept.of, kept.places, wait=True)
        before_host, now_host = kept.in_host(), now.in_host()
        self._changed = lambda: _differing(kept, now)
        flags = [(kept.on_device[one] != now.on_device[one]).any() for one in now.on_device]
        if before_host != now_host:
            return torch.ones((), dtype=torch.float64, device=self._device)
        if not flags:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([flag.to(self._device) for flag in flags]).any().double()

    def changed(self) -> list[tuple[str, int]]:
        """Name and present sum of each tensor that the last `compare` found changed; waits for the device."""
        return self._changed()

    def _add_up(self, resting: _Resting, places: tuple[torch.device, ...], *, wait: bool) -> _Sums:
        on_device: dict[torch.device, torch.Tensor] = {}
        host_sums: Callable[[], list[int]] = list
        for place in places:
            tensors = resting.tensors_at[place]
            if place.type == "cuda":
                # To load the kernel takes a second, which a rank that replaces another has not, in its first steps.
                if self._remembered <= STEPS_WITHOUT_KERNEL:
                    on_device[place] = torch.stack([sum_with_torch(tensor) for tensor in tensors])
                    continue
                chunks = self._chunks[place] = chunk_table(tensors, place, self._chunks.get(place))
                on_device[place] = sum_on_gpu(tensors, chunks)
            elif wait or not self._in_background:
                found = sum_in_host(tensors)
                host_sums = found.copy
            else:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-sums")
                host_sums = self._thread.submit(sum_in_host, tensors).result
        return _Sums(of=resting, places=places, on_device=on_device, in_host=host_sums)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Resting:
    """Tensors in the order they were given, and by where they lie; the same from step to step, as a rule."""

    names: list[str]
    tensors: list[torch.Tensor]
    places: dict[torch.device, list[int]]
    tensors_at: dict[torch.device, list[torch.Tensor]]

    @classmethod
    def of(cls, names: list[str], tensors: list[torch.Tensor]) -> _Resting:
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            place = tensor.device
            places.setdefault(place if place.type == "cuda" else HOST, []).append(index)
        tensors_at = {place: [tensors[index] for index in indices] for place, indices in places.items()}
        return cls(names=names, tensors=tensors, places=places, tensors_at=tensors_at)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same objects: hundreds, of which each look at a device would cost a microsecond."""
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    of: _Resting
    places: tuple[torch.device, ...]  # that were added up
    on_device: dict[torch.device, torch.Tensor]
    in_host: Callable[[], list[int]]


def _differing(before: _Sums, now: _Sums) -> list[tuple[str, int]]:
    found = []
    for place in now.places:
        indices = now.of.places[place]
        on_gpu = place in now.on_device
        old, new = ((one.on_device[place].tolist() if on_gpu else one.in_host()) for one in (before, now))
        found += [(index, new[at]) for at, index in enumerate(indices) if old[at] != new[at]]
    return [(now.of.names[index], total) for index, total in sorted(found)]


@torch.no_grad()
def sum_in_host(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of tensors in host memory."""
    found = []
    for tensor in tensors:
        raw = _raw(tensor)
        if raw.numel() >= FEW_WORDS * WORD and torch.get_num_threads() > 1:
            found.append(int(sum_with_torch(tensor)))
            continue
        # numpy: a model has hundreds of small tensors, and its calls cost a fraction of torch's.
        data = raw.numpy()
        whole = data.size // WORD * WORD
        total = int(np.add.reduce(data[:whole].view(np.int64)))
        if whole < data.size:
            total += int(data[whole:].sum(dtype=np.int64))
        found.append((total + 2**63) % 2**64 - 2**63)
    return found


@torch.no_grad()
def sum_with_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Of one tensor, on its device: a few kernels for each."""
    raw = _raw(tensor)
    whole = raw.numel() // WORD * WORD
    words = raw[:whole]
    if words.storage_offset() % WORD or words.data_ptr() % WORD:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + raw[whole:].sum(dtype=torch.int64) if whole < raw.numel() else total


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTable:
    """Where the tensors of a GPU lie, in chunks of at most `CHUNK_WORDS`; the same from step to step, as a rule."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    addresses: torch.Tensor  # of each chunk
    lengths: torch.Tensor  # in words
    rows: torch.Tensor  # the tensor it belongs to
    odd: list[int]  # tensors that the kernel cannot take: not aligned, or not of whole words
    odd_rows: torch.Tensor  # the same, for the device


def chunk_table(tensors: Sequence[torch.Tensor], device: torch.device, last: ChunkTable | None) -> ChunkTable:
    """The table of these tensors; the last one where nothing has moved."""
    pointers = [*map(torch.Tensor.data_ptr, tensors)]
    if last is not None and last.pointers == pointers and all(map(operator.is_, tensors, last.tensors)):
        return last
    odd, columns = [], []
    for row, (tensor, address) in enumerate(zip(tensors, pointers, strict=True)):
        size = tensor.numel() * tensor.element_size()
        if address % ALIGNED or size % WORD or not tensor.is_contiguous():
            odd.append(row)
            continue
        starts = np.arange(0, size // WORD, CHUNK_WORDS, dtype=np.int64)
        sizes = np.minimum(CHUNK_WORDS, size // WORD - starts)
        columns.append(np.stack([address + WORD * starts, sizes, np.full(len(starts), row)]))
    table = np.concatenate(columns, axis=1) if columns else np.empty((3, 0), np.int64)
    addresses, lengths, rows = torch.from_numpy(table).to(device).unbind()
    return ChunkTable(
        tensors=list(tensors),
        pointers=pointers,
        addresses=addresses,
        lengths=lengths.to(torch.int32),
        rows=rows.to(torch.int32),
        odd=odd,
        odd_rows=torch.tensor(odd, dtype=torch.int64).to(device),
    )


@torch.no_grad()
def sum_on_gpu(tensors: Sequence[torch.Tensor], chunks: ChunkTable) -> torch.Tensor:
    """Of tensors that lie on one GPU, in their order: in one kernel, or in several for each where Triton is missing."""
    kernel = load_kernel()
    if kernel is None:
        return torch.stack([sum_with_torch(tensor) for tensor in tensors])
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=chunks.rows.device)
    if len(chunks.rows):
        kernel(chunks.addresses, chunks.lengths, chunks.rows, sums)
    if chunks.odd:
        sums.index_copy_(0, chunks.odd_rows, torch.stack([sum_with_torch(tensors[row]) for row in chunks.odd]))
    return sums


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@cache
def load_kernel() -> Kernel | None:
    """The kernel, once it has given the right answer on the present device; None without Triton or a C compiler."""
    try:
        from phalanx.train.guard.sum_kernel import add_words

        words = torch.arange(CHUNK_WORDS + 3, dtype=torch.int64, device="cuda")
        chunks = chunk_table([words, words[:2]], words.device, None)
        sums = torch.zeros(2, dtype=torch.int64, device="cuda")
        add_words(chunks.addresses, chunks.lengths, chunks.rows, sums)
        return add_words if sums.tolist() == [int(words.sum()), 1] else None
    except Exception:  # of any kind: torch's own sums do the same, slower
        return None
