"""Notes: how ranks that save tell rank 0 that their part is safe, or that they gave up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from threading import Event

from phalanx.errors import PhalanxError, Problem, SystemFailure
from phalanx.train.state import names
from phalanx.train.state.jsontext import from_text, to_text
from phalanx.train.state.manifest import RankFiles
from phalanx.train.state.storage import Draft
from phalanx.train.state.streams import reason

# Rank 0 looks again after a fiftieth of the time it has waited: it hears of the last rank at most 2 % late.
FIRST_LOOK_S, LAST_LOOK_S, LOOKS = 0.002, 0.2, 50
NOTE_BYTES = 2**16  # the longest note of a rank


class Abandoned(Exception):
    """The save was given up by the process that began it."""


def tell_done(draft: Draft, rank: int, files: RankFiles) -> None:
    """Say what a rank has made safe."""
    draft.note(names.done_name(rank), to_text(asdict(files)))


def tell_failed(draft: Draft, rank: int, error: BaseException) -> None:
    """Say why a rank gave up, so that rank 0 need not wait for it."""
    draft.note(names.failed_name(rank), _first_line(error).encode()[:NOTE_BYTES])


def wait_for_ranks(draft: Draft, *, step: int, world: int, timeout_s: float, abandoned: Event) -> tuple[RankFiles, ...]:
    """What all ranks wrote, in order; raises SystemFailure when one is missing or gave up, Abandoned when told to."""
    began = time.monotonic()
    wanted = [names.done_name(rank) for rank in range(world)]
    while True:
        here = draft.notes()
        _stop_at_failure(draft, here, step)
        missing = [rank for rank, name in enumerate(wanted) if name not in here]
        if not missing:
            return tuple(RankFiles(**from_text(text)) for text in draft.read_notes(wanted, most_bytes=NOTE_BYTES))
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise SystemFailure(_late(draft, step, missing, timeout_s))
        if abandoned.wait(min(max(waited_s / LOOKS, FIRST_LOOK_S), LAST_LOOK_S)):
            raise Abandoned


def _late(draft: Draft, step: int, missing: Sequence[int], timeout_s: float) -> Problem:
    some = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return Problem(
        where=str(draft.place),
        what=f"step {step} is not saved: rank {some} did not write its part in {timeout_s:g} s",
        why="a checkpoint counts only when every rank's part is on the disk; the one before is intact",
        fix="look at the log of that rank, and that all ranks see the same file system",
    )


def _stop_at_failure(draft: Draft, here: set[str], step: int) -> None:
    failed = sorted(name for name in here if name.endswith(".failed"))
    if failed:
        text = draft.read_notes(failed[:1], most_bytes=NOTE_BYTES)[0].decode("utf-8", "replace")
        what = f"step {step} is not saved: {failed[0].removesuffix('.failed')} gave up: {text}"
        raise SystemFailure(Problem(where=str(draft.place), what=what, why="the checkpoint before it is intact"))


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, PhalanxError):
        return error.problems[0].render().splitlines()[0]
    return f"{type(error).__name__}: {error}"
