"""Where a server of ours listens: this machine alone, unless a token keeps strangers out."""

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
    """A host, as a name or in numbers, and a port; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, where: str = "--listen") -> Address:
    """`HOST:PORT`, `[HOST]:PORT`, or a port alone, which means this machine.

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
    """Whether only this machine reaches a host that is named by its address, or as localhost; asks no name server.

    >>> [is_loopback_host(one) for one in ("127.0.0.2", "::1", "localhost", "10.0.0.1", "node7")]
    [True, True, True, False, False]
    """
    return host in LOOPBACK_NAMES or (_is_literal(host) and _is_loopback(host))


def is_loopback(address: Address, *, where: str = "--listen") -> bool:
    """Whether only this machine reaches it."""
    return _is_loopback(_resolve_address(address, where=where)[1])


def open_socket(address: Address, *, guarded: bool, where: str = "--listen") -> socket.socket:
    """A listening socket; raises UserError for an address that others reach while no token guards it."""
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
        listener.listen(128)  # here and not later: a port in use is found out before anything is printed
    except OSError as error:
        listener.close()
        what = f"cannot listen there: {(error.strerror or str(error)).lower()}"
        fix = "end the program that has the port, or take a free one: 127.0.0.1:0"
        if error.errno == errno.EADDRNOTAVAIL:
            what, fix = "no network interface of this machine has this address", f"listen on 0.0.0.0:{address.port}"
        raise SystemFailure(Problem(where=f"{where} {address}", what=what, fix=fix)) from error
    return listener


def bound_address(listener: socket.socket) -> Address:
    """Where a socket really listens."""
    host, port = listener.getsockname()[:2]
    return Address(host=host, port=port)


def is_own_name(header: str) -> bool:
    """Whether a Host header names this machine by a loopback name. A foreign name that resolves to us is an attack
    (DNS rebinding).

    >>> is_own_name("localhost:9400"), is_own_name("evil.example:9400")
    (True, False)
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback_host(name)


def read_token(choice: str) -> str:
    """`auto` makes a new one; otherwise the first line of a file."""
    if choice == "auto":
        return secrets.token_urlsafe(24)
    try:
        with open(choice, encoding="utf-8") as file:
            token = file.readline(MOST_TOKEN + 2).strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise mistake(f"--token {choice}", f"cannot be read: {reason}", fix="name a file with a token") from error
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isascii() or not token.isprintable():
        what = f"its first line is no token: it takes {LEAST_TOKEN} to {MOST_TOKEN:,} ASCII characters"
        raise mistake(f"--token {choice}", what, fix="--token auto makes one")
    return token


def kept_token(path: Path) -> str:
    """The token in a file that only its owner reads; made if it is not there."""
    if not path.exists():
        try:
            _keep_token(path, read_token("auto"))
        except OSError as error:
            raise write_failure(path, error, fix="make room in the run folder") from error
    return read_token(str(path))


def _keep_token(path: Path, token: str) -> None:
    """Whole or not at all: whoever is killed here leaves no empty file, which would be refused ever after."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    made = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(made, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(made)
        try:
            os.link(aside, path)
        except FileExistsError:
            pass  # another launch was first: its token counts
        except OSError:
            os.replace(aside, path)  # a file system without links
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
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        what = f"the host is not known: {getattr(error, 'strerror', None) or error}"
        raise mistake(f"{where} {address}", what, fix="name an address of this machine, such as 127.0.0.1") from error
    family, _, _, _, name = found[0]
    return family, str(name[0])
