"""What of a run folder cannot be read, in words: shown beside what can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import UserError
from phalanx.record.run import Run

MOST_NAMED = 8  # ranks named one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Something of a run that cannot be read: where, what, and how many of it."""

    where: str
    what: str
    count: int


def folder_damage(run: Run, ranks: Sequence[int]) -> list[Damage]:
    """Files of the run itself that are missing or broken, and ranks without events."""
    found = []
    for name, read in (("plan.json", run.plan), ("launch.json", run.launch)):
        try:
            read()
        except UserError as error:
            found.append(Damage(where=name, what=str(error).splitlines()[0].partition(": ")[2][:200], count=1))
    if not found:
        missing = _missing(run, ranks)
        if missing:
            found.append(Damage(where="events", what=f"no file of {_named(missing)}", count=len(missing)))
    return found


def _missing(run: Run, ranks: Sequence[int]) -> list[int]:
    world = run.launch().get("world")
    if type(world) is not int or not 0 < world < 10**7:
        return []
    started = bool(ranks) or run.status().get("state") not in ("created", "launching", None)
    return sorted(set(range(world)).difference(ranks)) if started else []


def of_ranks(troubles: Mapping[int, Counter[str]]) -> list[Damage]:
    """The troubles of many ranks, the same ones together."""
    ranks: dict[str, list[int]] = {}
    count: Counter[str] = Counter()
    for rank in sorted(troubles):
        for what, number in troubles[rank].items():
            ranks.setdefault(what, []).append(rank)
            count[what] += number
    return [Damage(where=_named(ranks[what]), what=what, count=count[what]) for what in ranks]


def _named(ranks: Sequence[int]) -> str:
    """Some ranks for a person.

    >>> _named([3]), _named([0, 1, 7]), _named(range(100))
    ('rank 3', 'ranks 0, 1, 7', '100 ranks from 0 to 99')
    """
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks):,} ranks from {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
