"""What a chain of certificates says, and whether it leads to an authority: gRPC's TLS does not report that."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from skipper.control.model.errors import CertificateError
from skipper.control.wire.identity import SCHEME, Identity, Role, uri_of

_MOST_CERTIFICATES = 8
"""The most certificates in a chain that the other end shows."""


def uris(certificate: x509.Certificate) -> list[str]:
    """The URIs among the alternative names of a certificate's subject."""
    return [uri for uri in _names(certificate, x509.UniformResourceIdentifier) if uri.startswith(SCHEME)]


def cluster_of(authority: x509.Certificate) -> str:
    """The cluster that an authority of ``skipper certs init`` is for.

    Raises:
        CertificateError: it has no cluster.
    """
    found = uris(authority)
    if len(found) != 1:
        raise CertificateError(
            "the authority is of a version without clusters and roles: make another, skipper certs init"
        )
    return found[0].removeprefix(SCHEME).partition("/")[0]


def identity_of(chain: Sequence[x509.Certificate]) -> Identity:
    """The identity in the first certificate of a chain; nothing else of the chain is checked.

    Raises:
        CertificateError: it has no role, or one that an authority in the chain does not sign for.
    """
    found = uris(chain[0])
    parts = found[0].removeprefix(SCHEME).split("/") if len(found) == 1 else []
    if len(parts) != 3 or parts[1] not in list(Role):
        raise CertificateError(
            "the certificate has no role, as those of Skipper 0.1 have none: issue another "
            "(skipper certs issue --role script, host or client)"
        )
    cluster, role, name = parts[0], Role(parts[1]), parts[2]
    for above in chain[1:]:
        if any(uri not in (f"{SCHEME}{cluster}", uri_of(cluster, role)) for uri in uris(above)):
            raise CertificateError(
                f"the authority that signed the certificate of {role} {name!r} does not sign for that role"
            )
    hosts = frozenset(str(ip) for ip in _names(chain[0], x509.IPAddress))
    numbers = tuple((certificate.issuer.public_bytes(), certificate.serial_number) for certificate in chain)
    return Identity(cluster, role, name, hosts, numbers)


def verify(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> None:
    """Check that a chain of certificates is valid now, and leads to an authority.

    Raises:
        CertificateError: it is not, or does not.
    """
    if not 0 < len(chain) <= _MOST_CERTIFICATES:
        raise CertificateError("there is no certificate, or there are too many")
    now = datetime.datetime.now(datetime.UTC)
    trusted = [authority for authority in authorities if _is_valid(authority, now)]
    above = [*chain]
    if above[-1] in trusted and len(above) > 1:
        above.pop()  # it may be shown, but it is ours that counts
    if not all(_is_valid(certificate, now) for certificate in above):
        raise CertificateError("the certificate has expired, or is not valid yet: skipper certs renew makes another")
    for below, (certificate, issuer) in enumerate(pairwise(above)):
        if not _has_signed(issuer, certificate, below):
            raise CertificateError("the certificate is not signed by the next one in its chain")
    if not any(_has_signed(authority, above[-1], len(above) - 1) for authority in trusted):
        raise CertificateError("the certificate is signed by no authority that is trusted here")


def _has_signed(issuer: x509.Certificate, certificate: x509.Certificate, below: int) -> bool:
    """Whether an authority, with ``below`` others below it in the chain, has signed a certificate."""
    try:
        constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, ValueError, TypeError, InvalidSignature):
        return False
    return constraints.ca and (constraints.path_length is None or below <= constraints.path_length)


def _is_valid(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _names(
    certificate: x509.Certificate, kind: type[x509.UniformResourceIdentifier] | type[x509.IPAddress]
) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(name) for name in found.get_values_for_type(kind)]
