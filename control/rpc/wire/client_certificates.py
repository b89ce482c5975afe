"""`ClientCertificates`: whether whoever asks an actor server may do so, by the certificate that it has shown to TLS."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from skipper.control.model.errors import CertificateError
from skipper.control.wire.certificates import REVIEW_S, Certificates
from skipper.control.wire.identity import Identity, Role

_MOST_KNOWN = 1024
"""Certificates of which is kept what they say; it takes longer than a call to find out."""


class ClientCertificates:
    """Looks at role, cluster and validity of certificates, and whether they were revoked; for one thread.

    What a certificate says is kept for `REVIEW_S`; the lists of revoked ones are looked at for each request.

    Args:
        certificates: of the server, with whom it trusts and the lists of what was revoked.
        roles: those whose holders may ask.
    """

    def __init__(self, certificates: Certificates, roles: Collection[Role]) -> None:
        self._certificates = certificates
        self._roles = frozenset(roles)
        self._known: OrderedDict[tuple[bytes, ...], tuple[float, Identity]] = OrderedDict()

    def admit(self, shown: Sequence[bytes]) -> Identity:
        """Who has shown these certificates.

        Raises:
            CertificateError: it may not ask.
        """
        key, now = tuple(shown), time.monotonic()
        until, identity = self._known.get(key, (0.0, None))
        if identity is None or now >= until:
            self._known.pop(key, None)
            identity = self._certificates.admit(shown, self._roles)
            self._known[key] = now + REVIEW_S, identity
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        if self._certificates.is_revoked(identity):
            raise CertificateError(f"the certificate of {identity} was revoked")
        return identity
