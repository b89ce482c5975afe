"""Monarch's actor API over this library: ``from monarch.actor`` becomes ``from skipper.control.monarch``.

Most names are those of `control` itself. The others are what scripts for Monarch rely on: the results of
``call`` are iterated in pairs of point and value, `proc_mesh` and `shutdown_context` exist, and `enable_transport` is
checked and changes nothing. ``docs/reference/from_monarch.md`` lists which names are not here, and why.

What belongs to `control` alone (services, jobs, naming) is imported from there; actors of both kinds live in one job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skipper.control import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Context,
    Endpoint,
    Extent,
    Future,
    HostMesh,
    MeshFailure,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    Shape,
    SupervisionError,
    as_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    get_or_spawn_controller,
    shutdown,
    this_host,
    this_proc,
)
from skipper.control.model.endpoint_spec import EndpointOptions, marked
from skipper.control.model.value_mesh import PairMesh as ValueMesh

TRANSPORTS = ("ipc", "tcp", "metatls", "metatls-hostname")
"""Monarch's names for the transports between two processes."""


def endpoint(method: Any = None, /, *, explicit_response_port: bool = False, propagate: object = None) -> Any:
    """`control.endpoint`, whose ``call`` gives values that are iterated in pairs: ``for point, value in results``.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: see `control.endpoint`.
        propagate: see `control.endpoint`.

    Raises:
        ActorDefinitionError: (a `TypeError`) this cannot be an endpoint.
    """
    return marked(method, EndpointOptions(explicit_response_port, propagate=propagate, gives_pairs=True))


def concurrent_endpoint(
    method: Any = None, /, *, explicit_response_port: bool = False, propagate: object = None
) -> Any:
    """`control.concurrent_endpoint`, whose ``call`` gives values that are iterated in pairs.

    Args:
        method: the method, when used without parentheses.
        explicit_response_port: see `control.endpoint`.
        propagate: see `control.endpoint`.

    Raises:
        ActorDefinitionError: (a `TypeError`) this cannot be an endpoint.
    """
    options = EndpointOptions(explicit_response_port, concurrent=True, propagate=propagate, gives_pairs=True)
    return marked(method, options)


def proc_mesh(
    *, gpus: int = 1, hosts: int = 1, env: Mapping[str, str] | None = None, setup: Callable[[], object] | None = None
) -> ProcMesh:
    """Processes on this host, along the axes ``hosts`` and ``gpus``: Monarch's older form of ``spawn_procs``.

    Args:
        gpus: how many; Monarch counts the devices if this is not given.
        hosts: 1: processes of several hosts are spawned on a mesh of hosts (`control.attach_to_hosts`).
        env: environment variables for them, in addition to those of this process.
        setup: called in each of them before anything else.

    Raises:
        ValueError: there is only this host, or a number is below 1.
    """
    if hosts != 1:
        raise ValueError(f"proc_mesh starts processes on this host alone, not on {hosts}: see control.attach_to_hosts")
    return this_host().spawn_procs({"hosts": 1, "gpus": gpus}, env=env, bootstrap=setup)


def local_proc_mesh(*, gpus: int = 1, hosts: int = 1) -> ProcMesh:
    """Processes on this host. Monarch's are threads of this process, and share its memory; these do not.

    Raises:
        ValueError: there is only this host, or a number is below 1.
    """
    return proc_mesh(gpus=gpus, hosts=hosts)


def shutdown_context() -> Future[None]:
    """Stop everything that the script has spawned: `control.shutdown`, which also runs by itself at the script's end.

    Returns:
        A future that has ended.
    """
    shutdown()
    return Future.of(None)


def enable_transport(transport: str) -> None:
    """Only checked: processes of a host talk over sockets, those of several hosts over TCP, with or without TLS.

    Raises:
        ValueError: Monarch has no such transport either.
    """
    if transport not in TRANSPORTS and not str(transport).startswith("tcp://"):
        raise ValueError(f"no transport is called {transport!r}; Monarch's are {', '.join(TRANSPORTS)}")


__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "Shape",
    "SupervisionError",
    "ValueMesh",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "enable_transport",
    "endpoint",
    "get_or_spawn_controller",
    "local_proc_mesh",
    "proc_mesh",
    "shutdown_context",
    "this_host",
    "this_proc",
]
