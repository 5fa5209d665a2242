"""Who may take part: certificates and revoked fingerprints, numbered and signed by the run's owner.

Every peer pins the owner, not the list: a newer list of the same owner spreads from peer to peer and takes effect where
it arrives. Nobody else can write one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import mistake
from phalanx.io.files import load_json, write_text
from phalanx.io.write_errors import write_failure
from phalanx.peers.identity import (
    ID_DIGITS,
    NAME,
    PeerIdentity,
    certificate_name,
    fingerprint_of,
    is_signed,
    parse_certificate,
)

MOST_PEERS = 4096
MOST_LIST_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowList:
    """Certificates of those who may take part, of which the owner's is the first, and who was sent away for good."""

    run_id: str
    version: int
    certificates: tuple[str, ...]
    revoked: frozenset[str] = frozenset()
    revoked_names: tuple[tuple[str, str], ...] = ()  # fingerprint and name, so that people know who it was
    signature: bytes = b""

    @classmethod
    def create(cls, owner: PeerIdentity, run_id: str, certificates: Iterable[str] = ()) -> AllowList:
        """The first list of a run; `owner` is on it whether named or not."""
        others = tuple(one for one in certificates if one != owner.certificate_pem)
        return cls(run_id=run_id, version=1, certificates=(owner.certificate_pem, *others))._signed(owner)

    def add(self, owner: PeerIdentity, certificate_pem: str) -> AllowList:
        """With one more peer; raises UserError for one that was revoked, or where `owner` does not own the list."""
        if fingerprint_of(certificate_pem) in self.revoked:
            what = "this certificate was revoked"
            raise mistake("allowlist", what, fix="the peer needs a new identity and a new invitation")
        if certificate_pem in self.certificates:
            return self
        more = replace(self, version=self.version + 1, certificates=(*self.certificates, certificate_pem))
        return more._signed(owner)

    def revoke(self, owner: PeerIdentity, fingerprint: str) -> AllowList:
        """Without the peer of this fingerprint (or of this id), for good."""
        every = {fingerprint_of(pem): pem for pem in self.certificates}
        known = {one: pem for one, pem in every.items() if fingerprint in (one, one[:ID_DIGITS])}
        if not known:
            raise mistake("allowlist", f"{fingerprint[:64]} is nobody's fingerprint or id on the list")
        if self.owner_fingerprint in known:
            raise mistake("allowlist", "the owner of a run cannot be revoked", why="nobody could sign the next list")
        rest = tuple(pem for pem in self.certificates if pem not in known.values())
        names = {**dict(self.revoked_names), **{one: self.fingerprints()[one] for one in known}}
        shorter = replace(
            self,
            version=self.version + 1,
            certificates=rest,
            revoked=self.revoked | set(known),
            revoked_names=tuple(sorted(names.items())),
        )
        return shorter._signed(owner)

    @property
    def owner_fingerprint(self) -> str:
        """Of the only key that signs newer lists."""
        return fingerprint_of(self.certificates[0])

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint and name of everybody who may take part."""
        return {
            fingerprint_of(pem): certificate_name(parse_certificate(pem, where="allowlist"), where="allowlist")
            for pem in self.certificates
        }

    def replaces(self, older: AllowList) -> bool:
        """Whether this is a newer list of the same run and owner; its signature was checked when it was read.

        One that forgets a revocation is none: whoever was sent away stays away.
        """
        same = self.run_id == older.run_id and self.owner_fingerprint == older.owner_fingerprint
        return same and self.version > older.version and older.revoked <= self.revoked

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**self._content(), "signature": base64.b64encode(self.signature).decode("ascii")}

    @classmethod
    def from_json(cls, data: Any, *, where: str, owner: str = "") -> AllowList:
        """A list whose signature is right, and of the owner with this fingerprint where one is given.

        Raises UserError for anything else: files and messages come from strangers.
        """
        try:
            found = cls(
                run_id=_text(data["run_id"], 200),
                version=_whole(data["version"]),
                certificates=tuple(_text(one, 16 * 1024) for one in _list(data["certificates"])),
                revoked=frozenset(_text(one, 64) for one in _list(data["revoked"])),
                revoked_names=_names(data.get("revoked_names", {})),
                signature=base64.b64decode(_text(data["signature"], 400), validate=True),
            )
            fingerprints = [fingerprint_of(pem) for pem in found.certificates]
        except (KeyError, TypeError, ValueError) as error:
            raise mistake(where, "is not an allowlist") from error
        if not fingerprints or len({one[:ID_DIGITS] for one in fingerprints}) < len(fingerprints):
            raise mistake(where, "is not an allowlist: it names nobody, or somebody twice")
        if found.revoked & set(fingerprints):
            raise mistake(where, "allows a peer that it also revokes")
        if not dict(found.revoked_names).keys() <= found.revoked:
            raise mistake(where, "is not an allowlist: it names somebody who was not revoked")
        if owner and found.owner_fingerprint != owner:
            raise mistake(
                where, "the allowlist belongs to another owner", why=f"the run's owner is {owner[:ID_DIGITS]}"
            )
        if not is_signed(found.certificates[0], found._signed_bytes(), found.signature):
            raise mistake(where, "the allowlist was changed after its owner signed it")
        found.fingerprints()  # every certificate can be read
        return found

    def save(self, path: Path) -> None:
        """As a JSON file."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, *, owner: str = "") -> AllowList:
        """From a file; raises UserError."""
        try:
            data = load_json(path, MOST_LIST_BYTES)
        except FileNotFoundError as error:
            raise mistake(str(path), "there is no such allowlist") from error
        except (OSError, ValueError) as error:
            raise mistake(str(path), f"cannot be read as an allowlist: {error}") from error
        return cls.from_json(data, where=str(path), owner=owner)

    def _content(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "version": self.version,
            "certificates": list(self.certificates),
            "revoked": sorted(self.revoked),
            **({"revoked_names": dict(self.revoked_names)} if self.revoked_names else {}),
        }

    def _signed_bytes(self) -> bytes:
        return b"phalanx allowlist\n" + json.dumps(self._content(), sort_keys=True).encode()

    def _signed(self, owner: PeerIdentity) -> AllowList:
        if owner.certificate_pem != self.certificates[0]:
            fix = "change it where the run was founded"
            raise mistake("allowlist", f"{owner.name} ({owner.id}) does not own this run", fix=fix)
        if len(self.certificates) > MOST_PEERS:
            raise mistake("allowlist", f"more than {MOST_PEERS:,} peers")
        return replace(self, signature=owner.sign(self._signed_bytes()))


@contextmanager
def locked_list(path: Path) -> Iterator[None]:
    """Nobody else who asks changes the list in this file meanwhile: whoever reads, changes and writes it holds this."""
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise write_failure(path.parent, error, fix="make the folder writable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _names(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or len(value) > MOST_PEERS:
        raise ValueError("not names")
    if not all(NAME.fullmatch(_text(name, 100)) for name in value.values()):
        raise ValueError("not a name")
    return tuple(sorted((_text(one, 64), name) for one, name in value.items()))


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isascii():
        raise ValueError("not a text")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**53:
        raise ValueError("not a number")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) > MOST_PEERS:
        raise ValueError("not a list")
    return value
