"""What of a run folder cannot be read, in words: shown beside what can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.errors import UserError
from phalanx.io.values import integer
from phalanx.record.run import Run
from phalanx.record.run_files import read_json
from phalanx.units import plural

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
    files: dict[str, Callable[[], object]] = {
        "plan.json": run.plan,
        "launch.json": run.launch,
        "status.json": partial(read_json, run.path / "status.json"),
    }
    for name, read in files.items():
        try:
            read()
        except UserError as error:
            found.append(Damage(where=name, what=str(error).splitlines()[0].partition(": ")[2][:200], count=1))
    reported, planned = _reported_world(run), run.planned_world()
    if reported is not None and planned is not None and reported > planned:
        found.append(
            Damage(where="launch.json", what=f"{plural(reported, 'rank')}, where the plan has {planned:,}", count=1)
        )
    if not any(one.where == "launch.json" and reported is None for one in found):
        missing = _missing_ranks(run, ranks)
        if missing:
            found.append(Damage(where="events", what=f"no file of {_rank_names(missing)}", count=len(missing)))
    if strays := run.stray_files():
        what = "files of ranks that no plan of the run has, left unread"
        found.append(Damage(where="events", what=what, count=strays))
    return found


def _missing_ranks(run: Run, ranks: Sequence[int]) -> list[int]:
    world = run.world()
    if world is None or not 0 < world < 10**7:
        return []
    return sorted(set(range(world)).difference(ranks)) if _has_started(run, ranks) else []


def _reported_world(run: Run) -> int | None:
    try:
        return integer(run.launch(), "world")
    except UserError:
        return None


def _has_started(run: Run, ranks: Sequence[int]) -> bool:
    return bool(ranks) or run.status().get("state") not in ("created", "launching", None)


def supervisor_damage(run: Run, ranks: Sequence[int], *, generation: int) -> list[Damage]:
    """Whether supervisor.jsonl is missing; `generation` of the newest start: only a supervisor counts it up from 0."""
    try:
        launched = "launched" in run.launch()
    except UserError:
        launched = False
    if run.supervisor.is_file() or not _has_started(run, ranks) or not (launched or generation):
        return []
    how = "is not a file" if run.supervisor.exists() else "is missing"
    return [Damage(where=run.supervisor.name, what=f"{how}: incidents and memberships are unknown", count=1)]


def of_ranks(troubles: Mapping[int, Counter[str]]) -> list[Damage]:
    """The troubles of many ranks, the same ones together."""
    ranks: dict[str, list[int]] = {}
    count: Counter[str] = Counter()
    for rank in sorted(troubles):
        for what, number in troubles[rank].items():
            ranks.setdefault(what, []).append(rank)
            count[what] += number
    return [Damage(where=_rank_names(ranks[what]), what=what, count=count[what]) for what in ranks]


def _rank_names(ranks: Sequence[int]) -> str:
    """Some ranks for a person.

    >>> _rank_names([3]), _rank_names([0, 1, 7]), _rank_names(range(100))
    ('rank 3', 'ranks 0, 1, 7', '100 ranks from 0 to 99')
    """
    if len(ranks) > MOST_NAMED:
        return f"{plural(len(ranks), 'rank')} from {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
