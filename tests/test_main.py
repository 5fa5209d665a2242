"""`python -m phalanx` is the command."""

import subprocess
import sys


def phalanx(*arguments):
    return subprocess.run([sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True, timeout=300)


def test_help():
    done = phalanx("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: phalanx VERB")


def test_the_exit_code_is_passed_on():
    done = phalanx("plna")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'phalanx: there is no verb "plna"\n  did you mean phalanx plan?\n'
