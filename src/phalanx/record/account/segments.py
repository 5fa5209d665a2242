"""The stretches of a run that one layout did: what was predicted and what was measured belong together in each.

A run that is resumed in another layout, or goes on with fewer ranks, has several. A step counts for the formation whose
step stayed. Each segment has the plan of its own layout; one that nobody planned, as after a lost rank, has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable
from phalanx.record.account.formations import Formation, formations
from phalanx.record.run import Run, read_json

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

MOST_PLANS = 1000
PLAN = re.compile(r"plan-([1-9]\d{0,5})\.json")
Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Steps `first` to `last` that stayed, all done in one layout."""

    layout: Table
    world: int
    first: int
    last: int
    epochs: tuple[int, ...]  # formations that did them
    plan: Table  # of this layout; empty where there is none
    under: Table  # the plan that the run had then, of whatever layout: its count of FLOPs, its devices and their price

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The layout in letters."""
        return layout_name(self.layout) or "layout not recorded"

    @property
    def mfu_per_token(self) -> float | None:
        """MFU at one token per second, by the plan's own count of FLOPs, against the peak of these ranks' devices."""
        return measured_mfu(self.under, 1.0, world=self.world)


def measured_mfu(plan: Table, tokens_per_s: float | None, *, world: int | None = None) -> float | None:
    """MFU at a measured rate, by the plan's own count of FLOPs; None where the plan or the rate does not give it.

    The peak is that of `world` ranks where that is known: fewer than planned after a loss. It is the planned MFU times
    the ratio of the rates, since FLOPs per token and the peak of a device are the plan's in both.
    """
    prediction, planned_world = at(plan, "prediction"), world_of(at(plan, "layout"))
    planned, rate = number(prediction, "mfu"), number(prediction, "tokens_per_s")
    if not planned or not rate or tokens_per_s is None or tokens_per_s < 0.0:
        return None
    return planned * tokens_per_s / rate * (planned_world / world if planned_world and world else 1.0)


def world_of(layout: Table) -> int | None:
    """Ranks of a layout; None when it is none."""
    sizes = [integer(layout, axis) for axis in ("data", "tensor", "context", "pipeline")]
    return math.prod(max(1, one or 1) for one in sizes) if sizes[0] else None


def layout_name(layout: Table) -> str:
    """A layout as the plan spells it (`plan.layout.Layout.name`); empty when it is none.

    >>> layout_name({"data": 2, "shard": 2, "tensor": 1, "context": 1, "pipeline": 2, "zero": 2, "micro_batch": 2})
    'TP1·CP1·PP2·DP2 (ZeRO-2, EP1) mbs2 no-recompute'
    """
    data = integer(layout, "data")
    if data is None:
        return ""
    size = {
        axis: integer(layout, axis) or 1 for axis in ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
    }
    zero, shard = integer(layout, "zero") or 0, integer(layout, "shard") or data
    grouped = f"/{shard}" if zero and shard < data * size["context"] else ""
    stages = f"PP{size['pipeline']}" + (f"·VPP{size['virtual_pipeline']}" if size["virtual_pipeline"] > 1 else "")
    head = f"TP{size['tensor']}·CP{size['context']}·{stages}·DP{data} (ZeRO-{zero}{grouped}, EP{size['expert']})"
    recompute = printable(layout.get("recompute") or "none", most=40)
    words = [f"mbs{integer(layout, 'micro_batch') or 1}", "no-recompute" if recompute == "none" else recompute]
    if size["pipeline"] > 1 and layout.get("schedule") in ("gpipe", "zero-bubble"):
        words.append(str(layout["schedule"]))
    for key, word in (("offload", "offload"), ("compression", "grads")):
        if layout.get(key) not in (None, "none"):
            words.append(f"{word}-{printable(layout[key], most=40)}")
    return " ".join([head, *words])


def segments(run: Run, history: RunHistory, known: Sequence[Formation] | None = None) -> list[Segment]:
    """All of them, in order; one where nothing changed, none before the first step."""
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return []
    if known is None:
        known = formations(run, starts=lambda rank: history.events("run_start", rank=rank))
    told = {integer(one, "epoch"): one for one in history.supervisor() if one["event"] == "epoch"}
    plans = _Plans(run)
    found: list[Segment] = []
    for one in known:
        event = told.get(one.epoch, {})
        plan, under = plans.of(event)
        layout = at(event, "layout") or at(under, "layout")
        # A start on record without a number of ranks counts as one rank: the layout knows better.
        told_world = integer(event, "world") or (one.world if one.world > 1 else None)
        world = told_world or world_of(layout) or run.world() or 1
        begin = first if one.from_step is None and not found else one.from_step
        end = min(one.floor - 1, last)
        if begin is None or begin > end:
            continue
        piece = Segment(
            layout=layout,
            world=world,
            first=max(first, begin),
            last=end,
            epochs=(one.epoch,),
            plan=plan,
            under=under,
        )
        if found and _goes_on(found[-1], piece):
            before = found.pop()
            piece = Segment(
                layout=layout,
                world=world,
                first=before.first,
                last=end,
                epochs=(*before.epochs, one.epoch),
                plan=plan,
                under=under,
            )
        found.append(piece)
    if found:
        return found
    plan = plans.newest
    world = run.world() or 1
    return [Segment(layout=at(plan, "layout"), world=world, first=first, last=last, epochs=(), plan=plan, under=plan)]


def segment_plan(run: Run, history: RunHistory, step: int | None) -> Table:
    """The plan of the layout that did a step; empty where nobody planned it."""
    known = segments(run, history)
    found = [one for one in known if step is not None and one.first <= step <= one.last] or known[-1:]
    return found[0].plan if found else _Plans(run).newest


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of a run: how long it held how many devices, by which plan."""

    seconds: float
    world: int
    plan: Table


