"""Damaged checkpoints: which of them a restore met, and that it went further back instead of taking them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.record.drill import REFUSED
from phalanx.record.events import Event
from phalanx.train.drill.history import History
from phalanx.train.drill.oracle import Verdict, because
from phalanx.train.drill.timing import Outcome


def refused(history: History, found: Sequence[Outcome], *, drawn: bool = False) -> list[Verdict]:
    """The verdict on damaged checkpoints; none where no file was damaged.

    A file that nobody read afterwards proves nothing, and the verdict is not judged: the ranks have their state in
    memory, and the disk is read only when every copy of some part is gone. Nobody asked for what was `drawn` by chance.
    """
    hits = [one for one in found if one.kind == "damage"]
    if not hits:
        return []
    wrong, met = [], []
    for one in hits:
        folder = one.note.partition(":")[0]
        readers = [event for event in history.ranks if event["event"] == "ready" and float(event["t"]) > one.fired_s]
        if taken := [event for event in readers if _took(history, event, folder, since_s=one.fired_s)]:
            wrong.append(f"epoch {taken[0].get('epoch')} took {folder}, which was damaged")
        elif who := [event for event in readers if folder in str(event.get("warnings") or "")]:
            met.append(f"epoch {who[0].get('epoch')} refused {folder} and went back to step {who[0].get('step')}")
    unread = len(hits) - len(met) - len(wrong)
    text = "; ".join(met) or "no restore met one"
    if unread:
        text += f"; {unread} of {len(hits)} nobody read, which proves nothing of {'it' if unread == 1 else 'them'}"
    is_open = bool(unread) and not wrong and not drawn
    return [Verdict(name=REFUSED, ok=not wrong and not is_open, judged=not is_open, evidence=because(text, wrong))]


def _took(history: History, event: Event, folder: str, *, since_s: float) -> bool:
    """Whether a rank took up what was damaged; unless the same step was saved anew in between."""
    step = int(event.get("step") or 0)
    if event.get("source") != "disk" or folder != f"step-{step:08d}":
        return False
    anew = [one for one in history.checkpoints if int(one["step"]) == step and since_s < float(one["t"])]
    return not any(float(one["t"]) < float(event["t"]) for one in anew)
