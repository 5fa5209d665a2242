"""Where the time and the money went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from phalanx.record.account.cost import Amount
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf
from phalanx.web.story import Story, soon

NO_CURVE: Mapping[str, Any] = {"t": (), "cumulative": (), "last_hour": (), "window_s": None}
NO_LEDGER: Mapping[str, Any] = {"wall_s": None, "accounts": {}, "closes": None, "gap": "", "overlap_s": None}
NO_BILL: Mapping[str, Any] = {"so_far": Amount(), "projected": Amount(), "predicted": Amount(), "sources": {}}


# A walk over 100,000 steps takes about 4 s of one core; a longer one is asked for again.
PATIENCE_S = 15.0


def ledger(shelf: Shelf, name: str) -> Json:
    """Every second of the run in one account, and effective training time over the run."""
    parts, run = Parts(), shelf.run(name)
    told = parts.read("ledger", lambda: soon(shelf, run, wait_s=PATIENCE_S))
    book = told.summary.ledger.to_json() if told and told.summary.ledger else dict(NO_LEDGER)
    share = book.pop("effective", None)
    curve = {key: getattr(told.effective, key) for key in NO_CURVE} if told else NO_CURVE
    return {**book, "effective_share": share, "effective": curve, **_state(parts, told)}


def cost(shelf: Shelf, name: str) -> Json:
    """Dollars, energy and carbon, so far and to the end, and where each number comes from."""
    parts, run = Parts(), shelf.run(name)
    told = parts.read("cost", lambda: soon(shelf, run, wait_s=PATIENCE_S))
    bill = told.summary.cost if told else None
    known = {one.name: getattr(bill, one.name) for one in fields(bill)} if bill else {}
    return {**NO_BILL, **known, **_state(parts, told)}


def _state(parts: Parts, told: Story | None) -> Json:
    return {"settled": told is not None or bool(parts.damage), "damage": parts.damage}
