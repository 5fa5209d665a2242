"""Landlock rules for a candidate's process: it may read the folders that a GPU's libraries load from, and nothing
else.

On a GPU files cannot be forbidden outright: drivers and Triton open libraries and compiled kernels when they are
first needed. Needs Linux 5.13 or newer; elsewhere `restrict_files` returns False.
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
_ALL_OF_FIRST = (1 << 13) - 1  # the rights of Landlock's first version
_MOVE = 1 << 13  # moving files between folders, since version 2; version 1 always forbids it
_PR_SET_NO_NEW_PRIVS = 38


def readable_folders() -> list[str]:
    """Return the folders with the files of Python, PyTorch, Triton and the driver."""
    folders = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/opt", "/etc/ld.so.cache", "/sys", "/proc/self"}
    folders |= {path for path in sys.path if path and Path(path).is_dir()}
    return sorted(path for path in folders if Path(path).exists())


def restrict_files(*, writable: Iterable[str] = (), run_programs: bool = False) -> bool:
    """Restrict this process to reading libraries and devices, and to the folders `writable`.

    With `run_programs` it may also run programs and write to `writable`; otherwise it may only read them. Returns
    False where the system does not support it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    if run_programs and version < 2:  # Triton moves compiled files into its folder
        return False
    everything = _ALL_OF_FIRST | (_MOVE if version >= 2 else 0)
    rules = struct.pack("=Q", everything)
    ruleset = libc.syscall(_CREATE, ctypes.c_char_p(rules), ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        return False
    reading = _READ | _READ_FOLDER | (_EXECUTE if run_programs else 0)
    rights = [(path, reading) for path in readable_folders()]
    rights += [("/dev", _READ | _WRITE | _READ_FOLDER)]
    rights += [(path, everything if run_programs else reading) for path in writable]
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
    status = libc.syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return bool(status == 0)
