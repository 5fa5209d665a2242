"""An immutable mapping: a copy with one changed value costs the same whether it has 4 keys or 16,384."""

from __future__ import annotations

import zlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar, overload

K = TypeVar("K", bound=int | str)
V = TypeVar("V")
T = TypeVar("T")
# With 16,384 hosts each bucket holds 64: a change copies 64 + 256 references instead of all.
BUCKETS = 256


class FrozenMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping; `set` and `drop` return a changed copy, in a time that hardly grows with its size."""

    __slots__ = ("_buckets", "_count", "_own")

    def __init__(self) -> None:
        self._buckets: Sequence[dict[K, V]] = ({},) * BUCKETS
        self._count = 0
        self._own: set[int] = set()  # buckets that no other map shares yet: see `draft`

    def __getitem__(self, key: K) -> V:
        return self._buckets[_bucket(key)][key]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...
    def get(self, key: K, /, default: V | T | None = None) -> V | T | None:
        """Return the value of a key, or `default`."""
        return self._buckets[_bucket(key)].get(key, default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int | str) and key in self._buckets[_bucket(key)]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._buckets)

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[K, V]:
        """Return all items at once; no key is looked up again."""
        return self._as_dict().items()

    def values(self) -> ValuesView[V]:
        """Return all values at once; no key is looked up again."""
        return self._as_dict().values()

    def _as_dict(self) -> dict[K, V]:
        items: dict[K, V] = {}
        for bucket in self._buckets:
            items.update(bucket)
        return items

    def keys_in(self, buckets: Iterable[int]) -> list[K]:
        """Return the keys in some of its 256 buckets (modulo 256), so that a caller can visit all in portions."""
        return [key for number in buckets for key in self._buckets[number % BUCKETS]]

    def set(self, key: K, value: V) -> FrozenMap[K, V]:
        """Return a copy with this value under this key."""
        number = _bucket(key)
        return self._with(number, {**self._buckets[number], key: value})

    def drop(self, key: K) -> FrozenMap[K, V]:
        """Return a copy without this key."""
        number = _bucket(key)
        return self._with(
            number, {other_key: value for other_key, value in self._buckets[number].items() if other_key != key}
        )

    def update(self, values: Mapping[K, V]) -> FrozenMap[K, V]:
        """Return a copy with all of these values; many changes at once cost one copy."""
        buckets = [dict(bucket) for bucket in self._buckets]
        for key, value in values.items():
            buckets[_bucket(key)][key] = value
        return self._made(buckets, sum(len(bucket) for bucket in buckets))

    def mapped(self, change: Callable[[V], V]) -> FrozenMap[K, V]:
        """Return a copy with another value under every key; no key is looked up."""
        return self._made(
            [{key: change(value) for key, value in bucket.items()} for bucket in self._buckets], self._count
        )

    def draft(self) -> FrozenMap[K, V]:
        """Return a copy that may be changed with `put` while only its maker has it: many changes cost one copy."""
        return self._made(list(self._buckets), self._count)

    def put(self, key: K, value: V) -> None:
        """Change a value of a draft."""
        number, buckets = _bucket(key), self._buckets
        assert isinstance(buckets, list), "not a draft"
        if number not in self._own:
            buckets[number] = dict(buckets[number])
            self._own.add(number)
        self._count += key not in buckets[number]
        buckets[number][key] = value

    def _with(self, number: int, bucket: dict[K, V]) -> FrozenMap[K, V]:
        buckets = (*self._buckets[:number], bucket, *self._buckets[number + 1 :])
        return self._made(buckets, self._count + len(bucket) - len(self._buckets[number]))

    @staticmethod
    def _made(buckets: Sequence[dict[K, V]], count: int) -> FrozenMap[K, V]:
        frozen: FrozenMap[K, V] = FrozenMap.__new__(FrozenMap)
        frozen._buckets, frozen._count, frozen._own = buckets, count, set()
        return frozen


# Every message looks up its host.
@lru_cache(maxsize=1 << 18)
def _bucket(key: int | str) -> int:
    # Not hash(): that of a string differs from process to process, and so would the order of what is done.
    return (key if isinstance(key, int) else zlib.crc32(key.encode())) % BUCKETS
