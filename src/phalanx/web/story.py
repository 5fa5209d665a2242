"""What takes a walk over all steps of a run to know: made once for all who ask, and kept until the run has grown."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.record.account.ledger import walk_ledger
from phalanx.record.account.summary import Summary, summarize
from phalanx.record.account.time_accounts import Effective, from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.web.memo import NotYetError
from phalanx.web.shelf import Shelf, mark
from phalanx.web.views import state_of

EFFECTIVE_POINTS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A run as told at its end: the summary, with ledger and bill, and the effective training time over the run."""

    summary: Summary
    effective: Effective


def story(shelf: Shelf, run: Run, *, wait_s: float) -> Story:
    """The story of a run; raises NotYetError when it takes longer than `wait_s`, and is there the next time."""
    over = not state_of(run)[1]
    found: Story = shelf.memo.get(("story", run.name), mark(run), lambda: _tell(run), wait_s=wait_s, now=over)
    return found


def soon(shelf: Shelf, run: Run, *, wait_s: float) -> Story | None:
    """`story`, or None while it is being worked out."""
    try:
        return story(shelf, run, wait_s=wait_s)
    except NotYetError:
        return None


def _tell(run: Run) -> Story:
    # A history of its own: a walk over 100,000 steps takes seconds, in which the page must be able to draw.
    history = RunHistory.open(run)
    walked = walk_ledger(run, history)
    summary = summarize(run, history, walked)
    return Story(summary=summary, effective=from_trail(walked.trail, EFFECTIVE_POINTS))
