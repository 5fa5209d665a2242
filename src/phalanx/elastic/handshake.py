"""How two processes prove to each other that they know the run's secret; bytes only, no sockets.

    server -> client   magic, nonce_s
    client -> server   magic, size, nonce_c, hello, HMAC(secret, "client", nonce_s, nonce_c, hello)
    server -> client   size, hello, HMAC(secret, "server", nonce_s, nonce_c, hello of both)     size 0: refused

Each side draws a fresh nonce, so a recorded conversation proves nothing the next time. What each says of itself (role,
host, epoch) is under its HMAC, and is parsed only after the HMAC was found right. Later frames are signed with a key
per direction, drawn from the secret and both nonces, over a count of frames: a frame repeated, dropped, moved, or sent
back to its author does not match.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from phalanx.errors import mistake
from phalanx.record.secret import SECRET_BYTES
from phalanx.record.secret import read_secret as read_secret  # whoever makes secrets reads them too

Message = dict[str, Any]

MAGIC = b"PHX1"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_HELLO_BYTES = 4096
OPENING = struct.Struct(f"!{len(MAGIC)}sH{NONCE_BYTES}s")  # of the client: magic, size of its hello, nonce
ANSWER = struct.Struct("!H")  # of the server: size of its hello, 0 when it refuses
COUNT = struct.Struct("!Q")
BLOCK_BYTES = 64  # of SHA-256
INNER_PAD, OUTER_PAD = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


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


class KeyedHash:
    """HMAC-SHA256 (RFC 2104) of many texts under one key.

    The same bytes as `hmac.digest`, in a third of the time: the key is taken once, and OpenSSL 3 copies a plain hash
    faster than an HMAC. A coordinator makes ten of them for every host that joins.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        padded = (key if len(key) <= BLOCK_BYTES else hashlib.sha256(key).digest()).ljust(BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(padded.translate(INNER_PAD))
        self._outer = hashlib.sha256(padded.translate(OUTER_PAD))

    def digest(self, text: bytes) -> bytes:
        """The HMAC of a text."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.digest()


@lru_cache(maxsize=4)  # one secret for all connections of a process
def _keyed(secret: bytes) -> KeyedHash:
    return KeyedHash(secret)


class Handshake:
    """One handshake: the same arithmetic seen from both sides, once both nonces are known."""

    def __init__(self, secret: bytes, nonce_s: bytes, nonce_c: bytes) -> None:
        self._keyed = _keyed(secret)
        self._nonces = nonce_s + nonce_c

    def client_mac(self, hello_c: bytes) -> bytes:
        """Proof of the client."""
        return self._mac(b"client", hello_c)

    def server_mac(self, hello_c: bytes, hello_s: bytes) -> bytes:
        """Proof of the server, bound to the hello it answers."""
        return self._mac(b"server", hello_c, hello_s)

    def keys(self, hello_c: bytes, hello_s: bytes) -> tuple[bytes, bytes]:
        """Keys of the frames: from the client, from the server."""
        return self.client_key(hello_c, hello_s), self.server_key(hello_c, hello_s)

    def client_key(self, hello_c: bytes, hello_s: bytes) -> bytes:
        """Key of the client's frames."""
        return self._mac(b"from client", hello_c, hello_s)

    def server_key(self, hello_c: bytes, hello_s: bytes) -> bytes:
        """Key of the server's frames."""
        return self._mac(b"from server", hello_c, hello_s)

    def _mac(self, *parts: bytes) -> bytes:
        # Each part after its length: no two lists of parts give the same text.
        sized = b"".join(COUNT.pack(len(part)) + part for part in (*parts, self._nonces))
        return self._keyed.digest(sized)


def same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


class Seal:
    """Signs, or checks, the frames of one direction in their order."""

    __slots__ = ("_count", "_key", "_keyed")

    def __init__(self, key: bytes | Callable[[], bytes]) -> None:
        # A function is asked for the key with the first frame: thousands of hosts join before one says anything.
        self._key, self._count = key, 0
        self._keyed: KeyedHash | None = None

    def next(self, frame: bytes) -> bytes:
        """The HMAC of the next frame."""
        keyed = self._keyed
        if keyed is None:
            keyed = self._keyed = KeyedHash(self._key if isinstance(self._key, bytes) else self._key())
            self._key = b""
        mac = keyed.digest(COUNT.pack(self._count) + frame)
        self._count += 1
        return mac


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
