"""Where the time and the money went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from phalanx.record.cost import Amount
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf
from phalanx.web.story import story

NO_CURVE: Mapping[str, Any] = {"t": (), "cumulative": (), "last_hour": (), "window_s": None}
NO_LEDGER: Mapping[str, Any] = {"wall_s": None, "accounts": {}, "closes": None, "gap": "", "overlap_s": None}
NO_BILL: Mapping[str, Any] = {"so_far": Amount(), "projected": Amount(), "predicted": Amount(), "sources": {}}


def ledger(shelf: Shelf, name: str) -> Json:
    """Every second of the run in one account, and effective training time over the run."""
    parts, run = Parts(), shelf.run(name)
    told = parts.read("ledger", lambda: story(shelf, run))
    book = told.summary.ledger.to_json() if told and told.summary.ledger else dict(NO_LEDGER)
    share = book.pop("effective", None)
    curve = {key: getattr(told.effective, key) for key in NO_CURVE} if told else NO_CURVE
    return {**book, "effective_share": share, "effective": curve, "damage": parts.damage}


def cost(shelf: Shelf, name: str) -> Json:
    """Dollars, energy and carbon, so far and to the end, and where each number comes from."""
    parts, run = Parts(), shelf.run(name)
    told = parts.read("cost", lambda: story(shelf, run))
    bill = told.summary.cost if told else None
    known = {one.name: getattr(bill, one.name) for one in fields(bill)} if bill else {}
    return {**NO_BILL, **known, "damage": parts.damage}
