"""The handshake by which two processes prove to each other that they know the run's secret; bytes only, no sockets.

    server -> client   magic, nonce_s
    client -> server   magic, size, nonce_c, hello, MAC(secret, "client", nonce_s, nonce_c, hello)
    server -> client   size, hello, MAC(secret, "server", nonce_s, nonce_c, hello of both)     size 0: refused

Each side draws a fresh nonce, so a recorded conversation proves nothing the next time. The hello of each side (role,
host, epoch) is covered by its MAC, and is parsed only after the MAC was verified. Later frames are signed with a key
of the connection, derived from the secret, both nonces and both hellos, over their direction and a count of frames: a
frame repeated, dropped, moved, or sent back to its author does not match.

The MAC is BLAKE2b with a key (RFC 7693), of 32 bytes: half the cost of an HMAC-SHA256 through OpenSSL, and a
connection stores nothing but its key. A coordinator of 16,384 hosts makes three of them for each when one rank is
lost.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from phalanx.errors import mistake
from phalanx.record.secret import SECRET_BYTES
from phalanx.record.secret import read_secret as read_secret  # re-exported: processes that make secrets also read them

Message = dict[str, Any]

MAGIC = b"PHX2"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_HELLO_BYTES = 4096
# Of the client: magic, size of its hello, nonce.
OPENING = struct.Struct(f"!{len(MAGIC)}sH{NONCE_BYTES}s")
# Of the server: size of its hello, 0 when it refuses.
ANSWER = struct.Struct("!H")
# The prover's role, and the sizes of both hellos: no two pairs give the same text.
PROOF = struct.Struct("!6sHH")
# The sender of a frame, and the number of frames it sent before.
FRAME = struct.Struct("!cQ")
FROM_CLIENT, FROM_SERVER = b"c", b"s"


class Refused(ConnectionError):
    """Raised when the other side's bytes are not authentic: another secret, a repeated or a changed frame."""


def make_nonce() -> bytes:
    """Return random bytes that no earlier conversation has used."""
    return secrets.token_bytes(NONCE_BYTES)


def encode(message: Message) -> bytes:
    """Encode a message as compact JSON."""
    try:
        return orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # orjson refuses whole numbers of more than 64 bits.
        return json.dumps(message, separators=(",", ":")).encode()


def decode(text: bytes) -> Message:
    """Decode the message in authentic bytes; raises Refused for anything but a JSON object."""
    try:
        message = orjson.loads(text)
    except ValueError:
        raise Refused("an authentic frame does not hold JSON") from None
    if not isinstance(message, dict):
        raise Refused("an authentic frame does not hold a JSON object")
    return message


def encode_hello(hello: Message) -> bytes:
    """Encode a hello; raises ValueError for one that is too large to be accepted from an unproven connection."""
    text = encode(hello)
    if len(text) > MAX_HELLO_BYTES:
        raise ValueError(f"a hello of {len(text)} bytes; the other side takes {MAX_HELLO_BYTES}")
    return text


def greeting(nonce_s: bytes) -> bytes:
    """Return the first bytes that the server sends."""
    return MAGIC + nonce_s


GREETING_BYTES = len(MAGIC) + NONCE_BYTES


def read_greeting(text: bytes) -> bytes:
    """Return the server's nonce from its greeting; raises Refused for another protocol."""
    if text[: len(MAGIC)] != MAGIC:
        raise Refused("what answers there is not a Phalanx process of this version")
    return text[len(MAGIC) :]


def read_opening(text: bytes) -> tuple[int, bytes]:
    """Return the size of the client's hello and its nonce; raises Refused for bytes that do not begin like a client."""
    magic, size, nonce_c = OPENING.unpack(text)
    if magic != MAGIC or size > MAX_HELLO_BYTES:
        raise Refused("not the hello of a Phalanx process")
    return size, nonce_c


def keyed_digest(key: bytes, text: bytes, digest_bytes: int = MAC_BYTES) -> bytes:
    """Return the MAC of a text.

    MACs of different sizes are unrelated, the shorter is not the beginning of the longer.
    """
    return blake2b(text, digest_size=digest_bytes, key=key).digest()


class Handshake:
    """The computations of one handshake, for either side, once both nonces are known."""

    __slots__ = ("_nonces", "_secret")

    def __init__(self, secret: bytes, nonce_s: bytes, nonce_c: bytes) -> None:
        self._secret, self._nonces = secret, nonce_s + nonce_c

    def client_mac(self, hello_c: bytes) -> bytes:
        """Return the client's proof."""
        return keyed_digest(self._secret, PROOF.pack(b"client", len(hello_c), 0) + hello_c + self._nonces)

    def server_mac_and_key(self, hello_c: bytes, hello_s: bytes) -> tuple[bytes, bytes]:
        """Return the server's proof, bound to the hello it answers, and the connection's key, which is never sent."""
        sizes = PROOF.pack(b"server", len(hello_c), len(hello_s))
        proof_and_key = keyed_digest(self._secret, sizes + hello_c + hello_s + self._nonces, 2 * MAC_BYTES)
        return proof_and_key[:MAC_BYTES], proof_and_key[MAC_BYTES:]


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs, in a time that does not reveal where they differ."""
    return hmac.compare_digest(one, other)


class FrameSigner:
    """Signs, or checks, the frames of one direction in their order."""

    __slots__ = ("_count", "_key", "_sender")

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._count = key, sender, 0

    def next(self, frame: bytes) -> bytes:
        """Return the MAC of the next frame."""
        count = self._count
        self._count = count + 1
        return blake2b(FRAME.pack(self._sender, count) + frame, digest_size=MAC_BYTES, key=self._key).digest()


# The run's secret: 32 random bytes in a file that only its owner can read.


def make_secret(path: Path) -> bytes:
    """Write a new secret to `path`, readable by its owner alone; raises UserError where the file exists."""
    secret = secrets.token_bytes(SECRET_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise mistake(
            str(path), "a secret is already there", why="ranks of a living run may use it", fix="delete it first"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        # A umask may have removed the owner's own bits.
        os.fchmod(descriptor, 0o600)
        file.write(secret.hex().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)
    return secret
