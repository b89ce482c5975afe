"""The controller's metadata service: the registered names, each kept while its lease is renewed.

It is an actor on an `ActorServer` like any other, called ``/metadata``, with the same authentication, deadlines and
encodings.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skipper.control.api import namespaces
from skipper.control.model.bounds import check_seconds
from skipper.control.model.endpoint_spec import idempotent
from skipper.control.model.errors import ControlError, NameNotFoundError, ResolverError
from skipper.control.rpc.actor_server import ActorServer
from skipper.control.rpc.resolver import FixedResolver
from skipper.control.rpc.rpc_client import RpcClient, RpcOptions
from skipper.control.rpc.urls import ACTOR, ServiceUrl, split_address
from skipper.control.wire.certificates import Tls

_log = logging.getLogger("skipper.control")

METADATA_VARIABLE = "SKIPPER_METADATA"
"""Environment variable with the address, ``host:port``, of the metadata service."""

LEASE_S = 10.0
MAX_REGISTRATIONS = 1_000_000  # about 600 bytes each
MIN_LEASE_S = 0.1
MAX_LEASE_S = 3600.0
_STEP = 1000
"""How many leases one request checks for expiry."""
_LAST_CHARACTER = chr(sys.maxunicode)
_NAME = "metadata"
_TIMEOUT_S = 5.0
_RETRIES = 3


class FullError(Exception):
    """There are too many registrations."""


@dataclass(slots=True)
class _Lease:
    name: str
    url: str
    lease_s: float
    expires: float
    number: int


class Registry:
    """Registrations of absolute names. All times are seconds of one monotonic clock, which the caller reads.

    Only the first listing after a change takes longer with more names.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._by_name: dict[str, dict[str, None]] = {}
        self._sorted: list[str] = []
        """Sorted names, some of which may have been withdrawn."""
        self._added: list[str] = []
        """Names that are not in `_sorted` yet."""
        self._count = 0
        self._expiring: list[tuple[float, str, int]] = []
        """A heap with each lease, the number of its registration, and a time before which it does not expire."""

    def register(self, lease: str, name: str, url: str, lease_s: float, now: float) -> None:
        """Register a service. An existing lease is replaced; the same URL twice counts once.

        Args:
            lease: chosen by the registering process, and unknown to others.
            name: absolute.
            url: where the service is.
            lease_s: it expires this long after its latest renewal.
            now: the time.

        Raises:
            ValueError: the lease is too short or too long.
            FullError: there are too many registrations.
        """
        if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
            raise ValueError(f"a lease is for {MIN_LEASE_S:g} to {MAX_LEASE_S:g} s, not for {lease_s!r}")
        self._expire(now, _STEP)
        self.withdraw(lease)
        if len(self._leases) >= MAX_REGISTRATIONS:
            self._expire(now, len(self._expiring))
        if len(self._leases) >= MAX_REGISTRATIONS:
            raise FullError(f"the metadata service already has {MAX_REGISTRATIONS} registrations, its maximum")
        self._count += 1
        self._leases[lease] = _Lease(name, url, lease_s, now + lease_s, self._count)
        if name not in self._by_name:
            self._by_name[name] = {}
            self._added.append(name)
        self._by_name[name][lease] = None
        heapq.heappush(self._expiring, (now + lease_s, lease, self._count))
        self._compact()

    def renew(self, leases: Iterable[str], now: float) -> list[str]:
        """Renew leases; returns the unknown ones."""
        self._expire(now, _STEP)
        unknown: list[str] = []
        for lease in leases:
            registration = self._leases.get(lease)
            if registration is None or registration.expires <= now:
                unknown.append(lease)
            else:
                registration.expires = now + registration.lease_s
        return unknown

    def withdraw(self, lease: str) -> None:
        """Remove a registration, if it exists."""
        registration = self._leases.pop(lease, None)
        if registration is not None:
            of_name = self._by_name[registration.name]
            del of_name[lease]
            if not of_name:
                del self._by_name[registration.name]

    def resolve(self, name: str, now: float) -> list[str]:
        """The URLs of a service, the latest registration first."""
        self._expire(now, _STEP)
        found = [each for lease in self._by_name.get(name, ()) if (each := self._leases[lease]).expires > now]
        found.sort(key=lambda each: -each.number)
        return list(dict.fromkeys(each.url for each in found))

    def names(self, prefix: str, now: float) -> dict[str, list[str]]:
        """All services whose names begin with ``prefix``, by name."""
        self._sort()
        begin, end = (bisect.bisect_left(self._sorted, bound) for bound in (prefix, prefix + _LAST_CHARACTER))
        return {name: urls for name in self._sorted[begin:end] if (urls := self.resolve(name, now))}

    def _expire(self, now: float, most: int) -> None:
        """Remove expired registrations, checking at most ``most`` leases: nobody should wait for a million of them."""
        for _ in range(most):
            if not self._expiring or self._expiring[0][0] > now:
                return
            _, lease, number = heapq.heappop(self._expiring)
            registration = self._leases.get(lease)
            if registration is None or registration.number != number:
                continue  # it was withdrawn, or replaced by a lease with its own entry
            if registration.expires <= now:
                self.withdraw(lease)
            else:
                heapq.heappush(self._expiring, (registration.expires, lease, number))

    def _sort(self) -> None:
        if self._added:
            names = filter(self._by_name.__contains__, itertools.chain(self._sorted, self._added))
            self._sorted = list(dict.fromkeys(sorted(names)))
            self._added.clear()

    def _compact(self) -> None:
        """Drop the leftovers of withdrawn or replaced registrations, once they are the larger part."""
        most = 2 * len(self._leases) + _STEP
        if len(self._added) > most:
            self._sort()
        if len(self._expiring) > most:
            self._expiring = [(each.expires, lease, each.number) for lease, each in self._leases.items()]
            heapq.heapify(self._expiring)


