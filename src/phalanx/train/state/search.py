"""In which order to ask the ranks that wrote a checkpoint for their indexes: those that most likely hold ours first.

Ranks are numbered stage by stage, then copy by copy, then shard by shard (parallel/dims.py), and of all copies only one
writes. From the number of ranks and of writers alone, the writer of our own part is one of a few: one for each number
of stages that may have been. Around it are the owners of what it shared with its neighbours. Asking from the middle
outwards instead would read hundreds of indexes where a shard has many copies.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

MOST_GUESSES = 16  # 4,096 writers have 13 divisors; those of few stages come first


def guesses(rank: int, *, world: int, writers: int) -> list[int]:
    """Places among the writers at which the part of `rank` of `world` may lie.

    Two stages of three copies of four shards: rank 17 is the second shard of the second copy of the second stage, and
    its writer the sixth of eight. One stage would make it the second.

    >>> guesses(17, world=24, writers=8)
    [1, 5]
    """
    found = []
    for stages in range(1, writers + 1):
        if writers % stages == 0:
            shards = writers // stages
            found.append(rank * stages // world * shards + rank % shards)
    return list(dict.fromkeys(found))[:MOST_GUESSES]


def search(rank: int, world: int, *, writers: Sequence[int], copies: bool) -> Generator[int, int, None]:
    """The writers, likeliest first; `send` how much was found with each. Around the best of them the rest follow.

    `rank` and `world` are the reader's; with `copies` there were ranks that wrote nothing.
    """
    best, most, asked = rank * len(writers) // world, 0, set()
    for guess in [best, *(guesses(rank, world=world, writers=len(writers)) if copies else ())]:
        if guess not in asked:
            asked.add(guess)
            found = yield writers[guess]
            if found > most:
                best, most = guess, found
    for place in outwards(best, len(writers)):
        if place not in asked:
            yield writers[place]


def outwards(middle: int, count: int) -> Iterator[int]:
    """Every place below `count`, those near `middle` first.

    >>> list(outwards(3, 5))
    [3, 4, 2, 1, 0]
    """
    middle = min(max(middle, 0), count - 1)
    yield middle
    for distance in range(1, count):
        yield from (place for place in (middle + distance, middle - distance) if 0 <= place < count)
