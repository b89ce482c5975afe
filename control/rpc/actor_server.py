"""`ActorServer`: objects of plain classes, and meshes of actors, that other processes call by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import logging
import os
import threading
from collections.abc import Collection
from typing import Any, cast

from skipper.control.api import namespaces
from skipper.control.api.mesh import ActorMesh
from skipper.control.model.bounds import check_count, check_port, check_seconds
from skipper.control.model.errors import CertificateError, ControlError, NoSuchMethodError
from skipper.control.model.future import Future
from skipper.control.rpc.encoding import decode_arguments, encode_error, encode_mesh_error, encode_result
from skipper.control.rpc.hosted import Hosted, LateError, MeshActor, PlainActor
from skipper.control.rpc.operations import Operations
from skipper.control.rpc.resolver import NameMapping
from skipper.control.rpc.scope import Scope
from skipper.control.rpc.urls import ACTOR
from skipper.control.rpc.user_secret import shared_secret
from skipper.control.rpc.wire import messages
from skipper.control.runtime.loop import LoopThread
from skipper.control.support.daemon_threads import DaemonThreads
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.certificates import Certificates, Tls
from skipper.control.wire.identity import Role

_log = logging.getLogger("skipper.control")

_MAX_THREADS = 256
_MAX_CALLS = 1024
_MAX_WAITING = 128


class ActorServer:
    """Serves actors under names; a context manager that starts with the block and stops with it.

    Args:
        host: name or address to listen on.
        port: port to listen on; 0: a free one, see `address`.
        mapping: where the names are registered, if anywhere.
        namespace: the namespace of the names; None: that of ``mapping`` if it has one, or else that of
            `namespaces.namespace`. Clients that look for a name in another namespace do not find the actor.
        secret: the secret that callers have to know, of 16 bytes or more; None: that of the user (see `user_secret`).
        tls: certificate and key for TLS. Without it, or `certs`, the server listens for other hosts only if `insecure`
            is set.
        certs: in place of `tls`, a folder of certificates as `skipper certs` issues them: clients then need one of the
            same cluster, with one of `roles`, that was not revoked. The folder is reloaded when it changes.
        roles: with `certs`, the roles whose holders may call: ``script``, ``host``, ``client``; None: all of them.
        insecure: listen for other hosts without TLS: anyone on the network path can then read what is sent. They still
            cannot change it, and only clients with the secret can call.
        allow_json: also serve clients without a proof of the secret, if they use JSON. No server does this by default,
            also not one that only this host can reach, because a host may have several users.
        advertise: the host name or address to register with `mapping`, if others know this host by another one.
        max_message_nbytes: maximum size of arguments, or of a result.

    Raises:
        ValueError: a number is out of its range, or it may not listen there without TLS, or other hosts could not reach
            the address that it would advertise; or both `tls` and `certs` are given, or `roles` without `certs`, or
            there is no such role.
        TypeError: a number has another type.
        CertificateError: (a `ValueError`) TLS cannot use the folder, or it is for a client.
        UnsafeFileError: others could read the user's secret.

    Example:
        ```python
        from skipper.control.rpc import ActorServer, FixedResolver, RpcClient

        class Adder:  # any class
            def add(self, a: int, b: int) -> int:
                return a + b

        with ActorServer("127.0.0.1", 0) as server:
            server.register("adder", Adder())
            client = RpcClient(FixedResolver(f"actor://{server.address}/adder"), Adder)
            print(client.add.sync(1, 2))  # 3
        ```
    """

    def __init__(
        self,
        host: str,
        port: int,
        mapping: NameMapping | None = None,
        *,
        namespace: str | None = None,
        secret: bytes | None = None,
        tls: Tls | None = None,
        certs: str | os.PathLike[str] | None = None,
        roles: Collection[Role | str] | None = None,
        insecure: bool = False,
        allow_json: bool = False,
        advertise: str | None = None,
        max_message_nbytes: int = messages.MAX_MESSAGE_NBYTES,
    ) -> None:
        check_port("port", port)
        check_count("max_message_nbytes", max_message_nbytes, 1, messages.LARGEST_MESSAGE_NBYTES)
        if not isinstance(host, str):
            raise TypeError(f"host is the name or address of one, not {type(host).__name__}")
        if tls is not None and certs is not None:
            raise ValueError("certs= takes the place of tls=: pass one of them")
        if roles is not None and certs is None:
            raise ValueError(
                "roles= needs certificates: pass certs= too; without them everybody who knows the secret may call"
            )
        admitted = frozenset(Role if roles is None else map(Role, roles))
        if tls is None and certs is None and not insecure and not _is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other hosts: pass certs= or tls=, or insecure=True where the network is "
                "trusted"
            )
        if mapping is not None and advertise is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(f"other hosts cannot call {host!r}: pass advertise= with an address that they can reach")
        self.host = advertise or host
        self.port = port
        self.mapping = mapping
        self._namespace = None if namespace is None else namespaces.check_namespace(namespace)
        self._listens_on = host
        self._secret = shared_secret(secret)
        self._roles = admitted
        self._tls = tls if certs is None else _certificates(certs)
        self._allow_json = allow_json
        self._max_nbytes = max_message_nbytes
        self._catalog = ActorCatalog(mapping, self._namespace)
        self._starting = threading.Lock()
        self._listener: Any = None
        self._executor = DaemonThreads(_MAX_THREADS, name="actor-server")
        self._operations = Operations(self._run)
        self._loop: LoopThread | None = None
        self._loop_starting = threading.Lock()

    @property
    def address(self) -> str:
        """``host:port`` for clients to connect to; the port is known when the server has been started."""
        return addresses.at(self.host, self.port)

    @property
    def namespace(self) -> str:
        """The namespace of its names."""
        found = self._namespace if self._namespace is not None else getattr(self.mapping, "namespace", None)
        return found if found is not None else namespaces.namespace()

    def register(self, name: str, instance: object, *, concurrency: int = 1, replace: bool = False) -> str:
        """Serve an object, or an `ActorMesh`, under a name.

        Clients can call all methods of an object whose names do not begin with an underscore, plain or ``async``; of a
        mesh they can call the endpoints: one actor answers with its result, several with a `ValueMesh`. A mesh that
        fails or is stopped loses its name.

        Args:
            name: name of the actor; absolute, or in the server's namespace.
            instance: the object to serve; it is not copied.
            concurrency: how many calls of an object may run at the same time, each in a thread of its own, or on the
                event loop of the server; with 1 the object need not be thread-safe. Further calls wait in the order of
                their arrival. It does not apply to actors of a mesh.
            replace: replace an actor that this server already has under the name.

        Returns:
            The handle of this actor.

        Raises:
            ValueError: it is not a valid name, or this server has an actor of that name, or `concurrency` is below 1.
            RuntimeError: the server has been stopped.
            NamingError: the mapping could not register it.
        """
        namespaces.check_name(name)
        check_count("concurrency", concurrency, 1)
        hosted: Hosted
        if isinstance(instance, ActorMesh):
            hosted = MeshActor(name, cast(Any, instance))
        else:
            hosted = PlainActor(
                name, instance, concurrency=concurrency, max_waiting=_MAX_WAITING, run_async=self._run_async
            )
        self._catalog.add(hosted, replace=replace)
        if isinstance(hosted, MeshActor):
            self._watch(hosted)
        return hosted.handle

    def unregister(self, name: str) -> None:
        """Stop serving an actor. Calls that are running continue.

        Raises:
            KeyError: there is no actor of this name.
        """
        self._catalog.remove(name)

    def start(self) -> ActorServer:
        """Listen, serve, and register the names with the mapping.

        Returns:
            The server itself.

        Raises:
            WireError: the server cannot listen on the address.
            RuntimeError: it has been started, or stopped, before.
            NamingError: the mapping could not register a name; the server has been stopped.
        """
        grpc_poller.choose()
        from skipper.control.rpc.wire.listener import ActorListener

        with self._starting:
            if self._listener is not None or self._catalog.is_closed:
                raise RuntimeError("an actor server can be started only once: make another one")
            self._listener = ActorListener(
                self,
                addresses.at(self._listens_on, self.port),
                self._secret,
                executor=self._executor,
                tls=self._tls,
                roles=self._roles,
                takes_open_json=self._allow_json,
                max_message_nbytes=self._max_nbytes,
                max_calls=_MAX_CALLS,
            )
        self.port = self._listener.port
        try:
            self._catalog.publish(self.address)
        except BaseException:
            self.stop(grace_s=0)
            raise
        return self

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Unregister the names, accept no more calls, and wait for those that are running. It may be called again.

        Args:
            grace_s: seconds to wait; calls that have not ended by then are aborted, and operations are cancelled.
        """
        grace_s = check_seconds("grace_s", grace_s)
        if self._catalog.close():
            return
        if self._listener is not None:
            self._listener.stop(grace_s)
        self._operations.cancel_all()
        self._executor.shutdown(wait=False)
        if self._loop is not None:
            self._loop.run(_cancel_all(), timeout=1.0)
            self._loop.close(timeout=1.0)

    def __enter__(self) -> ActorServer:
        return self if self._listener is not None else self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        names = ", ".join(sorted(each.name for each in self._catalog.all()))
        return f"<ActorServer {self.address}: {names or 'no actors'}>"

    # Requests of the listener

    def invoke(self, call: messages.MethodCall, remaining_s: float | None) -> messages.CallResult:
        """Call a method of an actor."""
        return self._run(call, Scope(remaining_s))

    def list_methods(self, query: messages.Query) -> tuple[messages.MethodInfo, ...] | messages.CallFailure:
        """The methods of an actor."""
        found = self._find(query.handle, query.actor)
        return found if isinstance(found, messages.CallFailure) else found.methods()

    def list_actors(self, query: messages.Query) -> tuple[messages.ActorInfo, ...]:
        """The actors, or the one with the given name, if it is here."""
        hosted = self._catalog.all()
        if query.actor:
            meant = self._catalog.by_name(query.actor)
            hosted = [] if meant is None else [meant]
        if query.namespace and query.namespace != self.namespace:
            hosted = [each for each in hosted if each.name.startswith("/")]
        return tuple(messages.ActorInfo(each.name, each.handle, each.class_name) for each in hosted)

    def start_operation(self, start: messages.Start) -> messages.OperationState:
        """Start an operation."""
        return self._operations.start(start)

    def poll_operation(self, query: messages.OperationQuery, remaining_s: float | None) -> messages.OperationState:
        """The state of an operation."""
        return self._operations.poll(query, remaining_s)

    def cancel_operation(self, query: messages.OperationQuery) -> messages.OperationState:
        """Cancel an operation."""
        return self._operations.cancel(query)

    def _run(self, call: messages.MethodCall, scope: Scope) -> messages.CallResult:
        hosted = self._find(call.handle, call.actor)
        if isinstance(hosted, messages.CallFailure):
            return messages.CallResult(failure=hosted)
        try:
            args, kwargs = decode_arguments(call)
            result = hosted.call(call.method, args, kwargs, scope)
        except NoSuchMethodError as error:
            return messages.CallResult(failure=messages.CallFailure(messages.Code.NO_SUCH_METHOD, str(error)))
        except ControlError as error:
            encode = encode_mesh_error if isinstance(hosted, MeshActor) else encode_error
            return messages.CallResult(failure=encode(error, is_json=call.is_json))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the caller gets any error of a method)
            return messages.CallResult(failure=encode_error(error, is_json=call.is_json))
        return encode_result(result, is_json=call.is_json, most_nbytes=self._max_nbytes)

    def _find(self, handle: str, name: str) -> Hosted | messages.CallFailure:
        if handle:
            return self._catalog.by_handle(handle) or messages.CallFailure(
                messages.Code.HANDLE_EXPIRED, "the actor of this handle is gone"
            )
        return self._catalog.by_name(name) or messages.CallFailure(
            messages.Code.NO_SUCH_ACTOR, f"there is no actor {name!r} at {self.address}"
        )

    def _run_async(self, awaitable: Any, scope: Scope) -> Any:
        with self._loop_starting:
            if self._loop is None:
                self._loop = LoopThread()
        task = asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop.loop)
        scope.when_cancelled(task.cancel)
        concurrent.futures.wait((task,), scope.remaining_s())
        if not task.done():
            task.cancel()
            raise LateError
        try:
            return task.result()
        except concurrent.futures.CancelledError:
            raise LateError from None

    def _watch(self, hosted: MeshActor) -> None:
        """Remove the name of a mesh that fails or has ended."""

        def ended(_: Future[Any]) -> None:
            self._catalog.forget(hosted)  # at once; unregistering the name may take time
            threading.Thread(target=self._catalog.drop, args=(hosted,), name="actor-server-drop", daemon=True).start()

        hosted.ended.add_done_callback(ended)


