"""Services as data: options, templates, states and metrics.

The code that runs services is `control.services`, a layer above, which registers its start function here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

from skipper.control.model.bounds import LONGEST_S, MAX_PROCESSES, check_count, check_seconds

if TYPE_CHECKING:
    from skipper.control.api.actor import Actor
    from skipper.control.api.mesh import HostMesh

S = TypeVar("S")
P = ParamSpec("P")


class ReplicaState(enum.Enum):
    """The state of a replica.

    The example of `ServiceTemplate` shows one.
    """

    STARTING = "starting"
    """Its processes or its actors are still starting."""
    READY = "ready"
    """It gets requests."""
    UPDATING = "updating"
    """It handles its call of a rolling fanout; it gets requests only if no other replica can."""
    UNHEALTHY = "unhealthy"
    """It did not answer its last health check in time; it gets no requests."""
    DRAINING = "draining"
    """It finishes its requests and its sessions; it gets no new ones."""
    DOWN = "down"
    """It has no process at the moment. A process will start, or will replace one that has died."""


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """The counts of one replica and its predecessors of the same number, over all processes that call the service.

    The example of `ServiceTemplate` shows one.

    Attributes:
        replica: its number.
        state: the state of the present replica.
        restarts: how often it was replaced because it had died or was unhealthy.
        outstanding: requests that it has not answered yet.
        sessions: open sessions that are bound to it.
        done: requests that it has answered, with a value or an exception.
        errors: requests that it has answered with an exception.
        lost: requests that it has not answered because it died; others may have answered some of them.
        mean_s: mean time from the sending of a request to its answer, in seconds; 0.0 if none was answered.
        longest_s: the longest of these times.
    """

    replica: int
    state: ReplicaState
    restarts: int
    outstanding: int
    sessions: int
    done: int
    errors: int
    lost: int
    mean_s: float
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The replicas of a service, and how they are kept running.

    The example of `ServiceTemplate` shows one.

    Attributes:
        procs: processes of one replica, with an actor in each, along the axis ``procs``.
        with_gpus: whether each process gets a GPU of its own: the processes of a replica see only the GPUs of their
            replica, so that rank ``r`` uses device ``r``.
        num_replicas: how many replicas there are at first.
        hosts: attached hosts over which the replicas are distributed round robin, by their numbers; all processes of a
            replica are on one host. If a host is lost, the successors of its replicas start on other hosts, or on the
            same one if it has been attached again. None: all on the host of the process that starts the service.
        env: environment variables for the processes.
        bootstrap: called in each process before anything else, and awaited there if it is ``async``.
        setup: name of an endpoint that is called on all actors of a replica, before the replica gets requests; its
            argument is the mesh of the replica's actors. None calls nothing.
        health: name of an endpoint without arguments that is called on every replica every ``health_interval_s``
            seconds, and has to answer within ``health_timeout_s``. A replica that does not answer, or raises, gets no
            requests; if it fails again, it is replaced. None checks only what is checked for every process: that it is
            alive and not frozen.
        health_interval_s: seconds from one check to the next.
        health_timeout_s: seconds for an answer; longer than the longest request, because a check waits for the requests
            before it.
        retries: how often a request to an `idempotent` endpoint is sent again when its replica has died.
        max_restarts: how many times in a row a replica may die before it was stable, while no other one came up; after
            that the service fails.
        stable_s: a replica is stable when it has been up for this many seconds, or has reached its second request.
        backoff_s: seconds until the second replacement in a row; it doubles each time, up to ten seconds. The first
            replacement starts at once.
        drain_timeout_s: seconds that a replica has to finish its sessions and requests before it is stopped.
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
            TypeError: a count is not an integer, or a time is not a number.
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
    """An actor class with the options of a service; what `Actor.options` returns.

    Example:
        ```python
        from skipper.control import Actor, endpoint
        from skipper.control.services import (
            ReplicaMetrics,
            ReplicaState,
            ServiceMethod,
            ServiceOptions,
            ServiceTemplate,
        )

        class Policy(Actor):
            @endpoint
            def generate(self, prompt: str) -> str:
                return prompt[::-1]

        template: ServiceTemplate = Policy.options(procs=1, num_replicas=2)
        options: ServiceOptions = template.options
        policy = template.as_service()
        policy.initialized.get(timeout=60)
        generate: ServiceMethod = policy.generate
        print(generate.route("abc").get(timeout=60), options.num_replicas)  # cba 2
        metrics: list[ReplicaMetrics] = policy.metrics().get(timeout=60)
        print(all(each.state is ReplicaState.READY for each in metrics))  # True
        policy.stop().get(timeout=60)
        ```
    """

    actor_class: type[Actor]
    options: ServiceOptions

    @overload
    def as_service(self, *args: P.args, **kwargs: P.kwargs) -> S: ...
    @overload
    def as_service(self, *args: Any, name: str | None, **kwargs: Any) -> S: ...
    def as_service(  # type: ignore[misc]  # mypy wants P in it
        self, *args: Any, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Start the service, which the calling actor owns. Returns at once; ``await`` it to have all replicas up.

        Requests may be sent at once: they wait for the first replica. The service ends with its owner. If it fails,
        because a replica cannot be kept alive, the owner gets a `MeshFailure`, as for any mesh.

        Args:
            *args: arguments of ``__init__`` of every actor.
            name: name of the service, for people; None uses the name of the class.
            **kwargs: keyword arguments of ``__init__`` of every actor.

        Raises:
            TypeError: the arguments do not fit ``__init__``.
            ActorDefinitionError: (a `TypeError`) the class cannot be spawned, one of its endpoints has a name that a
                service uses itself, or ``setup`` or ``health`` are not endpoints of it.
            PayloadError: (a `TypeError`) the class or an argument cannot be pickled.
        """
        assert _start is not None  # importing skipper.control has registered it
        return _start(self, args, kwargs, name)


StartService: TypeAlias = Callable[[ServiceTemplate[..., Any], tuple[Any, ...], dict[str, Any], str | None], Any]
"""Checks a template and the arguments for ``__init__``, and starts the service; the last argument is its name."""

_start: StartService | None = None


def starts_services(start: StartService) -> None:
    """Register the function by which `ServiceTemplate.as_service` starts services."""
    global _start
    _start = start
