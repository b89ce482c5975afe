"""Certificates for TLS between the machines of a job: an authority of one's own, and what it signs for each machine.

A folder made here holds ``ca.pem``, ``cert.pem``, ``key.pem`` and ``secret``, which `attach_to_hosts` and the agents
take; that of the authority, besides, ``ca-key.pem``, which should stay where it was made. Certificates of another
origin do as well, in files of these names.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from control.errors import CertificateError
from control.wire.certificates import AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY, SECRET

DAYS = 365
_CLOCKS_DIFFER = datetime.timedelta(minutes=5)
"""A certificate is valid from a little before it was made: not all clocks are the same."""


def make_authority(folder: str | os.PathLike[str], *, days: int = DAYS) -> Path:
    """Make an authority, and a secret for agents, in a new folder.

    Args:
        folder: where; made with mode 0700.
        days: how long its certificate is valid, and what it signs.

    Returns:
        The folder.

    Raises:
        CertificateError: the folder exists already, or cannot be made.
    """
    where = _new_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Skipper authority")])
    begin = datetime.datetime.now(datetime.UTC) - _CLOCKS_DIFFER
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(where / AUTHORITY_KEY, _pem_of_key(key), 0o600)
    _write(where / AUTHORITY, certificate.public_bytes(Encoding.PEM), 0o644)
    _write(where / SECRET, secrets.token_hex(32).encode() + b"\n", 0o600)
    return where


def issue(authority: str | os.PathLike[str], folder: str | os.PathLike[str], hosts: Sequence[str]) -> Path:
    """Make a certificate for one machine, in a new folder that holds all that this machine needs.

    Args:
        authority: the folder that `make_authority` made.
        folder: where; made with mode 0700.
        hosts: the IPs at which the machine is reached, and its names.

    Returns:
        The folder.

    Raises:
        CertificateError: the folder exists already, the authority cannot be read, or no host is named.
    """
    if not hosts:
        raise CertificateError("a certificate is for a machine: name an IP at which it is reached")
    source = Path(authority)
    try:
        signer = load_pem_private_key((source / AUTHORITY_KEY).read_bytes(), None)
        issuer = x509.load_pem_x509_certificate((source / AUTHORITY).read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{source} holds no authority (skipper certs init makes one): {error}") from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{source / AUTHORITY_KEY} is no key that skipper certs init makes")
    where = _new_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    begin = datetime.datetime.now(datetime.UTC) - _CLOCKS_DIFFER
    both_ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(begin, issuer.not_valid_before_utc))
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([_name_of(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ways), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    _write(where / KEY, _pem_of_key(key), 0o600)
    _write(where / CERTIFICATE, certificate.public_bytes(Encoding.PEM), 0o644)
    shutil.copyfile(source / AUTHORITY, where / AUTHORITY)
    if (source / SECRET).exists():
        _write(where / SECRET, (source / SECRET).read_bytes(), 0o600)
    return where


def _new_folder(folder: str | os.PathLike[str]) -> Path:
    where = Path(folder)
    try:
        where.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise CertificateError(f"{where} cannot be made: {error.strerror}") from error
    return where


def _write(path: Path, content: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