def launches(run: Run, history: RunHistory) -> list[Launch]:
    """The launches of a run that its supervisor told of, oldest first; their seconds say how the time is shared."""
    plans, found = _Plans(run), []
    began: list[tuple[float, Table, int]] = []  # when, under which plan, with how many ranks
    told = [(time_s, one) for one in history.supervisor() if (time_s := number(one, "t")) is not None]
    known = run.launches()
    ends = [time_s for time_s, one in told if one["event"] == "end"]
    for time_s, one in told:
        if one["event"] != "epoch":
            continue
        under, world = plans.of(one)[1], max(1, integer(one, "world") or 1)
        if one.get("reason") == "start" or not began:
            launched = max((launch_s for launch_s in known if launch_s <= time_s), default=time_s)
            began.append((launched, under, world))
        else:  # devices that a launch has lost are rented on
            began[-1] = (began[-1][0], began[-1][1], max(world, began[-1][2]))
    newest_s = max([*(time_s for time_s, _ in told), number(history.latest("step") or {}, "t") or 0.0], default=0.0)
    for count, (launched, under, world) in enumerate(began):
        until = began[count + 1][0] if count + 1 < len(began) else newest_s
        end_s = next((time_s for time_s in ends if launched < time_s <= until), until)
        found.append(Launch(seconds=max(0.0, end_s - launched), world=world, plan=under))
    return found


def _goes_on(before: Segment, after: Segment) -> bool:
    return before.layout == after.layout and before.world == after.world and before.under == after.under


class _Plans:
    """The plans that a run had, oldest first: plan-1.json and so on, then plan.json."""

    def __init__(self, run: Run) -> None:
        numbers = sorted(int(match.group(1)) for match in map(PLAN.fullmatch, _names(run)) if match)[:MOST_PLANS]
        self._plans = [_read(run, f"plan-{number}.json") for number in numbers] + [_read(run, "plan.json")]
        self._at = 0  # plans are used in the order in which they were made

    @property
    def newest(self) -> Table:
        return self._plans[-1]

    def of(self, event: Table) -> tuple[Table, Table]:
        """The plan of a formation's layout (empty where it has another), and the plan it was made under.

        An `epoch` event says which plan it was made under; in older records that is the next one with its layout.
        """
        told, layout = integer(event, "plan"), at(event, "layout")
        if told is not None and 1 <= told <= len(self._plans):
            self._at = told - 1
        elif layout:
            later = range(self._at, len(self._plans))
            self._at = next((count for count in later if _is_of(self._plans[count], layout)), self._at)
        else:  # a record without layouts has one plan that can be told
            self._at = len(self._plans) - 1
        plan = self._plans[self._at]
        return (plan if not layout or _is_of(plan, layout) else {}), plan


def _is_of(plan: Table, layout: Table) -> bool:
    planned = at(plan, "layout")
    return bool(planned) and all(planned.get(key) == value for key, value in layout.items() if key in planned)


def _names(run: Run) -> list[str]:
    try:
        return [path.name for path in run.path.iterdir()]
    except OSError:
        return []


def _read(run: Run, name: str) -> Table:
    try:
        return read_json(run.path / name)
    except PhalanxError:
        return {}
