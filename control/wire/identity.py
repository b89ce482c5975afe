"""`Identity`: the holder of a certificate, the role that it may take, and in which cluster.

A certificate says so in one name, the URI ``spiffe://CLUSTER/ROLE/NAME`` among its subject's alternative names.
SPIFFE's certificates have such names, and other authorities can issue them, too. An intermediate authority may have
``spiffe://CLUSTER/ROLE``: then it signs only for that role.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.control.model.errors import CertificateError

SCHEME = "spiffe://"
"""The prefix of the name that identifies the holder of a certificate."""

_CLUSTER = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,254}")
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")


class Role(enum.StrEnum):
    """The role that the holder of a certificate may take.

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
        cluster: the cluster of the certificate.
        role: what its holder may do there.
        name: of the holder, for people and for revocation.
        hosts: the IPs at which it is reached.
        numbers: issuer and serial number, as in lists of revoked certificates, of the certificate and of those above
            it.
    """

    cluster: str
    role: Role
    name: str
    hosts: frozenset[str]
    numbers: tuple[tuple[bytes, int], ...]

    def __str__(self) -> str:
        return f"{self.role} {self.name!r} of the cluster {self.cluster!r}"


def uri_of(cluster: str, role: Role, name: str | None = None) -> str:
    """The name of a certificate, or without ``name``, of an authority that signs only for one role.

    Raises:
        CertificateError: ``cluster`` or ``name`` has characters that are not allowed there.
    """
    if not _CLUSTER.fullmatch(cluster):
        raise CertificateError(f"a cluster is named with a-z, 0-9, '.', '-' and '_', not {cluster!r}")
    if name is not None and not _NAME.fullmatch(name):
        raise CertificateError(f"a certificate is named with letters, digits, '.', '-' and '_', not {name!r}")
    return f"{SCHEME}{cluster}/{role}" + ("" if name is None else f"/{name}")


def default_name(hosts: Sequence[str]) -> str:
    """The default name of a machine in its certificate: the first of its addresses."""
    import ipaddress  # most processes do not need it

    try:
        return ipaddress.ip_address(hosts[0]).compressed.replace(":", "-")
    except ValueError:
        return re.sub(r"[^A-Za-z0-9._-]", "-", hosts[0])
