"""Actors in processes, meshes of them, and supervision: one script controls a whole job."""

if __name__ != "skipper.control":  # imported by the folder's own name, as a second copy of the package
    raise ImportError("write `from skipper import control`, or `from skipper.control import ...`", name=__name__)


from typing import TYPE_CHECKING

from skipper.control.api.actor import Actor, concurrent_endpoint, endpoint
from skipper.control.api.context import ActorInstance, Context, context, current_actor_name, current_rank, current_size
from skipper.control.api.endpoint import Accumulator, Endpoint, as_endpoint
from skipper.control.api.join import ServedJob, join, leave, serve_job
from skipper.control.api.mesh import HostMesh, ProcMesh, get_or_spawn_controller, subscribe, this_host, this_proc
from skipper.control.api.spmd import SpmdActor
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.model.endpoint_spec import idempotent
from skipper.control.model.errors import (
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
    HollowHostError,
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
    RankFailedError,
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
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.future import Future
from skipper.control.model.progress import Progress, ProgressSubscription, ProgressTask, on_progress, track_progress
from skipper.control.model.settings import Settings, configure
from skipper.control.model.shape import Extent, Point, Shape
from skipper.control.model.value_mesh import ValueMesh
from skipper.control.runtime.current_runtime import shutdown
from skipper.control.runtime.messages import Creator
from skipper.control.runtime.port import Channel, Port, PortReceiver
from skipper.control.runtime.ports import ResponseStream
from skipper.control.runtime.supervision import unhandled_fault_hook
from skipper.control.wiring import register

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh
else:
    from skipper.control.api.mesh import ActorMesh

register(lambda: unhandled_fault_hook)  # the function that a user has assigned to this name

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
    # progress
    "on_progress",
    "track_progress",
    "Progress",
    "ProgressTask",
    "ProgressSubscription",
    # the runtime
    "configure",
    "Settings",
    "shutdown",
    "serve_job",
    "ServedJob",
    "join",
    "leave",
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
    "RankFailedError",
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
    "HollowHostError",
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
