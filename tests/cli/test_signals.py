"""Ctrl-C and SIGTERM at awkward moments: a verb that signals itself there, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# `phalanx slow`: what the verb does stands in BODY; INT() and TERM() are signals from outside.
PROGRAM = """
import os, signal, sys, types
from phalanx.cli import main, signals

INT, TERM = (lambda number=number: os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM))
verb = types.ModuleType("slow")
verb.configure_parser = lambda parser: None
def run(args):
{body}
verb.run_command = run
sys.modules["slow"] = verb
main.VERBS["slow"] = ("slow", "", "")
sys.argv = ["phalanx", "slow"]
sys.exit(main.main())
"""
CLEAN_UP = "finally:\n {again}\n print('cleaned up', flush=True)"


def call(body: str, *, ignored: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the verb."""
    at_start = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body="\n".join(f" {line}" for line in body.splitlines()))],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, at_start),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("again", ["pass", "INT()", "INT(); INT(); INT()", "TERM()"])
def test_a_second_signal_does_not_cut_the_clean_up(again: str) -> None:
    body = "try:\n INT()\n" + CLEAN_UP.format(again=again)
    assert call(body) == (130, "cleaned up\n", "stopped by Ctrl-C\n")


def test_a_second_one_later_ends_it_at_once() -> None:
    body = "signals.SAME_S = -1.0\ntry:\n INT()\n" + CLEAN_UP.format(again="INT()")
    assert call(body) == (130, "", "")


def test_one_in_the_last_moments_changes_nothing() -> None:
    """Threads are waited for, exit functions run, and handlers are reset: each a place for Ctrl-C to make a trace."""
    body = "import atexit\natexit.register(INT)\nclass Last:\n def __del__(self): INT()\nverb.last = Last()\n"
    assert call(body + "INT()") == (130, "", "stopped by Ctrl-C\n")
    code, _, errors = call(body + "return 1")
    assert (code, "Traceback" in errors) == (1, False)


def test_an_error_made_of_ctrl_c_is_no_error() -> None:
    body = "try:\n INT()\nexcept KeyboardInterrupt:\n raise ImportError('numpy.core.multiarray failed to import')"
    assert call(body) == (130, "", "stopped by Ctrl-C (ImportError)\n")
    assert call("raise ImportError('x')")[0] == 3


def test_one_that_python_drops_is_raised_again() -> None:
    """In a callback, as the import system's own: an exception there is printed and forgotten."""
    body = "import time, weakref\nclass Thing: pass\nthing = Thing()\nlost = weakref.ref(thing, lambda _: {number}())\n"
    body += "del thing\ntime.sleep(600)"
    assert call(body.format(number="INT")) == (130, "", "stopped by Ctrl-C\n")
    assert call(body.format(number="TERM")) == (-signal.SIGTERM, "", "")


def test_one_that_passed_through_the_text_of_a_program() -> None:
    """Python remembers that, and would end itself by SIGINT: an exit code of -2, for whoever started us."""
    assert call("exec('INT()', {'INT': INT})") == (130, "", "stopped by Ctrl-C\n")


def test_sigterm_unwinds_and_then_ends_the_process() -> None:
    assert call("try:\n TERM()\n" + CLEAN_UP.format(again="TERM()")) == (-signal.SIGTERM, "cleaned up\n", "")


def test_what_the_caller_switched_off_stays_off() -> None:
    assert call("INT()\nreturn 0", ignored=True) == (0, "", "")


def test_called_from_python_it_leaves_signals_alone(tmp_path: Path) -> None:
    from phalanx.cli.main import main

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["--version"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
