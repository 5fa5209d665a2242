"""What an agent does once for the processes it forks later, while all its ranks train and nobody waits for it.

It is first tried in a process of its own. Where that fails, hangs, starts a thread or touches a GPU, or takes so long
that the agent would be missed, the agent leaves it alone: a replacement then does in its first step what it did before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.elastic.forked_check import ForkedCheck

MOST_S = 2.0  # for which an agent may neither hear nor answer
LEAST_LEFT = 4  # times as long as that must it be silent before it counts as lost


class Preload:
    """`attempt` answers with its seconds, or with why it must not be done; `load` does the same in the agent."""

    def __init__(self, load: Callable[[], None], attempt: Callable[[], Sequence[str]], *, dead_after_s: float) -> None:
        self._load, self._attempt = load, attempt
        self._most_s = min(MOST_S, dead_after_s / LEAST_LEFT)
        self._trial: ForkedCheck | None = None
        self.is_over = False
        self.refused = ""  # why it was not done

    def turn(self, forget: Callable[[], None]) -> None:
        """Go on with it; `forget` closes in a forked child what is only the agent's."""
        if self.is_over:
            return
        if self._trial is None:
            self._trial = ForkedCheck(self._attempt, forget=forget)
            return
        found = self._trial.found()
        if found is None:
            return
        self._trial, self.is_over = None, True
        self.refused = refusal(found, most_s=self._most_s)
        if self.refused:
            print(f"replacements load their first step themselves: loading it here {self.refused}", file=sys.stderr)
        else:
            with suppress(Exception):  # it went well a moment ago; if not, replacements start as before
                self._load()

    def forget(self) -> None:
        """In a forked child: the trial is the agent's."""
        if self._trial is not None:
            self._trial.forget()

    def close(self) -> None:
        """The run is over."""
        if self._trial is not None:
            self._trial.close()
        self._trial, self.is_over = None, True


def refusal(found: Sequence[str], *, most_s: float) -> str:
    """Why it must not be done in the agent, by what the trial said; nothing where it may be.

    >>> refusal(["0.4"], most_s=2.0), refusal(["2.5"], most_s=2.0), refusal(["has used CUDA"], most_s=2.0)
    ('', 'took 2.5 s', 'has used CUDA')
    >>> refusal([], most_s=2.0)
    'ended without a word'
    """
    if not found:
        return "ended without a word"
    try:
        seconds = float(found[0])
    except ValueError:
        return found[0]
    return "" if seconds <= most_s else f"took {seconds:g} s"
