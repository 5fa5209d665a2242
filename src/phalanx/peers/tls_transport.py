"""Mutual TLS 1.3 between peers whose certificates are on the run's allowlist, and the hello that opens a connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.listen import Address as ListenAddress
from phalanx.io.listen import open_socket
from phalanx.io.values import printable
from phalanx.peers.allowlist import AllowList
from phalanx.peers.doorway import Admit, Doorway
from phalanx.peers.facts import Address, RunFacts
from phalanx.peers.frames import MOST_HELLO_BYTES, READ_BYTES, PeerConnection
from phalanx.peers.identity import ID_DIGITS, PeerIdentity
from phalanx.peers.messages import PROTOCOL, Hello, PeerRefusal, Welcome

HANDSHAKE_S = 10.0  # for everything up to the welcome
MOST_CONNECTIONS = 1024  # authenticated ones
PURPOSES = ("join", "control", "data", "state")
FACT_NAMES = {
    "run_id": "run",
    "model_digest": "model, or other settings",
    "tokenizer_digest": "tokenizer",
    "code_digest": "version of the code",
}

FACT_FIXES = {
    "model_digest": "[model], [optim], [batch], [data], [scale] and [sync] must be the same: join without --job and "
    "--set, and the job of the invitation is taken",
    "tokenizer_digest": "build the dataset as the run's owner did, from the same text and with the same tokenizer",
    "code_digest": "install the same version of Phalanx on both",
    "run_id": "take the invitation of the run that listens at this address",
}


class NoWelcomeError(ConnectionResetError):
    """A peer with a trusted key ended the connection before its welcome: it does not trust this key, or just died."""


class PeerTransport:
    """A peer's end of all connections: one listener, and `dial` for outgoing ones."""

    def __init__(self, identity: PeerIdentity, run: RunFacts, allowed: AllowList, instance: str) -> None:
        self.identity, self.run, self.allowed, self.instance = identity, run, allowed, instance
        self.fingerprints = allowed.fingerprints()
        self._server_context = _context(identity, ssl.PROTOCOL_TLS_SERVER)
        self._client_context = _context(identity, ssl.PROTOCOL_TLS_CLIENT)
        self._door: Doorway | None = None
        self._open: set[PeerConnection] = set()
        self._trust()

    def set_allowed(self, allowed: AllowList) -> None:
        """Take over a newer allowlist, and close the connections of revoked peers."""
        self.allowed, self.fingerprints = allowed, allowed.fingerprints()
        self._trust()
        revoked_ids = {fingerprint[:ID_DIGITS] for fingerprint in allowed.revoked}
        for connection in [connection for connection in self._open if connection.peer in revoked_ids]:
            connection.abort()

    async def listen(
        self,
        address: Address,
        accepted: Callable[[PeerConnection, Hello], Awaitable[None]],
        refused: Callable[[str], None],
    ) -> Address:
        """Listen, and return the actual address; `accepted` runs for each authenticated connection until it returns.

        `refused` is called with the reason when a connection completes TLS but is not admitted.
        """

        async def serve(sock: socket.socket, admit: Admit) -> None:
            writer = connection = None
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    reader, writer = await self._shake_hands(sock)
                    connection, hello = await self._answer(reader, writer)
                admit()
                if len(self._open) >= MOST_CONNECTIONS:
                    return
                self._open.add(connection)
                await accepted(connection, hello)
            except (OSError, ValueError, TimeoutError) as error:
                # Handshakes that break before TLS is complete are common on an open port, and not reported.
                if connection is None and writer is not None:
                    refused(printable(error))
            finally:
                if connection is not None:
                    self._open.discard(connection)
                if writer is not None:
                    writer.transport.abort()

        # guarded: TLS and the allowlist protect the socket, so it may listen on a public address.
        where = ListenAddress(host=address[0], port=address[1])
        sock = open_socket(where, guarded=True, where="peers listen")
        self._door = Doorway(sock, serve)
        host, port = sock.getsockname()[:2]
        return host, port

    async def dial(
        self, address: Address, purpose: str, *, peer: str = "", timeout_s: float = HANDSHAKE_S
    ) -> PeerConnection:
        """Connect to a peer, which must have the id `peer` if that is given.

        Raises UserError if another program answers, or a peer of another run, or the peer refuses this one; OSError or
        TimeoutError if no connection comes about.
        """
        where = f"peer at {printable(address[0])}:{address[1]}"
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_connection(
                    *address, limit=READ_BYTES, ssl=self._client_context, server_hostname="", ssl_shutdown_timeout=1.0
                )
            except ssl.SSLCertVerificationError as error:
                problem = "answers with a key that is not on the run's allowlist"
                raise mistake(
                    where, problem, fix="check the address, or ask the run's owner for the new list"
                ) from error
            except ssl.SSLError as error:
                problem = f"answers, but not as a peer of Phalanx ({printable(error.reason or error).lower()})"
                raise mistake(where, problem, fix="check the host and the port") from error
            try:
                return await self._introduce(reader, writer, where, purpose, peer)
            except BaseException:
                writer.transport.abort()
                raise

    async def close(self) -> None:
        """End the listener and every connection."""
        if self._door is not None:
            await self._door.close()
        for connection in list(self._open):
            connection.abort()
        # Aborted transports are freed in the next iteration of the event loop.
        await asyncio.sleep(0)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str, purpose: str, peer: str
    ) -> PeerConnection:
        """Exchange hello and welcome on a dialled connection; raises UserError if the peer is another or refuses."""
        connection = PeerConnection(reader, writer, peer=self._identify(writer))
        if peer and connection.peer != peer:
            raise mistake(
                where, f"is {connection.peer}, another peer than {peer}", fix="check the addresses of the run"
            )
        hello = Hello(protocol=PROTOCOL, purpose=purpose, run=self.run, instance=self.instance)
        try:
            await connection.send(hello)
            answer, _ = await connection.receive(MOST_HELLO_BYTES)
        except ConnectionError as error:
            # TLS 1.3: the other side checks this certificate only after this side's handshake is complete, and may
            # then end the connection without an answer.
            raise NoWelcomeError(str(error)) from error
        if isinstance(answer, PeerRefusal):
            raise mistake(where, printable(answer.what), fix=printable(answer.fix))
        if not isinstance(answer, Welcome):
            raise mistake(where, "answers, but not as a peer of Phalanx")
        connection.instance = answer.instance
        return connection

    async def _shake_hands(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Do the server's side of the TLS handshake on an accepted socket."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._server_context,
            ssl_handshake_timeout=HANDSHAKE_S,
            ssl_shutdown_timeout=1.0,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[PeerConnection, Hello]:
        """Answer the hello of an accepted connection; raises ValueError if it is refused."""
        connection = PeerConnection(reader, writer, peer=fingerprint_seen(writer)[:ID_DIGITS])
        hello, _ = await connection.receive(MOST_HELLO_BYTES)
        if not isinstance(hello, Hello) or hello.purpose not in PURPOSES:
            raise ValueError("no hello")
        refusal = self._refusal(fingerprint_seen(writer), hello)
        if refusal is not None:
            connection.post(refusal)
            await connection.close()
            raise ValueError(f"{connection.peer} was refused: {refusal.what}")
        connection.instance = hello.instance
        connection.post(Welcome(instance=self.instance))
        return connection, hello

    def _refusal(self, fingerprint: str, hello: Hello) -> PeerRefusal | None:
        """Return the refusal of a hello, or None if key, protocol version and run facts are right."""
        if fingerprint in self.allowed.revoked:
            return PeerRefusal(what="this key was revoked by the run's owner", fix="ask for a new invitation")
        if fingerprint not in self.fingerprints:
            return PeerRefusal(
                what="this key is not on the run's allowlist", fix="ask the run's owner for an invitation"
            )
        if hello.protocol != PROTOCOL:
            problem = f"speaks version {PROTOCOL} of the protocol between peers, this side version {hello.protocol}"
            return PeerRefusal(what=problem, fix="install the same version of Phalanx on both")
        for field, name in FACT_NAMES.items():
            their_fact, own_fact = getattr(hello.run, field), getattr(self.run, field)
            if their_fact != own_fact:
                problem = (
                    f"has another {name}: {printable(own_fact, most=40)} there, {printable(their_fact, most=40)} here"
                )
                return PeerRefusal(what=problem, fix=FACT_FIXES.get(field, f"start both with the same {name}"))
        return None

    def _identify(self, writer: asyncio.StreamWriter) -> str:
        fingerprint = fingerprint_seen(writer)
        if fingerprint not in self.fingerprints:
            raise mistake("peer", f"{fingerprint[:ID_DIGITS]} is not on the run's allowlist, or was revoked")
        return fingerprint[:ID_DIGITS]

    def _trust(self) -> None:
        pems = "\n".join(self.allowed.certificates)
        for context in (self._server_context, self._client_context):
            # Certificates can only be added to a context; revoked ones are refused after the handshake.
            context.load_verify_locations(cadata=pems)


def fingerprint_seen(writer: asyncio.StreamWriter) -> str:
    """Return the fingerprint of the certificate that the other side has presented and proved to own."""
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not certificate:
        raise ValueError("no certificate")
    return hashlib.sha256(certificate).hexdigest()


def _context(identity: PeerIdentity, side: int) -> ssl.SSLContext:
    """Return a TLS 1.3 context that presents the identity's certificate and requires one of the other side."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is pinned, and addresses of volunteers change.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # A listed certificate is trusted by itself, without an authority above it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Strict verification, the default since Python 3.13, requires extensions of an authority in a pinned certificate.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would not check the certificate again
    # A folder of mode 0700, because the ssl module reads keys from files only.
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        path = Path(folder) / "identity.pem"
        path.touch(mode=0o600)
        path.write_text(identity.key_pem + identity.certificate_pem, encoding="ascii")
        context.load_cert_chain(path)
    return context


def unreachable(addresses: list[Address], why: dict[Address, str]) -> SystemFailure:
    """Return the error for a group of which no address answered; `why` holds the reason by address."""
    tried = "; ".join(f"{printable(host)}:{port}: {why.get((host, port), 'no answer')}" for host, port in addresses[:8])
    fix = "check that a peer of the run is up there, and that no firewall is between"
    return SystemFailure(Problem(where="join", what=f"no peer of the run could be reached ({tried})", fix=fix))


def unknown_key(address: Address, name: str) -> UserError:
    """Return the error for a peer that repeatedly closed the connection after it saw this peer's key."""
    where = f"peer at {printable(address[0])}:{address[1]}"
    problem = f"does not know the key of {name}: it is not on the allowlist there, or was revoked"
    return mistake(where, problem, fix="ask the run's owner for an invitation")


def first_refusal(errors: list[BaseException]) -> UserError | None:
    """Return the first refusal among the errors of several attempts, or None; it explains more than a timeout does."""
    with contextlib.suppress(StopIteration):
        return next(error for error in errors if isinstance(error, UserError))
    return None
