"""Points that take the whole run to know: goodput, the ledger, stragglers, money, energy and carbon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TypeVar

from phalanx.errors import PhalanxError
from phalanx.metrics import names
from phalanx.metrics.point import Point, RankValue, by_rank, point
from phalanx.record.account.cost import run_cost
from phalanx.record.account.ledger import Ledger, LedgerWalk, walk_ledger
from phalanx.record.account.stragglers import scores
from phalanx.record.account.time_accounts import from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run

T = TypeVar("T")


def story_points(history: RunHistory, run: Run, *, hosts: Mapping[int, str], most_ranks: int) -> Iterator[Point]:
    """All of them; what a damaged record cannot tell is left out."""
    walked = _asked(lambda: walk_ledger(run, history))
    if walked is not None:
        yield from _spent(walked)
        yield from _cost(run, history, walked.ledger)
    scored = _asked(lambda: scores(history))
    if scored is not None:
        values = [RankValue(rank=rank, value=score) for rank, score in sorted(scored.score.items())]
        yield from by_rank(names.STRAGGLER, values, hosts=hosts, most_ranks=most_ranks)


def _spent(walked: LedgerWalk) -> Iterator[Point]:
    for account, seconds in asdict(walked.ledger.accounts).items():
        yield from point(names.TIME, seconds, account=account)
    effective = from_trail(walked.trail, 2)
    yield from point(names.GOODPUT, effective.cumulative[-1] if effective.cumulative else None, window="run")
    yield from point(names.GOODPUT, effective.last_hour[-1] if effective.last_hour else None, window="recent")


def _cost(run: Run, history: RunHistory, book: Ledger) -> Iterator[Point]:
    found = _asked(lambda: run_cost(run, history, book))
    for horizon in ("so_far", "projected", "predicted") if found is not None else ():
        amount = getattr(found, horizon)
        yield from point(names.COST, amount.usd, horizon=horizon)
        yield from point(names.CARBON, None if amount.kgco2e is None else 1000 * amount.kgco2e, horizon=horizon)
        yield from point(names.RUN_ENERGY, amount.energy_j, horizon=horizon)


def _asked(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (PhalanxError, OSError):
        return None
