"""`ActorCatalog`: the actors of one server by name and by handle, and what a mapping has been told of them."""

from __future__ import annotations

import logging
import threading

from skipper.control.api import namespaces
from skipper.control.model.errors import ControlError
from skipper.control.rpc.hosted import Hosted
from skipper.control.rpc.resolver import NameMapping
from skipper.control.rpc.urls import ACTOR

_log = logging.getLogger("skipper.control")


class ActorCatalog:
    """Which actors a server has. Names count without the slash that makes them absolute.

    A mapping may take its time over what it is told; looking up an actor never waits for it.

    Args:
        mapping: who is told of the names, if anybody.
        namespace: that the names are told in; None: in that of the mapping.
    """

    def __init__(self, mapping: NameMapping | None, namespace: str | None) -> None:
        self._mapping = mapping
        self._namespace = namespace
        self._telling = threading.RLock()
        self._lock = threading.Lock()
        self._by_name: dict[str, Hosted] = {}
        self._by_handle: dict[str, Hosted] = {}
        self._told: dict[str, str] = {}
        self._address: str | None = None
        self.is_closed = False

    def add(self, hosted: Hosted, *, replace: bool) -> None:
        """Take an actor in.

        Raises:
            ValueError: there is one of that name, and `replace` is not set.
            RuntimeError: the catalog has been closed.
            NamingError: the mapping could not take note of it.
        """
        key = _key(hosted.name)
        with self._telling:
            if self.is_closed:
                raise RuntimeError("the server has been stopped")
            former = self._by_name.get(key)
            if former is not None and not replace:
                raise ValueError(
                    f"this server has an actor called {hosted.name!r} already; replace=True takes its name away"
                )
            with self._lock:
                if former is not None:
                    self._by_handle.pop(former.handle, None)
                self._by_name[key] = self._by_handle[hosted.handle] = hosted
            self._publish(hosted.name)

    def remove(self, name: str) -> None:
        """Take the actor of a name out.

        Raises:
            KeyError: there is none.
        """
        with self._telling:
            hosted = self._by_name.get(_key(name))
            if hosted is None:
                raise KeyError(f"this server has no actor called {name!r}")
            self.drop(hosted)

    def drop(self, hosted: Hosted) -> None:
        """Take an actor out, if it is still the one of its name."""
        with self._telling:
            self.forget(hosted)
            with self._lock:
                if self._by_name.get(_key(hosted.name)) is not hosted:
                    return
                del self._by_name[_key(hosted.name)]
            self._withdraw(hosted.name)

    def forget(self, hosted: Hosted) -> None:
        """Find an actor by its handle no more. Never waits."""
        with self._lock:
            self._by_handle.pop(hosted.handle, None)

    def publish(self, address: str) -> None:
        """Tell the mapping of all names, and from now on of every new one.

        Args:
            address: ``host:port`` of the server, as others are to dial it.

        Raises:
            NamingError: the mapping could not take note of a name.
        """
        with self._telling:
            self._address = address
            for hosted in self.all():
                self._publish(hosted.name)

    def close(self) -> bool:
        """Take all names back, and take no more actors in.

        Returns:
            Whether it had been closed before.
        """
        with self._telling:
            was_closed, self.is_closed = self.is_closed, True
            for name in list(self._told):
                self._withdraw(name)
            return was_closed

    def by_name(self, name: str) -> Hosted | None:
        """The actor of a name, if there is one."""
        with self._lock:
            return self._by_name.get(_key(name))

    def by_handle(self, handle: str) -> Hosted | None:
        """The actor of a handle, if it is still there."""
        with self._lock:
            return self._by_handle.get(handle)

    def all(self) -> list[Hosted]:
        """All actors that have a name here."""
        with self._lock:
            return list(self._by_name.values())

    def _publish(self, name: str) -> None:
        if self._mapping is not None and self._address is not None and name not in self._told:
            url = f"{ACTOR}://{self._address}/{_key(name)}"
            self._mapping.register(self._in_namespace(name), url)
            self._told[name] = url

    def _withdraw(self, name: str) -> None:
        url = self._told.pop(name, None)
        unregister = getattr(self._mapping, "unregister", None)
        if url is not None and unregister is not None:
            try:
                unregister(self._in_namespace(name), url)
            except (ControlError, OSError) as error:  # its registration ends by itself
                _log.warning("the name %s could not be taken back: %s", name, error)

    def _in_namespace(self, name: str) -> str:
        """What the mapping is told: names in a namespace that was given become absolute."""
        return name if self._namespace is None else namespaces.absolute(name, self._namespace)


def _key(name: str) -> str:
    return name.removeprefix("/")
