"""Actors in processes, meshes of them, and supervision: the floor on which one script steers a job."""

from typing import TYPE_CHECKING

from control.accumulator import Accumulator
from control.actor import Actor
from control.context import ActorInstance, Context, context, current_actor_name, current_rank, current_size
from control.controller import get_or_spawn_controller
from control.endpoint import Endpoint, as_endpoint
from control.errors import (
    AbsentError,
    ActorDefinitionError,
    ActorError,
    AlreadyInJobError,
    AuthenticationError,
    BackpressureError,
    CertificateError,
    ChannelClosedError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    EngineMissingError,
    ForkedProcessError,
    HandleExpiredError,
    HostError,
    HostMismatchError,
    HostUnreachableError,
    InsecureHostError,
    JobError,
    JobExistsError,
    JobFailedError,
    JobLibraryError,
    JobNotFoundError,
    JoinError,
    LinkError,
    MessageTooLargeError,
    NameNotFoundError,
    NamingError,
    NoActorContextError,
    NoSuchMethodError,
    NotElasticError,
    OperationCancelledError,
    OperationNotFoundError,
    PayloadError,
    ProtocolError,
    RemoteHostError,
    RendezvousError,
    ReplicaLostError,
    ResolverError,
    RpcError,
    ScriptExitError,
    ServiceEndedError,
    ServiceUrlError,
    SessionLostError,
    StopTimeoutError,
    SupervisionError,
    ThreadLimitError,
    TorchrunError,
    TracingMissingError,
    UnreachableError,
    UnsafeFileError,
    WireError,
    WorkspaceError,
)
from control.failure import FailureKind, MeshFailure
from control.future import Future
from control.hosts import HostMesh, attach_to_hosts, this_host
from control.marking import concurrent_endpoint, endpoint, idempotent
from control.mesh import ProcMesh, this_proc
from control.port import Channel, Port, PortReceiver
from control.runtime.job import shutdown
from control.runtime.join import ServedJob, join, serve_job
from control.runtime.messages import Creator
from control.runtime.ports import ResponseStream
from control.runtime.supervision import unhandled_fault_hook
from control.settings import Settings, configure
from control.shape import Extent, Point, Shape
from control.spmd import SpmdActor
from control.subscription import subscribe
from control.value_mesh import ValueMesh

if TYPE_CHECKING:
    from control.views import ActorMesh
else:
    from control.mesh import ActorMesh

__all__ = [
    "AbsentError",
    # actors
    "Actor",
    "endpoint",
    "concurrent_endpoint",
    "idempotent",
    "as_endpoint",
    "Endpoint",
    "context",
    "Context",
    "ActorInstance",
    "Creator",
    "current_actor_name",
    "current_rank",
    "current_size",
    "SpmdActor",
    # meshes
    "this_host",
    "attach_to_hosts",
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
    "ThreadLimitError",
    "LinkError",
    "ReplicaLostError",
    "SessionLostError",
    "ServiceEndedError",
    "StopTimeoutError",
    "DeadlineError",
    "BackpressureError",
    "ChannelClosedError",
    "ActorDefinitionError",
    "PayloadError",
    "ForkedProcessError",
    "NoActorContextError",
    "EngineMissingError",
    "TracingMissingError",
    "RendezvousError",
    "ScriptExitError",
    "WorkspaceError",
    "JoinError",
    "JobNotFoundError",
    "JobError",
    "JobFailedError",
    "JobLibraryError",
    "NotElasticError",
    "TorchrunError",
    "JobExistsError",
    "AlreadyInJobError",
    "RemoteHostError",
    "UnsafeFileError",
    "HostError",
    "HostUnreachableError",
    "HostMismatchError",
    "InsecureHostError",
    "CertificateError",
    "NamingError",
    "NameNotFoundError",
    "ServiceUrlError",
    "ResolverError",
    "RpcError",
    "UnreachableError",
    "ConnectionLostError",
    "HandleExpiredError",
    "NoSuchMethodError",
    "MessageTooLargeError",
    "OperationNotFoundError",
    "OperationCancelledError",
    "WireError",
    "AuthenticationError",
    "ProtocolError",
]
