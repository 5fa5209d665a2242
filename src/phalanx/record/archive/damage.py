"""Damage of a run folder: the parts that cannot be read, in words, for display next to the rest."""

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

MOST_NAMED = 8  # ranks listed one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A part of a run that cannot be read: its place, the problem, and the number of cases."""

    where: str
    what: str
    count: int


def folder_damage(run: Run, ranks: Sequence[int]) -> list[Damage]:
    """Return the run's own files that are missing or broken, and the ranks without events."""
    problems = []
    files: dict[str, Callable[[], object]] = {
        "plan.json": run.plan,
        "launch.json": run.launch,
        "status.json": partial(read_json, run.path / "status.json"),
    }
    for name, read in files.items():
        try:
            read()
        except UserError as error:
            problems.append(Damage(where=name, what=str(error).splitlines()[0].partition(": ")[2][:200], count=1))
    launched_world, planned_world = _reported_world(run), run.planned_world()
    if launched_world is not None and planned_world is not None and launched_world > planned_world:
        problems.append(
            Damage(
                where="launch.json",
                what=f"{plural(launched_world, 'rank')}, where the plan has {planned_world:,}",
                count=1,
            )
        )
    if not any(problem.where == "launch.json" and launched_world is None for problem in problems):
        missing = _missing_ranks(run, ranks)
        if missing:
            problems.append(Damage(where="events", what=f"no file of {_rank_names(missing)}", count=len(missing)))
    if strays := run.stray_files():
        message = "files of ranks that no plan of the run has, left unread"
        problems.append(Damage(where="events", what=message, count=strays))
    return problems


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
    """Report supervisor.jsonl if it is missing.

    `generation` is that of the newest start: only a coordinator counts it up from 0.
    """
    try:
        launched = "launched" in run.launch()
    except UserError:
        launched = False
    if run.supervisor.is_file() or not _has_started(run, ranks) or not (launched or generation):
        return []
    state = "is not a file" if run.supervisor.exists() else "is missing"
    return [Damage(where=run.supervisor.name, what=f"{state}: incidents and memberships are unknown", count=1)]


def of_ranks(troubles: Mapping[int, Counter[str]]) -> list[Damage]:
    """Return the troubles of many ranks, equal ones combined."""
    ranks: dict[str, list[int]] = {}
    count: Counter[str] = Counter()
    for rank in sorted(troubles):
        for trouble, number in troubles[rank].items():
            ranks.setdefault(trouble, []).append(rank)
            count[trouble] += number
    return [Damage(where=_rank_names(ranks[trouble]), what=trouble, count=count[trouble]) for trouble in ranks]


def _rank_names(ranks: Sequence[int]) -> str:
    """Format ranks as text.

    >>> _rank_names([3]), _rank_names([0, 1, 7]), _rank_names(range(100))
    ('rank 3', 'ranks 0, 1, 7', '100 ranks from 0 to 99')
    """
    if len(ranks) > MOST_NAMED:
        return f"{plural(len(ranks), 'rank')} from {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
