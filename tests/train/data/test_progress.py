"""The line that says how far a build is."""

from __future__ import annotations

import io

from phalanx.train.data.progress import BuildProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_and_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = BuildProgress(stream, 1_000_000, clock=clock)
    progress.begin("tokens")
    clock.now = 5.0
    progress.advance(200_000, 50_000)
    assert stream.getvalue() == "", "a log gets a line every ten seconds"
    clock.now = 10.0
    progress.advance(50_000, 10_000)
    assert stream.getvalue() == "tokens: 25% of 1.00 MB, 60.0k tokens, 25.0 kB/s, 30.0 s left\n"


def test_what_an_earlier_call_did_is_no_speed() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = BuildProgress(stream, 1000, clock=clock)
    progress.begin("tokens")
    progress.advance(500, skipped=True)
    clock.now = 10.0
    progress.advance(100)
    assert stream.getvalue() == "tokens: 60% of 1.00 kB, 10 B/s, 40.0 s left\n"


def test_a_packed_file_never_passes_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = BuildProgress(stream, 100, clock=clock)
    progress.begin("tokens")
    clock.now = 10.0
    progress.advance(300)
    assert stream.getvalue() == "tokens: 100% of 100 B, 30 B/s\n"


def test_a_terminal_keeps_one_line() -> None:
    clock, stream = Clock(), Terminal()
    progress = BuildProgress(stream, 100, clock=clock)
    progress.begin("tokens")
    clock.now = 1.0
    progress.advance(50)
    progress.note("a note")
    progress.end()
    assert stream.getvalue().count("\n") == 1
    assert "\r\x1b[Ka note\n" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
