"""Addresses on which Phalanx servers listen: this machine only, unless a token protects the server."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.io.write_errors import write_failure

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
LEAST_TOKEN, MOST_TOKEN = 16, 1024  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A host, as a name or numeric address, and a port; port 0 selects a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, where: str = "--listen") -> Address:
    """Parse `HOST:PORT`, `[HOST]:PORT`, or a port alone, which means this machine.

    >>> str(parse_address("[::1]:80")), str(parse_address("9000"))
    ('[::1]:80', '127.0.0.1:9000')
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    clear = bare == host or ":" in bare
    if not (port.isascii() and port.isdigit() and int(port) < 2**16) or not clear or (":" in bare and bare == host):
        raise mistake(
            where,
            f"{text[:60]!r} is not an address",
            why="it takes a host and a port from 0 to 65535",
            fix="write it as 127.0.0.1:9400, [::1]:9400, or 127.0.0.1:0 for a free port",
        )
    return Address(host=bare or "127.0.0.1", port=int(port))


def is_loopback_host(host: str) -> bool:
    """Return True if a host is a loopback address or localhost, which only this machine reaches; no DNS lookup.

    >>> [is_loopback_host(host) for host in ("127.0.0.2", "::1", "localhost", "10.0.0.1", "node7")]
    [True, True, True, False, False]
    """
    return host in LOOPBACK_NAMES or (_is_literal(host) and _is_loopback(host))


def is_loopback(address: Address, *, where: str = "--listen") -> bool:
    """Return True if only this machine can reach the address."""
    return _is_loopback(_resolve_address(address, where=where)[1])


def open_socket(address: Address, *, guarded: bool, where: str = "--listen") -> socket.socket:
    """Return a listening socket; raise UserError if other machines reach the address and no token protects it."""
    family, numeric = _resolve_address(address, where=where)
    if not guarded and not _is_loopback(numeric):
        raise mistake(
            f"{where} {address}",
            "this address can be reached from other machines, and there is no token",
            why="everybody who reaches it could read the run",
            fix="add --token auto, or listen on 127.0.0.1 and come in through ssh -L",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((numeric, address.port))
        # Listen here, so that a port in use is reported before anything is printed.
        listener.listen(128)
    except OSError as error:
        listener.close()
        message = f"cannot listen there: {(error.strerror or str(error)).lower()}"
        fix = "end the program that has the port, or take a free one: 127.0.0.1:0"
        if error.errno == errno.EADDRNOTAVAIL:
            message, fix = "no network interface of this machine has this address", f"listen on 0.0.0.0:{address.port}"
        raise SystemFailure(Problem(where=f"{where} {address}", what=message, fix=fix)) from error
    return listener


def bound_address(listener: socket.socket) -> Address:
    """Return the actual address of a listening socket."""
    host, port = listener.getsockname()[:2]
    return Address(host=host, port=port)


def is_own_name(header: str) -> bool:
    """Return True if a Host header names this machine by a loopback name.

    Any other name that resolves to this machine is a DNS rebinding attack.

    >>> is_own_name("localhost:9400"), is_own_name("evil.example:9400")
    (True, False)
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback_host(name)


def read_token(choice: str) -> str:
    """Return a new token for `auto`; otherwise the first line of a file."""
    if choice == "auto":
        return secrets.token_urlsafe(24)
    try:
        with open(choice, encoding="utf-8") as file:
            token = file.readline(MOST_TOKEN + 2).strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise mistake(f"--token {choice}", f"cannot be read: {reason}", fix="name a file with a token") from error
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isascii() or not token.isprintable():
        message = f"its first line is no token: it takes {LEAST_TOKEN} to {MOST_TOKEN:,} ASCII characters"
        raise mistake(f"--token {choice}", message, fix="--token auto makes one")
    return token


def kept_token(path: Path) -> str:
    """Return the token in a file that only its owner can read; create the file if it is missing."""
    if not path.exists():
        try:
            _keep_token(path, read_token("auto"))
        except OSError as error:
            raise write_failure(path, error, fix="make room in the run folder") from error
    return read_token(str(path))


def _keep_token(path: Path, token: str) -> None:
    """Write a token file atomically: a process killed here leaves no empty file, which readers would refuse."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(aside, path)
        except FileExistsError:
            pass  # another launch was first: its token is used
        except OSError:
            # A file system without hard links.
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _is_loopback(numeric: str) -> bool:
    return ipaddress.ip_address(numeric.partition("%")[0]).is_loopback


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _resolve_address(address: Address, *, where: str) -> tuple[int, str]:
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"the host is not known: {getattr(error, 'strerror', None) or error}"
        raise mistake(
            f"{where} {address}", message, fix="name an address of this machine, such as 127.0.0.1"
        ) from error
    family, _, _, _, name = addresses[0]
    return family, str(name[0])
