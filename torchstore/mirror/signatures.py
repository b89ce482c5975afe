"""Signatures of a mirror's files: by Ed25519, so that readers cannot write, or by a secret that both sides have."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skipper.torchstore.errors import MirrorSignatureError
from skipper.trust.private_file import read_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_LEAST_NBYTES = 32  # of a shared secret
_DOMAIN = b"skipper.mirror 1\0"
_MOST_HEADER = 256


class Verifier(Protocol):
    """Verifies that bytes are the publisher's."""

    @property
    def scheme(self) -> str:
        """Its name in the files of a mirror."""

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the publisher has signed this."""


class Signer(Verifier, Protocol):
    """Signs for a publisher, and verifies its own signatures."""

    def sign(self, message: bytes) -> bytes:
        """The signature."""


class SharedSecret:
    """A secret of the publisher and all readers (HMAC-SHA256): each of them could also write.

    Args:
        secret: 32 random bytes or more.

    Raises:
        ValueError: The secret is shorter.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from skipper.torchstore.mirror import SharedSecret

        path = Path(tempfile.mkdtemp(), "secret")
        secret = SharedSecret.generate()
        secret.save(path)
        print(SharedSecret.load(path).sign(b"manifest") == secret.sign(b"manifest"))  # True
        ```
    """

    scheme = "hmac-sha256"

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _LEAST_NBYTES:
            raise ValueError(f"a shared secret has {_LEAST_NBYTES} bytes or more, not {len(secret)}")
        self._secret = bytes(secret)

    @staticmethod
    def generate() -> SharedSecret:
        """Generate a new one."""
        return SharedSecret(secrets.token_bytes(_LEAST_NBYTES))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SharedSecret:
        """Load it from a file that no other user may read (mode 0600).

        Raises:
            PrivateFileError: Others could read the file, or could have written it.
            ValueError: It cannot be read, or is too short.
        """
        return SharedSecret(read_secret(Path(path), least_nbytes=_LEAST_NBYTES))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save it to a new file of mode 0600.

        Raises:
            FileExistsError: There is one already.
        """
        _write_new(path, self._secret, 0o600)

    def sign(self, message: bytes) -> bytes:
        """The signature."""
        return hmac.digest(self._secret, message, hashlib.sha256)

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether this was signed with the secret."""
        return hmac.compare_digest(self.sign(message), signature)


class VerifyingKey:
    """The public half of a `SigningKey`: not a secret. Needs the package ``cryptography``.

    The example of `Mirror` shows one.
    """

    scheme = "ed25519"

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    @staticmethod
    def load(path: str | os.PathLike[str]) -> VerifyingKey:
        """Load it from a PEM file.

        Raises:
            ValueError: There is no such key in it.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        key = load_pem_public_key(Path(path).read_bytes())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError(f"{path} holds another kind of key than Ed25519")
        return VerifyingKey(key)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save it to a new PEM file, which all users may read.

        Raises:
            FileExistsError: There is one already.
        """
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        _write_new(path, self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether this was signed with the private half."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """The private half, only for the publisher. Needs the package ``cryptography``.

    The example of `Mirror` shows one.
    """

    scheme = "ed25519"

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.verifying_key = VerifyingKey(key.public_key())

    @staticmethod
    def generate() -> SigningKey:
        """Generate a new one."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return SigningKey(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SigningKey:
        """Load it from a PEM file that no other user may read (mode 0600).

        Raises:
            PrivateFileError: Others could read the file, or could have written it.
            ValueError: There is no such key in it.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key = load_pem_private_key(read_secret(Path(path), least_nbytes=_LEAST_NBYTES), None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"{path} holds another kind of key than Ed25519")
        return SigningKey(key)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save it to a new PEM file of mode 0600.

        Raises:
            FileExistsError: There is one already.
        """
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        _write_new(path, self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)

    def sign(self, message: bytes) -> bytes:
        """The signature."""
        return self._key.sign(message)

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether this was signed with this key."""
        return self.verifying_key.is_signed(message, signature)


def seal(signer: Signer, kind: str, body: bytes) -> bytes:
    """A file of a mirror: a line with the signature, and the body that is signed together with its kind."""
    signature = signer.sign(_message(kind, body)).hex()
    return f"skipper.mirror 1 {signer.scheme} {signature}\n".encode() + body


def unseal(verifier: Verifier, kind: str, data: bytes, path: str) -> bytes:
    """The body of a file, after its signature was verified.

    Raises:
        MirrorSignatureError: The publisher has not signed it; the body was not used.
    """
    header, line_end, body = data[:_MOST_HEADER].partition(b"\n")
    try:
        name, version, scheme, hexadecimal = header.decode("ascii").split(" ")
        signature = bytes.fromhex(hexadecimal)
        if signature.hex() != hexadecimal:
            raise ValueError(
                "it is not written in the canonical form"
            )  # fromhex ignores spaces, but a file must have only one valid form
    except ValueError:
        raise MirrorSignatureError(path, "it does not begin with a signature") from None
    body = data[len(header) + len(line_end) :]
    if (name, version, scheme) != ("skipper.mirror", "1", verifier.scheme):
        raise MirrorSignatureError(
            path, f"it is signed by {scheme!r}, and this reader has a key for {verifier.scheme!r}"
        )
    if not verifier.is_signed(_message(kind, body), signature):
        raise MirrorSignatureError(
            path, "its signature is not that of the publisher's key: it was altered, or made with another key"
        )
    return body


def _message(kind: str, body: bytes) -> bytes:
    return _DOMAIN + kind.encode() + b"\0" + body


def _write_new(path: str | os.PathLike[str], data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
