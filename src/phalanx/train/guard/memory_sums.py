"""Sums over memory: cheap enough to compare weights and moments between every two updates.

The sum of a tensor is that of its 64-bit words, and of the bytes after the last whole word, modulo 2^64. One changed
bit always changes it. Several changes may cancel, and words that swap places do: sums are made between digests, and
do not replace them. They are integers, so they depend neither on the order of addition nor on the device.

A GPU adds up all tensors in one kernel, at the speed of its memory, and keeps the sums: the host gets one number of
them, with the other numbers of the step, and waits for nothing. Tensors that are offloaded to host memory are added
up by a thread while the GPU computes, only in steps whose digests are compared.
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
ALIGNED = 16  # bytes of one load of a GPU's thread
CHUNK_WORDS = 1 << 15  # words that one block of a GPU's threads adds up: 256 KiB
STEPS_WITHOUT_KERNEL = 2
HOST = torch.device("cpu")
# For fewer words in host memory numpy on one core is as fast as torch on several.
FEW_WORDS = 1 << 17


class MemorySums:
    """Remembers the sums of some tensors, and compares them with their sums later.

    `in_background`: a thread adds up tensors in host memory; the default where a GPU computes meanwhile.
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
        """True if there are sums to compare with."""
        return self._kept is not None

    def remember(self, shards: Sequence[TensorShard], *, offloaded: bool = True) -> None:
        """Remember the sums of these shards, which the caller must not change before `compare`.

        Without `offloaded`, tensors in host memory are left out if a GPU computes: a host takes 40 times as long.
        """
        self._remembered += 1
        tensors = [shard.tensor for shard in shards]
        if self._resting is None or not self._resting.holds(tensors):
            self._resting = _Resting.of([shard.name for shard in shards], tensors)
        leave_out = self._device.type == "cuda" and not offloaded
        places = tuple(place for place in self._resting.places if place.type == "cuda" or not leave_out)
        self._kept = self._add_up(self._resting, places, wait=False)

    def forget(self) -> None:
        """Drop the sums, since the tensors are about to change."""
        self._kept = None

    def compare(self) -> torch.Tensor:
        """Return 1 if some tensor changed since `remember`, else 0, as a tensor on the device; drops the sums.

        Waits for no device.
        """
        before, self._kept, self._changed = self._kept, None, list
        if before is None:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        now = self._add_up(before.of, before.places, wait=True)
        before_host, now_host = before.in_host(), now.in_host()
        self._changed = lambda: _differing(before, now)
        flags = [(before.on_device[place] != now.on_device[place]).any() for place in now.on_device]
        if before_host != now_host:
            return torch.ones((), dtype=torch.float64, device=self._device)
        if not flags:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([flag.to(self._device) for flag in flags]).any().double()

    def changed(self) -> list[tuple[str, int]]:
        """Return name and present sum of each tensor that the last `compare` found changed; waits for the device."""
        return self._changed()

    def _add_up(self, resting: _Resting, places: tuple[torch.device, ...], *, wait: bool) -> _Sums:
        """Add up the tensors at these places; those in host memory by a thread, unless `wait`."""
        on_device: dict[torch.device, torch.Tensor] = {}
        host_sums: Callable[[], list[int]] = list
        for place in places:
            tensors = resting.tensors_at[place]
            if place.type == "cuda":
                # Loading the kernel takes a second, which would delay the first steps of a replacement rank.
                if self._remembered <= STEPS_WITHOUT_KERNEL:
                    on_device[place] = torch.stack([sum_with_torch(tensor) for tensor in tensors])
                    continue
                chunks = self._chunks[place] = chunk_table(tensors, place, self._chunks.get(place))
                on_device[place] = sum_on_gpu(tensors, chunks)
            elif wait or not self._in_background:
                computed = sum_in_host(tensors)
                host_sums = computed.copy
            else:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-sums")
                host_sums = self._thread.submit(sum_in_host, tensors).result
        return _Sums(of=resting, places=places, on_device=on_device, in_host=host_sums)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Resting:
    """Tensors in the order they were passed, and by their device; usually the same from step to step."""

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
        """Return True if these are the same objects; looking at each tensor's device would take a microsecond."""
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """The sums of tensors: on GPUs as tensors, in host memory as a function that waits for its thread."""

    of: _Resting
    places: tuple[torch.device, ...]  # devices whose tensors were added up
    on_device: dict[torch.device, torch.Tensor]
    in_host: Callable[[], list[int]]


def _differing(before: _Sums, now: _Sums) -> list[tuple[str, int]]:
    """Return name and present sum of each tensor whose sums differ."""
    changes = []
    for place in now.places:
        indices = now.of.places[place]
        on_gpu = place in now.on_device
        old, new = ((sums.on_device[place].tolist() if on_gpu else sums.in_host()) for sums in (before, now))
        changes += [(index, new[at]) for at, index in enumerate(indices) if old[at] != new[at]]
    return [(now.of.names[index], total) for index, total in sorted(changes)]


@torch.no_grad()
def sum_in_host(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sums of tensors in host memory."""
    sums = []
    for tensor in tensors:
        raw = _raw(tensor)
        if raw.numel() >= FEW_WORDS * WORD and torch.get_num_threads() > 1:
            sums.append(int(sum_with_torch(tensor)))
            continue
        # numpy for small tensors: a model has hundreds, and numpy's calls cost a fraction of torch's.
        data = raw.numpy()
        whole_bytes = data.size // WORD * WORD
        total = int(np.add.reduce(data[:whole_bytes].view(np.int64)))
        if whole_bytes < data.size:
            total += int(data[whole_bytes:].sum(dtype=np.int64))
        # To a signed 64-bit integer, as torch's sum wraps around.
        sums.append((total + 2**63) % 2**64 - 2**63)
    return sums


@torch.no_grad()
def sum_with_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of one tensor, on its device; takes a few kernels."""
    raw = _raw(tensor)
    whole_bytes = raw.numel() // WORD * WORD
    words = raw[:whole_bytes]
    if words.storage_offset() % WORD or words.data_ptr() % WORD:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + raw[whole_bytes:].sum(dtype=torch.int64) if whole_bytes < raw.numel() else total


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTable:
    """The tensors of a GPU in chunks of at most `CHUNK_WORDS`; usually the same from step to step."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    addresses: torch.Tensor  # address of each chunk
    lengths: torch.Tensor  # of each chunk, in words
    rows: torch.Tensor  # index of the tensor that each chunk belongs to
    odd: list[int]  # tensors that the kernel cannot add up: not aligned, or not of whole words
    odd_rows: torch.Tensor  # the same on the device


def chunk_table(tensors: Sequence[torch.Tensor], device: torch.device, last: ChunkTable | None) -> ChunkTable:
    """Return the table of these tensors; `last` if no tensor has moved."""
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
    """Return the sums of tensors on one GPU, in their order.

    One kernel adds them all up; without Triton it takes several kernels per tensor.
    """
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
    """Return the kernel, once it has computed a known sum correctly; None without Triton or a C compiler."""
    try:
        from phalanx.train.guard.sum_kernel import add_words

        words = torch.arange(CHUNK_WORDS + 3, dtype=torch.int64, device="cuda")
        chunks = chunk_table([words, words[:2]], words.device, None)
        sums = torch.zeros(2, dtype=torch.int64, device="cuda")
        add_words(chunks.addresses, chunks.lengths, chunks.rows, sums)
        return add_words if sums.tolist() == [int(words.sum()), 1] else None
    except Exception:  # any error: torch's sums give the same result, slower
        return None
