"""Facts about checkpoints: events of the ranks, step by step, and the content of the checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.files import Spot
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.values import integer, number
from phalanx.io.write_errors import free_bytes
from phalanx.record.event_schema import EventColumns
from phalanx.record.run import COMMIT, Run
from phalanx.rules.facts.log_facts import CheckpointFacts
from phalanx.rules.log.sums import Histogram

MOST_STEPS = 65_536  # commits that are remembered
MOST_PENDING = 64
INTERVAL = "interval"  # the reason of a save that was due by the interval
NEWEST = 8  # commits whose bytes are added up
MOST_LISTED = 100_000  # entries of the checkpoint folder that are read

Restore = tuple[int, str, Spot]  # step, source, place of the event


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """The newest roll-back of a run: the generation that distrusted the state, and the checkpoints it set aside."""

    generation: int
    target: int
    set_aside: tuple[int, ...]


class Pending:
    """The checkpoints of one rank that were staged and are not yet committed."""

    __slots__ = ("generation", "last_s", "late", "steps", "unsure")

    def __init__(self) -> None:
        self.steps: set[int] = set()
        # Those after which another one was staged before they were committed.
        self.late: set[int] = set()
        self.generation: Any = None
        self.last_s: float | None = None  # time of the last commit in this membership
        # Values of the newest save in a record without reasons: the last save of a membership may be due to a
        # Ctrl-C.
        self.unsure: list[tuple[Histogram, float]] = []


class Saves:
    """Checkpoint events of all ranks together.

    Counts and intervals come from the observer, the lowest rank on record.
    """

    def __init__(self) -> None:
        self._stages = self._commits = self._errors = self._unstaged = self._overlapping = 0
        self._blocked, self._persist, self._interval = Histogram(), Histogram(), Histogram()
        self._final_blocked, self._final_persist, self._due = Histogram(), Histogram(), Histogram()
        self._error_spot: Spot | None = None
        self._disorder_spot: Spot | None = None
        self._steps: dict[int, None] = {}
        self._bytes: dict[int, float] = {}
        self._newest_generation = -1  # newest generation in which a commit was reported
        self.is_reported = False

    def take(self, columns: EventColumns, file: str, lines: Sequence[int], pending: Pending, *, witness: bool) -> None:
        """Add checkpoint events of one rank."""
        self.is_reported = True
        for event, line in zip(columns.events, lines, strict=True):
            spot = Spot(file=file, line=line)
            # Saves that a membership left unfinished are never finished.
            if event.get("epoch") != pending.generation:
                pending.steps.clear()
                pending.late.clear()
                pending.unsure.clear()
                # The time between two memberships is not an interval.
                pending.last_s = None
                pending.generation = event.get("epoch")
            if event.get("error"):
                self._errors += 1
                self._error_spot = self._error_spot or spot
                pending.steps.discard(event["step"])
            elif event.get("phase") == "stage" or (event.get("phase") is None and not event.get("path")):
                self._take_stage(event, spot, pending, witness)
            else:
                self._take_commit(event, spot, pending, witness)

    def _take_stage(self, event: Mapping[str, Any], spot: Spot, pending: Pending, witness: bool) -> None:
        self._stages += witness
        # Another save followed, so this was not the last.
        for histogram, value in pending.unsure:
            histogram.add([value])
        pending.unsure.clear()
        blocked_s = number(event, "blocked_s")
        if blocked_s is not None:
            self._measure_save(event, pending, blocked_s, due=self._blocked, final=self._final_blocked)
        if pending.steps:
            # A stop may come while a save is being written.
            if event.get("reason") in (None, INTERVAL):
                self._overlapping += 1
                self._disorder_spot = self._disorder_spot or spot
            pending.late = pending.late | pending.steps if len(pending.late) < MOST_PENDING else pending.steps
        pending.steps = {event["step"]}

    def _take_commit(self, event: Mapping[str, Any], spot: Spot, pending: Pending, witness: bool) -> None:
        step = event["step"]
        if step not in pending.steps and step not in pending.late:
            self._unstaged += 1
            self._disorder_spot = self._disorder_spot or spot
        pending.steps.discard(step)
        pending.late.discard(step)
        took_s, now_s = number(event, "seconds"), number(event, "t")
        if took_s is not None:
            self._measure_save(event, pending, took_s, due=self._persist, final=self._final_persist)
        self._newest_generation = max(self._newest_generation, integer(event, "epoch") or 0)
        if witness:
            self._commits += 1
            self._measure_save(event, pending, 1.0, due=self._due, final=None)
            if pending.last_s is not None and now_s is not None:
                self._measure_save(event, pending, now_s - pending.last_s, due=self._interval, final=None)
            pending.last_s = now_s
        self._remember_size(step, number(event, "bytes"))

    def _measure_save(
        self, event: Mapping[str, Any], pending: Pending, value: float, *, due: Histogram, final: Histogram | None
    ) -> None:
        """Add a duration to the histogram for the reason of the save."""
        reason = event.get("reason")
        if reason is None:
            pending.unsure.append((due, value))
        elif reason == INTERVAL:
            due.add([value])
        elif final is not None:
            final.add([value])

    def _remember_size(self, step: int, size: float | None) -> None:
        # Inserted again at the end, so that the oldest commit is dropped first.
        self._steps.pop(step, None)
        self._steps[step] = None
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        if size is not None and (step in self._bytes or step >= min(self._bytes, default=step) or len(self._bytes) < 2):
            self._bytes[step] = self._bytes.get(step, 0.0) + size
            if len(self._bytes) > NEWEST:
                del self._bytes[min(self._bytes)]

    def facts(self, run: Run, restores: Sequence[Restore], rollback: Rollback | None = None) -> CheckpointFacts:
        """Return the facts from the events and from the folder."""
        # After a later commit the folder fills up again, and the roll-back explains no gap in it.
        is_recent = rollback is not None and self._newest_generation <= rollback.generation
        folder = Folder(run)
        known_steps = self._steps.keys() | set(folder.steps)
        uncommitted = [
            restore for restore in restores if restore[1] == "disk" and restore[0] > 0 and restore[0] not in known_steps
        ]
        return CheckpointFacts(
            stages=self._stages,
            commits=self._commits,
            interval_saves=due.count if (due := self._due.spread()) is not None else 0,
            final_blocked_s=self._final_blocked.spread(),
            final_persist_s=self._final_persist.spread(),
            blocked_s=self._blocked.spread(),
            persist_s=self._persist.spread(),
            interval_s=self._interval.spread(),
            bytes=self._bytes[max(self._bytes)] if self._bytes else None,
            errors=self._errors,
            error_spot=self._error_spot,
            commits_without_stage=self._unstaged,
            overlapping=self._overlapping,
            disorder_spot=self._disorder_spot,
            restores=sum(source in ("disk", "memory") for _, source, _ in restores),
            # Once commits were dropped, a restore without a known commit proves nothing.
            restored_uncommitted=len(uncommitted) if len(self._steps) < MOST_STEPS else 0,
            restored_spot=uncommitted[0][2] if uncommitted else None,
            kept=folder.kept,
            incomplete=folder.incomplete,
            free_bytes=folder.free_bytes,
            given_up=rollback.set_aside if rollback is not None and is_recent else (),
            rolled_back_to=rollback.target if rollback is not None and is_recent else None,
        )


class Folder:
    """The checkpoint folder as it is now; None where it is not on this machine."""

    def __init__(self, run: Run) -> None:
        self.steps: list[int] = []
        self.kept: int | None = None
        self.incomplete: int | None = None
        self.free_bytes: float | None = None
        try:
            root = run.checkpoints
        except PhalanxError:
            return
        if isinstance(root, Path) and is_folder(root):
            self._list_steps(root)
            self.free_bytes = free_bytes(root)

    def _list_steps(self, root: Path) -> None:
        self.kept = self.incomplete = 0
        try:
            with os.scandir(root) as entries:
                for _, entry in zip(range(MOST_LISTED), entries, strict=False):
                    match = COMMIT.fullmatch(entry.name)
                    if match is None or not entry.is_dir(follow_symlinks=False):
                        continue
                    if is_file(Path(entry.path) / "manifest.json"):
                        self.kept += 1
                        self.steps.append(int(match.group(1)))
                    else:
                        self.incomplete += 1
        except OSError:
            self.kept = self.incomplete = None


def rollback_of(event: Mapping[str, Any]) -> Rollback | None:
    """Return a `rollback` event as a Rollback; None where it lacks its numbers."""
    generation, target, step_list = integer(event, "epoch"), integer(event, "target"), event.get("set_aside")
    if generation is None or target is None:
        return None
    steps = tuple(step for step in step_list if isinstance(step, int)) if isinstance(step_list, list) else ()
    return Rollback(generation=generation, target=target, set_aside=steps[:MOST_LISTED])


def restore_of(event: Mapping[str, Any], spot: Spot) -> Restore | None:
    """Return step, source and place of a `restore` or `ready` event; None where they are missing."""
    step, source = integer(event, "step"), event.get("source")
    return (step, source, spot) if step is not None and isinstance(source, str) else None
