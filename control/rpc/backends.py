"""`ActorBackends`: a client's list of the servers that have one name, and which of them gets the next call."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipper.control.model.errors import (
    ConnectionLostError,
    ControlError,
    DeadlineError,
    NameNotFoundError,
    NamingError,
    ResolverError,
    UnreachableError,
)
from skipper.control.rpc.resolver import Resolver
from skipper.control.rpc.urls import ACTOR, ServiceUrl
from skipper.control.rpc.wire.messages import Query
from skipper.control.wire import grpc_poller
from skipper.control.wire.certificates import Tls

if TYPE_CHECKING:
    from skipper.control.rpc.wire.channel import ActorChannel

_log = logging.getLogger("skipper.control")

CONNECT_TIMEOUT_S = 5.0
REFRESH_S = 5.0
"""After this time a client resolves the name again, in the background."""

QUIET_S = 1.0
"""A server that has not answered for this long may be gone: nothing watches an idle connection."""

_AVOIDED_S = 1.0
"""A server that could not be reached is the last choice for this long."""


class ActorBackend:
    """One server that has, or had, an actor with the name.

    Attributes:
        url: where it is.
        handle: handle of the actor there, or None if unknown.
        outstanding: how many calls of this client it has not answered.
        avoided_until: until then it is chosen only if there is no other.
        used: number of its latest call.
        answered_at: when it last answered.
        is_gone: whether it no longer has the name.
    """

    def __init__(self, url: ServiceUrl, channel: ActorChannel, handle: str | None) -> None:
        self.url = url
        self.channel = channel
        self.handle = handle
        self.outstanding = 0
        self.avoided_until = 0.0
        self.used = 0
        self.answered_at = time.monotonic()
        self.is_gone = False

    @property
    def is_ready(self) -> bool:
        """Whether a call can be sent at once."""
        return self.handle is not None and self.channel.is_open


class ActorBackends:
    """What a client knows about a name; for any number of threads.

    With ``handle``, that one actor is called, even if another gets its name later; otherwise the name decides.
    """

    def __init__(
        self,
        resolver: Resolver,
        name: str,
        *,
        secret: bytes,
        tls: Tls | None,
        max_message_nbytes: int,
        handle: str | None = None,
    ) -> None:
        self.name = name
        self.pinned = handle
        self._resolver = resolver
        self._secret = secret
        self._tls = tls
        self._max_nbytes = max_message_nbytes
        self._lock = threading.Lock()
        self._known: dict[str, ActorBackend] = {}
        self._resolved_at: float | None = None
        self._is_stale = True
        self._is_refreshing = False
        self._is_closed = False
        self._numbers = itertools.count(1)

    def take_ready(self, *, surely: bool = False) -> ActorBackend | None:
        """A backend that a call can be sent to at once; None if there is none.

        Args:
            surely: only one that has answered recently, for a call that must not be lost on its way.
        """
        while (best := self._choose_ready(surely=surely)) is not None and best.channel.let_go_if_ended():
            with self._lock:
                best.handle = self.pinned  # another server may answer there the next time
            self.give_back(best, has_answered=False)
        return best

    def _choose_ready(self, *, surely: bool) -> ActorBackend | None:
        with self._lock:
            ready = [backend for backend in self._known.values() if backend.is_ready]
            if self._is_stale or not ready:
                return None
            best = ready[0] if len(ready) == 1 else min(ready, key=self._rank)
            if best.avoided_until > time.monotonic() or (surely and _is_quiet(best)):
                return None
            self._lend(best)
            is_old = self._resolved_at is None or time.monotonic() - self._resolved_at > REFRESH_S
        if is_old:
            self._refresh_beside()
        return best

    def take(self, deadline: float | None, *, surely: bool = False) -> ActorBackend:
        """A reachable backend for a call. If needed, all of them are tried.

        Args:
            deadline: the deadline, as `time.monotonic` counts.
            surely: if it has not answered recently, check first that it is still there.

        Raises:
            NamingError: the name leads to no server.
            UnreachableError: no server that has the name can be reached.
            AuthenticationError: the reachable servers do not know the client's secret.
            DeadlineError: the deadline passed first.
        """
        if (ready := self.take_ready(surely=surely)) is not None:
            return ready
        was_fresh = self._is_stale
        if was_fresh:
            self._resolve()
        try:
            return self._take_reachable(deadline, surely)
        except DeadlineError:
            raise
        except ControlError:
            if was_fresh:
                raise
            self._resolve()
            return self._take_reachable(deadline, surely)

    def keep(self, backend: ActorBackend) -> None:
        """Count one more call at a backend. `give_back` ends it."""
        with self._lock:
            self._lend(backend)

    def give_back(self, backend: ActorBackend, *, has_answered: bool = True, is_out_of_reach: bool = False) -> None:
        """Note that a call is over, and whether the backend could not be reached."""
        with self._lock:
            backend.outstanding -= 1
            if is_out_of_reach:
                self._is_stale = True
                backend.avoided_until = time.monotonic() + _AVOIDED_S
                backend.handle = self.pinned  # another server may answer there the next time
            elif has_answered:
                backend.answered_at = time.monotonic()
            is_unused = backend.is_gone and backend.outstanding == 0
        if is_unused:
            backend.channel.close()

    def expired(self, backend: ActorBackend) -> None:
        """Note that the actor of a backend's handle is gone."""
        with self._lock:
            if self.pinned is None:
                backend.handle = None
                self._is_stale = True

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._is_closed = True
            backends = list(self._known.values())
        for backend in backends:
            backend.channel.close()

    def _rank(self, backend: ActorBackend) -> tuple[bool, int, int]:
        return backend.avoided_until > time.monotonic(), backend.outstanding, backend.used

    def _lend(self, backend: ActorBackend) -> None:
        backend.outstanding += 1
        backend.used = next(self._numbers)

    def _take_reachable(self, deadline: float | None, surely: bool) -> ActorBackend:
        with self._lock:
            candidates = sorted(self._known.values(), key=self._rank)
        failure: ControlError | None = None
        for backend in candidates:
            try:
                self._connect(backend, deadline, surely=surely)
            except DeadlineError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeadlineError(f"no connection to {self.name!r} in time: {failure or error}") from error
                failure = failure or UnreachableError(str(error))
            except ConnectionLostError as error:  # the check was lost, not the call
                failure = failure or UnreachableError(str(error))
            except ControlError as error:
                failure = failure or error
            else:
                with self._lock:
                    self._lend(backend)
                return backend
            backend.avoided_until = time.monotonic() + _AVOIDED_S
        raise failure or NameNotFoundError(f"{self.name!r} resolves to no server")

    def _connect(self, backend: ActorBackend, deadline: float | None, *, surely: bool = False) -> None:
        """Connect to a backend; with ``surely``, also check that a ready one still answers."""
        timeout = CONNECT_TIMEOUT_S
        if deadline is not None:
            timeout = min(timeout, max(deadline - time.monotonic(), 0))
        if self._is_closed:
            raise UnreachableError(f"the client of {self.name!r} has been closed")
        backend.channel.open(timeout)
        if backend.handle is None or (surely and _is_quiet(backend)):
            within = getattr(self._resolver, "namespace", None) or ""
            query = Query(actor=backend.url.path, namespace="" if self.name.startswith("/") else within)
            actors = backend.channel.list_actors(query, timeout)
            backend.answered_at = time.monotonic()
            if self.pinned is None and not actors:
                raise NameNotFoundError(
                    f"{backend.url.target} serves no actor {backend.url.path!r}, or does not allow this client to "
                    "call it"
                )
            backend.handle = self.pinned or actors[0].handle

    def _resolve(self) -> None:
        """Resolve the name again. Several threads may do so at the same time."""
        try:
            urls = self._resolver.resolve(self.name)
        except NamingError:
            raise
        except Exception as error:
            raise ResolverError(f"the resolver failed at {self.name!r}: {type(error).__name__}: {error}") from error
        found = [url for url in map(ServiceUrl.parse, urls) if url.scheme == ACTOR]
        if not found:
            words = f", only {', '.join(urls)}" if urls else ""
            raise NameNotFoundError(f"{self.name!r} resolves to no actor server{words}")
        self._learn(found)

    def _learn(self, urls: Sequence[ServiceUrl]) -> None:
        grpc_poller.choose()
        from skipper.control.rpc.wire.channel import ActorChannel

        unused: list[ActorBackend] = []
        with self._lock:
            named = {str(url): url for url in urls}
            for text in self._known.keys() - named.keys():
                gone = self._known.pop(text)
                gone.is_gone = True
                if gone.outstanding == 0:
                    unused.append(gone)
            for text, url in named.items():
                if text not in self._known:
                    channel = ActorChannel(url.target, self._secret, tls=self._tls, max_message_nbytes=self._max_nbytes)
                    self._known[text] = ActorBackend(url, channel, self.pinned)
            self._is_stale = False
            self._resolved_at = time.monotonic()
            are_ready = all(backend.is_ready for backend in self._known.values())
        for backend in unused:
            backend.channel.close()
        if len(urls) > 1 and not are_ready:
            self._refresh_beside(resolve=False)

    def _refresh_beside(self, *, resolve: bool = True) -> None:
        """On a separate thread, find out what has changed and connect to new backends."""
        with self._lock:
            if self._is_refreshing or self._is_closed:
                return
            self._is_refreshing = True
        threading.Thread(target=self._refresh, args=(resolve,), name="rpc-refresh", daemon=True).start()

    def _refresh(self, resolve: bool) -> None:
        try:
            if resolve:
                self._resolve()
            with self._lock:
                backends = [backend for backend in self._known.values() if not backend.is_ready]
            for backend in backends:
                try:
                    self._connect(backend, None)
                except ControlError:
                    backend.avoided_until = time.monotonic() + _AVOIDED_S
        except ControlError as error:
            _log.debug("keeping the known addresses of %s: %s", self.name, error)
            with self._lock:
                self._resolved_at = time.monotonic()
        finally:
            with self._lock:
                self._is_refreshing = False


def _is_quiet(backend: ActorBackend) -> bool:
    return time.monotonic() - backend.answered_at > QUIET_S
