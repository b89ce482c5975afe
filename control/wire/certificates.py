"""`Certificates`: what a process shows to others and requires of them if TLS protects links between hosts.

Both ends of a connection show a certificate. Each end accepts only one that an authority of its folder has signed, of
its own cluster, with a role that may take this part, and not revoked. The dialing end also checks that it contains the
IP of the dialed host. The server has the client's certificate from TLS. The client gets the server's in the handshake
after that, with a signature over it: gRPC does not tell a client whose certificate it got.

The folder is read again and again, so replaced files count for every later connection.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.control.model.errors import CertificateError
from skipper.control.wire.identity import Identity, Role

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, rsa


AUTHORITY, CERTIFICATE, KEY, SECRET = "ca.pem", "cert.pem", "key.pem", "secret"
"""Names of the files in a folder of certificates."""

REVOKED = "revoked.pem"
"""Another file, once a certificate was revoked: the authorities' lists of revoked certificates."""

AUTHORITY_KEY = "ca-key.pem"
"""Another file, in the folder of an authority: its key."""

SIGNER = "signer.pem"
"""Another file, in the folder of an intermediate authority: its certificate."""

REVIEW_S = 2.0
"""How often a process checks whether the certificate at the other end of a connection has been revoked."""

_LOOK_S = 0.5
"""How long the content of a folder counts as current before it is read again."""

_MOST_NBYTES = 1 << 20
"""The most bytes of a file: enough for a list of about ten thousand revoked certificates."""

_log = logging.getLogger("skipper.control")


@dataclass(frozen=True, slots=True)
class _Content:
    """What a folder contains: its files as PEM, and the parsed data. ``revoked``: issuers and serial numbers."""

    authority: bytes
    certificate: bytes
    key: bytes
    identity: Identity
    authorities: tuple[x509.Certificate, ...]
    chain: tuple[x509.Certificate, ...]
    signs: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    revoked: frozenset[tuple[bytes, int]]

    def __repr__(self) -> str:
        return "<the content of a folder of certificates>"  # never the key


