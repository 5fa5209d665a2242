"""Slow answers: made once, kept, made anew when their run has grown, and never in anybody's way."""

from __future__ import annotations

import threading
import time

import pytest

from phalanx.web.run_store import MOST_WORKERS, AnswerMemo, NotYetError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_is_made_once_and_again_when_its_run_has_grown() -> None:
    clock, memo, made = Clock(), None, []
    memo = AnswerMemo(clock=clock)

    def work() -> int:
        made.append(1)
        return len(made)

    assert [memo.get("a", 1, work, wait_s=10) for _ in range(3)] == [1, 1, 1]
    clock.now = 0.5
    assert memo.get("a", 2, work, wait_s=10) == 1  # grown, but too soon to look again
    clock.now = 2.0
    assert memo.get("a", 3, work, wait_s=10) == 1  # the one before, while the next is made
    _until(lambda: memo.get("a", 3, work, wait_s=10) == 2)


def test_of_a_run_that_is_over_the_last_word_is_waited_for() -> None:
    memo, go = AnswerMemo(clock=Clock()), threading.Event()  # a clock that stands still: no answer is old
    assert memo.get("a", 1, lambda: "going", wait_s=20) == "going"
    assert memo.get("a", 2, lambda: "over", wait_s=20) == "going"
    with pytest.raises(NotYetError):
        memo.get("a", 2, lambda: go.wait(20) and "over", wait_s=0, now=True)
    go.set()
    assert memo.get("a", 2, lambda: "over", wait_s=20, now=True) == "over"


def test_who_waits_too_long_is_told_and_finds_it_the_next_time() -> None:
    memo, go = AnswerMemo(), threading.Event()
    with pytest.raises(NotYetError):
        memo.get("a", 1, lambda: go.wait(20), wait_s=0.05)
    go.set()
    assert memo.get("a", 1, lambda: False, wait_s=20) is True


def test_many_orders_take_few_threads_and_the_newest_comes_first() -> None:
    memo, go, order = AnswerMemo(), threading.Event(), []
    for number in range(50):
        with pytest.raises(NotYetError):
            memo.get(number, 1, lambda number=number: go.wait(20) and order.append(number), wait_s=0)
    assert sum(one.name == "phalanx-memo" for one in threading.enumerate()) <= MOST_WORKERS
    go.set()
    _until(lambda: len(order) == 50)
    assert order.index(49) < order.index(10)


def test_an_error_is_kept_like_an_answer() -> None:
    memo, made = AnswerMemo(), []

    def fail() -> None:
        made.append(1)
        raise ValueError("damaged")

    for _ in range(3):
        with pytest.raises(ValueError, match="damaged"):
            memo.get("a", 1, fail, wait_s=20)
    assert made == [1]


def test_closing_lets_everybody_go() -> None:
    memo, go, gone = AnswerMemo(), threading.Event(), []

    def ask() -> None:
        try:
            memo.get("a", 1, lambda: go.wait(20), wait_s=20)
        except NotYetError:
            gone.append(1)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    memo.close()
    for thread in threads:
        thread.join(300)
    go.set()
    assert gone == [1, 1, 1]


def _until(true: object) -> None:
    end = time.monotonic() + 300
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)