class MetadataService:
    """The actor. A lease is a text that the registering process has chosen at random."""

    def __init__(self) -> None:
        self._registry = Registry()

    @idempotent
    def register(self, lease: str, name: str, url: str, lease_s: float) -> None:
        """Note that the service of an absolute name is at a URL, as long as the lease is renewed in time."""
        if not namespaces.check_name(name).startswith("/"):
            raise ValueError(f"only absolute names can be registered, and {name!r} does not begin with a slash")
        self._registry.register(lease, name, str(ServiceUrl.parse(url)), lease_s, time.monotonic())

    @idempotent
    def renew(self, leases: list[str]) -> list[str]:
        """Renew leases; returns those that are not known here, or no longer."""
        return self._registry.renew(leases, time.monotonic())

    @idempotent
    def withdraw(self, lease: str) -> None:
        """End a registration."""
        self._registry.withdraw(lease)

    @idempotent
    def resolve(self, name: str) -> list[str]:
        """The URLs of an absolute name, the latest registration first; empty if it is not registered."""
        return self._registry.resolve(name, time.monotonic())

    @idempotent
    def names(self, prefix: str = "/") -> dict[str, list[str]]:
        """Names that begin with a prefix, with their URLs."""
        return self._registry.names(prefix, time.monotonic())


class MetadataServer(ActorServer):
    """The metadata service; a context manager. Arguments are those of `ActorServer`, without those about names.

    Registrations are only in its memory. When it is restarted at the same address, clients register again by
    themselves, within a third of the lease.

    Args:
        host: name or address to listen on.
        port: port to listen on; 0: a free one.
        secret: the secret that callers have to know; None: that of the user.
        tls: certificate and key for TLS.
        certs: as for `ActorServer`.
        insecure: listen for other hosts without TLS.
        allow_json: also serve clients without a proof of the secret. All that can reach it can then register names.

    Example:
        ```python
        from skipper.control.rpc import ActorServer, MetadataMapping, MetadataResolver, MetadataServer, RpcClient

        class Curriculum:
            def level(self) -> int:
                return 3

        with MetadataServer() as names, ActorServer("127.0.0.1", 0, MetadataMapping(names.address)) as server:
            server.register("curriculum", Curriculum())
            client = RpcClient(MetadataResolver(names.address), Curriculum, name="curriculum")
            print(client.level.sync())  # 3
        ```
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: bytes | None = None,
        tls: Tls | None = None,
        certs: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        allow_json: bool = False,
    ) -> None:
        super().__init__(
            host,
            port,
            namespace=namespaces.ROOT,
            secret=secret,
            tls=tls,
            certs=certs,
            insecure=insecure,
            allow_json=allow_json,
        )
        self.register(_NAME, MetadataService())

    def environment(self) -> dict[str, str]:
        """The environment variables with which a process finds this service without an argument."""
        return {METADATA_VARIABLE: self.address}


class _MetadataClient:
    """The common part of the resolver and the mapping."""

    def __init__(
        self, address: str | None, namespace: str | None, secret: bytes | None, tls: Tls | None, timeout: float
    ) -> None:
        address = address or os.environ.get(METADATA_VARIABLE)
        if not address:
            raise ValueError(f"where is the metadata service? Pass its host:port, or set {METADATA_VARIABLE}")
        host, port = split_address(address)
        self.namespace = namespaces.namespace() if namespace is None else namespaces.check_namespace(namespace)
        self.address = address
        self._client = RpcClient(
            FixedResolver(str(ServiceUrl(ACTOR, host, port, _NAME))),
            MetadataService,
            RpcOptions(timeout=timeout, retries=_RETRIES),
            name=f"/{_NAME}",
            secret=secret,
            tls=tls,
        )

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._client, method).sync(*arguments)
        except ControlError as error:
            raise ResolverError(f"the metadata service at {self.address} does not answer: {error}") from error


class MetadataResolver(_MetadataClient):
    """Asks the metadata service.

    The example of `MetadataServer` shows one.

    Args:
        address: its ``host:port``; None: the value of the environment variable ``SKIPPER_METADATA``.
        namespace: the namespace of names; None: that of `namespaces.namespace`.
        secret: the secret of the service; None: that of the user.
        tls: certificates for TLS.
        timeout: seconds to wait for an answer.

    Raises:
        ValueError: there is no address, or it is not valid.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        namespace: str | None = None,
        secret: bytes | None = None,
        tls: Tls | None = None,
        timeout: float = _TIMEOUT_S,
    ) -> None:
        super().__init__(address, namespace, secret, tls, timeout)

    def resolve(self, name: str) -> list[str]:
        """The URLs of a name, the latest registration first.

        Raises:
            NameNotFoundError: (a `LookupError`) it is not registered.
            ResolverError: the service does not answer.
            ValueError: it is not a valid name.
        """
        absolute = namespaces.absolute(name, self.namespace)
        urls: list[str] = self._ask("resolve", absolute)
        if not urls:
            raise NameNotFoundError(f"{absolute!r} is not registered with the metadata service at {self.address}")
        return urls

    def names(self, prefix: str = "") -> dict[str, list[str]]:
        """Absolute names that begin with ``prefix``, or all of the namespace, with their URLs.

        Raises:
            ResolverError: the service does not answer.
        """
        within = "/" if self.namespace == namespaces.ROOT else f"/{self.namespace}/"
        found: dict[str, list[str]] = self._ask("names", prefix or within)
        return found

    def __repr__(self) -> str:
        return f"MetadataResolver({self.address!r}, namespace={self.namespace!r})"


