"""`Certificates`: what a process shows to others and asks of them where TLS protects links between hosts.

Both ends of a connection show a certificate, and each takes only one that the same authority has signed. The names in
it are checked by who dials: it has to hold the IP of the host that was dialed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from control.errors import CertificateError

AUTHORITY, CERTIFICATE, KEY, SECRET = "ca.pem", "cert.pem", "key.pem", "secret"
"""Names of the files in a folder of certificates."""

AUTHORITY_KEY = "ca-key.pem"
"""Besides, in the folder of an authority."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of three PEM files.

    Attributes:
        authority: certificates of those whose signature counts.
        certificate: this host's, with those between it and the authority.
        key: the private key that belongs to it.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> Certificates:
        """Read ``ca.pem``, ``cert.pem`` and ``key.pem``.

        Raises:
            CertificateError: a file is missing or no PEM, or others than its owner can read the key.
        """
        where = Path(folder)
        contents = []
        for name in (AUTHORITY, CERTIFICATE, KEY):
            try:
                contents.append((where / name).read_bytes())
            except OSError as error:
                raise CertificateError(f"{where / name} cannot be read: {error.strerror}") from error
            if b"-----BEGIN " not in contents[-1]:
                raise CertificateError(f"{where / name} is no PEM file")
        if (where / KEY).stat().st_mode & 0o077:
            raise CertificateError(f"{where / KEY} can be read by others than its owner: chmod 600")
        return Certificates(*contents)

    def __repr__(self) -> str:
        return "<Certificates>"  # never the key
