"""Certificates for TLS between the machines of a cluster: the cluster's own authority, and what it signs for each.

A folder made by `issue` holds ``ca.pem``, ``cert.pem``, ``key.pem`` and ``secret``, which `attach_to_hosts` and the
agents take, and ``revoked.pem`` once something was revoked. That of the authority holds ``ca.pem``, ``ca-key.pem`` and
``secret``, and in ``issued`` a copy of each certificate; it should stay where it was made. Certificates of another
origin do as well, in files of these names, if they have the names that `control.wire.identity` tells of.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skipper.control.model.errors import CertificateError
from skipper.control.support import private_file
from skipper.control.wire.certificates import AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY, REVOKED, SECRET, SIGNER
from skipper.control.wire.chain import cluster_of, identity_of
from skipper.control.wire.identity import Role, default_name, uri_of

DAYS = 365
OLD_AUTHORITY_KEY = "old-ca-key.pem"
"""In the folder of an authority that is being replaced: the old authority's key."""

ISSUED = "issued"
"""In the folder of an authority: a copy of every certificate that was made with it."""

_CLOCKS_DIFFER = datetime.timedelta(minutes=5)
"""A certificate is valid from slightly before it was made, since clocks differ."""


@dataclass(frozen=True, slots=True)
class _Signer:
    """The signing authority of a folder.

    Attributes:
        key: its key.
        certificate: its certificate.
        trusted: PEM: the authorities that holders of its certificates have to trust.
        above: PEM: its certificate, if it is not one of these; else empty.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    trusted: bytes
    above: bytes


def make_authority(folder: str | os.PathLike[str], *, days: int = DAYS, cluster: str | None = None) -> Path:
    """Make an authority, and a secret for agents, in a new folder.

    Args:
        folder: where; made with mode 0700.
        days: how long its certificate is valid, and what it signs.
        cluster: the name of the machines whose certificates it signs, in all of these; None: a fresh one.

    Returns:
        The folder.

    Raises:
        CertificateError: the folder exists already, or cannot be made, or that is no name for a cluster.
    """
    cluster = f"cluster-{secrets.token_hex(4)}" if cluster is None else cluster
    key, certificate = _new_authority(cluster, days)
    where = _new_folder(folder)
    _write(where / AUTHORITY_KEY, _pem_of_key(key), 0o600)
    _write(where / AUTHORITY, certificate, 0o644)
    _write(where / SECRET, secrets.token_hex(32).encode() + b"\n", 0o600)
    return where


def issue(
    authority: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    hosts: Sequence[str],
    *,
    role: Role | str,
    name: str | None = None,
    days: int | None = None,
) -> Path:
    """Make a certificate for one machine, in a new folder that holds all that this machine needs.

    Args:
        authority: the folder that `make_authority` or `delegate` made.
        folder: where; made with mode 0700.
        hosts: the IPs at which the machine is reached, and its names; a client needs none.
        role: what the machine may do; see `Role`.
        name: by which the certificate is revoked; None: the first of ``hosts``.
        days: how long it is valid; None: as long as its authority is.

    Returns:
        The folder.

    Raises:
        CertificateError: the folder exists already, the authority cannot be read or does not sign for this role, that
            is no role or name, or no host is named.
    """
    found = _role(role)
    if not hosts and (found is not Role.CLIENT or name is None):
        raise CertificateError("a certificate of a host needs the IP of that host (skipper certs issue --host IP)")
    source = Path(authority)
    signer = _signer(source)
    uri = uri_of(cluster_of(signer.certificate), found, default_name(hosts) if name is None else name)
    key, chain = _sign(signer, hosts, found, uri, days)
    where = _new_folder(folder)
    _write(where / KEY, _pem_of_key(key), 0o600)
    _write(where / CERTIFICATE, chain, 0o644)
    _keep(source, chain)
    update(source, [where])
    if (source / SECRET).exists() and found is not Role.CLIENT:
        _write(where / SECRET, (source / SECRET).read_bytes(), 0o600)
    return where


def renew(authority: str | os.PathLike[str], folder: str | os.PathLike[str], *, days: int | None = None) -> None:
    """Replace key and certificate in a folder that `issue` made, by new ones for the same machine and role.

    Processes that use the folder take them for what they connect from then on.

    Args:
        authority: the folder of the authority.
        folder: that of the machine.
        days: how long the new certificate is valid; None: as long as its authority is.

    Raises:
        CertificateError: one of the folders is not what it should be.
    """
    where, source = Path(folder), Path(authority)
    before = _certificates(where / CERTIFICATE)
    identity, signer = identity_of(before), _signer(source)
    names = before[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*map(str, names.get_values_for_type(x509.IPAddress)), *names.get_values_for_type(x509.DNSName)]
    uri = uri_of(identity.cluster, identity.role, identity.name)
    key, chain = _sign(signer, hosts, identity.role, uri, days)
    _keep(source, chain)
    update(source, [where])  # first, so that the present files are trusted at any time
    _write(where / KEY, _pem_of_key(key), 0o600)
    _write(where / CERTIFICATE, chain, 0o644)


def revoke(authority: str | os.PathLike[str], who: Sequence[str]) -> list[str]:
    """Revoke certificates, in the file ``revoked.pem`` of the authority; `update` brings it to other folders.

    Args:
        authority: the folder of the authority.
        who: names as in the certificates, or ``ROLE/NAME``: all of that name are revoked that were issued so far; or
            paths of certificates, or of folders with one. With an authority below this one all is revoked that it has
            signed.

    Returns:
        What was revoked, in this call or before, in words.

    Raises:
        CertificateError: no certificate has such a name, another authority has signed it, or this one cannot be read or
            written. Then nothing is revoked.
    """
    source = Path(authority)
    found = [certificate for name in who for certificate in _issued(source, name)]
    authorities = _authorities(source)
    for certificate in found:
        if not any(certificate.issuer == signer.subject for signer, _ in authorities):
            raise CertificateError(
                f"{_who(certificate)} was not signed by {source}, but by {_common_name_of(certificate.issuer)}: "
                "revoke it with the authority that has signed it; if that one is below this authority, revoke that one"
            )
    for signer, key in authorities:
        _revoke(source / REVOKED, signer, key, [each for each in found if each.issuer == signer.subject])
    return list(map(_who, found))


def rotate(authority: str | os.PathLike[str], *, days: int = DAYS) -> None:
    """Begin to replace an authority: what is issued from now on is signed by a new one, and both are trusted.

    Bring ``ca.pem`` to all folders then (`update`), `renew` all of them, and end with `finish_rotation`.

    Args:
        authority: its folder.
        days: how long the new one is valid.

    Raises:
        CertificateError: the last rotation is not finished, or the folder cannot be read or written.
    """
    source = Path(authority)
    if (source / OLD_AUTHORITY_KEY).exists():
        raise CertificateError(
            f"the authority in {source} is already being replaced: finish that first (skipper certs rotate --finish)"
        )
    signer = _signer(source)
    if signer.above:
        raise CertificateError(f"{source} holds an intermediate authority: replace the one that signed it")
    key, certificate = _new_authority(cluster_of(signer.certificate), days)
    _write(source / OLD_AUTHORITY_KEY, (source / AUTHORITY_KEY).read_bytes(), 0o600)
    _write(source / AUTHORITY_KEY, _pem_of_key(key), 0o600)
    _write(source / AUTHORITY, certificate + signer.certificate.public_bytes(Encoding.PEM), 0o644)


def finish_rotation(authority: str | os.PathLike[str]) -> None:
    """End the replacement of an authority: the old one is trusted no more where ``ca.pem`` is brought (`update`).

    Raises:
        CertificateError: none is being replaced, or the folder cannot be read or written.
    """
    source = Path(authority)
    if not (source / OLD_AUTHORITY_KEY).exists():
        raise CertificateError(f"the authority in {source} is not being replaced")
    signer = _signer(source)
    _write(source / AUTHORITY, signer.certificate.public_bytes(Encoding.PEM), 0o644)
    if (source / REVOKED).exists():
        _revoke(source / REVOKED, signer.certificate, signer.key, [], drop_others=True)
    (source / OLD_AUTHORITY_KEY).unlink()


def delegate(authority: str | os.PathLike[str], folder: str | os.PathLike[str], *, role: Role | str) -> Path:
    """Make an authority below another, in a new folder, that signs for one role and cluster alone.

    Machines that have to make their certificates themselves, as they do not know their IPs before they run, get this in
    place of the whole authority.

    Args:
        authority: the folder of that.
        folder: where; made with mode 0700.
        role: what those may do whom it signs certificates.

    Returns:
        The folder.

    Raises:
        CertificateError: the folder exists already, or the authority cannot be read or is such a one itself.
    """
    source, found = Path(authority), _role(role)
    signer = _signer(source)
    if signer.above:
        raise CertificateError(f"{source} holds an intermediate authority, which cannot sign other authorities")
    key, cluster = ec.generate_private_key(ec.SECP256R1()), cluster_of(signer.certificate)
    common = f"{cluster} authority for the role {found} {secrets.token_hex(4)}"
    builder = _builder(common, signer, key, None).add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri_of(cluster, found))]), critical=False
    )
    certificate = _with_powers(builder, key, signs=True).sign(signer.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    where = _new_folder(folder)
    _write(where / AUTHORITY_KEY, _pem_of_key(key), 0o600)
    _write(where / SIGNER, certificate, 0o644)
    _keep(source, certificate)
    update(source, [where])
    if (source / SECRET).exists():
        _write(where / SECRET, (source / SECRET).read_bytes(), 0o600)
    return where


def update(authority: str | os.PathLike[str], folders: Iterable[str | os.PathLike[str]]) -> None:
    """Bring who is trusted and what is revoked, as the authority has it by now, to folders of machines.

    Raises:
        CertificateError: a file cannot be read or written.
    """
    source = Path(authority)
    for folder in folders:
        for name in (REVOKED, AUTHORITY):
            try:
                content = (source / name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CertificateError(f"{source / name} cannot be read: {error.strerror}") from error
            _write(Path(folder) / name, content, 0o644)


# Reading


def _role(role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError:
        raise CertificateError(f"a role is one of {', '.join(Role)}, not {role!r}") from None


def _signer(source: Path) -> _Signer:
    try:
        key = load_pem_private_key((source / AUTHORITY_KEY).read_bytes(), None)
        trusted = (source / AUTHORITY).read_bytes()
        above = (source / SIGNER).read_bytes() if (source / SIGNER).exists() else b""
        certificates = x509.load_pem_x509_certificates(above or trusted)
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(f"{source} holds no authority (skipper certs init makes one): {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{source / AUTHORITY_KEY} is not a key made by skipper certs init")
    if key.public_key() != certificates[0].public_key():
        raise CertificateError(f"{source / AUTHORITY_KEY} does not belong to the certificate in the same folder")
    return _Signer(key, certificates[0], trusted, above)


def _authorities(source: Path) -> list[tuple[x509.Certificate, ec.EllipticCurvePrivateKey]]:
    """The authority, and the one that it is replacing, each with its key."""
    signer = _signer(source)
    if signer.above:
        raise CertificateError(f"{source} holds an intermediate authority: revoke with the one that signed it")
    found = [(signer.certificate, signer.key)]
    if (source / OLD_AUTHORITY_KEY).exists():
        old = load_pem_private_key((source / OLD_AUTHORITY_KEY).read_bytes(), None)
        assert isinstance(old, ec.EllipticCurvePrivateKey)  # `rotate` has written it
        found += [
            (certificate, old)
            for certificate in x509.load_pem_x509_certificates(signer.trusted)
            if certificate.public_key() == old.public_key()
        ]
    return found


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{path} holds no certificate: {error}") from error


def _issued(source: Path, who: str) -> list[x509.Certificate]:
    """The certificates that ``who`` selects: see `revoke`."""
    if os.path.isdir(who):
        signs = (Path(who) / SIGNER).exists()
        return _certificates(Path(who) / (SIGNER if signs else CERTIFICATE))[:1]
    if os.path.isfile(who):
        return _certificates(Path(who))[:1]
    found = []
    for path in sorted((source / ISSUED).glob("*.pem")):
        chain = _certificates(path)
        with contextlib.suppress(CertificateError):  # an intermediate authority has no name
            identity = identity_of(chain)
            if who in (identity.name, f"{identity.role}/{identity.name}"):
                found.append(chain[0])
    if not found:
        raise CertificateError(
            f"no certificate has been issued to {who!r} with {source}, and it is not a file with one"
        )
    return found


def _who(certificate: x509.Certificate) -> str:
    """The holder of a certificate, in words; an intermediate authority has none."""
    try:
        return str(identity_of([certificate]))
    except CertificateError:
        return _common_name_of(certificate.subject)


def _common_name_of(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()


def _lists(path: Path) -> list[x509.CertificateRevocationList]:
    end = b"-----END X509 CRL-----"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return [x509.load_pem_x509_crl(part + end + b"\n") for part in content.split(end)[:-1]]
    except ValueError as error:
        raise CertificateError(f"{path} is not a list of revoked certificates: {error}") from error


# Making


def _new_authority(cluster: str, days: int) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A key, and its certificate in PEM. Names differ, so that lists of revoked certificates tell authorities apart."""
    uri_of(cluster, Role.HOST)  # raises if that is not a valid name for a cluster
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name(f"{cluster} authority {secrets.token_hex(4)}")
    begin = datetime.datetime.now(datetime.UTC) - _CLOCKS_DIFFER
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{cluster}")]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate.public_bytes(Encoding.PEM)


