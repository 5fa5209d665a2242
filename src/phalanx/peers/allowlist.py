"""The run's allowlist: admitted certificates and revoked fingerprints, numbered and signed by the run's owner.

Every peer pins the owner, not the list: a newer list of the same owner spreads from peer to peer and takes effect
where it arrives. Only the owner can write one.
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
    """Certificates of the peers that may take part, the owner's first, and fingerprints that were revoked."""

    run_id: str
    version: int
    certificates: tuple[str, ...]
    revoked: frozenset[str] = frozenset()
    revoked_names: tuple[tuple[str, str], ...] = ()  # fingerprint and name, for people
    signature: bytes = b""

    @classmethod
    def create(cls, owner: PeerIdentity, run_id: str, certificates: Iterable[str] = ()) -> AllowList:
        """Create the first list of a run; the owner's certificate is added if `certificates` lacks it."""
        peer_pems = tuple(pem for pem in certificates if pem != owner.certificate_pem)
        return cls(run_id=run_id, version=1, certificates=(owner.certificate_pem, *peer_pems))._signed(owner)

    def add(self, owner: PeerIdentity, certificate_pem: str) -> AllowList:
        """Return the list with one more peer.

        Raises UserError for a revoked certificate, and where `owner` does not own the list.
        """
        if fingerprint_of(certificate_pem) in self.revoked:
            problem = "this certificate was revoked"
            raise mistake("allowlist", problem, fix="the peer needs a new identity and a new invitation")
        if certificate_pem in self.certificates:
            return self
        longer = replace(self, version=self.version + 1, certificates=(*self.certificates, certificate_pem))
        return longer._signed(owner)

    def revoke(self, owner: PeerIdentity, fingerprint: str) -> AllowList:
        """Return the list with the peer of this fingerprint, or of this id, revoked; this cannot be undone."""
        pems = {fingerprint_of(pem): pem for pem in self.certificates}
        matches = {digest: pem for digest, pem in pems.items() if fingerprint in (digest, digest[:ID_DIGITS])}
        if not matches:
            raise mistake("allowlist", f"{fingerprint[:64]} is nobody's fingerprint or id on the list")
        if self.owner_fingerprint in matches:
            raise mistake("allowlist", "the owner of a run cannot be revoked", why="nobody could sign the next list")
        remaining = tuple(pem for pem in self.certificates if pem not in matches.values())
        names = {**dict(self.revoked_names), **{digest: self.fingerprints()[digest] for digest in matches}}
        shorter = replace(
            self,
            version=self.version + 1,
            certificates=remaining,
            revoked=self.revoked | set(matches),
            revoked_names=tuple(sorted(names.items())),
        )
        return shorter._signed(owner)

    @property
    def owner_fingerprint(self) -> str:
        """Fingerprint of the owner's certificate, whose key is the only one that signs newer lists."""
        return fingerprint_of(self.certificates[0])

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint and name of every peer that may take part."""
        return {
            fingerprint_of(pem): certificate_name(parse_certificate(pem, where="allowlist"), where="allowlist")
            for pem in self.certificates
        }

    def replaces(self, older: AllowList) -> bool:
        """Return True if this is a newer list of the same run and owner; its signature was checked when it was read.

        A list that lacks an earlier revocation does not replace: revoked peers stay revoked.
        """
        same = self.run_id == older.run_id and self.owner_fingerprint == older.owner_fingerprint
        return same and self.version > older.version and older.revoked <= self.revoked

    def to_json(self) -> dict[str, Any]:
        """Return the values that `from_json` reads."""
        return {**self._content(), "signature": base64.b64encode(self.signature).decode("ascii")}

    @classmethod
    def from_json(cls, data: Any, *, where: str, owner: str = "") -> AllowList:
        """Read a list with a valid signature, of the owner with fingerprint `owner` if that is given.

        Raises UserError for anything else: files and messages come from strangers.
        """
        try:
            parsed = cls(
                run_id=_text(data["run_id"], 200),
                version=_whole(data["version"]),
                certificates=tuple(_text(pem, 16 * 1024) for pem in _list(data["certificates"])),
                revoked=frozenset(_text(digest, 64) for digest in _list(data["revoked"])),
                revoked_names=_names(data.get("revoked_names", {})),
                signature=base64.b64decode(_text(data["signature"], 400), validate=True),
            )
            fingerprints = [fingerprint_of(pem) for pem in parsed.certificates]
        except (KeyError, TypeError, ValueError) as error:
            raise mistake(where, "is not an allowlist") from error
        if not fingerprints or len({digest[:ID_DIGITS] for digest in fingerprints}) < len(fingerprints):
            raise mistake(where, "is not an allowlist: it names nobody, or somebody twice")
        if parsed.revoked & set(fingerprints):
            raise mistake(where, "allows a peer that it also revokes")
        if not dict(parsed.revoked_names).keys() <= parsed.revoked:
            raise mistake(where, "is not an allowlist: it names somebody who was not revoked")
        if owner and parsed.owner_fingerprint != owner:
            raise mistake(
                where, "the allowlist belongs to another owner", why=f"the run's owner is {owner[:ID_DIGITS]}"
            )
        if not is_signed(parsed.certificates[0], parsed._signed_bytes(), parsed.signature):
            raise mistake(where, "the allowlist was changed after its owner signed it")
        parsed.fingerprints()  # every certificate can be read
        return parsed

    def save(self, path: Path) -> None:
        """Write the list to a JSON file."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, *, owner: str = "") -> AllowList:
        """Read a list from a file; raises UserError."""
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
    """Hold a file lock on the list at `path`: callers that read, change and write the list take it."""
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
    return tuple(sorted((_text(digest, 64), name) for digest, name in value.items()))


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
