"""Actors in processes, meshes of them, and supervision: the floor on which one script steers a job."""

from control.accumulator import Accumulator
from control.actor import Actor
from control.context import ActorInstance, Context, context, current_rank, current_size
from control.controller import get_or_spawn_controller
from control.endpoint import Endpoint, as_endpoint
from control.errors import (
    ActorDefinitionError,
    ActorError,
    AlreadyInJobError,
    AuthenticationError,
    BackpressureError,
    ChannelClosedError,
    ControlError,
    DeadlineError,
    EngineMissingError,
    JobExistsError,
    JobNotFoundError,
    JoinError,
    LinkError,
    NoActorContextError,
    PayloadError,
    ProtocolError,
    RemoteHostError,
    SupervisionError,
    UnsafeFileError,
    WireError,
)
from control.failure import FailureKind, MeshFailure
from control.future import Future
from control.hosts import HostMesh, this_host
from control.marking import concurrent_endpoint, endpoint
from control.mesh import ActorMesh, ProcMesh, this_proc
from control.port import Channel, Port, PortReceiver
from control.runtime.job import shutdown
from control.runtime.join import ServedJob, join, serve_job
from control.runtime.messages import Creator
from control.runtime.ports import ResponseStream
from control.runtime.supervision import unhandled_fault_hook
from control.settings import Settings, configure
from control.shape import Extent, Point, Shape
from control.subscription import subscribe
from control.value_mesh import ValueMesh

__all__ = [
    # actors
    "Actor",
    "endpoint",
    "concurrent_endpoint",
    "as_endpoint",
    "Endpoint",
    "context",
    "Context",
    "ActorInstance",
    "Creator",
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
    "Accumulator",
    "ResponseStream",
    "Channel",
    "Port",
    "PortReceiver",
    # supervision
    "MeshFailure",
    "FailureKind",
    "subscribe",
    "unhandled_fault_hook",
    # the runtime
    "configure",
    "Settings",
    "shutdown",
    "serve_job",
    "ServedJob",
    "join",
    # errors
    "ControlError",
    "ActorError",
    "SupervisionError",
    "LinkError",
    "DeadlineError",
    "BackpressureError",
    "ChannelClosedError",
    "ActorDefinitionError",
    "PayloadError",
    "NoActorContextError",
    "EngineMissingError",
    "JoinError",
    "JobNotFoundError",
    "JobExistsError",
    "AlreadyInJobError",
    "RemoteHostError",
    "UnsafeFileError",
    "WireError",
    "AuthenticationError",
    "ProtocolError",
]