def _sign(
    signer: _Signer, hosts: Sequence[str], role: Role, uri: str, days: int | None
) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A key and its chain of certificates, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A client's certificate cannot be used as a server's.
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if role is Role.CLIENT else [ExtendedKeyUsageOID.SERVER_AUTH])]
    names = [x509.UniformResourceIdentifier(uri), *map(_name_of, hosts)]
    builder = (
        _builder(uri.rpartition("/")[2], signer, key, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    )
    certificate = _with_powers(builder, key, signs=False).sign(signer.key, hashes.SHA256())
    identity_of([certificate, signer.certificate])  # raises if this authority does not sign for the role
    return key, certificate.public_bytes(Encoding.PEM) + signer.above


def _builder(
    common_name: str, signer: _Signer, key: ec.EllipticCurvePrivateKey, days: int | None
) -> x509.CertificateBuilder:
    begin = datetime.datetime.now(datetime.UTC) - _CLOCKS_DIFFER
    end = signer.certificate.not_valid_after_utc
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(common_name))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(begin, signer.certificate.not_valid_before_utc))
        .not_valid_after(end if days is None else min(end, begin + datetime.timedelta(days=days)))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()), critical=False)
    )


def _with_powers(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, *, signs: bool
) -> x509.CertificateBuilder:
    length = 0 if signs else None
    return (
        builder.add_extension(x509.BasicConstraints(ca=signs, path_length=length), critical=True)
        .add_extension(_usage(signs=signs), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _revoke(
    path: Path,
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    certificates: Sequence[x509.Certificate],
    *,
    drop_others: bool = False,
) -> None:
    """Write the authority's list again, with these certificates added; other lists stay unless they are dropped."""
    lists = _lists(path)
    before = {entry.serial_number: entry for each in lists if each.issuer == authority.subject for entry in each}
    now = datetime.datetime.now(datetime.UTC)
    for certificate in certificates:
        fresh = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now)
        before.setdefault(certificate.serial_number, fresh.build())
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now - _CLOCKS_DIFFER)
        .next_update(authority.not_valid_after_utc)  # it is never fetched: `update` brings a new one
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
    )
    for entry in before.values():
        builder = builder.add_revoked_certificate(entry)
    others = [each for each in lists if each.issuer != authority.subject and not drop_others]
    content = [each.public_bytes(Encoding.PEM) for each in (builder.sign(key, hashes.SHA256()), *others)]
    _write(path, b"".join(content), 0o644)


def _keep(source: Path, chain: bytes) -> None:
    """Keep a copy of an issued certificate, for revocation by name, unless the authority's folder is read-only."""
    serial = x509.load_pem_x509_certificates(chain)[0].serial_number
    with contextlib.suppress(CertificateError, OSError):
        (source / ISSUED).mkdir(mode=0o700, exist_ok=True)
        _write(source / ISSUED / f"{serial:040x}.pem", chain, 0o644)


def _new_folder(folder: str | os.PathLike[str]) -> Path:
    where = Path(folder)
    try:
        where.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise CertificateError(f"{where} cannot be made: {error.strerror}") from error
    return where


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        private_file.replace(path, content, mode)
    except OSError as error:
        raise CertificateError(f"{path} cannot be written: {error.strerror}") from error


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # ub-common-name of RFC 5280


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
