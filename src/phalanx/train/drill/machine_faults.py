"""Faults of the machine under a run: a full or read-only disk, connections from strangers, a core that is shared.

All are real. A disk is filled, or made read-only for root, only where the drill mounted a small file system itself
(`SmallDisk`): a drill never fills a disk that others use.
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
# On a busy machine so many connections take longer than the 3 s of an idle one.
STRANGERS_S = 10.0
# File descriptors that stay free for the drill itself.
KEPT_OPEN = 256
# Of a core that others use: about the length of a scheduler's turn.
PERIOD_S = 0.04
MOUNT_TIMEOUT_S = 10.0


class SmallDisk:
    """A context that mounts a file system so small that it can be filled, and unmounts it at the end. Needs root."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self._size_bytes = folder, size_bytes

    def __enter__(self) -> SmallDisk:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run_mount(["-t", "tmpfs", "-o", f"size={self._size_bytes},mode=0700", "phalanx-drill", str(self.folder)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Lazy: processes that have a file open on it keep that file, and the folder is free at once.
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
    """Fill the file system of a folder to its last byte; the bytes written, None where the drill did not mount it."""
    if not os.path.ismount(folder):
        return None
    written_bytes, chunk = 0, 1 << 20
    with open(folder / BALLAST, "ab", buffering=0) as file:
        while chunk:
            try:
                written_bytes += file.write(bytes(chunk))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # Less than this is free.
                chunk //= 2
    return written_bytes


def free_disk(folder: Path) -> None:
    """Delete the ballast file, so that the disk has space again."""
    (folder / BALLAST).unlink(missing_ok=True)


def set_writable(folder: Path, writable: bool) -> bool:
    """Make a folder read-only or writable, by its mode, or for root by its mount; False where that is impossible."""
    if os.geteuid() != 0:
        folder.chmod(0o755 if writable else 0o555)
        return True
    if not os.path.ismount(folder):
        return False
    # Busy: another process is writing to it.
    with suppress(SystemFailure):
        _run_mount(["-o", f"remount,{'rw' if writable else 'ro'}", str(folder)])
        return True
    return False


# The ports on which processes of a run listen, and connections from strangers to them.


def listening_ports(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Return the addresses on which these processes accept TCP connections, from /proc."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    addresses = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:  # LISTEN
                    address, _, port = words[1].partition(":")
                    addresses.append((_parse_address(address, family), int(port, 16)))
    return sorted(set(addresses))


def _parse_address(text: str, family: int) -> str:
    """Parse an address of /proc/net/tcp, whose 4-byte groups are in the machine's byte order.

    Returns the loopback for the address "any".
    """
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if not any(raw):
        return "127.0.0.1" if family == socket.AF_INET else "::1"
    return socket.inet_ntop(family, raw)


def send_strangers(ports: Sequence[tuple[str, int]], *, count: int = STRANGERS, for_s: float = STRANGERS_S) -> int:
    """Open connections that send nothing, as many at once as this process may have; returns how many were opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(16, soft - KEPT_OPEN)
    until_s = time.monotonic() + for_s
    waiting: deque[socket.socket] = deque()
    opened = 0
    for number in range(count if ports else 0):
        if time.monotonic() > until_s:
            break
        address, port = ports[number % len(ports)]
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        # A blocking connect whose packets are dropped would take minutes.
        connection.setblocking(False)
        opened += connection.connect_ex((address, port)) in (0, errno.EINPROGRESS)
        waiting.append(connection)
        if len(waiting) >= most:
            waiting.popleft().close()
    for connection in waiting:
        connection.close()
    return opened


class BusyCore:
    """Let a process run for only a share of the time, by SIGSTOP and SIGCONT, until `close`."""

    def __init__(self, pid: int, share: float) -> None:
        self._pid, self._share, self._over = pid, share, threading.Event()
        self._thread = threading.Thread(target=self._take_turns, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the process run freely again."""
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