class Certificates:
    """The current certificates in a folder. Its methods may be called from any thread.

    Args:
        folder: with ``ca.pem``, ``cert.pem``, ``key.pem`` and perhaps ``revoked.pem``.

    Raises:
        CertificateError: a file is missing or has wrong content, users other than its owner can read the key or write
            one of the files, the certificate has no role or is not valid now, or cryptography is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.abspath(folder))
        self._lock = threading.Lock()
        self._seen = _stamp(self._folder)
        self._content = _load(self._folder)
        self._looked_s = time.monotonic()

    @property
    def authority(self) -> bytes:
        """PEM: the certificates of the trusted authorities."""
        return self._now().authority

    def pems(self) -> tuple[bytes, bytes, bytes]:
        """The authorities, this end's certificate and its key, which belong together."""
        now = self._now()
        return now.authority, now.certificate, now.key

    @property
    def identity(self) -> Identity:
        """The identity of this end."""
        return self._now().identity

    def require(self, role: Role, what: str) -> None:
        """Check that these certificates are for a role that may do ``what``.

        Raises:
            CertificateError: they are for another role.
        """
        mine = self.identity
        if mine.role is not role:
            raise CertificateError(
                f"{self._folder} holds the certificate of a {mine.role}, and {what} needs that of a {role}: "
                f"skipper certs issue --role {role} makes one"
            )

    def admit(self, pems: Sequence[bytes], roles: Collection[Role]) -> Identity:
        """Check that the other end, which has shown these certificates to TLS, has one of some roles.

        Raises:
            CertificateError: it does not.
        """
        from cryptography import x509

        chain: list[x509.Certificate] = []
        for pem in pems:
            try:
                chain += [each for each in x509.load_pem_x509_certificates(pem) if each not in chain]
            except ValueError as error:
                raise CertificateError(f"the certificate cannot be read: {error}") from None
        return self._judge(chain, roles)

    def is_revoked(self, identity: Identity) -> bool:
        """Whether a certificate, or one above it, has been revoked."""
        return not self._now().revoked.isdisjoint(identity.numbers)

    def sign(self, *transcript: bytes) -> tuple[bytes, bytes]:
        """This end's certificates, and its signature over the handshake so far, as `check` takes them."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding

        now = self._now()
        shown = b"".join(_sized(certificate.public_bytes(Encoding.DER)) for certificate in now.chain)
        text, kind = _text(shown, transcript), _kind(is_rsa=not isinstance(now.signs, ec.EllipticCurvePrivateKey))
        return shown, now.signs.sign(text, *kind)  # type: ignore[arg-type]  # the kind is that of the key

    def check(
        self, shown: object, signature: object, transcript: Sequence[bytes], host: str, roles: Collection[Role]
    ) -> Identity:
        """Check that the other end, dialed at ``host``, has a certificate for that host and for one of some roles.

        Args:
            shown: the certificates that `sign` returned there.
            signature: the signature that it returned.
            transcript: the handshake so far.
            host: an IP.
            roles: the roles that the dialed end may have.

        Raises:
            CertificateError: it has none.
        """
        import ipaddress  # most processes do not need it

        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        if not isinstance(shown, bytes) or not isinstance(signature, bytes):
            raise CertificateError("the other end has shown no role: it runs another version, or has no certificate")
        try:
            chain = [x509.load_der_x509_certificate(der) for der in _parts(shown)]
        except ValueError as error:
            raise CertificateError(f"the certificate cannot be read: {error}") from None
        identity = self._judge(chain, roles)
        key, text = chain[0].public_key(), _text(shown, transcript)
        try:
            if isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
                key.verify(signature, text, *_kind(is_rsa=isinstance(key, rsa.RSAPublicKey)))  # type: ignore[arg-type]
            else:
                raise CertificateError("the certificate has a key of a kind that is not known here")
        except InvalidSignature:
            raise CertificateError(f"the other end does not have the key of the certificate of {identity}") from None
        if str(ipaddress.ip_address(host)) not in identity.hosts:
            raise CertificateError(f"the certificate of {identity} is not for {host}")
        return identity

    def _judge(self, chain: Sequence[x509.Certificate], roles: Collection[Role]) -> Identity:
        from skipper.control.wire.chain import identity_of, verify

        now = self._now()
        verify(chain, now.authorities)
        identity = identity_of(chain)
        if identity.cluster != now.identity.cluster:
            raise CertificateError(f"{identity} does not belong to the cluster {now.identity.cluster!r}")
        if not now.revoked.isdisjoint(identity.numbers):
            raise CertificateError(f"the certificate of {identity} was revoked")
        if identity.role not in roles:
            raise CertificateError(f"{identity} does not have the role of a {' or a '.join(sorted(roles))}")
        return identity

    def _now(self) -> _Content:
        with self._lock:
            if time.monotonic() - self._looked_s > _LOOK_S:
                self._look()
                self._looked_s = time.monotonic()
            return self._content

    def _look(self) -> None:
        """Take over changes, all or none of them: files are replaced one by one."""
        seen = _stamp(self._folder)
        if seen == self._seen:
            return
        before = self._content
        try:
            found = _load(self._folder)
            if (found.identity.cluster, found.identity.role) != (before.identity.cluster, before.identity.role):
                raise CertificateError(f"that is the certificate of {found.identity}, which is not {before.identity}")
        except CertificateError as error:
            _log.warning("the certificates in %s were not reloaded: %s", self._folder, error)
        else:
            # For this process, revoked certificates stay revoked even if the list disappears.
            self._content = dataclasses.replace(found, revoked=found.revoked | before.revoked)
        self._seen = seen

    def __repr__(self) -> str:
        return f"<Certificates {self._folder}>"


def _stamp(folder: Path) -> tuple[object, ...]:
    """A value that changes when a file in a folder is written or replaced."""

    def of(name: str) -> tuple[int, ...] | None:
        try:
            found = (folder / name).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return tuple(map(of, (AUTHORITY, CERTIFICATE, KEY, REVOKED)))


def _load(folder: Path) -> _Content:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec, rsa
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise CertificateError(
            "TLS between hosts needs the package cryptography: pip install 'skipper-mesh[hosts]'"
        ) from error
    from skipper.control.wire.chain import identity_of, verify

    authority, certificate = _read(folder / AUTHORITY), _read(folder / CERTIFICATE)
    key, revoked = _read(folder / KEY, is_private=True), _read(folder / REVOKED, is_needed=False)
    name = AUTHORITY
    try:
        authorities = x509.load_pem_x509_certificates(authority)
        name = CERTIFICATE
        chain = x509.load_pem_x509_certificates(certificate)
        name = KEY
        signs = load_pem_private_key(key, None)
        name = REVOKED
        numbers = _revoked(revoked, authorities)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{folder / name} is not valid: {error}") from error
    if not isinstance(signs, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise CertificateError(f"{folder / KEY} is neither a key of an elliptic curve nor one of RSA")
    if signs.public_key() != chain[0].public_key():
        raise CertificateError(f"{folder / KEY} does not belong to {CERTIFICATE}")
    try:
        verify(chain, authorities)
        identity = identity_of(chain)
    except CertificateError as error:
        raise CertificateError(f"{folder / CERTIFICATE}: {error}") from None
    return _Content(authority, certificate, key, identity, tuple(authorities), tuple(chain), signs, numbers)


def _read(path: Path, *, is_private: bool = False, is_needed: bool = True) -> bytes:
    """The content of a PEM file that no other user could have written or, if it is private, read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not block if it is a pipe
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_needed:
            return b""
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
            raise CertificateError(f"{path} does not belong to this user or to root")
        if is_private and found.st_mode & 0o077:
            raise CertificateError(f"{path} can be read by other users: chmod 600")
        if found.st_mode & 0o022:
            raise CertificateError(f"{path} can be written by other users: chmod go-w")
        content = file.read(_MOST_NBYTES + 1)
    if len(content) > _MOST_NBYTES:
        raise CertificateError(f"{path} has more than {_MOST_NBYTES} bytes")
    if b"-----BEGIN " not in content:
        raise CertificateError(f"{path} is not a PEM file")
    return content


