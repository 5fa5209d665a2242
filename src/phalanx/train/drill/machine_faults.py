"""Faults of the machine under a run: a full or read-only disk, strangers at its ports, a core that others use.

All are real. A disk is filled, or made read-only for root, only where the drill mounted a small file system of its own
(`SmallDisk`): nobody's disk is filled by a drill.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from phalanx.errors import Problem, SystemFailure

BALLAST = "ballast"  # the file that fills a disk
STRANGERS = 20_000
STRANGERS_S = 10.0  # on a busy machine so many connections take longer than the 3 s of an idle one
KEPT_OPEN = 256  # descriptors that stay free for the drill itself
PERIOD_S = 0.04  # of a core that others use: about what a scheduler deals out
MOUNT_TIMEOUT_S = 10.0


class SmallDisk:
    """A file system of its own, so small that it can be filled; a context that takes it away again. Needs root."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self._size_bytes = folder, size_bytes

    def __enter__(self) -> SmallDisk:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run_mount(["-t", "tmpfs", "-o", f"size={self._size_bytes},mode=0700", "phalanx-drill", str(self.folder)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Lazy: whoever still has a file open on it keeps that file, and the folder is free.
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, timeout=MOUNT_TIMEOUT_S)


def _run_mount(words: Sequence[str]) -> None:
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, timeout=MOUNT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise _mount_refused(str(error)) from error
    if done.returncode:
        raise _mount_refused(done.stderr.strip() or f"mount ended with exit code {done.returncode}")


def _mount_refused(why: str) -> SystemFailure:
    what = f"a small file system cannot be mounted: {why}"
    return SystemFailure(Problem(where="phalanx drill", what=what, fix="run it as root, outside of a container"))


def fill_disk(folder: Path) -> int | None:
    """Fill the file system of a folder to its last byte; bytes that it took, None where it is not the drill's own."""
    if not os.path.ismount(folder):
        return None
    taken, chunk = 0, 1 << 20
    with open(folder / BALLAST, "ab", buffering=0) as file:
        while chunk:
            try:
                taken += file.write(bytes(chunk))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2  # what is left is less than this
    return taken


def free_disk(folder: Path) -> None:
    """Take the ballast away."""
    (folder / BALLAST).unlink(missing_ok=True)


def set_writable(folder: Path, writable: bool) -> bool:
    """Whether a folder could be made read-only, or writable again: by its mode, and for root by its mount."""
    if os.geteuid() != 0:
        folder.chmod(0o755 if writable else 0o555)
        return True
    if not os.path.ismount(folder):
        return False
    with suppress(SystemFailure):  # busy: somebody is writing to it
        _run_mount(["-o", f"remount,{'rw' if writable else 'ro'}", str(folder)])
        return True
    return False


# Ports that processes of a run listen on, and strangers who come to them.


def listening_ports(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Addresses on which these processes take TCP connections, as the kernel tells."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:  # LISTEN
                    address, _, port = words[1].partition(":")
                    found.append((_parse_address(address, family), int(port, 16)))
    return sorted(set(found))


def _parse_address(text: str, family: int) -> str:
    """An address of /proc/net/tcp, where each four bytes are in the order of the machine; the loopback for "any"."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if not any(raw):
        return "127.0.0.1" if family == socket.AF_INET else "::1"
    return socket.inet_ntop(family, raw)


def send_strangers(ports: Sequence[tuple[str, int]], *, count: int = STRANGERS, for_s: float = STRANGERS_S) -> int:
    """Connections without a word said, as many at once as this process may have; how many were made."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(16, soft - KEPT_OPEN)
    until_s = time.monotonic() + for_s
    waiting: deque[socket.socket] = deque()
    made = 0
    for number in range(count if ports else 0):
        if time.monotonic() > until_s:
            break
        address, port = ports[number % len(ports)]
        one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)  # one whose packets are dropped would keep us for minutes
        made += one.connect_ex((address, port)) in (0, errno.EINPROGRESS)
        waiting.append(one)
        if len(waiting) >= most:
            waiting.popleft().close()
    for one in waiting:
        one.close()
    return made


class BusyCore:
    """A process that gets its core for a share of the time only; `close` gives it back."""

    def __init__(self, pid: int, share: float) -> None:
        self._pid, self._share, self._over = pid, share, threading.Event()
        self._thread = threading.Thread(target=self._take_turns, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let it run."""
        self._over.set()
        self._thread.join()

    def _take_turns(self) -> None:
        try:
            while not self._over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep(PERIOD_S * self._share)
                os.kill(self._pid, signal.SIGCONT)
                self._over.wait(PERIOD_S * (1 - self._share))
        except ProcessLookupError:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)
