"""`Resolver`: from the name of a service to its address. And the two smallest implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from skipper.control.model.errors import NameNotFoundError, NamingError
from skipper.control.rpc.urls import ServiceUrl


@runtime_checkable
class Resolver(Protocol):
    """Finds services by name; any number of threads may use it. Users can write their own.

    A resolver with names in one namespace has it as the attribute ``namespace``: if a server of another namespace now
    has an address of this one, it refuses the calls.
    """

    def resolve(self, name: str) -> list[str]:
        """The URLs of all servers that provide the service ``name``.

        Raises:
            NameNotFoundError: (a `LookupError`) no server provides it.
            ResolverError: it cannot be resolved at the moment.
        """


@runtime_checkable
class NameMapping(Protocol):
    """Registers where services are, for resolvers to find them. Users can write their own.

    If it has a method ``unregister(name, target_url)``, that is called at the end of a service.
    """

    def register(self, name: str, target_url: str) -> object:
        """Register that the service ``name`` is at ``target_url`` from now on; the return value is ignored."""


class FixedResolver:
    """Addresses that are known in advance.

    Args:
        *urls: URLs of the only service, for any name; or one mapping from names to URLs.

    Raises:
        ServiceUrlError: (a `ValueError`) one of them is not a URL of a service.
        ValueError: there is no URL.

    Example:
        ```python
        from skipper.control.rpc import FixedResolver

        resolver = FixedResolver({"judge": "actor://10.0.0.1:7000/judge"})
        print(resolver.resolve("judge"))  # ['actor://10.0.0.1:7000/judge']
        ```
    """

    def __init__(self, *urls: str | Mapping[str, Sequence[str] | str]) -> None:
        self._by_name: dict[str, list[str]] | None = None
        self._urls: list[str] = []
        if len(urls) == 1 and isinstance(urls[0], Mapping):
            self._by_name = {name: [one] if isinstance(one, str) else list(one) for name, one in urls[0].items()}
            listed = [url for several in self._by_name.values() for url in several]
        else:
            listed = self._urls = [url for url in urls if isinstance(url, str)]
            if len(listed) != len(urls):
                raise TypeError("FixedResolver takes URLs, or one mapping from names to URLs")
        if not listed:
            raise ValueError("FixedResolver needs a URL")
        for url in listed:
            ServiceUrl.parse(url)

    def resolve(self, name: str) -> list[str]:
        """The given addresses; raises as `Resolver.resolve` does."""
        if self._by_name is None:
            return list(self._urls)
        if not (urls := self._by_name.get(name)):
            raise NameNotFoundError(f"there is no {name!r} among {', '.join(sorted(self._by_name)) or 'no names'}")
        return list(urls)

    def __repr__(self) -> str:
        return f"FixedResolver({self._by_name if self._by_name is not None else ', '.join(self._urls)})"


class ChainResolver:
    """Asks one resolver after another; the first one that knows the name answers.

    Args:
        *resolvers: in the order in which they are asked.

    Raises:
        ValueError: there is none.

    Example:
        ```python
        from skipper.control.rpc import ChainResolver, FixedResolver, GcsResolver

        known = FixedResolver({"controller": "grpc://10.0.0.1:7000/controller"})
        resolver = ChainResolver(known, GcsResolver("my-project"))  # Google Cloud is asked for other names
        print(resolver.resolve("controller"))  # ['grpc://10.0.0.1:7000/controller']
        ```
    """

    def __init__(self, *resolvers: Resolver) -> None:
        if not resolvers:
            raise ValueError("a chain needs a resolver")
        self._resolvers = resolvers

    @property
    def namespace(self) -> str | None:
        """The namespace of its resolvers, if all that have one agree."""
        found = {within for each in self._resolvers if (within := getattr(each, "namespace", None)) is not None}
        return found.pop() if len(found) == 1 else None

    def resolve(self, name: str) -> list[str]:
        """The URLs from the first resolver that knows the name.

        Raises:
            NameNotFoundError: (a `LookupError`) none of them knows it.
            ResolverError: none of them knows it, and one could not resolve it: its error.
        """
        failure: NamingError | None = None
        for resolver in self._resolvers:
            try:
                if urls := resolver.resolve(name):
                    return urls
            except NameNotFoundError:
                continue
            except NamingError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        raise NameNotFoundError(f"no resolver of the chain knows {name!r}")

    def __repr__(self) -> str:
        return f"ChainResolver({', '.join(map(repr, self._resolvers))})"
