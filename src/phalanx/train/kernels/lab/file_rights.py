"""Folders that a candidate's process may still read, by Landlock: what a GPU's libraries load, and nothing else.

On a GPU files cannot be forbidden outright: drivers and Triton open libraries and compiled kernels when they are first
needed. Linux 5.13 and newer; elsewhere `restrict_files` says False.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on x86-64 and arm64
_EXECUTE, _WRITE, _READ, _READ_FOLDER = 1, 2, 4, 8
_ALL_OF_FIRST = (1 << 13) - 1  # the rights that the first version knows
_MOVE = 1 << 13  # between folders, since the second version; the first forbids it whatever is allowed
_PR_SET_NO_NEW_PRIVS = 38


def readable_folders() -> list[str]:
    """Where Python, PyTorch, Triton and the driver have their files."""
    found = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/opt", "/etc/ld.so.cache", "/sys", "/proc/self"}
    found |= {one for one in sys.path if one and Path(one).is_dir()}
    return sorted(one for one in found if Path(one).exists())


def restrict_files(*, writable: Iterable[str] = (), run_programs: bool = False) -> bool:
    """Leave this process reading of libraries, devices, and the folders `writable`; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    if run_programs and version < 2:  # Triton moves what it compiled into its folder
        return False
    everything = _ALL_OF_FIRST | (_MOVE if version >= 2 else 0)
    rules = struct.pack("=Q", everything)
    ruleset = libc.syscall(_CREATE, ctypes.c_char_p(rules), ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        return False
    reading = _READ | _READ_FOLDER | (_EXECUTE if run_programs else 0)
    rights = [(one, reading) for one in readable_folders()]
    rights += [("/dev", _READ | _WRITE | _READ_FOLDER)]
    rights += [(one, everything if run_programs else reading) for one in writable]
    for path, right in rights:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            allowed = right if Path(path).is_dir() else right & ~_READ_FOLDER
            rule = struct.pack("=Qi", allowed, folder)
            libc.syscall(_ADD, ruleset, 1, ctypes.c_char_p(rule), 0)
        finally:
            os.close(folder)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = libc.syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return bool(done == 0)
