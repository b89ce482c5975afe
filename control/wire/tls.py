"""`Tls`: certificates and keys of one end of a connection to an actor server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tls:
    """What one end of a connection to an actor server has for TLS; all of it PEM, and most of it optional.

    Links between the hosts of a job take nothing but the whole of it, from a folder: see `Certificates`.

    Attributes:
        authority: certificates of who may have signed the other end's; at a server, None asks clients for none.
        certificate: this end's, with those between it and the authority.
        key: this end's private key.
        server_name: at a client, the name that the server's certificate is for, where that is not the address.
    """

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate goes with its key, and a key with its certificate")