def _revoked(pem: bytes, authorities: Sequence[x509.Certificate]) -> frozenset[tuple[bytes, int]]:
    from cryptography import x509

    begin, end = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
    numbers: set[tuple[bytes, int]] = set()
    parts = pem.split(end)[:-1]
    if pem and (not parts or len(parts) != pem.count(begin)):
        raise ValueError("a list in it is cut off")
    for part in parts:
        found = x509.load_pem_x509_crl(part + end + b"\n")
        if not any(
            authority.subject == found.issuer and found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
            for authority in authorities
        ):
            raise ValueError("none of the authorities has signed this list")
        issuer = found.issuer.public_bytes()
        numbers |= {(issuer, entry.serial_number) for entry in found}
    return frozenset(numbers)


def _text(shown: bytes, transcript: Sequence[bytes]) -> bytes:
    """The bytes to sign; the lengths separate neighbouring parts."""
    return b"".join(map(_sized, (b"skipper certificate of who was dialed", shown, *transcript)))


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _parts(shown: bytes) -> list[bytes]:
    found = []
    while shown:
        nbytes = int.from_bytes(shown[:4], "little")
        part, shown = shown[4 : 4 + nbytes], shown[4 + nbytes :]
        if not part or len(part) != nbytes:
            raise ValueError("it is cut off")
        found.append(part)
    return found


def _kind(*, is_rsa: bool) -> tuple[object, ...]:
    """The signature algorithm for a key of this kind."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, padding

    if not is_rsa:
        return (ec.ECDSA(hashes.SHA256()),)
    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH), hashes.SHA256()


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS certificates and key of one end of a connection to an actor server, as PEM. Most of it is optional.

    Links between the hosts of a job need all of it, from a folder: see `Certificates`.

    Attributes:
        authority: certificates of the authorities that may sign the other end's; at a server, None: clients need no
            certificate.
        certificate: the certificate of this end, with those between it and the authority.
        key: the private key of this end.
        server_name: at a client, the name in the server's certificate, if that is not the address.

    Example:
        ```python
        import subprocess
        import sys
        import tempfile
        from pathlib import Path

        from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, Tls

        class Echo:
            def echo(self, text: str) -> str:
                return text

        folder = tempfile.mkdtemp()
        for command in ("init authority", "issue authority node1 --role host --host 127.0.0.1"):
            words = [sys.executable, "-m", "skipper", "certs", *command.split()]
            subprocess.run(words, cwd=folder, check=True, capture_output=True)
        tls = Tls(*(Path(folder, "node1", name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")))
        with ActorServer("127.0.0.1", 0, tls=tls) as server:
            server.register("echo", Echo())
            client = RpcClient(FixedResolver(f"actor://{server.address}/echo"), Echo, tls=tls)
            print(client.echo.sync("encrypted"))  # encrypted
        ```
    """

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate needs its key, and a key needs its certificate")
