"""Doctests of the trainer are collected only where torch is installed; everything else needs no extra."""

from importlib.util import find_spec

from hypothesis import settings

collect_ignore_glob = [] if find_spec("torch") else ["src/phalanx/train/*"]

# No deadline: the suite runs on two shared cores, where a 200 ms limit measures the neighbours.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
