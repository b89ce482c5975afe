"""`Service`: the reference that callers use; `Session`: calls that stay with one replica."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from skipper.control.api.actor import Actor
from skipper.control.api.mesh import this_proc
from skipper.control.api.service import ReplicaMetrics, ServiceTemplate
from skipper.control.model.actor import ActorInterface, check_construction, interface_of
from skipper.control.model.bounds import MAX_PROCESSES, check_count
from skipper.control.model.endpoint_spec import checker
from skipper.control.model.errors import ActorDefinitionError
from skipper.control.model.future import Future, Promise
from skipper.control.services.methods import ServiceMethod, SessionMethod
from skipper.control.services.replica_controller import ReplicaController
from skipper.control.services.replicas import Blueprint
from skipper.control.services.requests import SessionBinding
from skipper.control.services.service_client import Address, client_of

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

A = TypeVar("A", bound=Actor)


class Session(Generic[A]):
    """Calls that all go to one replica, which can keep state for them: ``with service.session() as session:``.

    Endpoints are attributes, with the adverb `route`. The replica is the one with the fewest open sessions of this
    process. A replica that is drained waits until its sessions are closed, up to the drain timeout. A session stays in
    the process that opened it.

    Example:
        ```python
        from skipper.control import Actor, endpoint
        from skipper.control.services import SessionMethod

        class Chat(Actor):
            def __init__(self) -> None:
                self.words: list[str] = []

            @endpoint
            def say(self, word: str) -> list[str]:
                self.words.append(word)
                return self.words

        chat = Chat.options(procs=1, num_replicas=2).as_service()
        with chat.session() as session:  # every call goes to the same replica
            say: SessionMethod = session.say
            say.route("hello").get(timeout=60)
            print(say.route("again").get(timeout=60))  # ['hello', 'again']
        chat.stop().get(timeout=60)
        ```
    """

    def __init__(self, address: Address, actor_class: type | None = None) -> None:
        self._address = address
        self._actor_class = actor_class
        self._client = client_of(address)
        self._binding = SessionBinding()
        self._client.bind(self._binding)

    @property
    def replica(self) -> int | None:
        """The number of its replica; None before it has one."""
        replica = self._binding.replica
        return None if replica is None else replica.number

    def close(self) -> None:
        """End the session; requests in flight are still answered. It may be called again."""
        self._client.unbind(self._binding)

    def __getattr__(self, name: str) -> SessionMethod[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        method: SessionMethod[..., Any] = SessionMethod(
            self._address, self._client, name, self._actor_class, self._binding
        )
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._address.interface.endpoints]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a session cannot leave the process that opened it: send the service instead")

    def __del__(self) -> None:
        binding = self.__dict__.get("_binding")
        if binding is not None and not binding.is_closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)
            self.close()

    def __repr__(self) -> str:
        return f"<session of {self._address.name}, replica {self.replica}>"


class Service(Generic[A]):
    """Replicas of an actor class behind one name; a reference to them, which may be sent to other actors.

    Its endpoints are attributes: ``service.step.route(...)`` (see `ServiceMethod`). ``await service`` waits until all
    replicas are up, and returns the service. Only the actor that started it owns it; all code that has a reference may
    call it, and each process routes its own requests.

    Example:
        ```python
        from skipper.control import Actor, endpoint, idempotent

        class Policy(Actor):
            def __init__(self, temperature: float) -> None:
                self.temperature = temperature

            @endpoint
            @idempotent
            def generate(self, prompt: str) -> str:
                return f"{prompt} at {self.temperature}"

        policy = Policy.options(procs=1, num_replicas=2).as_service(0.7)
        print(policy.generate.route("to be").get(timeout=60))  # to be at 0.7
        print(policy.generate.fanout("all").get(timeout=60))  # ['all at 0.7', 'all at 0.7']
        policy.stop().get(timeout=60)
        ```
    """

    def __init__(self, address: Address, actor_class: type | None = None) -> None:
        self._address = address
        self._actor_class = actor_class

    @property
    def name(self) -> str:
        """The name that it was started with."""
        return self._address.name

    @property
    def initialized(self) -> Future[None]:
        """A future that ends when all replicas are up, or with an error if the service has failed."""
        return self._controller.up.call_one()

    def session(self) -> Session[A]:
        """Open a session: its calls all go to one replica. Close it, or use it as a context manager."""
        return Session(self._address, self._actor_class)

    def scale(self, num_replicas: int) -> Future[None]:
        """Change the number of replicas. Those with the highest numbers are removed first, after draining.

        Returns:
            A future that ends when the new ones are up, and the removed ones have ended.

        Raises:
            ValueError: the number is below 1.
            TypeError: it is not a whole number.
        """
        check_count("num_replicas", num_replicas, 1, MAX_PROCESSES)
        return self._controller.scale.call_one(num_replicas)

    def drain(self, replica: int) -> Future[None]:
        """Let one replica finish its sessions and requests, and replace it by a new one.

        Returns:
            A future that ends when the new one is up. An `ActorError` with an `IndexError` as its cause means that
            there is no such replica.
        """
        return self._controller.drain.call_one(replica)

    def metrics(self) -> Future[list[ReplicaMetrics]]:
        """The metrics of each replica, in the order of their numbers, over all processes that call the service."""
        return self._controller.metrics.call_one()

    def stop(self) -> Future[None]:
        """Drain all replicas and end the service, which is not a failure. It may be called again."""
        result: Promise[None] = Promise()
        controller = self._controller

        def finished(finish: Future[None]) -> None:
            controller.stop().add_done_callback(lambda _: result.set_result(None))

        controller.finish.call_one().add_done_callback(finished)
        return result

    @property
    def _controller(self) -> ActorMesh[ReplicaController]:
        return self._address.controller

    def __getattr__(self, name: str) -> ServiceMethod[..., Any]:
        # Reached for names that are no attribute, so once per endpoint: the object is kept.
        if name.startswith("_"):
            raise AttributeError(name)
        client = client_of(self._address)
        method: ServiceMethod[..., Any] = ServiceMethod(self._address, client, name, self._actor_class)
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._address.interface.endpoints]

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.initialized.__await__()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Service, (self._address,))

    def __repr__(self) -> str:
        return f"<service {self.name}>"


def start_service(
    template: ServiceTemplate[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
) -> Service[Any]:
    """Start a service: see `ServiceTemplate.as_service`."""
    cls, options = template.actor_class, template.options
    interface = interface_of(cls)
    check_construction(cls, args, kwargs)
    _check_names(interface)
    _check_hook(interface, "setup", options.setup, arguments=1)
    _check_hook(interface, "health", options.health, arguments=0)
    name = name or cls.__name__
    controller = this_proc().spawn(name, ReplicaController, Blueprint(name, cls, args, kwargs, options))
    return Service(Address(name, controller, interface, options.procs, options.retries), cls)


def _check_names(interface: ActorInterface) -> None:
    taken = sorted(name for name in interface.endpoints if hasattr(Service, name))
    if taken:
        raise ActorDefinitionError(
            f"{interface.class_name}.{taken[0]}: a service has an attribute of that name; give the endpoint another "
            "name"
        )


def _check_hook(interface: ActorInterface, option: str, name: str | None, *, arguments: int) -> None:
    if name is None:
        return
    spec = interface.endpoints.get(name)
    if spec is None:
        raise ActorDefinitionError(f"{option}={name!r}: {interface.class_name} has no endpoint of that name")
    try:
        checker(spec)(*[None] * arguments)
    except TypeError as error:
        raise ActorDefinitionError(f"{option}={name!r}: {interface.class_name}.{error}") from None
