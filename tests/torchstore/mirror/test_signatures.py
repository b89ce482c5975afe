"""Keys in files, and what they sign."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from skipper import torchstore as ts
from skipper.torchstore.mirror import SharedSecret, SigningKey, VerifyingKey
from skipper.torchstore.mirror.signatures import seal, unseal
from skipper.trust.private_file import PrivateFileError


def test_keys_are_the_same_from_their_files(tmp_path: Path) -> None:
    key, secret = SigningKey.generate(), SharedSecret.generate()
    key.save(tmp_path / "key.pem")
    key.verifying_key.save(tmp_path / "public.pem")
    secret.save(tmp_path / "secret")
    for name, mode in (("key.pem", 0o600), ("secret", 0o600)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    signed = seal(SigningKey.load(tmp_path / "key.pem"), "version", b"body")
    assert unseal(VerifyingKey.load(tmp_path / "public.pem"), "version", signed, "x") == b"body"
    signed = seal(secret, "version", b"body")
    assert unseal(SharedSecret.load(tmp_path / "secret"), "version", signed, "x") == b"body"
    with pytest.raises(FileExistsError):
        key.save(tmp_path / "key.pem")


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "key.pem")
    SharedSecret.generate().save(tmp_path / "secret")
    for name in ("key.pem", "secret"):
        (tmp_path / name).chmod(0o644)
    with pytest.raises(PrivateFileError):
        SigningKey.load(tmp_path / "key.pem")
    with pytest.raises(PrivateFileError):
        SharedSecret.load(tmp_path / "secret")


def test_other_keys_and_short_secrets_are_refused(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "public.pem").write_bytes(
        other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(ValueError, match="Ed25519"):
        SigningKey.load(tmp_path / "key.pem")
    with pytest.raises(ValueError, match="Ed25519"):
        VerifyingKey.load(tmp_path / "public.pem")
    with pytest.raises(ValueError, match="32"):
        SharedSecret(b"short")


def test_a_signature_is_good_for_its_kind_and_scheme_alone() -> None:
    key, secret = SigningKey.generate(), SharedSecret.generate()
    signed = seal(key, "version", b"body")
    for verifier, kind in ((key.verifying_key, "latest"), (secret, "version"), (SigningKey.generate(), "version")):
        with pytest.raises(ts.MirrorSignatureError, match="x: "):
            unseal(verifier, kind, signed, "x")
    for data in (b"", b"\n", b"skipper.mirror 1 ed25519 zz\n", b"a b c d\nbody", b"\xff\n", signed[:-1]):
        with pytest.raises(ts.MirrorSignatureError):
            unseal(key.verifying_key, "version", data, "x")
