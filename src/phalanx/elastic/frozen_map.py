"""A mapping that never changes: a copy with one other value costs the same whether it has 4 keys or 16,384."""

from __future__ import annotations

import zlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar, overload

K = TypeVar("K", bound=int | str)
V = TypeVar("V")
T = TypeVar("T")
BUCKETS = 256  # of 16,384 hosts each holds 64: a change copies 64 + 256 references instead of all


class FrozenMap(Mapping[K, V], Generic[K, V]):
    """A mapping that never changes; `set` and `drop` give another, in a time that hardly grows with its size."""

    __slots__ = ("_buckets", "_count", "_own")

    def __init__(self) -> None:
        self._buckets: Sequence[dict[K, V]] = ({},) * BUCKETS
        self._count = 0
        self._own: set[int] = set()  # buckets that nobody shares with us yet: see `draft`

    def __getitem__(self, key: K) -> V:
        return self._buckets[_bucket(key)][key]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...
    def get(self, key: K, /, default: V | T | None = None) -> V | T | None:
        """The value of a key, or `default`."""
        return self._buckets[_bucket(key)].get(key, default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int | str) and key in self._buckets[_bucket(key)]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._buckets)

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[K, V]:
        """All at once: no key is looked up again."""
        return self._as_dict().items()

    def values(self) -> ValuesView[V]:
        """The same."""
        return self._as_dict().values()

    def _as_dict(self) -> dict[K, V]:
        whole: dict[K, V] = {}
        for bucket in self._buckets:
            whole.update(bucket)
        return whole

    def keys_in(self, buckets: Iterable[int]) -> list[K]:
        """The keys of some of its 256 parts, counted round and round: so many at a time, and in the end all."""
        return [key for number in buckets for key in self._buckets[number % BUCKETS]]

    def set(self, key: K, value: V) -> FrozenMap[K, V]:
        """With this value under this key."""
        number = _bucket(key)
        return self._with(number, {**self._buckets[number], key: value})

    def drop(self, key: K) -> FrozenMap[K, V]:
        """Without this key."""
        number = _bucket(key)
        return self._with(number, {one: value for one, value in self._buckets[number].items() if one != key})

    def update(self, values: Mapping[K, V]) -> FrozenMap[K, V]:
        """With all of these; what many changes at once cost one copy."""
        buckets = [dict(one) for one in self._buckets]
        for key, value in values.items():
            buckets[_bucket(key)][key] = value
        return self._made(buckets, sum(len(one) for one in buckets))

    def mapped(self, change: Callable[[V], V]) -> FrozenMap[K, V]:
        """With another value under every key; no key is looked up."""
        return self._made([{key: change(value) for key, value in one.items()} for one in self._buckets], self._count)

    def draft(self) -> FrozenMap[K, V]:
        """A copy that may be changed with `put`, as long as only its maker knows it: many changes cost one copy."""
        return self._made(list(self._buckets), self._count)

    def put(self, key: K, value: V) -> None:
        """Change a draft."""
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
        made: FrozenMap[K, V] = FrozenMap.__new__(FrozenMap)
        made._buckets, made._count, made._own = buckets, count, set()
        return made


@lru_cache(maxsize=1 << 18)  # every message asks for its host's
def _bucket(key: int | str) -> int:
    # Not hash(): that of a string differs from process to process, and so would the order of what is done.
    return (key if isinstance(key, int) else zlib.crc32(key.encode())) % BUCKETS
