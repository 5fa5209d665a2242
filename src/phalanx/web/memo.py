"""Answers that take long to work out: kept, and worked out again in the background once the run has grown."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

MOST_ANSWERS = 512
# An answer that took a second is made anew at most every ten: a run that grows costs a tenth of a core.
REST = 10.0
LEAST_REST_S = 1.0
MOST_WORKERS = 1  # the work is Python: a second thread would only take turns with the first, and with the requests


class NotYetError(Exception):
    """The answer is still being worked out, or the server is closing; ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    mark: Hashable
    work: Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    mark: Hashable
    value: Any
    error: Exception | None
    took_s: float
    at_s: float


class Memo:
    """Keeps answers by key. Whoever asks first waits; whoever asks while it is made anew gets the one before."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._orders: OrderedDict[Hashable, _Order] = OrderedDict()  # not begun yet; the last one is next
        self._busy: set[Hashable] = set()
        self._workers = 0
        self._closed = False

    def get(self, key: Hashable, mark: Hashable, work: Callable[[], Any], *, wait_s: float, now: bool = False) -> Any:
        """The answer for `key`; raises what `work` raised. `mark` tells whether what it was made of has changed.

        With `now`, an answer that changed is waited for, too: of a run that is over, the last word counts.
        """
        until_s = self._clock() + wait_s
        with self._changed:
            while True:
                answer = self._answers.get(key)
                if self._is_due(answer, mark, now=now) and key not in self._busy and not self._closed:
                    self._order(key, _Order(mark=mark, work=work))
                if answer is not None and (answer.mark == mark or not now):
                    break
                left_s = until_s - self._clock()
                if left_s <= 0 or self._closed:
                    raise NotYetError
                self._changed.wait(left_s)
            self._answers.move_to_end(key)
        if answer.error is not None:
            raise answer.error.with_traceback(None)  # or every raise would add to the same one
        return answer.value

    def close(self) -> None:
        """Let everybody go who waits; nothing more is begun."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()

    def _is_due(self, answer: _Answer | None, mark: Hashable, *, now: bool) -> bool:
        if answer is None or answer.mark == mark:
            return answer is None
        return now or self._clock() - answer.at_s >= max(LEAST_REST_S, REST * answer.took_s)

    def _order(self, key: Hashable, order: _Order) -> None:
        # What was asked for last is looked at by somebody now; a long list of runs may wait.
        self._orders[key] = order
        self._orders.move_to_end(key)
        if self._workers < MOST_WORKERS:
            self._workers += 1
            # A daemon: Ctrl-C does not wait for an answer nobody is going to read.
            threading.Thread(target=self._work, daemon=True, name="phalanx-memo").start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._workers -= 1
                    return
                key, order = self._orders.popitem()
                self._busy.add(key)
            answer = self._make(order)
            with self._changed:
                self._answers[key] = answer
                self._busy.discard(key)
                while len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
                self._changed.notify_all()

    def _make(self, order: _Order) -> _Answer:
        value, error = None, None
        began_s = self._clock()
        try:
            value = order.work()
        except Exception as caught:  # a damaged run: whoever asked says so
            error = caught
        now_s = self._clock()
        return _Answer(mark=order.mark, value=value, error=error, took_s=now_s - began_s, at_s=now_s)
