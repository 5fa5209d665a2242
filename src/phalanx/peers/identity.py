"""A peer's identity: a private key and a self-signed certificate, which other peers pin by its fingerprint."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import mistake
from phalanx.io.files import read_bounded
from phalanx.io.write_errors import write_failure

KEY_FILE, CERTIFICATE_FILE = "peer-key.pem", "peer-certificate.pem"
MOST_PEM_BYTES = 16 * 1024
ID_DIGITS = 16  # of the fingerprint; peers are pinned by the full fingerprint
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NEW_KEY = "ask the run's owner for a new invitation, which brings a new key"
# Identities end by revocation, not by date: clocks of volunteers may be wrong.
VALID_DAYS = 3650


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PeerIdentity:
    """A peer's private key and certificate, both as PEM text; `repr` shows neither."""

    name: str
    key_pem: str
    certificate_pem: str

    @classmethod
    def create(cls, name: str) -> PeerIdentity:
        """Create a key (ECDSA on P-256) and its certificate; raises UserError for an invalid name."""
        check_name(name)
        x509, ec, hashes, serialization = _cryptography()
        key = ec.generate_private_key(ec.SECP256R1())
        # Two peers may share a name but not a subject: one certificate would be taken for the other's issuer.
        common = x509.NameAttribute(x509.NameOID.COMMON_NAME, name)
        serial = x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, secrets.token_hex(16))
        subject = x509.Name([common, serial])
        # From 1970: a peer whose clock is years behind is still a peer.
        begin = datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC)
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=VALID_DAYS)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return cls(
            name=name,
            key_pem=key.private_bytes(pem, form, plain).decode("ascii"),
            certificate_pem=certificate.public_bytes(pem).decode("ascii"),
        )

    @classmethod
    def from_pem(cls, key_pem: str, certificate_pem: str, *, where: str) -> PeerIdentity:
        """Read a key and its certificate from PEM text; raises UserError if they do not belong together."""
        _, ec, _, serialization = _cryptography()
        certificate = parse_certificate(certificate_pem, where=where)
        try:
            key = serialization.load_pem_private_key(key_pem.encode("ascii"), password=None)
        except (ValueError, TypeError, UnicodeEncodeError) as error:
            raise mistake(where, "the private key cannot be read", fix=NEW_KEY) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise mistake(where, "the private key and the certificate do not belong together", fix=NEW_KEY)
        return cls(name=certificate_name(certificate, where=where), key_pem=key_pem, certificate_pem=certificate_pem)

    @classmethod
    def load(cls, folder: Path) -> PeerIdentity:
        """Read an identity from the folder that `save` wrote; raises UserError if other users can read the key."""
        texts = []
        for name in (KEY_FILE, CERTIFICATE_FILE):
            try:
                texts.append(read_bounded(folder / name, MOST_PEM_BYTES).decode("ascii"))
            except FileNotFoundError as error:
                raise mistake(str(folder), f"holds no peer identity: {name} is missing") from error
            except (OSError, ValueError) as error:
                raise mistake(str(folder / name), f"cannot be read: {error}") from error
        if stat.S_IMODE((folder / KEY_FILE).stat().st_mode) & 0o077:
            fix = f"chmod 600 {folder / KEY_FILE}, or make a new identity where others may have read it"
            raise mistake(str(folder / KEY_FILE), "other users of this machine can read the private key", fix=fix)
        return cls.from_pem(*texts, where=str(folder))

    def save(self, folder: Path) -> None:
        """Write the identity to a folder that only this user can enter; raises UserError if it already holds one."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            # The key last: where it exists, so does the certificate.
            for name, text in ((CERTIFICATE_FILE, self.certificate_pem), (KEY_FILE, self.key_pem)):
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(text)
        except FileExistsError as error:
            raise mistake(
                str(folder), "holds a peer identity already", fix="load it, or name another folder"
            ) from error
        except OSError as error:
            raise write_failure(folder, error) from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, 64 hexadecimal digits."""
        return fingerprint_of(self.certificate_pem)

    @property
    def id(self) -> str:
        """Id of this peer in views and messages: the first 16 digits of the fingerprint."""
        return self.fingerprint[:ID_DIGITS]

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data` by this peer's key."""
        _, ec, hashes, serialization = _cryptography()
        key = serialization.load_pem_private_key(self.key_pem.encode("ascii"), password=None)
        signature: bytes = key.sign(data, ec.ECDSA(hashes.SHA256()))
        return signature

    def __repr__(self) -> str:
        return f"PeerIdentity({self.name!r}, {self.id})"


def check_name(name: str, *, where: str = "peer name") -> None:
    """Raises UserError for an invalid peer name: names appear in files, web pages and terminals."""
    if not NAME.fullmatch(name):
        problem = f"{name[:70]!r} is not a name for a peer"
        raise mistake(where, problem, fix="take at most 63 letters, digits, dots, dashes and underscores")


def parse_certificate(certificate_pem: str, *, where: str) -> Any:
    """Return the certificate as an object of `cryptography`; raises UserError."""
    x509, ec, _, _ = _cryptography()
    try:
        if len(certificate_pem) > MOST_PEM_BYTES:
            raise ValueError("too long")
        certificate = x509.load_pem_x509_certificate(certificate_pem.encode("ascii"))
        if not isinstance(certificate.public_key(), ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
    except Exception as error:  # bytes from a stranger, for which the parser raises various error types
        raise mistake(where, "the certificate cannot be read", fix=NEW_KEY) from error
    return certificate


def certificate_name(certificate: Any, *, where: str) -> str:
    """Return the name in a certificate's subject; raises UserError for an invalid one."""
    x509, *_ = _cryptography()
    attributes = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = str(attributes[0].value) if len(attributes) == 1 else ""
    check_name(name, where=where)
    return name


def fingerprint_of(certificate_pem: str) -> str:
    """Return the SHA-256 of a certificate's bytes as hexadecimal text; raises ValueError for text that is not PEM."""
    import ssl

    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem)).hexdigest()


def is_signed(certificate_pem: str, data: bytes, signature: bytes) -> bool:
    """Return True if `signature` is a signature of `data` by the certificate's key."""
    from cryptography.exceptions import InvalidSignature

    _, ec, hashes, _ = _cryptography()
    certificate = parse_certificate(certificate_pem, where="certificate")
    with contextlib.suppress(InvalidSignature):
        certificate.public_key().verify(signature, data, ec.ECDSA(hashes.SHA256()))
        return True
    return False


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """Return the used modules of `cryptography`; raises UserError with the command that installs it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        problem = 'needs the Python package "cryptography", which is not installed'
        raise mistake("training with peers", problem, fix="pip install 'phalanx[peers]'") from error
    return x509, ec, hashes, serialization
