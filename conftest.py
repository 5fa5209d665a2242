"""Doctests of the trainer and the dashboard are collected only where their extras are installed."""

import atexit
import json
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec

import pytest
from hypothesis import settings

collect_ignore_glob = [] if find_spec("torch") else ["src/phalanx/train/*"]
collect_ignore_glob += [] if find_spec("starlette") else ["src/phalanx/web/*"]

# No deadline: the suite runs on two shared cores, where a 200 ms limit measures the neighbours.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

# No test waits for this machine to be measured, but those of the measurement.
os.environ.setdefault("PHALANX_PROBE", "0")
# Nor does what was measured on it earlier change what a test sees.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="phalanx-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

# A shell starts what it puts in the background with Ctrl-C switched off, and children inherit that: the tests that send
# it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The ids of tests that fail, one JSON string a line, for the diagnosis of `.ci/tests.py`."""
    if report.failed and (path := os.environ.get("FAILED_TESTS")):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(report.nodeid) + "\n")
