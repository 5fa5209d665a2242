"""How two processes prove to each other that they know the run's secret; bytes only, no sockets.

    server -> client   magic, nonce_s
    client -> server   magic, size, nonce_c, hello, MAC(secret, "client", nonce_s, nonce_c, hello)
    server -> client   size, hello, MAC(secret, "server", nonce_s, nonce_c, hello of both)     size 0: refused

Each side draws a fresh nonce, so a recorded conversation proves nothing the next time. What each says of itself (role,
host, epoch) is under its MAC, and is parsed only after the MAC was found right. Later frames are signed with a key of
the connection, drawn from the secret, both nonces and both hellos, over their direction and a count of frames: a frame
repeated, dropped, moved, or sent back to its author does not match.

The MAC is BLAKE2b with a key (RFC 7693), of 32 bytes: half the cost of an HMAC-SHA256 through OpenSSL, and nothing is
kept for a connection but its key. A coordinator of 16,384 hosts makes three of them for each when one rank is lost.
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
from phalanx.record.secret import read_secret as read_secret  # whoever makes secrets reads them too

Message = dict[str, Any]

MAGIC = b"PHX2"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_HELLO_BYTES = 4096
OPENING = struct.Struct(f"!{len(MAGIC)}sH{NONCE_BYTES}s")  # of the client: magic, size of its hello, nonce
ANSWER = struct.Struct("!H")  # of the server: size of its hello, 0 when it refuses
PROOF = struct.Struct("!6sHH")  # whose proof it is, and the sizes of both hellos: no two pairs give the same text
FRAME = struct.Struct("!cQ")  # from whom a frame comes, and how many came before it
FROM_CLIENT, FROM_SERVER = b"c", b"s"


class Refused(ConnectionError):
    """What the other side sent is not authentic: another secret, a repeated or a changed frame."""


def make_nonce() -> bytes:
    """Random bytes that no earlier conversation has used."""
    return secrets.token_bytes(NONCE_BYTES)


def encode(message: Message) -> bytes:
    """A message as compact JSON."""
    try:
        return orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # whole numbers of more than 64 bits
        return json.dumps(message, separators=(",", ":")).encode()


def decode(text: bytes) -> Message:
    """The message in authentic bytes; a peer that speaks something else is refused."""
    try:
        message = orjson.loads(text)
    except ValueError:
        raise Refused("an authentic frame does not hold JSON") from None
    if not isinstance(message, dict):
        raise Refused("an authentic frame does not hold a JSON object")
    return message


def encode_hello(hello: Message) -> bytes:
    """What one says of oneself, small enough to be taken from a stranger."""
    text = encode(hello)
    if len(text) > MAX_HELLO_BYTES:
        raise ValueError(f"a hello of {len(text)} bytes; the other side takes {MAX_HELLO_BYTES}")
    return text


def greeting(nonce_s: bytes) -> bytes:
    """The first words of the server."""
    return MAGIC + nonce_s


GREETING_BYTES = len(MAGIC) + NONCE_BYTES


def read_greeting(text: bytes) -> bytes:
    """The server's nonce."""
    if text[: len(MAGIC)] != MAGIC:
        raise Refused("what answers there is not a Phalanx process of this version")
    return text[len(MAGIC) :]


def read_opening(text: bytes) -> tuple[int, bytes]:
    """Size of the client's hello and its nonce; refuses at once what does not begin like a client."""
    magic, size, nonce_c = OPENING.unpack(text)
    if magic != MAGIC or size > MAX_HELLO_BYTES:
        raise Refused("not the hello of a Phalanx process")
    return size, nonce_c


def keyed_digest(key: bytes, text: bytes, digest_bytes: int = MAC_BYTES) -> bytes:
    """The MAC of a text; one of another size is not the beginning of it, but unrelated."""
    return blake2b(text, digest_size=digest_bytes, key=key).digest()


class Handshake:
    """One handshake: the same arithmetic seen from both sides, once both nonces are known."""

    __slots__ = ("_nonces", "_secret")

    def __init__(self, secret: bytes, nonce_s: bytes, nonce_c: bytes) -> None:
        self._secret, self._nonces = secret, nonce_s + nonce_c

    def client_mac(self, hello_c: bytes) -> bytes:
        """Proof of the client."""
        return keyed_digest(self._secret, PROOF.pack(b"client", len(hello_c), 0) + hello_c + self._nonces)

    def server_mac_and_key(self, hello_c: bytes, hello_s: bytes) -> tuple[bytes, bytes]:
        """Proof of the server, bound to the hello it answers; and the key of the connection, which is never sent."""
        sizes = PROOF.pack(b"server", len(hello_c), len(hello_s))
        both = keyed_digest(self._secret, sizes + hello_c + hello_s + self._nonces, 2 * MAC_BYTES)
        return both[:MAC_BYTES], both[MAC_BYTES:]


def same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


class FrameSigner:
    """Signs, or checks, the frames of one direction in their order."""

    __slots__ = ("_count", "_key", "_sender")

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._count = key, sender, 0

    def next(self, frame: bytes) -> bytes:
        """The MAC of the next frame."""
        count = self._count
        self._count = count + 1
        return blake2b(FRAME.pack(self._sender, count) + frame, digest_size=MAC_BYTES, key=self._key).digest()


# The run's secret: 32 random bytes in a file that only its owner can read.


def make_secret(path: Path) -> bytes:
    """A new secret, written to `path` for its owner alone; a file already there is never overwritten."""
    secret = secrets.token_bytes(SECRET_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise mistake(
            str(path), "a secret is already there", why="ranks of a living run may use it", fix="delete it first"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # a umask may have taken the owner's own bits
        file.write(secret.hex().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)
    return secret
