"""Sums of what lies in memory: cheap enough to compare weights and moments between every two updates.

The sum of a tensor's 64-bit words, and of the bytes behind the last whole one, modulo 2^64. One changed bit always
changes it. Several may cancel, and words that change places do: sums stand between digests, not in their place. They
are whole numbers, so neither the order of addition nor the device shows in them.

A GPU adds up all tensors in one kernel, at the speed of its memory, and keeps the sums: the host hears one number of
them, with the others of the step, and waits for nothing. After an update it does so beside the next forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.train.parallel.tensor_shard import TensorShard

WORD = 8  # bytes
ALIGNED = 16  # bytes: what one load of a GPU's thread takes
CHUNK_WORDS = 1 << 15  # that one block of a GPU's threads adds up: 256 KiB
FEW_WORDS = 1 << 17  # of host memory: below it, numpy on one core is as fast as torch on several
FIRST_LOOKS = 3  # of a process, without the kernel: loading it takes most of a second


class MemorySums:
    """Remembers the sums of some tensors, and says whether they are still the same, in a tensor on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: _Grouped | None = None
        self._kept: _Sums | None = None
        self._changed: Callable[[], list[tuple[str, int]]] = list
        self._aside: torch.cuda.Stream | None = None
        self._looks = 0
        self._host_s = 0.0  # of the last look, on the host
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the second half, on a GPU

    @property
    def is_known(self) -> bool:
        """Whether there is something to compare with."""
        return self._kept is not None

    def remember(self, shards: Sequence[TensorShard]) -> None:
        """Keep their sums. Whoever gives the same list again says that the same tensors are in it."""
        self._looks += 1
        if self._looks == FIRST_LOOKS and self._device.type == "cuda":
            load_in_background()
        self._host_s = 0.0
        self._kept = self._add_up(self._group(shards), aside=True)

    def forget(self) -> None:
        """They are about to change."""
        self._kept = None

    def compare(self, shards: Sequence[TensorShard]) -> torch.Tensor:
        """1 where some tensor is no longer what `remember` saw, else 0; forgets it. Nobody waits for a device."""
        kept, self._kept, self._changed, self._marks = self._kept, None, list, None
        same = torch.zeros((), dtype=torch.float64, device=self._device)
        if kept is None:
            return same
        grouped = self._group(shards)
        if kept.names != grouped.names:  # an optimizer that has made more state
            return same
        begin = self._mark()
        now = self._add_up(grouped, aside=False)
        end = self._mark()
        self._marks = (begin, end) if begin is not None and end is not None else None
        self._changed = lambda: _differing(kept, now, grouped)
        if kept.in_host != now.in_host:
            return same + 1.0
        for place, sums in now.on_device.items():
            if self._aside is not None:
                torch.cuda.current_stream(place).wait_stream(self._aside)
            same = torch.maximum(same, (kept.on_device[place] != sums).any().to(same))
        return same

    def changed(self) -> list[tuple[str, int]]:
        """Name and present sum of each tensor that the last `compare` found changed; waits for the device."""
        return self._changed()

    @property
    def look_s(self) -> float | None:
        """What the last comparison and its sums before cost, if that is known by now; at most, on a GPU."""
        if self._marks is None:
            return self._host_s or None
        begin, end = self._marks
        return self._host_s + 2.0 * begin.elapsed_time(end) / 1e3 if end.query() else None

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _group(self, shards: Sequence[TensorShard]) -> _Grouped:
        if self._known is None or self._known.shards is not shards:
            self._known = _Grouped.of(shards, self._known)
        return self._known

    def _add_up(self, grouped: _Grouped, *, aside: bool) -> _Sums:
        on_device = {}
        for place, chunks in grouped.chunks.items():
            tensors = [grouped.tensors[index] for index in grouped.places[place]]
            if aside and present_kernel() is not None:
                on_device[place] = self._sum_aside(tensors, chunks, place)
            else:
                on_device[place] = sum_on_gpu(tensors, chunks)
        began_s = time.perf_counter()
        in_host = sum_in_host([grouped.tensors[index] for index in grouped.places.get(HOST, ())])
        self._host_s += time.perf_counter() - began_s
        return _Sums(names=grouped.names, on_device=on_device, in_host=in_host)

    def _sum_aside(self, tensors: Sequence[torch.Tensor], chunks: ChunkTable, place: torch.device) -> torch.Tensor:
        """Beside what comes next in the present stream, which only reads these tensors until `compare` is called."""
        if self._aside is None:
            self._aside = torch.cuda.Stream(place)
        self._aside.wait_stream(torch.cuda.current_stream(place))
        with torch.cuda.stream(self._aside):
            sums = sum_on_gpu(tensors, chunks)
        sums.record_stream(torch.cuda.current_stream(place))
        return sums


HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Grouped:
    """Tensors by where they lie, with what a GPU must know of its own."""

    shards: Sequence[TensorShard]
    names: list[str]
    tensors: list[torch.Tensor]
    places: dict[torch.device, list[int]]
    chunks: dict[torch.device, ChunkTable]

    @classmethod
    def of(cls, shards: Sequence[TensorShard], last: _Grouped | None) -> _Grouped:
        tensors = [shard.tensor.detach() for shard in shards]
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            places.setdefault(tensor.device if tensor.device.type == "cuda" else HOST, []).append(index)
        chunks = {
            place: chunk_table([tensors[index] for index in some], place, last.chunks.get(place) if last else None)
            for place, some in places.items()
            if place.type == "cuda"
        }
        names = [shard.name for shard in shards]
        return cls(shards=shards, names=names, tensors=tensors, places=places, chunks=chunks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    names: list[str]
    on_device: dict[torch.device, torch.Tensor]
    in_host: list[int]


def _differing(before: _Sums, now: _Sums, grouped: _Grouped) -> list[tuple[str, int]]:
    found = []
    for place, indices in grouped.places.items():
        old, new = ((one.on_device[place].tolist() if place in one.on_device else one.in_host) for one in (before, now))
        found += [(index, new[at]) for at, index in enumerate(indices) if old[at] != new[at]]
    return [(now.names[index], total) for index, total in sorted(found)]


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

    key: list[tuple[int, int]]  # address and bytes of every tensor
    addresses: torch.Tensor  # of each chunk
    lengths: torch.Tensor  # in words
    rows: torch.Tensor  # the tensor it belongs to
    odd: list[int]  # tensors that the kernel cannot take: not aligned, or not of whole words
    odd_rows: torch.Tensor  # the same, for the device


def chunk_table(tensors: Sequence[torch.Tensor], device: torch.device, last: ChunkTable | None) -> ChunkTable:
    """The table of these tensors; the last one where nothing has moved."""
    key = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    if last is not None and last.key == key:
        return last
    odd, columns = [], []
    for row, (tensor, (address, size)) in enumerate(zip(tensors, key, strict=True)):
        if address % ALIGNED or size % WORD or not tensor.is_contiguous():
            odd.append(row)
            continue
        starts = np.arange(0, size // WORD, CHUNK_WORDS, dtype=np.int64)
        sizes = np.minimum(CHUNK_WORDS, size // WORD - starts)
        columns.append(np.stack([address + WORD * starts, sizes, np.full(len(starts), row)]))
    table = np.concatenate(columns, axis=1) if columns else np.empty((3, 0), np.int64)
    addresses, lengths, rows = torch.from_numpy(table).to(device).unbind()
    return ChunkTable(
        key=key,
        addresses=addresses,
        lengths=lengths.to(torch.int32),
        rows=rows.to(torch.int32),
        odd=odd,
        odd_rows=torch.tensor(odd, dtype=torch.int64).to(device),
    )


@torch.no_grad()
def sum_on_gpu(tensors: Sequence[torch.Tensor], chunks: ChunkTable) -> torch.Tensor:
    """Of tensors that lie on one GPU, in their order: in one kernel, or in several for each until that is loaded."""
    kernel = present_kernel()
    if kernel is None:
        return torch.stack([sum_with_torch(tensor) for tensor in tensors])
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=chunks.rows.device)
    if len(chunks.rows):
        kernel(chunks.addresses, chunks.lengths, chunks.rows, sums)
    if chunks.odd:
        sums.index_copy_(0, chunks.odd_rows, torch.stack([sum_with_torch(tensors[row]) for row in chunks.odd]))
    return sums


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_loaded: list[Kernel | None] = []  # of this process; empty until it was tried
_loading = threading.Lock()


def present_kernel() -> Kernel | None:
    """The kernel, if it is loaded."""
    return _loaded[0] if _loaded else None


def load_in_background() -> None:
    """Load it beside the steps: importing Triton takes most of a second, and a new process has others waiting."""
    if not _loaded:
        threading.Thread(target=load_kernel, name="memory-sums", daemon=True).start()


def load_kernel() -> Kernel | None:
    """The kernel, once it has given the right answer on the present device; None without Triton or a C compiler."""
    with _loading:
        if not _loaded:
            _loaded.append(_tried_kernel())
        return _loaded[0]


def _tried_kernel() -> Kernel | None:
    try:
        from phalanx.train.guard.sum_kernel import add_words

        with torch.cuda.stream(torch.cuda.Stream()):  # not behind the steps
            words = torch.arange(CHUNK_WORDS + 3, dtype=torch.int64, device="cuda")
            chunks = chunk_table([words, words[:2]], words.device, None)
            sums = torch.zeros(2, dtype=torch.int64, device="cuda")
            add_words(chunks.addresses, chunks.lengths, chunks.rows, sums)
            return add_words if sums.tolist() == [int(words.sum()), 1] else None
    except Exception:  # of any kind: torch's own sums do the same, slower
        return None
