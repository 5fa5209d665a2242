"""Memory meter of a trace: live bytes of every storage, the peak, and its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Categories of memory, in the order of printing. Unclaimed storages belong to the phase that allocated them: those
# of forward that backward uses are activations, the others are working memory.
MEMORY_PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "exchange", "working")
HOST = "host"  # offloaded: counted, but not as device memory
# A new peak is analysed in detail if it exceeds the last analysed one by this factor.
RESOLUTION = 1.001
BORN = {"forward": "activations"}


class StorageMeter:
    """Follows storages from allocation to release; their category comes from `claim` or from the phase."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.host_bytes = 0
        self.peak_phase = ""
        self.peak_parts: dict[str, int] = {}
        self._looked = 0.0
        self._size: dict[int, int] = {}
        self._part: dict[int, str] = {}
        self._host: set[int] = set()
        self._resize: Callable[..., Any] | None = None
        self.phase = "forward"
        self.look: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())

    def see(self, tensor: torch.Tensor, part: str = "") -> None:
        """Register a tensor's storage; `part` is its category, unless it was claimed already."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self._note_storage(local.untyped_storage(), part)

    def claim(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Assign these tensors to a category from now on."""
        for tensor in tensors:
            self.see(tensor, part)
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            key = local.untyped_storage()._cdata
            if part == HOST and key not in self._host:
                self._host.add(key)
                self.live_bytes -= self._size[key]
                self.host_bytes += self._size[key]
            self._part[key] = part

    def begin(self) -> None:
        """Reset the peak."""
        self.peak_bytes, self._looked, self.peak_parts = 0, 0.0, {}
        self._mark_peak()

    def __enter__(self) -> StorageMeter:
        # FSDP2 frees and refills the gathered weights by resizing their storage, which no operator shows.
        original = torch.UntypedStorage.resize_
        meter = self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            meter._note_storage(storage, "gathered")
            meter._part[storage._cdata] = "gathered"
            return result

        self._resize = original
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]

    def _note_storage(self, storage: torch.UntypedStorage, part: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        previous_nbytes = self._size.get(key)
        if previous_nbytes is None:
            self._size[key] = nbytes
            self._part[key] = part or BORN.get(self.phase, "working")
            weakref.finalize(storage, self._forget_storage, key)
            self.live_bytes += nbytes
        elif previous_nbytes != nbytes:
            self._size[key] = nbytes
            if key in self._host:
                self.host_bytes += nbytes - previous_nbytes
            else:
                self.live_bytes += nbytes - previous_nbytes
        if self.live_bytes > self.peak_bytes:
            self._mark_peak()

    def _forget_storage(self, key: int) -> None:
        nbytes = self._size.pop(key, 0)
        self._part.pop(key, None)
        if key in self._host:
            self._host.discard(key)
            self.host_bytes -= nbytes
        else:
            self.live_bytes -= nbytes

    def _mark_peak(self) -> None:
        self.peak_bytes, self.peak_phase = self.live_bytes, self.phase
        if self.peak_bytes > self._looked * RESOLUTION:
            self._looked = self.peak_bytes
            self.peak_parts = self._by_part()

    def _by_part(self) -> dict[str, int]:
        current_parts = {_storage_key(tensor): part for part, tensor in self.look()}
        part_bytes = dict.fromkeys(MEMORY_PARTS, 0)
        for key, nbytes in self._size.items():
            if key not in self._host:
                part_bytes[current_parts.get(key, self._part[key])] += nbytes
        return part_bytes


def _storage_key(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