class MetadataMapping(_MetadataClient):
    """Registers names with the metadata service, and renews what it has registered; a context manager.

    The registrations end within ``lease_s`` of the end of this process, in any way, and also while it is stopped. It
    renews them on a thread of its own, every third of that time, and registers again what the service has lost.

    The example of `MetadataServer` shows one.

    Args:
        address: the service's ``host:port``; None: the value of the environment variable ``SKIPPER_METADATA``.
        namespace: the namespace of names; None: that of `namespaces.namespace`.
        secret: the secret of the service; None: that of the user.
        tls: certificates for TLS.
        lease_s: the lease in seconds, from 0.1 to 3600.

    Raises:
        ValueError: there is no address, or it is not valid, or the lease is out of its range.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        namespace: str | None = None,
        secret: bytes | None = None,
        tls: Tls | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(address, namespace, secret, tls, _TIMEOUT_S)
        if not MIN_LEASE_S <= check_seconds("lease_s", lease_s) <= MAX_LEASE_S:
            raise ValueError(f"lease_s is from {MIN_LEASE_S:g} to {MAX_LEASE_S:g}, not {lease_s!r}")
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], str] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, name: str, target_url: str) -> None:
        """Register a service, and keep it registered.

        Raises:
            ResolverError: the service does not answer, or does not accept the name.
            ValueError: it is not a valid name.
        """
        key = (namespaces.absolute(name, self.namespace), target_url)
        lease = secrets.token_hex(16)
        self._ask("register", lease, *key, self._lease_s)
        with self._lock:
            self._held[key] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_for_ever, name="name-leases", daemon=True)
                self._thread.start()

    def unregister(self, name: str, target_url: str) -> None:
        """End a registration of this mapping, if there is one.

        Raises:
            ResolverError: the service does not answer; the registration ends with its lease.
        """
        with self._lock:
            lease = self._held.pop((namespaces.absolute(name, self.namespace), target_url), None)
        if lease is not None:
            self._ask("withdraw", lease)

    def close(self) -> None:
        """Stop renewing: the registrations end with their leases."""
        self._closing.set()
        super().close()

    def __enter__(self) -> MetadataMapping:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _renew_for_ever(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            with self._lock:
                held = dict(self._held)
            try:
                self._renew(held)
            except ControlError as error:
                _log.warning("the names at %s could not be renewed, and are tried again: %s", self.address, error)

    def _renew(self, held: dict[tuple[str, str], str]) -> None:
        forgotten: Sequence[str] = self._client.renew.sync(list(held.values())) if held else ()
        for key, lease in held.items():
            with self._lock:
                is_held = self._held.get(key) == lease
            if lease in forgotten and is_held:
                self._client.register.sync(lease, *key, self._lease_s)
