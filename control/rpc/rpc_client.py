"""`RpcClient`: calls the methods of an actor by its name, at any server that has the actor at the moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast

from skipper.control.model.bounds import check_count, check_optional_seconds
from skipper.control.model.endpoint_spec import is_idempotent
from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, Promise
from skipper.control.rpc.attempts import Attempts, Outcome
from skipper.control.rpc.backends import ActorBackends
from skipper.control.rpc.encoding import open_answer
from skipper.control.rpc.hosted import checker, public_methods
from skipper.control.rpc.remote_operation import RemoteOperation, start_operation
from skipper.control.rpc.resolver import Resolver
from skipper.control.rpc.scope import deadline_after
from skipper.control.rpc.user_secret import shared_secret
from skipper.control.rpc.wire.messages import LARGEST_MESSAGE_NBYTES, MAX_MESSAGE_NBYTES
from skipper.control.wire.certificates import Tls
from skipper.control.wire.payload import pack_inert_arguments

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """One actor of an `ActorServer`; it may be passed around.

    `RpcClient.pin` returns it, and ``RpcClient(handle, Cls)`` is a client of it. When the actor is gone, because its
    server has ended, or because another one has its name now, calls raise `HandleExpiredError`, with any number of
    retries, and are never delivered to its successor.

    Attributes:
        url: the URL of the actor.
        handle: identifies it among all actors that this URL has had.

    Example:
        ```python
        from skipper.control import HandleExpiredError
        from skipper.control.rpc import ActorHandle, ActorServer, FixedResolver, RpcClient

        class Counter:
            def read(self) -> int:
                return 0

        with ActorServer("127.0.0.1", 0) as server:
            server.register("counter", Counter())
            client = RpcClient(FixedResolver(f"actor://{server.address}/counter"), Counter)
            handle: ActorHandle = client.pin()
            server.register("counter", Counter(), replace=True)
            try:
                RpcClient(handle, Counter).read.sync()
            except HandleExpiredError:
                print("another counter has the name")  # another counter has the name
        ```
    """

    url: str
    handle: str

    def resolve(self, name: str) -> list[str]:
        """Its URL, for any name: a handle is a `Resolver`."""
        return [self.url]


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """Options of calls: deadline and retries.

    Attributes:
        timeout: seconds for a call, including retries; None sets no limit. In either case, a call that is made while
            another one is served has at most the time that is left of that one.
        retries: how often a call may be repeated after its first attempt. An attempt is one request that is sent to a
            server, or a search that found no server. A call is repeated only if it was certainly not delivered, or may
            run twice (`control.idempotent`).

    Example:
        ```python
        from skipper.control import idempotent
        from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, RpcMethod, RpcOptions

        class Table:
            @idempotent
            def read(self, key: str) -> str:
                return key.upper()

        with ActorServer("127.0.0.1", 0) as server:
            server.register("table", Table())
            resolver = FixedResolver(f"actor://{server.address}/table")
            client = RpcClient(resolver, Table, RpcOptions(timeout=10, retries=2))
            read: RpcMethod = client.read
            print(read.sync("a"), read("b").get())  # A B
        ```
    """

    timeout: float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        seconds = check_optional_seconds("timeout", self.timeout)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is a number of seconds above 0, or None, not {self.timeout!r}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries is an int, 0 or more, not {self.retries!r:.80}")

    def copy(self) -> RpcOptions:
        """The same options: this object, because it cannot be changed."""
        return self


class RpcClient(Generic[T]):
    """Calls an actor by name: ``await client.method(...)``, or ``client.method(...).get(timeout)`` in a thread.

    It has every public method of ``cls``. Addresses are cached; the client resolves the name again when the actor's
    handle has expired, when no server answers, and every few seconds in the background. If several servers have the
    name, a call goes to the one with the fewest outstanding calls of this client. Any number of threads and event loops
    may use it; the clients that `with_options` returns share all of this.

    Args:
        resolver: resolves the name; or an `ActorHandle`, for a client of that one actor.
        cls: the class of the actor, or one with the same methods. It is not sent.
        options: how calls are made.
        name: name of the actor; None: the name of the class.
        secret: the secret of the server; None: that of the user (see `user_secret`).
        tls: certificates for TLS; the server has to use TLS, too.
        max_message_nbytes: maximum size of arguments, or of a result.

    Raises:
        ValueError: the secret is too short, or a number is out of its range.
        UnsafeFileError: others could read the user's secret.

    Example:
        ```python
        from skipper.control.rpc import ActorServer, MetadataMapping, MetadataResolver, MetadataServer, RpcClient

        class Curriculum:
            def raise_to(self, level: int) -> int:
                return level

        with MetadataServer() as names, ActorServer("127.0.0.1", 0, MetadataMapping(names.address)) as server:
            server.register("curriculum", Curriculum())
            resolver = MetadataResolver(names.address)  # elsewhere, with this address alone
            client = RpcClient(resolver, Curriculum, name="curriculum").with_options(timeout=10, retries=2)
            print(client.raise_to(3).get())  # 3
        ```
    """

    def __init__(
        self,
        resolver: Resolver,
        cls: type[T],
        options: RpcOptions | None = None,
        *,
        name: str | None = None,
        secret: bytes | None = None,
        tls: Tls | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._cls = cls
        self._options = options if options is not None else RpcOptions()
        self._backends = ActorBackends(
            resolver,
            name if name is not None else cls.__name__,
            secret=shared_secret(secret),
            tls=tls,
            max_message_nbytes=check_count("max_message_nbytes", max_message_nbytes, 1, LARGEST_MESSAGE_NBYTES),
            handle=resolver.handle if isinstance(resolver, ActorHandle) else None,
        )

    def with_options(self, **kwargs: Any) -> RpcClient[T]:
        """The same client with other options: ``client.with_options(timeout=3, retries=2)``.

        Raises:
            TypeError: there is no such option, or the timeout is not a number.
            ValueError: it cannot have this value.
        """
        other = RpcClient.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._options = replace(self._options, **kwargs)
        return other

    def pin(self, *, timeout: float = 10.0) -> ActorHandle:
        """A handle of the actor that a call would go to now, even if another one gets its name; waits in this thread.

        Raises:
            ControlError: there is no such actor, as for a call.
        """
        backend = self._backends.take(deadline_after(timeout))
        self._backends.give_back(backend)
        return ActorHandle(str(backend.url), cast(str, backend.handle))

    def close(self) -> None:
        """Close the connections; calls in flight end with an error. Also for those that `with_options` has returned."""
        self._backends.close()

    def __getattr__(self, name: str) -> RpcMethod[..., Any]:
        if name.startswith("_") or name not in public_methods(self._cls):
            raise AttributeError(f"{self._cls.__qualname__} has no public method {name!r}")
        return RpcMethod(self, name, self._options, self._cls)

    def __enter__(self) -> RpcClient[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RpcClient of {self._backends.name!r}: {self._cls.__qualname__}>"


class RpcMethod(Generic[P, R]):
    """A method of a remote actor, as a client calls it.

    `RpcClient` makes them. Make one yourself for a method whose name the client itself has:
    ``RpcMethod(client, "close", RpcOptions(), Cls)(...)``.

    The example of `RpcOptions` shows one.

    Args:
        client: the client.
        name: name of the method.
        options: how it is called.
        cls: the class of the actor.

    Raises:
        AttributeError: there is no such method.
    """

    def __init__(self, client: RpcClient[Any], name: str, options: RpcOptions, cls: type) -> None:
        self._backends = client._backends
        self._name = name
        self._options = options.copy()
        self._check = checker(cls, name)
        self._is_idempotent = is_idempotent(public_methods(cls)[name])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it without waiting: await the returned future, or ``get`` it.

        Returns:
            A future of what the method returns. Instead of that it may raise `ActorError` (the method raised),
            `NamingError` (the name has no address), `RpcError` (the call failed on its way; the class says whether it
            may have run), `BackpressureError` (too many calls wait there), `DeadlineError` (a `TimeoutError`),
            `SupervisionError` (an actor of a mesh is dead) or `AuthenticationError`.

        Raises:
            TypeError: the arguments do not fit the method.
            PayloadError: (a `TypeError`) they cannot be pickled.
        """
        attempts = self._attempts(args, kwargs)
        future: Promise[R] = Promise()
        attempts.begin(lambda outcome: future.settle_by(lambda: self._open(outcome)))
        return future

    def sync(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it and wait in this thread for the result: shorter than ``method(...).get()``, and takes less time.

        Raises as the future of a call does.
        """
        return cast(R, self._open(self._attempts(args, kwargs).run()))

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Future[RemoteOperation[R]]:
        """Run it on the server for as long as it takes, without a connection that waits for it.

        Returns:
            A future of the operation: it ends when the operation has been started, and raises as a call does.

        Raises:
            TypeError: the arguments do not fit the method.
            PayloadError: (a `TypeError`) they cannot be pickled.
        """
        return start_operation(self._attempts(args, kwargs), self._options.retries)

    def _attempts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempts:
        self._check(*args, **kwargs)
        return Attempts(
            self._backends,
            self._name,
            pack_inert_arguments(args, kwargs),
            deadline=deadline_after(self._options.timeout),
            retries=self._options.retries,
            is_idempotent=self._is_idempotent,
        )

    def _open(self, outcome: Outcome) -> Any:
        if isinstance(outcome, ControlError):
            raise outcome
        return open_answer(outcome, actor=self._backends.name, method=self._name)

    def __repr__(self) -> str:
        return f"<method {self._backends.name}.{self._name}>"
