"""`Identity`: who a certificate says that its holder is, which part that one may take, and in which cluster.

A certificate says so in one name, the URI ``spiffe://CLUSTER/ROLE/NAME`` among its subject's alternative names, which
is what SPIFFE's certificates have and what other authorities can issue, too. An authority between the one that is
trusted and the certificate may have ``spiffe://CLUSTER/ROLE``: then it signs for that role alone.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.control.model.errors import CertificateError

SCHEME = "spiffe://"
"""How the name begins that says who the holder of a certificate is."""

_CLUSTER = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,254}")
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")


class Role(enum.StrEnum):
    """The part that the holder of a certificate may take.

    Attributes:
        SCRIPT: it attaches hosts and has processes started there.
        HOST: it runs an agent, and processes of the jobs of scripts.
        CLIENT: it calls actor servers, and takes part in no job.
    """

    SCRIPT = "script"
    HOST = "host"
    CLIENT = "client"


MEMBERS = frozenset((Role.SCRIPT, Role.HOST))
"""The roles on whose machines the processes of a job run."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says.

    Attributes:
        cluster: whose certificate it is.
        role: what its holder may do there.
        name: of the holder, for people and for revocation.
        hosts: the IPs at which it is reached.
        numbers: issuer and serial number, as in lists of revoked certificates, of it and of those above it.
    """

    cluster: str
    role: Role
    name: str
    hosts: frozenset[str]
    numbers: tuple[tuple[bytes, int], ...]

    def __str__(self) -> str:
        return f"{self.role} {self.name!r} of the cluster {self.cluster!r}"


def uri_of(cluster: str, role: Role, name: str | None = None) -> str:
    """The name that a certificate has, or without ``name`` an authority that signs for one role alone.

    Raises:
        CertificateError: ``cluster`` or ``name`` has characters that are not allowed there.
    """
    if not _CLUSTER.fullmatch(cluster):
        raise CertificateError(f"a cluster is named with a-z, 0-9, '.', '-' and '_', not {cluster!r}")
    if name is not None and not _NAME.fullmatch(name):
        raise CertificateError(f"a certificate is named with letters, digits, '.', '-' and '_', not {name!r}")
    return f"{SCHEME}{cluster}/{role}" + ("" if name is None else f"/{name}")


def default_name(hosts: Sequence[str]) -> str:
    """The name of a machine in its certificate where none is given: the first of those at which it is reached."""
    import ipaddress  # most processes do without

    try:
        return ipaddress.ip_address(hosts[0]).compressed.replace(":", "-")
    except ValueError:
        return re.sub(r"[^A-Za-z0-9._-]", "-", hosts[0])
