"""Doctests of the trainer and the dashboard are collected only where their extras are installed."""

from importlib.util import find_spec

from hypothesis import settings

collect_ignore_glob = [] if find_spec("torch") else ["src/phalanx/train/*"]
collect_ignore_glob += [] if find_spec("starlette") else ["src/phalanx/web/*"]

# No deadline: the suite runs on two shared cores, where a 200 ms limit measures the neighbours.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
