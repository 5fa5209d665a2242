"""An invitation: a file that lets a new peer find a run, prove its identity, and verify the other peers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.files import load_json
from phalanx.io.write_errors import write_failure
from phalanx.peers.allowlist import MOST_LIST_BYTES, AllowList
from phalanx.peers.facts import Address
from phalanx.peers.identity import PeerIdentity

MOST_ADDRESSES = 64
KIND = "phalanx peer invitation 1"
ASK_AGAIN = "ask the run's owner for a new invitation: phalanx peers invite RUN NAME writes one"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Invitation:
    """Addresses of the run's peers, the new peer's own key, and the owner's allowlist, which pins all other peers."""

    addresses: tuple[Address, ...]
    identity: PeerIdentity
    allowed: AllowList

    @property
    def run_id(self) -> str:
        """Id of the run that the invitation is for."""
        return self.allowed.run_id

    @classmethod
    def create(cls, owner: PeerIdentity, allowed: AllowList, name: str, addresses: Sequence[Address]) -> Invitation:
        """Create a key for a new peer and an allowlist with it; pass `.allowed` to the running group too."""
        identity = PeerIdentity.create(name)
        longer = allowed.add(owner, identity.certificate_pem)
        return cls(addresses=tuple(addresses), identity=identity, allowed=longer)

    def save(self, path: Path) -> None:
        """Write a new file that only this user can read: its holder can take the new peer's place."""
        data = {
            "kind": KIND,
            "addresses": [list(address) for address in self.addresses],
            "key": self.identity.key_pem,
            "certificate": self.identity.certificate_pem,
            "allowed": self.allowed.to_json(),
        }
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
        except FileExistsError as error:
            raise mistake(str(path), "exists already", fix="name a new file for the invitation") from error
        except OSError as error:
            raise write_failure(path, error) from error

    @classmethod
    def load(cls, path: Path) -> Invitation:
        """Read a file; raises UserError for anything that is not a complete invitation."""
        where = str(path)
        try:
            data = load_json(path, MOST_LIST_BYTES)
        except FileNotFoundError as error:
            raise mistake(where, "there is no such invitation", fix=ASK_AGAIN) from error
        except (OSError, ValueError) as error:
            problem = f"is not an invitation, or is damaged: {error}"
            raise mistake(where, problem, fix=ASK_AGAIN) from error
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise mistake(where, "is not an invitation", fix=ASK_AGAIN)
        listed = data.get("addresses")
        addresses = tuple(parse_wire_address(pair) for pair in listed) if isinstance(listed, list) else ()
        if not addresses or len(addresses) > MOST_ADDRESSES or None in addresses:
            problem = f"names no address, one that is none, or more than {MOST_ADDRESSES}"
            raise mistake(where, problem, fix=ASK_AGAIN)
        key, certificate = data.get("key"), data.get("certificate")
        if not isinstance(key, str) or not isinstance(certificate, str):
            raise mistake(where, "lacks the key or the certificate", fix=ASK_AGAIN)
        identity = PeerIdentity.from_pem(key, certificate, where=where)
        try:
            allowed = AllowList.from_json(data.get("allowed"), where=where)
        except UserError as error:
            raise UserError([replace(problem, fix=ASK_AGAIN) for problem in error.problems]) from error
        if identity.fingerprint not in allowed.fingerprints():
            raise mistake(where, "its allowlist does not name the peer that it invites", fix=ASK_AGAIN)
        return cls(addresses=tuple(address for address in addresses if address), identity=identity, allowed=allowed)

    def __repr__(self) -> str:
        return f"Invitation({self.run_id!r}, {self.identity!r})"


def parse_wire_address(value: Any) -> Address | None:
    """Return a host and a port from a JSON value, None for anything else.

    >>> parse_wire_address(["10.0.0.1", 80]), parse_wire_address(["10.0.0.1", 0]), parse_wire_address("x")
    (('10.0.0.1', 80), None, None)
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    host, port = value
    good = isinstance(host, str) and 0 < len(host) <= 253 and host.isascii() and host.isprintable() and " " not in host
    return (host, port) if good and type(port) is int and 0 < port < 2**16 else None
