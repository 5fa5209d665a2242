"""A rank's line to its agent: formations come and go while the training may be anywhere."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.elastic.heartbeat_board import HeartbeatBoard, Phase
from phalanx.elastic.rank_link import Interrupted, RankLink, open_sockets, shut_sockets

SLOT = 1


class Line:
    """The agent's end."""

    def __init__(self) -> None:
        self.agent, rank = socket.socketpair()
        self.board = HeartbeatBoard(2)
        self.link = RankLink(rank, self.board, SLOT)
        self._rank = rank

    def say(self, kind: str, **fields: Any) -> None:
        self.agent.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def close(self) -> None:
        self.agent.close()
        for thread in threading.enumerate():
            if thread.name == "link":
                thread.join(5)
        self._rank.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected network sockets, as a process group would open."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours = socket.create_connection(door.getsockname())
        theirs, _ = door.accept()
    ours.settimeout(10)
    theirs.settimeout(10)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_only_the_newest_formation_counts(line: Line) -> None:
    for epoch in (1, 2, 3):
        line.say("form", epoch=epoch)
    until = time.monotonic() + 300
    while not line.link.is_over(2) and time.monotonic() < until:
        time.sleep(0.01)
    form = line.link.next_form()
    assert form is not None
    assert form["epoch"] == 3


def test_go_is_for_one_epoch(line: Line) -> None:
    line.say("form", epoch=2)
    assert line.link.next_form()
    line.link.enter(2)
    line.say("go", epoch=1, store="old")
    line.say("go", epoch=2, store="new")
    assert line.link.go(2)["store"] == "new"


def test_a_newer_formation_ends_the_wait_to_go(line: Line) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    line.link.enter(1)
    line.say("form", epoch=2)
    with pytest.raises(Interrupted):
        line.link.go(1)
    line.link.leave()
    form = line.link.next_form()
    assert form is not None
    assert form["epoch"] == 2


def test_the_end_of_the_run_ends_every_wait(line: Line) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    line.link.enter(1)
    line.say("end")
    with pytest.raises(Interrupted):
        line.link.go(1)
    assert line.link.next_form() is None


def test_an_agent_that_is_gone_is_the_end(line: Line) -> None:
    line.agent.close()
    assert line.link.next_form() is None


def test_a_formation_that_is_over_before_it_is_entered(line: Line) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    line.say("form", epoch=2)
    until = time.monotonic() + 300
    while not line.link.is_over(1) and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(Interrupted):
        line.link.enter(1)


def test_a_newer_formation_cuts_what_the_old_one_opened(line: Line) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    with socket.create_server(("127.0.0.1", 0)) as door:
        kept = socket.create_connection(door.getsockname())
        other, _ = door.accept()
        line.link.enter(1)
        opened = socket.create_connection(door.getsockname())
        end, _ = door.accept()
        opened.settimeout(10)
        line.say("form", epoch=2)
        assert opened.recv(1) == b"", "whoever waits for a peer wakes up"
        late = socket.create_connection(door.getsockname())
        late_end, _ = door.accept()
        late.settimeout(10)
        assert late.recv(1) == b"", "also what is opened while the training does not know yet"
        line.link.leave()
        kept.sendall(b"x")
        assert other.recv(1) == b"x", "what was there before stays"
        for one in (kept, other, opened, end, late, late_end):
            one.close()


def test_communicators_are_aborted_before_the_sockets_are_cut(line: Line) -> None:
    """An abort says goodbye over sockets; one that does not come to an end is not waited for for ever."""
    order: list[str] = []
    line.say("form", epoch=1)
    line.link.next_form()
    with socket.create_server(("127.0.0.1", 0)) as door:
        line.link.enter(1)
        opened = socket.create_connection(door.getsockname())
        end, _ = door.accept()
        end.settimeout(60)

        def abort() -> bool:
            order.append("open" if end in select.select([], [end], [], 0)[1] and not closed(end) else "cut")
            return len(order) >= 5

        line.link.abort = abort
        line.say("form", epoch=2)
        assert end.recv(1) == b""
        assert order[:5] == ["open"] * 5
        line.link.leave()
        opened.close()
        end.close()


def closed(one: socket.socket) -> bool:
    """Whether the other end is shut."""
    return bool(select.select([one], [], [], 0)[0])


@pytest.mark.parametrize("broken", [False, True], ids=["never done", "raises"])
def test_an_abort_that_fails_does_not_keep_the_sockets(line: Line, broken: bool) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    with socket.create_server(("127.0.0.1", 0)) as door:
        line.link.enter(1)
        opened = socket.create_connection(door.getsockname())
        end, _ = door.accept()
        end.settimeout(60)

        def abort() -> bool:
            if broken:
                raise RuntimeError("NCCL error")
            return False

        line.link.abort = abort
        line.say("form", epoch=2)
        assert end.recv(1) == b""
        line.link.leave()
        form = line.link.next_form()
        assert form is not None, "the line is still read"
        assert form["epoch"] == 2
        opened.close()
        end.close()


def test_leaving_cuts_and_the_next_formation_begins_clean(
    line: Line, pair: tuple[socket.socket, socket.socket]
) -> None:
    line.say("form", epoch=1)
    line.link.next_form()
    line.link.enter(1)  # the pair was there before
    line.link.leave()
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


def test_the_heart_beats_whatever_the_training_does(line: Line) -> None:
    line.say("form", epoch=4)
    line.link.next_form()
    line.link.enter(4)
    line.link.progress(7, Phase.TRAINING)
    first = line.board.last(SLOT)
    assert (first.generation, first.step, first.phase) == (4, 7, Phase.TRAINING)
    until = time.monotonic() + 300
    while line.board.last(SLOT).answered_s <= first.answered_s and time.monotonic() < until:
        time.sleep(0.01)
    later = line.board.last(SLOT)
    assert later.answered_s > first.answered_s
    assert later.progress_s == first.progress_s


def test_answers_are_lines_with_the_slot(line: Line) -> None:
    line.link.send("left", epoch=3, why="so")
    assert json.loads(line.agent.makefile().readline()) == {"kind": "left", "slot": SLOT, "epoch": 3, "why": "so"}


def test_who_came_to_our_store_for_the_next_round_is_not_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_server(("127.0.0.1", 0)) as other:
        kept = frozenset(open_sockets())
        pairs = [(socket.create_connection(one.getsockname()), one.accept()[0]) for one in (door, other)]
        ours = frozenset(open_sockets()) - kept
        count = shut_sockets(frozenset(open_sockets()) - ours, spared_port=door.getsockname()[1])
        assert count == 3, "the client's side of the store too: whoever waits there is to wake up"
        assert pairs[1][1].recv(1) == b""
        pairs[0][1].settimeout(60.0)
        assert pairs[0][1].recv(1) == b"", "its client was cut"
        pairs[0][1].sendall(b"x")  # not shut on this side
        for pair in pairs:
            for one in pair:
                one.close()
