"""URLs of services: ``actor://host:port/name`` and ``grpc://host:port/path``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skipper.control.model.errors import ServiceUrlError
from skipper.control.wire import addresses

_URL = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})(?:/(?P<path>[^\s?#]*))?"
)

ACTOR, GRPC = "actor", "grpc"


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """The address of a service, and its protocol.

    Attributes:
        scheme: ``actor`` for an actor of an `ActorServer`, ``grpc`` for any other gRPC server.
        host: name or address; an IPv6 address without brackets.
        port: 1 to 65535.
        path: the service of the server: the name of an actor.

    Example:
        ```python
        from skipper.control.rpc import ServiceUrl

        url = ServiceUrl.parse("actor://10.0.0.1:7000/curriculum")
        print(url.scheme, url.host, url.port, url.path)  # actor 10.0.0.1 7000 curriculum
        ```
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    def __post_init__(self) -> None:
        if self.scheme not in (ACTOR, GRPC):
            raise ServiceUrlError(f"a service is at {ACTOR}:// or {GRPC}://, not at {self.scheme}://")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 < self.port < 1 << 16:
            raise ServiceUrlError(f"{self.port!r:.80} is not a port")

    @staticmethod
    def parse(text: str) -> ServiceUrl:
        """Parse a URL.

        Raises:
            ServiceUrlError: (a `ValueError`) it is not a URL of a service.
        """
        found = _URL.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ServiceUrlError(f"{text!r} is not a URL of a service, such as actor://host:port/name")
        return ServiceUrl(found["scheme"], found["host"].strip("[]"), int(found["port"]), found["path"] or "")

    @property
    def target(self) -> str:
        """Host and port, for gRPC channels."""
        return addresses.at(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}/{self.path}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ServiceUrlError: (a `ValueError`) it is not that.
    """
    url = ServiceUrl.parse(f"{GRPC}://{address}")
    return url.host, url.port
