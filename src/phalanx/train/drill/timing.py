"""How long each fault took to notice and to get over, and what it cost; from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from phalanx.record.events import Event
from phalanx.train.drill.fault import KINDS, Fault
from phalanx.train.drill.fired import Fired
from phalanx.train.drill.history import Epoch, Execution, History
from phalanx.train.drill.oracle import Verdict, because


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One firing and what came of it; None where nothing of the kind followed."""

    fault: str  # as on the command line
    kind: str
    fired_s: float  # Unix time
    rank: int
    epoch: int
    step: int
    note: str
    detected_s: float | None  # until an incident was noticed
    blamed: int | None  # the rank that the incident names
    recovered_s: float | None  # until all ranks of a later epoch had committed a step
    steps_lost: int | None  # held in memory on all ranks, and yet behind what was restored
    steps_redone: int | None  # finished by all ranks, not yet held, and done again
    source: str  # of that restore: memory, disk or start
    world: int | None  # ranks afterwards
    judged: bool = True  # False: nobody noticed it, and the run ended before somebody had to


def outcomes(
    history: History, faults: Sequence[Fault], fired: Sequence[Fired], *, patience_s: float = 0.0
) -> list[Outcome]:
    """Every firing in the order of time; a fault may go unnoticed for `patience_s`."""
    texts = {fault.id: fault.text for fault in faults}
    end_s = float(history.end["t"]) if history.end is not None else inf
    incidents = _attribute(history, fired, patience_s)
    found = [_outcome(history, one, incidents.get(at), texts) for at, one in enumerate(fired)]
    return [replace(one, judged=not _is_open(one, end_s - patience_s)) for one in found]


def _must_be_noticed(one: Outcome) -> bool:
    """Whether somebody must recover from it; what passes by itself (`for_s`) may pass before it is noticed."""
    return KINDS[one.kind].ends and "for_s=" not in one.fault


def _is_open(one: Outcome, late_s: float) -> bool:
    return _must_be_noticed(one) and one.detected_s is None and one.fired_s >= late_s


def noticed(found: Sequence[Outcome], *, asked: int, patience_s: float, drawn: bool = False) -> Verdict:
    """Whatever somebody must recover from was noticed, and a wrong number's rank named.

    A fault that was neither noticed nor had `patience_s` until the end of the run could not be judged, and with it the
    whole claim; of faults that were `drawn` by chance one that could be judged is enough. Of the faults that were
    `asked` for some must have fired: a drill without any proves nothing.
    """
    name = "every fault was noticed"
    must = [one for one in found if _must_be_noticed(one) and one.judged]
    late = [one for one in found if not one.judged]
    wrong = [f"{one.fault} was not noticed" for one in must if one.detected_s is None]
    flips = [one for one in must if one.kind == "flip" and one.blamed is not None]
    wrong += [f"{one.fault} was blamed on rank {one.blamed}" for one in flips if one.blamed != one.rank]
    text = f"{len(must) - len(wrong):,} of {len(must):,} faults"
    if asked and not found:
        wrong, text = ["nothing was tried"], f"none of {asked:,} faults fired"
    elif not must and not late:
        text = f"no fault fired that needs noticing: {_why_none(found)}"
    if wrong or not late:
        return Verdict(name=name, ok=not wrong, evidence=because(text, wrong))
    told = f"{late[0].fault} came less than {patience_s:g} s before the end and nobody had noticed it by then"
    more = f", and {len(late) - 1:,} more" if len(late) > 1 else ""
    if drawn and must:
        return Verdict(name=name, ok=True, evidence=f"{text}; {len(late):,} more came too late to be judged")
    evidence = f"{text + '; ' if must else ''}{told}{more}: more steps, or an earlier fault, would tell"
    return Verdict(name=name, ok=False, judged=False, evidence=evidence)


def _why_none(found: Sequence[Outcome]) -> str:
    passes = sum(KINDS[one.kind].ends for one in found)
    counts = ((len(found) - passes, "harmless"), (passes, "passing by themselves"))
    return ", ".join(f"{count} {text}" for count, text in counts if count) or "none was asked for"