class ActorCatalog:
    """The actors of a server. Names are compared without the slash that makes them absolute.

    A mapping may be slow to register a name; looking up an actor never waits for it. Names are registered in the given
    namespace, or else in that of the mapping.
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
        """Add an actor.

        Raises:
            ValueError: there is one with that name, and `replace` is not set.
            RuntimeError: the catalog has been closed.
            NamingError: the mapping could not register it.
        """
        key = _key(hosted.name)
        with self._telling:
            if self.is_closed:
                raise RuntimeError("the server has been stopped")
            former = self._by_name.get(key)
            if former is not None and not replace:
                raise ValueError(
                    f"this server already has an actor called {hosted.name!r}; pass replace=True to replace it"
                )
            with self._lock:
                if former is not None:
                    self._by_handle.pop(former.handle, None)
                self._by_name[key] = self._by_handle[hosted.handle] = hosted
            self._publish(hosted.name)

    def remove(self, name: str) -> None:
        """Remove the actor with a name.

        Raises:
            KeyError: there is none.
        """
        with self._telling:
            hosted = self._by_name.get(_key(name))
            if hosted is None:
                raise KeyError(f"this server has no actor called {name!r}")
            self.drop(hosted)

    def drop(self, hosted: Hosted) -> None:
        """Remove an actor, if it still has its name."""
        with self._telling:
            self.forget(hosted)
            with self._lock:
                if self._by_name.get(_key(hosted.name)) is not hosted:
                    return
                del self._by_name[_key(hosted.name)]
            self._withdraw(hosted.name)

    def forget(self, hosted: Hosted) -> None:
        """Stop finding an actor by its handle. Never waits."""
        with self._lock:
            self._by_handle.pop(hosted.handle, None)

    def publish(self, address: str) -> None:
        """Register all names, and from now on every new one, with the mapping.

        Args:
            address: ``host:port`` at which others dial the server.

        Raises:
            NamingError: the mapping could not register a name.
        """
        with self._telling:
            self._address = address
            for hosted in self.all():
                self._publish(hosted.name)

    def close(self) -> bool:
        """Unregister all names, and accept no more actors.

        Returns:
            Whether it was closed before.
        """
        with self._telling:
            was_closed, self.is_closed = self.is_closed, True
            for name in list(self._told):
                self._withdraw(name)
            return was_closed

    def by_name(self, name: str) -> Hosted | None:
        """The actor with a name, if there is one."""
        with self._lock:
            return self._by_name.get(_key(name))

    def by_handle(self, handle: str) -> Hosted | None:
        """The actor with a handle, if it is still there."""
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
            except (ControlError, OSError) as error:  # its registration expires by itself
                _log.warning("the name %s could not be unregistered: %s", name, error)

    def _in_namespace(self, name: str) -> str:
        """The name for the mapping: in a given namespace, names become absolute."""
        return name if self._namespace is None else namespaces.absolute(name, self._namespace)


def _key(name: str) -> str:
    return name.removeprefix("/")


async def _cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _certificates(folder: str | os.PathLike[str]) -> Certificates:
    certificates = Certificates(folder)
    if certificates.identity.role is Role.CLIENT:
        raise CertificateError(
            f"{os.fspath(folder)} holds the certificate of a client, and a server needs that of a host"
        )
    return certificates


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
