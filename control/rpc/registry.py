"""`Registry`: which services are registered, each for as long as its lease is renewed. Pure: no clock, no wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_REGISTRATIONS = 100_000
MIN_LEASE_S = 0.1
MAX_LEASE_S = 3600.0


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
    """Registrations of absolute names. All times are seconds of one rising clock, which the caller reads."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._by_name: dict[str, dict[str, None]] = {}
        self._count = 0
        self._none_before = 0.0
        """No lease expires before this."""

    def register(self, lease: str, name: str, url: str, lease_s: float, now: float) -> None:
        """Take note of a service. A lease that is there already is replaced; the same URL twice counts once.

        Args:
            lease: chosen by whoever registers, and known to nobody else.
            name: absolute.
            url: where the service is.
            lease_s: it expires this long after it was last renewed.
            now: the time.

        Raises:
            ValueError: the lease is too short or too long.
            FullError: there are too many registrations.
        """
        if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
            raise ValueError(f"a lease is for {MIN_LEASE_S:g} to {MAX_LEASE_S:g} s, not for {lease_s!r}")
        self._expire(now)
        self.withdraw(lease)
        if len(self._leases) >= MAX_REGISTRATIONS:
            raise FullError(f"there are {MAX_REGISTRATIONS} registrations already")
        self._count += 1
        self._leases[lease] = _Lease(name, url, lease_s, now + lease_s, self._count)
        self._by_name.setdefault(name, {})[lease] = None
        self._none_before = min(self._none_before, now + lease_s)

    def renew(self, leases: Iterable[str], now: float) -> list[str]:
        """Have leases begin anew; those that are not there are returned."""
        self._expire(now)
        unknown: list[str] = []
        for lease in leases:
            registration = self._leases.get(lease)
            if registration is None:
                unknown.append(lease)
            else:
                registration.expires = now + registration.lease_s
        return unknown

    def withdraw(self, lease: str) -> None:
        """Forget a registration, if it is there."""
        registration = self._leases.pop(lease, None)
        if registration is not None:
            of_name = self._by_name[registration.name]
            del of_name[lease]
            if not of_name:
                del self._by_name[registration.name]

    def resolve(self, name: str, now: float) -> list[str]:
        """The URLs of a service, the latest registration first."""
        self._expire(now)
        found = sorted((self._leases[lease] for lease in self._by_name.get(name, ())), key=lambda each: -each.number)
        return list(dict.fromkeys(each.url for each in found))

    def names(self, prefix: str, now: float) -> dict[str, list[str]]:
        """All services whose names begin with ``prefix``, by name."""
        self._expire(now)
        return {name: self.resolve(name, now) for name in sorted(self._by_name) if name.startswith(prefix)}

    def _expire(self, now: float) -> None:
        if now < self._none_before:
            return
        for lease in [lease for lease, each in self._leases.items() if each.expires <= now]:
            self.withdraw(lease)
        self._none_before = min((each.expires for each in self._leases.values()), default=now + MAX_LEASE_S)