def _attribute(history: History, fired: Sequence[Fired], patience_s: float) -> dict[int, Event]:
    """The incident in which each firing was noticed, by its place in `fired`; none for those that nobody noticed.

    An incident belongs to the faults whose rank or host it names, and, of those that came before their time to be
    noticed was over, to all: processes fall together, and the first that is found is named. A fault that is older than
    that gets an incident only where no newer fault explains it.
    """
    waiting = {at: one for at, one in enumerate(fired) if KINDS[one.kind].ends}
    found: dict[int, Event] = {}
    owned: set[int] = set()  # incidents that a fault explains
    told = sorted([*history.incidents, *history.replacements], key=lambda one: float(one["t"]))
    for by_name in (True, False):
        for number, incident in enumerate(told):
            before = [
                at
                for at, one in waiting.items()
                if at not in found
                and one.t_s <= float(incident["t"])
                and _epoch_of(history, one) <= int(incident.get("epoch", -1))
                and (_names(incident, one) or not by_name)
            ]
            near = [at for at in before if _noticed_s(incident) - fired[at].t_s <= patience_s]
            newest = max(before, key=lambda at: fired[at].t_s, default=None)
            mine = near or ([newest] if newest is not None and number not in owned else [])
            found |= dict.fromkeys(mine, incident)
            owned |= {number} if mine else set()
    return found


def _names(incident: Event, one: Fired) -> bool:
    if one.rank >= 0:
        return one.rank in (incident.get("rank"), *(incident.get("others") or ()))
    return bool(one.host) and incident.get("host") == one.host


def _epoch_of(history: History, one: Fired) -> int:
    return one.epoch if one.epoch >= 0 else _epoch_at(history, one.t_s)


def _outcome(history: History, fired: Fired, incident: Event | None, texts: Mapping[int, str]) -> Outcome:
    epoch = _epoch_of(history, fired)
    later = _next_epoch(history, fired, int(incident.get("epoch", epoch))) if incident is not None else None
    first = _first_step(later)
    return Outcome(
        fault=texts.get(fired.id, fired.kind),
        kind=fired.kind,
        fired_s=fired.t_s,
        rank=fired.rank,
        epoch=epoch,
        step=fired.step,
        note=fired.note,
        detected_s=_noticed_s(incident) - fired.t_s if incident is not None else None,
        blamed=int(incident["rank"]) if incident is not None else None,
        recovered_s=first.ended_s - fired.t_s if first is not None else None,
        steps_lost=_lost(later) if later is not None else None,
        steps_redone=_redone(later) if later is not None else None,
        source=later.source if later is not None else "",
        world=later.world if later is not None else None,
    )


def _lost(epoch: Epoch) -> int:
    return max(0, max((one.held for one in epoch.undone), default=0) - epoch.restore_step)


def _redone(epoch: Epoch) -> int:
    """Steps that every rank had told of. One that was cut short was never done."""
    return sum(one.complete for one in epoch.undone)


def _noticed_s(incident: Event) -> float:
    """An incident is written when something can be done about it; until then it waits for a place, or a while."""
    return float(incident["t"]) - float(incident.get("waited_s") or 0.0)


def _next_epoch(history: History, fired: Fired, epoch: int) -> Epoch | None:
    """The first later epoch in which a step was committed; it may have been in the making when the fault fired."""
    later = (one for one in history.epochs if one.number > epoch and (one.went_s or one.began_s) >= fired.t_s)
    return next((one for one in later if _first_step(one) is not None), None)


def _first_step(epoch: Epoch | None) -> Execution | None:
    whole = [one for _, one in sorted(epoch.steps.items()) if one.complete] if epoch is not None else []
    return whole[0] if whole else None


def _epoch_at(history: History, t_s: float) -> int:
    return max((one.number for one in history.epochs if one.began_s <= t_s), default=0)
