"""`ServiceOptions`: what a service is made of. `Actor.options` makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from skipper.control.model.actor import Actor, ActorInterface, check_construction, interface_of
from skipper.control.model.bounds import LONGEST_S, MAX_PROCESSES, check_count, check_seconds
from skipper.control.model.endpoint_decorators import checker
from skipper.control.model.errors import ActorDefinitionError

if TYPE_CHECKING:
    from skipper.control.cluster.hosts import HostMesh

S = TypeVar("S")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What a service is made of and how it is kept.

    Attributes:
        procs: processes of one replica, with an actor in each, along the axis ``procs``.
        with_gpus: whether each process is to have a GPU: the processes of a replica see as many, and no others, so
            that rank ``r`` takes the device ``r``.
        num_replicas: how many replicas there are at first.
        hosts: attached hosts that the replicas are spread over, in turn by their numbers, the processes of each on one
            host. The successor of a replica whose host is lost starts on one that is not, and where its own has been
            attached again there. None: all on the host of the process that starts the service.
        env: environment variables for the processes.
        bootstrap: called in each process before anything else, and awaited there if it is ``async``.
        setup: name of an endpoint that every actor of a replica is called by, all at once, before the replica gets
            requests; it is given the mesh of the replica's actors. None calls nothing.
        health: name of an endpoint without arguments that has to answer within ``health_timeout_s``, asked of every
            replica every ``health_interval_s`` seconds. One that does not, or raises, gets no requests; if it fails
            again, it is replaced. None checks only what is checked of every process: that it lives and is not frozen.
        health_interval_s: seconds from one check to the next.
        health_timeout_s: seconds for an answer; the longest request has to fit in, since checks wait in their turn.
        retries: how often a request to an `idempotent` endpoint is sent again when its replica has died.
        max_restarts: how many times in a row a replica may die before it has been of use, while no other came up; after
            that the service fails.
        stable_s: a replica has been of use when it has been up for so many seconds, or has come to its second request.
        backoff_s: seconds until the second replacement in a row; it doubles each time, up to ten seconds. The first
            replacement starts at once.
        drain_timeout_s: seconds that a replica has to finish its sessions and its requests before it is stopped.
    """

    procs: int = 1
    with_gpus: bool = False
    num_replicas: int = 1
    hosts: HostMesh | None = None
    env: Mapping[str, str] | None = None
    bootstrap: Callable[[], object] | None = None
    setup: str | None = None
    health: str | None = None
    health_interval_s: float = 5.0
    health_timeout_s: float = 10.0
    retries: int = 3
    max_restarts: int = 5
    stable_s: float = 1.0
    backoff_s: float = 0.1
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: a number is out of its range.
            TypeError: a count is not an integer, or a time no number.
        """
        for name, least in (("procs", 1), ("num_replicas", 1), ("retries", 0), ("max_restarts", 0)):
            check_count(name, getattr(self, name), least, MAX_PROCESSES)
        for name in ("health_interval_s", "health_timeout_s", "stable_s", "backoff_s", "drain_timeout_s"):
            if not 0 <= check_seconds(name, value := getattr(self, name)) < LONGEST_S:
                raise ValueError(f"{name} is a number of seconds from 0 to {LONGEST_S:g}, not {value!r}")
        if not self.health_interval_s:
            raise ValueError("health_interval_s must be above 0")


@dataclass(frozen=True, slots=True)
class ServiceTemplate(Generic[P, S]):
    """An actor class with the options of a service; what `Actor.options` returns."""

    actor_class: type[Actor]
    options: ServiceOptions

    @overload
    def as_service(self, *args: P.args, **kwargs: P.kwargs) -> S: ...
    @overload
    def as_service(self, *args: Any, name: str | None, **kwargs: Any) -> S: ...
    def as_service(  # type: ignore[misc]  # mypy wants P in it
        self, *args: Any, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Start the service, owned by the calling actor. Returns at once; ``await`` it to have all replicas up.

        Requests may be sent at once: they wait for the first replica. The service ends with its owner. If it fails,
        since a replica cannot be kept alive, the owner is told by a `MeshFailure`, as of any mesh.

        Args:
            *args: for ``__init__`` of every actor.
            name: of the service, for people; None takes the name of the class.
            **kwargs: for ``__init__`` of every actor.

        Raises:
            TypeError: the arguments do not fit ``__init__``.
            ActorDefinitionError: (a `TypeError`) the class cannot be spawned, one of its endpoints has a name that a
                service uses itself, or ``setup`` or ``health`` are no endpoints of it.
            PayloadError: (a `TypeError`) the class or an argument cannot be pickled.
        """
        from skipper.control.services.service import start_service

        interface = interface_of(self.actor_class)
        check_construction(self.actor_class, args, kwargs)
        _check_names(interface)
        _check_hook(interface, "setup", self.options.setup, arguments=1)
        _check_hook(interface, "health", self.options.health, arguments=0)
        return start_service(self.actor_class, args, kwargs, name or self.actor_class.__name__, interface, self.options)


def _check_names(interface: ActorInterface) -> None:
    from skipper.control.services.service import Service

    taken = sorted(name for name in interface.endpoints if hasattr(Service, name))
    if taken:
        raise ActorDefinitionError(
            f"{interface.class_name}.{taken[0]}: a service has an attribute of that name; call the endpoint another"
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
