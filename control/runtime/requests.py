"""The requests between processes, besides calls to actors: each is declared here once, with its types.

A request travels as its name and its pickled argument. The part that serves it registers with
`control.runtime.request_server`. Requests of tools are declared next to the tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from skipper.control.wire.messages import Payload, ProcessRequest
from skipper.control.wire.payload import pack, unpack

if TYPE_CHECKING:
    from skipper.control.model.actor import ActorInterface
    from skipper.control.model.failure import MeshFailure
    from skipper.control.runtime.begin_log import BeginAddress
    from skipper.control.runtime.interfaces import OwnedMesh
    from skipper.control.runtime.messages import ActorRef, LaunchOrder, OwnerRef, SpawnRequest

A = TypeVar("A")
R = TypeVar("R")


class Request(Generic[A, R]):
    """A request to a process: ``A`` is the type of its argument, ``R`` that of its answer.

    Args:
        name: its name in messages.
        not_done: what the process has not done while there is no answer, for people.
    """

    __slots__ = ("name", "not_done")

    def __init__(self, name: str, not_done: str = "") -> None:
        self.name = name
        self.not_done = not_done

    def pack(self, argument: A) -> Payload:
        """The payload of the request; an argument of None takes no bytes."""
        return () if argument is None else pack(argument)

    def unpack(self, payload: Payload) -> A:
        """The inverse of `pack`."""
        return cast(A, unpack(payload) if payload else None)

    def message(self, argument: A, *, target: int = 0, port: int = 0, rank: int = 0) -> ProcessRequest:
        """The request as it is sent.

        Args:
            argument: the argument.
            target: the number of the actor, mesh or port that it is about; 0 for the process.
            port: where the answer is awaited; 0: nobody waits.
            rank: of the process among the receivers of the request.
        """
        return ProcessRequest(target, port, rank, self.name, payload=self.pack(argument))

    def __repr__(self) -> str:
        return f"<request {self.name}>"


class RequestWithBody(Request[tuple[A, Payload], R]):
    """A request whose argument is followed by a payload that is packed already."""

    __slots__ = ()

    def pack(self, argument: tuple[A, Payload]) -> Payload:
        """The payload of the request."""
        head, body = argument
        return (*pack(head), *body)

    def unpack(self, payload: Payload) -> tuple[A, Payload]:
        """The inverse of `pack`."""
        return unpack(payload[:1]), payload[1:]


# About an actor, or a mesh

SPAWN: RequestWithBody[tuple[SpawnRequest, bool], None] = RequestWithBody("spawn")
"""Make an actor; the flag says whether it is async. The body is the class and the arguments."""
CONTROLLER: RequestWithBody[tuple[str, SpawnRequest, ActorInterface], tuple[SpawnRequest, ActorInterface]] = (
    RequestWithBody("controller", "has not created the actor")
)
"""Find or make the job's only actor with a name. The body is the class and the arguments."""
READY: Request[None, None] = Request("ready", "has not been constructed")
"""Answer once the actor has been constructed."""
STOP_ACTOR: Request[float, None] = Request("stop_actor")
"""Stop an actor within so many seconds; answer once it has ended."""
WATCH: Request[None, MeshFailure | None] = Request("watch")
"""Answer once an actor has ended, with its failure if it had one."""
ACTIVITY: Request[None, str] = Request("activity", "has not said what it is doing")
"""Answer what an actor is doing."""
BEGINS: Request[None, BeginAddress] = Request("begins")
"""Make an actor log what it begins to handle from now on, and answer where the log is."""
LINK: Request[tuple[tuple[ActorRef, ...], tuple[ActorRef, ...]], None] = Request("link")
"""Link a port to some actors and unlink it from others."""
STOP_MESH: Request[float, None] = Request("stop_mesh")
"""Stop a mesh of processes that an actor of the asked process owns, within so many seconds."""

# Failures

FAILURE: Request[tuple[OwnerRef, MeshFailure], None] = Request("failure")
"""Bring a failure to an owner."""
HANDLED: Request[str, None] = Request("handled")
"""Note that an actor has handled the death of a process, which the script may own, too."""
EXIT_REASON: Request[str, str] = Request("obituary")
"""Answer with the reason once a process has ended that the receiver has launched, or that has joined."""

# Processes

PING: Request[None, None] = Request("ping", "does not answer")
"""Answer."""
EXIT: Request[float, None] = Request("exit")
"""End in good order within so many seconds."""
JOIN: Request[OwnedMesh, None] = Request("join", "has not let this process join its job")
"""Note a process that has joined the job, which the mesh refers to."""
ADDRESS: Request[str, str] = Request("address", "has not said where a process is reached")
"""Answer the address of a process that the receiver has launched, once the process is up."""
LAUNCH: Request[LaunchOrder, None] = Request("launch", "has not launched processes")
"""Start processes on this host for an actor elsewhere."""
STOP_LAUNCHED: Request[float, None] = Request("stop_launched")
"""Stop what was started for a mesh, within so many seconds; answer once it has ended."""
KILL_LAUNCHED: Request[str, None] = Request("kill_launched")
"""Kill what was started for a mesh, with this verdict."""
KILL_GIVEN_UP: Request[tuple[str, str], None] = Request("kill_given_up")
"""Kill a process that its owner has lost; the argument is its id and the verdict."""

AnyRequest = Request[Any, Any]
