"""Actors in processes, meshes of them, and supervision: the floor on which one script steers a job."""

from control.actor import Actor
from control.context import ActorInstance, Context, context, current_rank, current_size
from control.controller import get_or_spawn_controller
from control.endpoint import Endpoint, endpoint
from control.errors import (
    ActorDefinitionError,
    ActorError,
    AuthenticationError,
    ChannelClosedError,
    ControlError,
    DeadlineError,
    NoActorContextError,
    PayloadError,
    ProtocolError,
    SupervisionError,
    WireError,
)
from control.failure import FailureKind, MeshFailure
from control.future import Future
from control.mesh import ActorMesh, HostMesh, ProcMesh, this_host, this_proc
from control.port import Channel, Port, PortReceiver
from control.runtime.job import shutdown
from control.runtime.ports import ResponseStream
from control.runtime.supervision import unhandled_fault_hook
from control.settings import Settings, configure
from control.shape import Extent, Point, Shape
from control.value_mesh import ValueMesh

__all__ = [
    # actors
    "Actor",
    "endpoint",
    "Endpoint",
    "context",
    "Context",
    "ActorInstance",
    "current_rank",
    "current_size",
    # meshes
    "this_host",
    "this_proc",
    "HostMesh",
    "ProcMesh",
    "ActorMesh",
    "get_or_spawn_controller",
    "Extent",
    "Point",
    "Shape",
    "ValueMesh",
    # results and messages
    "Future",
    "ResponseStream",
    "Channel",
    "Port",
    "PortReceiver",
    # supervision
    "MeshFailure",
    "FailureKind",
    "unhandled_fault_hook",
    # the runtime
    "configure",
    "Settings",
    "shutdown",
    # errors
    "ControlError",
    "ActorError",
    "SupervisionError",
    "DeadlineError",
    "ChannelClosedError",
    "ActorDefinitionError",
    "PayloadError",
    "NoActorContextError",
    "WireError",
    "AuthenticationError",
    "ProtocolError",
]
